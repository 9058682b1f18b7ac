"""The invariants that every schedule and its instructions must satisfy.

1. Every F, B and W runs exactly once per chunk and microbatch; B after its F, W after its B, each after what it
   receives.
2. No deadlock: the happens-before relation over all ranks is acyclic under rendezvous (a transfer completes only when
   both ends have posted it and the previous one on its channel has completed).
3. Sends and receives match one to one and in the same order on each channel.
4. Live activations never exceed the schedule's bound, and end at zero; no W is left at the end.
5. The makespan is never below the critical path or the busiest rank's work: the simulator's, checked by tests.
6. Microbatches of one chunk and kind run in ascending order, so that the order of summation of a gradient does not
   depend on the schedule; backwards in any order, if the schedule says so. Those that are slices of one sequence run
   forward in order, and backward from the last to the first: F reads what earlier slices left, and B what later did.
7. What is copied to the host's memory is copied once: O after its F, L after O, and the backward action after L. A copy
   is complete before the memory that it is a copy of is given back, and before what it has copied is read.

Collectives along the other mesh axes need no invariant of their own. The instructions of a pipeline rank are run by all
ranks at that pipeline coordinate, with the same functions in the same order; so the ranks of a group start and await
the same collectives in the same order, and all pipelines exchange the same transfers. Project the happens-before
relation of all ranks onto one pipeline: a collective joins the same point of several ranks, which becomes one point. A
cycle among all ranks would become a cycle within the pipeline, which invariant 2 excludes.

`check_schedule` checks 1, 4, 6 and 7 on the schedule (1 within each rank), and `check_program` checks 1 (across
stages), 2, 3 and 7 on the instructions. Invariants 8 to 10 are those of streams and events
(`partita.compiler.schedules.stream_invariants`). A violation raises `Refused` with the invariant, the ranks and the
actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, zip_longest

from partita.compiler.instructions import (
    Channel,
    Compute,
    Instruction,
    Message,
    PostCopy,
    PostReceive,
    PostSend,
    Transfer,
    WaitCopy,
    WaitReceive,
    WaitSend,
)
from partita.compiler.schedules.communication import DIRECTION
from partita.compiler.schedules.offload import copied
from partita.compiler.schedules.schedule import (
    BACKWARD,
    COPIES,
    FORWARD,
    FULL_BACKWARD,
    LOAD,
    OFFLOAD,
    WEIGHT,
    Action,
    Schedule,
    peak_live,
)
from partita.compiler.schedules.simulator import equal_costs, simulate
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.syntax.source import Span

INVARIANTS = {
    1: "invariant 1: every F, B and W runs exactly once per chunk and microbatch, after its dependencies",
    3: "invariant 3: sends and receives match one to one and in the same order on each channel",
    4: "invariant 4: live activations stay within the bound that the schedule declares",
    6: "invariant 6: the microbatches of one chunk and kind run in ascending order, and backward slices in reverse",
    7: "invariant 7: what is copied to the host's memory is copied once, and back before it is read",
    8: "invariant 8: no memory is read before it is written, or used again before its last reader, on any stream",
    9: "invariant 9: no cyclic waits between ranks, in the order of streams and events",
    10: "invariant 10: no cyclic waits between ranks, though each host waits for its device in each action",
}

_MAX_ERRORS = 10

Problems = Iterator[Diagnostic]


def check_schedule(schedule: Schedule) -> None:
    """Checks invariants 1, 4, 6 and 7 of a schedule, for each rank separately.

    Raises Refused: E0501 for invariants 1, 6 and 7, E0504 for invariant 4.
    """
    raise_first(_shape(schedule))
    raise_first(
        problem
        for rank in range(schedule.ranks)
        for invariant in RANK_INVARIANTS
        for problem in invariant(schedule, rank)
    )


def check_program(programs: Sequence[Sequence[Instruction]]) -> None:
    """Checks invariants 1, 2, 3 and 7 of the instructions of all ranks.

    Raises Refused: E0501 if an action runs before what it receives or loads arrives, or a send or a copy before its
    producer; E0502 for a deadlock, with the cycle; E0503 for transfers whose ends do not match.
    """
    raise_first(_matching(programs))
    raise_first(_in_time(programs))
    raise_first(_copied(programs))
    simulate(programs, equal_costs())


def raise_first(problems: Iterator[Diagnostic]) -> None:
    """Raise the first problems, if there are any."""
    first = tuple(islice(problems, _MAX_ERRORS))
    if first:
        raise Refused(first)


def problem(code: str, invariant: int, message: str, help: str | None = None, span: Span | None = None) -> Diagnostic:
    """The diagnostic of a violated invariant."""
    return Diagnostic(code, message, span, notes=(INVARIANTS[invariant],), help=help)


# ---------------------------------------------------------------- schedules

# The kinds that an action counts as.
PARTS = {
    FORWARD: (FORWARD,),
    BACKWARD: (BACKWARD,),
    WEIGHT: (WEIGHT,),
    FULL_BACKWARD: (BACKWARD, WEIGHT),
    OFFLOAD: (OFFLOAD,),
    LOAD: (LOAD,),
}


def _shape(schedule: Schedule) -> Problems:
    if not schedule.placement:
        yield problem("E0501", 1, f"schedule `{schedule.name}` has no ranks")
        return
    stages = sorted(stage for line in schedule.placement for stage in line)
    ragged = schedule.spread is None and any(len(line) != schedule.chunks for line in schedule.placement)
    if ragged or stages != list(range(schedule.stages)):
        yield problem("E0501", 1, f"schedule `{schedule.name}` does not place each of its stages once")
        return
    for what, entries in (("orders", schedule.actions), ("bounds the memory of", schedule.bound)):
        if len(entries) != schedule.ranks:
            message = f"schedule `{schedule.name}` {what} {len(entries)} ranks and places stages on {schedule.ranks}"
            yield problem("E0501", 1, message)
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            known = action.kind in PARTS and (schedule.training or action.kind == FORWARD)
            if (
                not known
                or not 0 <= action.chunk < len(schedule.placement[rank])
                or not 0 <= action.microbatch < schedule.microbatches
            ):
                message = f"{_where(schedule, rank)} runs {action}, which is out of range"
                yield problem("E0501", 1, message, span=_span(schedule, rank, position))


def _once(schedule: Schedule, rank: int) -> Problems:
    counts: dict[Action, list[int]] = {}
    for position, action in enumerate(schedule.actions[rank]):
        for part in PARTS[action.kind]:
            counts.setdefault(Action(part, action.chunk, action.microbatch), []).append(position)
    for action, positions in counts.items():
        if len(positions) > 1:
            message = f"{_where(schedule, rank)} runs {action} {len(positions)} times"
            yield problem("E0501", 1, message, span=_span(schedule, rank, positions[1]))
    parts = (FORWARD, BACKWARD, WEIGHT) if schedule.training else (FORWARD,)
    chunks = len(schedule.placement[rank])
    if sum(each.kind not in COPIES for each in counts) < len(parts) * chunks * schedule.microbatches:
        expected = (
            Action(part, chunk, m) for m in range(schedule.microbatches) for chunk in range(chunks) for part in parts
        )
        missing = next(action for action in expected if action not in counts)
        last = len(schedule.actions[rank]) - 1
        message = f"{_where(schedule, rank)} never runs {missing}"
        yield problem("E0501", 1, message, span=_span(schedule, rank, last))


def _dependent(schedule: Schedule, rank: int) -> Problems:
    """B after F, W after B; and a rank runs its stages of a microbatch in order, forward and backward: what a stage
    receives depends on the earlier stages, possibly through other ranks.
    """
    stages = schedule.placement[rank]
    forward = sorted(range(len(stages)), key=lambda chunk: schedule.depth(stages[chunk]))
    before: dict[tuple[str, int], tuple[str, int]] = {}
    for earlier, chunk in pairwise(forward):
        before[FORWARD, chunk] = FORWARD, earlier
        before[BACKWARD, earlier] = BACKWARD, chunk
    before[BACKWARD, forward[-1]] = FORWARD, forward[-1]
    for chunk in forward:
        before[WEIGHT, chunk] = BACKWARD, chunk
    ran: set[tuple[str, int, int]] = set()
    for position, action in enumerate(schedule.actions[rank]):
        for part in PARTS[action.kind]:
            needed = before.get((part, action.chunk))
            if needed is not None and (*needed, action.microbatch) not in ran:
                first = Action(*needed, action.microbatch)
                message = f"{_where(schedule, rank)} runs {action} before {first}"
                yield problem("E0501", 1, message, span=_span(schedule, rank, position))
            ran.add((part, action.chunk, action.microbatch))


def _ascending(schedule: Schedule, rank: int) -> Problems:
    last: dict[tuple[str, int], Action] = {}
    for position, action in enumerate(schedule.actions[rank]):
        for part in () if action.kind in COPIES else PARTS[action.kind]:
            before = last.get((part, action.chunk))
            unordered = before is not None and _turn(schedule, part, before) > _turn(schedule, part, action)
            if unordered and (schedule.ascending or part == FORWARD or _of_one(schedule, action, before)):
                message = f"{_where(schedule, rank)} runs {action} after {before}"
                yield problem("E0501", 6, message, _accepting(part, schedule), _span(schedule, rank, position))
            last[part, action.chunk] = action


def _turn(schedule: Schedule, part: str, action: Action) -> int:
    return schedule.turn(part, action.microbatch)


def _of_one(schedule: Schedule, *actions: Action | None) -> bool:
    """Whether actions are of slices of one part of the batch."""
    return len({action.microbatch // schedule.slices for action in actions if action is not None}) == 1


def _accepting(part: str, schedule: Schedule) -> str | None:
    """How a file accepts an order of backwards."""
    if part == FORWARD or not schedule.spans:
        return None
    return "`from_file(…, summation = any)` accepts gradients that are summed in another order, and round differently"


def _bounded(schedule: Schedule, rank: int) -> Problems:
    peak, bound = peak_live(schedule.actions[rank]), schedule.bound[rank]
    if schedule.training and peak > bound:
        live = 0
        for position, culprit in enumerate(schedule.actions[rank]):  # noqa: B007
            live += (culprit.kind in (FORWARD, LOAD)) - (WEIGHT in PARTS[culprit.kind] or culprit.kind == OFFLOAD)
            if live > bound:
                break
        yield problem(
            "E0504",
            4,
            f"{_where(schedule, rank)} holds {live} live activations after {culprit} and {peak} at its peak, "
            f"but declares a bound of {bound}",
            "run backwards earlier, or declare a larger bound",
            _span(schedule, rank, position),
        )


def _span(schedule: Schedule, rank: int, position: int) -> Span | None:
    """The span of an action, if the schedule was read from a file."""
    return schedule.spans[rank][position] if schedule.spans and position >= 0 else None


def _where(schedule: Schedule, rank: int) -> str:
    return f"rank {rank} of schedule `{schedule.name}`"


def _copied_between(schedule: Schedule, rank: int) -> Problems:
    """O after F, L after O, and the backward action after L; each O has its L, and each L its O."""
    after = {FORWARD: None, OFFLOAD: FORWARD, LOAD: OFFLOAD}
    if not schedule.copies:
        return
    away, ran = copied(schedule.actions[rank]), set[tuple[str, int, int]]()
    for position, action in enumerate(schedule.actions[rank]):
        key = action.chunk, action.microbatch
        needed = LOAD if action.kind in (BACKWARD, FULL_BACKWARD) and key in away else after.get(action.kind)
        if needed is not None and (needed, *key) not in ran:
            message = f"{_where(schedule, rank)} runs {action} before {Action(needed, *key)}"
            yield problem("E0501", 7, message, span=_span(schedule, rank, position))
        ran.add((action.kind, *key))


RANK_INVARIANTS = (_once, _dependent, _ascending, _bounded, _copied_between)


# ---------------------------------------------------------------- instructions


def _matching(programs: Sequence[Sequence[Instruction]]) -> Problems:
    """Invariant 3: both ends of every channel post the same transfers in the same order, and wait once for each."""
    sends: dict[Channel, list[Transfer]] = {}
    receives: dict[Channel, list[Transfer]] = {}
    for rank, program in enumerate(programs):
        waits = {PostSend: WaitSend, PostReceive: WaitReceive}
        pending: dict[tuple[type, Channel, int], Transfer] = {}
        for instruction in program:
            if isinstance(instruction, (Compute, PostCopy, WaitCopy)):
                continue
            transfer = instruction.transfer
            channel = transfer.channel
            if isinstance(instruction, (PostSend, PostReceive)):
                sending = isinstance(instruction, PostSend)
                if rank != (channel.source if sending else channel.destination):
                    yield problem("E0503", 3, f"rank {rank} has {instruction} for another rank")
                    continue
                own = (sends if sending else receives).setdefault(channel, [])
                if transfer.index != len(own):
                    message = f"rank {rank} has {instruction} as number {len(own)}, not {transfer.index}"
                    yield problem("E0503", 3, message)
                own.append(transfer)
                pending[waits[type(instruction)], channel, transfer.index] = transfer
                continue
            posted = pending.pop((type(instruction), channel, transfer.index), None)
            if posted is not transfer and posted != transfer:
                yield problem("E0503", 3, f"rank {rank} has {instruction} without having posted it")
        for transfer in pending.values():
            yield problem("E0503", 3, f"rank {rank} posts {transfer} and never waits for it")
    for channel in sorted({*sends, *receives}):
        pairs = zip_longest(sends.get(channel, ()), receives.get(channel, ()))
        for index, (sent, received) in enumerate(pairs):
            if sent is not received and (sent != received or sent.message.bytes != received.message.bytes):
                yield problem(
                    "E0503",
                    3,
                    f"transfer {index} on channel {channel} is {_name(sent)} where rank {channel.source} "
                    f"sends it, and {_name(received)} where rank {channel.destination} receives it",
                )
                break


def _name(transfer: Transfer | None) -> str:
    if transfer is None:
        return "missing"
    message = transfer.message
    return (
        f"`{message.value}` of microbatch {transfer.microbatch} "
        f"(stage {message.source} to {message.destination}, {message.bytes} bytes)"
    )


def _in_time(programs: Sequence[Sequence[Instruction]]) -> Problems:
    """Invariant 1 across stages: an action runs after what it receives has arrived and before what it sends is posted,
    and every microbatch exchanges the same messages.
    """
    counts: Counter[Message] = Counter()
    runs: Counter[tuple[int, str]] = Counter()
    for rank, program in enumerate(programs):
        ran: set[tuple[int, str, int]] = set()
        for instruction in program:
            if isinstance(instruction, Compute):
                direction = DIRECTION.get(instruction.action.kind)
                if direction is not None:
                    ran.add((instruction.stage, direction, instruction.action.microbatch))
                    runs[instruction.stage, direction] += 1
                continue
            if isinstance(instruction, (PostCopy, WaitCopy)):
                continue
            transfer = instruction.transfer
            message = transfer.message
            if isinstance(instruction, PostSend):
                counts[message] += 1
                if (message.source, message.direction, transfer.microbatch) not in ran:
                    message_ = f"rank {rank} sends {transfer} before stage {message.source} has made it"
                    yield problem("E0501", 1, message_)
            elif isinstance(instruction, WaitReceive) and (
                (message.destination, message.direction, transfer.microbatch) in ran
            ):
                yield problem(
                    "E0501",
                    1,
                    f"rank {rank} waits for {transfer} after stage {message.destination} needed it",
                )
    for message, count in counts.items():
        for stage in (message.source, message.destination):
            if count != runs[stage, message.direction]:
                yield problem(
                    "E0503",
                    3,
                    f"`{message.value}` goes from stage {message.source} to {message.destination} {count} "
                    f"times, but stage {stage} runs {runs[stage, message.direction]} times",
                )


def _copied(programs: Sequence[Sequence[Instruction]]) -> Problems:
    """Invariant 7: on each stage a copy of a microbatch is posted after F and waited for before one back is posted,
    which is waited for before the backward action, each once.
    """
    following = ("", FORWARD, "post O", "wait O", "post L", "wait L", BACKWARD)
    for rank, program in enumerate(programs):
        away = {(each.stage, each.action.microbatch) for each in program if isinstance(each, (PostCopy, WaitCopy))}
        reached: dict[tuple[int, int], str] = dict.fromkeys(away, "")
        for instruction in program if away else ():
            if not isinstance(instruction, (Compute, PostCopy, WaitCopy)):
                continue
            action = instruction.action
            key = instruction.stage, action.microbatch
            if key not in away or action.kind == WEIGHT:
                continue
            if isinstance(instruction, Compute):
                step = FORWARD if action.kind == FORWARD else BACKWARD
            else:
                step = f"{'post' if isinstance(instruction, PostCopy) else 'wait'} {action.kind}"
            before = following[following.index(step) - 1]
            if reached[key] != before:
                last = reached[key] or "nothing"
                what = f"{instruction} of stage {key[0]}"
                yield problem("E0501", 7, f"rank {rank} has {what} after {last}, not {before}")
            reached[key] = step
        for (stage, microbatch), step in reached.items():
            if step != BACKWARD:
                yield problem("E0501", 7, f"rank {rank} ends microbatch {microbatch} of stage {stage} with {step}")
