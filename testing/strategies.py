"""Hypothesis strategies: shapes, valid schedules, copies in them, mutants of them, messages, costs, memory limits."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen
from hypothesis import strategies as st

from partita.compiler.instructions import Message
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.conditions import Conditions, Memory, Placement
from partita.compiler.schedules.generator import SCHEDULES
from partita.compiler.schedules.offload import with_copies
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import (
    BACKWARD,
    COPIES,
    FORWARD,
    FULL_BACKWARD,
    KINDS,
    WEIGHT,
    Action,
    Schedule,
    SharedVocabulary,
    loop_placement,
    peak_live,
    turn,
)
from partita.compiler.schedules.simulator import Costs, simulate
from partita.compiler.schedules.vocab_parallel import part_messages

# The schedules that a shape alone determines, rather than a file.
NAMED = sorted(each.name for each in SCHEDULES.values() if each.written is None)
# Those that nothing else determines: they are not searched for.
FIXED = [name for name in NAMED if not SCHEDULES[name].conditional]


@frozen
class Shape:
    """The size of a pipeline. `group` is a valid group of microbatches for interleaved orders; `slices` is into how
    many slices of the sequence each microbatch is cut, if a schedule can.
    """

    ranks: int
    chunks: int
    microbatches: int
    group: int
    slices: int = 1


@st.composite
def shapes(
    draw: st.DrawFn, max_ranks: int = 6, max_chunks: int = 3, max_microbatches: int = 12, max_slices: int = 1
) -> Shape:
    """Shapes from 1 rank, 1 chunk, 1 microbatch and 1 slice up; groups from P to 2P."""
    ranks = draw(st.integers(1, max_ranks))
    return Shape(
        ranks,
        draw(st.integers(1, max_chunks)),
        draw(st.integers(1, max_microbatches)),
        draw(st.integers(ranks, 2 * ranks)),
        draw(st.integers(1, max_slices)),
    )


@st.composite
def named_schedules(
    draw: st.DrawFn, of: st.SearchStrategy[Shape] | None = None, names: Sequence[str] = NAMED
) -> Schedule:
    """Built-in schedules by `names`, over shapes from `of`; those that depend on costs get random ones."""
    shape = draw(of if of is not None else shapes())
    generator = SCHEDULES[draw(st.sampled_from(names))]
    chunks = generator.chunks or shape.chunks
    legal = generator.legal(shape.ranks, chunks).items()
    arguments = draw(st.fixed_dictionaries({key: st.sampled_from(list(values)) for key, values in legal}))
    if shape.slices > 1 and "slices" in generator.own:
        arguments["slices"] = shape.slices
    stages = shape.ranks * chunks
    conditions = Conditions(draw(costs(stages)), default_messages(stages)) if generator.conditional else None
    return make(generator, shape.ranks, chunks, shape.microbatches, conditions=conditions, **arguments)


@st.composite
def random_orders(draw: st.DrawFn, of: st.SearchStrategy[Shape] | None = None) -> Schedule:
    """Valid schedules in random order.

    Repeatedly any rank runs any action whose inputs are available. Stages are placed in a loop, in a V or at random;
    the backward of each microbatch is split or not. Actions are drawn in one global order in time, so ranks cannot
    deadlock. The bound of live activations is the resulting peak.
    """
    shape = draw(of if of is not None else shapes(4, 3, 5))
    P, V, M = shape.ranks, shape.chunks, shape.microbatches * shape.slices
    placement = draw(_placements(P, V))
    rank_of = {stage: (r, c) for r, stages in enumerate(placement) for c, stage in enumerate(stages)}
    split = draw(st.lists(st.booleans(), min_size=M, max_size=M))
    random = draw(st.randoms(use_true_random=False))
    # The next index in the order of each kind of action of each stage; an action may run once its predecessor is
    # ahead of it.
    following = {(part, stage): 0 for part in (FORWARD, BACKWARD, WEIGHT) for stage in range(P * V)}
    actions: list[list[Action]] = [[] for _ in range(P)]

    def ready(part: str, stage: int) -> bool:
        m = following[part, stage]
        if m == M or (part == WEIGHT and not split[m]):
            return False
        if part == FORWARD:
            return stage == 0 or following[FORWARD, stage - 1] > m
        if part == WEIGHT:
            return following[BACKWARD, stage] > m
        arrived = stage == P * V - 1 or following[BACKWARD, stage + 1] > m
        # BW accumulates too, so it must not overtake the W of earlier microbatches.
        in_turn = split[m] or following[WEIGHT, stage] == m
        return arrived and in_turn and following[FORWARD, stage] > turn(BACKWARD, m, shape.slices)

    while possible := [key for key in following if ready(*key)]:
        part, stage = random.choice(possible)
        m = following[part, stage]
        following[part, stage] += 1
        kind = part
        if part == BACKWARD and not split[m]:
            following[WEIGHT, stage] += 1
            kind = FULL_BACKWARD
        rank, chunk = rank_of[stage]
        actions[rank].append(Action(kind, chunk, turn(kind, m, shape.slices)))
    orders = tuple(map(tuple, actions))
    return Schedule("random", M, placement, orders, tuple(map(peak_live, orders)), slices=shape.slices)


@st.composite
def shared_schedules(
    draw: st.DrawFn, of: st.SearchStrategy[Shape] | None = None, names: Sequence[str] = FIXED
) -> Schedule:
    """Built-in schedules with passes of a vocabulary that all ranks share (lookup, output layer, or both), which
    random costs place among the other actions.
    """
    schedule = draw(named_schedules(of, names))
    inputs, outputs = draw(st.sampled_from(((False, True), (True, False), (True, True))))
    spread = SharedVocabulary(schedule.ranks, schedule.stages, inputs, outputs)
    return SCHEDULES[schedule.name].shared(schedule, spread, draw(costs(spread.total)).action)


@st.composite
def descending_orders(draw: st.DrawFn, of: st.SearchStrategy[Shape] | None = None) -> Schedule:
    """Valid schedules that sum gradients in another order: all forwards, then backwards in any order of microbatches,
    which is the same on all ranks.
    """
    shape = draw(of if of is not None else shapes(4, 3, 5))
    placement = draw(_placements(shape.ranks, shape.chunks))
    order = draw(st.permutations(range(shape.microbatches)))
    kinds = draw(st.sampled_from(((FULL_BACKWARD,), (BACKWARD, WEIGHT))))
    lines = []
    for stages in placement:
        chunks = sorted(range(len(stages)), key=stages.__getitem__)
        forwards = [Action(FORWARD, chunk, m) for chunk in chunks for m in range(shape.microbatches)]
        backwards = [Action(kind, chunk, m) for chunk in reversed(chunks) for m in order for kind in kinds]
        lines.append((*forwards, *backwards))
    bound = tuple(map(peak_live, lines))
    return Schedule("descending", shape.microbatches, placement, tuple(lines), bound, ascending=False)


def schedules(of: st.SearchStrategy[Shape] | None = None) -> st.SearchStrategy[Schedule]:
    """Valid schedules: named ones and random orders."""
    return named_schedules(of) | random_orders(of)


@st.composite
def copied_schedules(
    draw: st.DrawFn, of: st.SearchStrategy[Schedule] | None = None
) -> tuple[Schedule, Schedule, Costs]:
    """A valid schedule, the same schedule with actions that offload and load for some stages, and the costs that
    placed these. Copies take from no time to long.
    """
    schedule = draw(of if of is not None else schedules())
    chosen = draw(st.sets(st.integers(0, schedule.stages - 1), min_size=1))
    seconds = st.sampled_from((0.0, 0.1, 0.5, 1.0, 3.0, 20.0))
    copies = {stage: draw(seconds) for stage in sorted(chosen)}
    own = evolve(draw(costs(schedule.stages)), copy=lambda stage: copies.get(stage, 0.0))
    timeline = simulate(communicate(schedule, messages_of(schedule)), own)
    return schedule, with_copies(schedule, copies, timeline), own


def messages_of(schedule: Schedule) -> tuple[Message, ...]:
    """The chain from stage to stage, and messages of the parts that all ranks share."""
    spread = schedule.spread
    chain = default_messages(spread.stages if spread else schedule.stages, schedule.training)
    return (*chain, *part_messages(spread, schedule.training)) if spread else chain


@st.composite
def _placements(draw: st.DrawFn, ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    form = draw(st.sampled_from(("loop", "v", "random")))
    if form == "loop":
        return loop_placement(ranks, chunks)
    if form == "v":
        return tuple(
            tuple(c * ranks + (r if c % 2 == 0 else ranks - 1 - r) for c in range(chunks)) for r in range(ranks)
        )
    stages = draw(st.permutations(range(ranks * chunks)))
    return tuple(tuple(stages[r * chunks : (r + 1) * chunks]) for r in range(ranks))


@st.composite
def mutants(draw: st.DrawFn, of: st.SearchStrategy[Schedule] | None = None) -> tuple[Schedule, Schedule, str]:
    """A valid schedule, a copy with one mistake, and a description of the mistake.

    Most mutants are invalid; some remain valid, for example with two actions of different chunks swapped.
    """
    schedule = draw(of if of is not None else schedules(shapes(4, 3, 5)))
    rank = draw(st.integers(0, schedule.ranks - 1))
    actions = list(schedule.actions[rank])
    i = draw(st.integers(0, len(actions) - 1))
    j = draw(st.integers(0, len(actions) - 1))
    action = actions[i]
    mistake = draw(st.sampled_from(("swap", "move", "drop", "duplicate", "replace")))
    text = f"rank {rank}: {mistake} {action}"
    if mistake == "swap":
        actions[i], actions[j] = actions[j], actions[i]
        text += f" and {actions[i]}"
    elif mistake == "move":
        actions.insert(j, actions.pop(i))
        text += f" to {j}"
    elif mistake == "drop":
        del actions[i]
    elif mistake == "duplicate":
        actions.insert(j, action)
        text += f" at {j}"
    else:
        kind = draw(st.sampled_from((*KINDS, *COPIES)))
        chunk = draw(st.integers(0, schedule.chunks))
        microbatch = draw(st.integers(0, schedule.microbatches))
        actions[i] = Action(kind, chunk, microbatch)
        text += f" by {actions[i]}"
    orders = (*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :])
    return schedule, evolve(schedule, actions=orders), text


@st.composite
def messages(draw: st.DrawFn, stages: int) -> tuple[Message, ...]:
    """The chain, and skip connections over any number of stages, or to all later ones, with their gradients, in any
    order.
    """
    pairs = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1))
    skips = [(min(pair), max(pair)) for pair in draw(st.lists(pairs, max_size=4)) if pair[0] != pair[1]]
    skips += [(a, b) for a in draw(st.lists(st.integers(0, stages - 1), max_size=2)) for b in range(a + 1, stages)]
    extra = [Message(f"skip{i}", a, b, "forward", 8 * i) for i, (a, b) in enumerate(skips)]
    extra += [Message(f"skip{i}'", b, a, "backward", 8 * i) for i, (a, b) in enumerate(skips)]
    return tuple(draw(st.permutations((*default_messages(stages), *extra))))


@st.composite
def costs(draw: st.DrawFn, stages: int) -> Costs:
    """Costs by stage and kind, where BW costs as much as B and W; transfers from free to slow."""
    seconds = st.integers(1, 40).map(lambda tenths: tenths / 10)
    table = {(stage, kind): draw(seconds) for stage in range(stages) for kind in (FORWARD, BACKWARD, WEIGHT)}
    for stage in range(stages):
        table[stage, FULL_BACKWARD] = table[stage, BACKWARD] + table[stage, WEIGHT]
    transfer = draw(st.sampled_from((0.0, 0.1, 1.0, 5.0)))
    return Costs(lambda stage, kind: table[stage, kind], lambda message: transfer)


@st.composite
def memories(draw: st.DrawFn, placement: Placement) -> Memory:
    """Memory limits for a placement, from less than one microbatch needs to more than several do. What stages keep
    differs, and may grow from F to W.
    """
    sizes = st.integers(1, 8).map(float)
    stages = [stage for own in placement for stage in own]
    forward = tuple(draw(sizes) for _ in stages)
    memory = Memory((), forward, tuple(draw(sizes) / 4 for _ in stages))
    return evolve(memory, limit=tuple(memory.one(own) * draw(st.integers(2, 30)) / 4 for own in placement))
