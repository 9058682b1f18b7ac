"""Every law refuses what breaks it and nothing else, held against the machine of `machine.py`."""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest
from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st

from partita.compiler.instructions import (
    Channel,
    Compute,
    Instruction,
    Message,
    PostReceive,
    PostSend,
    Transfer,
    WaitReceive,
    WaitSend,
)
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.forms import read
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.one_f_one_b import alternate
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Action, Schedule, loop_placement
from partita.compiler.schedules.simulator import equal_costs, simulate
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.syntax.source import Source
from partita.testing import assert_lawful, descending_orders, messages, mutants, random_orders, schedules, shapes
from tests.compiler.schedules.machine import Machine, Programs, Stuck, accumulations
from tests.marks import examples

seeds = st.integers(0, 2**32)
small_schedules = schedules(shapes(4, 3, 5))


def refusal(schedule: Schedule) -> Diagnostic:
    """The first thing that the laws say against a schedule."""
    with pytest.raises(Refused) as refused:
        assert_lawful(schedule)
    return refused.value.diagnostics[0]


# ---------------------------------------------------------------- against the machine


@examples(20)
@given(small_schedules, st.data(), seeds)
def test_lawful_schedules_run_to_the_end_in_any_order_of_events(schedule, data, seed):
    chain = data.draw(messages(schedule.stages))
    assert_lawful(schedule, messages=chain)
    programs = communicate(schedule, chain)
    ascending = {stage: list(range(schedule.microbatches)) for stage in range(schedule.stages)}
    assert accumulations(programs, chain, seed) == ascending


@examples(20)
@given(descending_orders(), seeds)
def test_backwards_run_in_any_order_that_a_schedule_states(schedule, seed):
    """Which is then the order in which gradients are summed, on every rank."""
    chain = default_messages(schedule.stages)
    programs = communicate(schedule, chain)
    assert_lawful(schedule)
    order = [each.microbatch for each in schedule.actions[0] if each.chunk == 0 and each.kind in ("W", "BW")]
    assert accumulations(programs, chain, seed) == dict.fromkeys(range(schedule.stages), order)
    if order != sorted(order):
        assert refusal(evolve(schedule, ascending=True)).notes[0].startswith("invariant 6")


@examples(20)
@given(mutants(), st.data(), seeds)
def test_mutants_are_refused_or_compute_the_same(mutant, data, seed):
    original, changed, mistake = mutant
    chain = data.draw(messages(original.stages))
    try:
        check_schedule(changed)
        programs = communicate(changed, chain)
        check_program(programs)
    except Refused as refused:
        event(refused.diagnostics[0].code)
        return
    event("lawful")
    same = accumulations(communicate(original, chain), chain, seed)
    assert accumulations(programs, chain, seed) == same, mistake


@examples(20)
@given(small_schedules, st.data(), seeds)
def test_mutants_of_instructions_are_refused_or_compute_the_same(schedule, data, seed):
    chain = data.draw(messages(schedule.stages))
    programs = communicate(schedule, chain)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    own = list(programs[rank])
    # Actions stay in their order, which is the schedule's and check_schedule's to hold.
    places = [i for i, instruction in enumerate(own) if not isinstance(instruction, Compute)]
    if not places:
        return
    i, j = data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))
    mistake = data.draw(st.sampled_from(("drop", "move", "swap", "exchange")))
    if mistake == "drop":
        del own[i]
    elif mistake == "move":
        own.insert(data.draw(st.integers(0, len(own) - 1)), own.pop(i))
    elif mistake == "swap":
        own[i], own[j] = own[j], own[i]
    else:
        # Both keep their places in their channels, and get each other's content.
        a, b = own[i].transfer, own[j].transfer
        own[i] = evolve(own[i], transfer=evolve(a, message=b.message, microbatch=b.microbatch))
        own[j] = evolve(own[j], transfer=evolve(b, message=a.message, microbatch=a.microbatch))
    broken = (*programs[:rank], tuple(own), *programs[rank + 1 :])
    try:
        check_program(broken)
    except Refused as refused:
        event(refused.diagnostics[0].code)
        return
    event("lawful")
    assert accumulations(broken, chain, seed) == accumulations(programs, chain, seed)


# ---------------------------------------------------------------- law 2


@st.composite
def posts_and_waits(draw: st.DrawFn) -> Programs:
    """Ranks whose posts match one to one and in order; posts of different channels, and waits, anywhere."""
    ranks = draw(st.integers(2, 4))
    ways = [Channel(a, b, d) for a in range(ranks) for b in range(ranks) if a != b for d in ("forward", "backward")]
    transfers: dict[Channel, list[Transfer]] = defaultdict(list)
    for each in draw(st.lists(st.sampled_from(ways), min_size=2, max_size=10)):
        message = Message("x", each.source, each.destination, each.direction)
        index = len(transfers[each])
        transfers[each].append(Transfer(each, message, index, index))
    programs: list[list[Instruction]] = [[] for _ in range(ranks)]
    random = draw(st.randoms(use_true_random=False))
    for each, queue in transfers.items():
        ends = ((each.source, PostSend, WaitSend), (each.destination, PostReceive, WaitReceive))
        for rank, post, wait in ends:
            program, after = programs[rank], 0
            for transfer in queue:
                after = random.randint(after, len(program))
                program.insert(after, post(transfer))
                after += 1
            for transfer in queue:
                posted = program.index(post(transfer))
                program.insert(random.randint(posted + 1, len(program)), wait(transfer))
    return programs


def happens_before(programs: Programs) -> dict[tuple, set[tuple]]:
    """The relation in full: each event with those that come right before it."""
    before: dict[tuple, set[tuple]] = defaultdict(set)
    for rank, program in enumerate(programs):
        for position, instruction in enumerate(program):
            if position:
                before[rank, position].add((rank, position - 1))
            channel, index = instruction.transfer.channel, instruction.transfer.index
            if isinstance(instruction, (WaitSend, WaitReceive)):
                before[rank, position].add((channel, index))
            else:
                before[channel, index].add((rank, position))
                if index:
                    before[channel, index].add((channel, index - 1))
    return before


@examples(20)
@given(posts_and_waits(), seeds)
def test_deadlock_is_a_cycle_of_the_happens_before_relation(programs, seed):
    try:
        TopologicalSorter(happens_before(programs)).prepare()
    except CycleError:
        event("cyclic")
        with pytest.raises(Stuck):
            Machine(programs).execute(seed)
        with pytest.raises(Refused) as refused:
            simulate(programs, equal_costs())
        (diagnostic,) = refused.value.diagnostics
        assert diagnostic.code == "E0502"
        # The cycle is told rank by rank, the last waiting for the first.
        *cycle, _ = diagnostic.notes
        ranks = [note.split(",")[0] for note in cycle]
        assert 2 <= len(set(ranks)) == len(ranks)
        for note, following in zip(cycle, [*ranks[1:], ranks[0]], strict=True):
            assert following in note.split(",", 1)[1], diagnostic.render()
    else:
        event("acyclic")
        Machine(programs).execute(seed)
        simulate(programs, equal_costs(transfer=1.0))


@examples(20)
@given(st.data(), seeds)
def test_ranks_of_different_schedules_are_lawful_exactly_if_they_get_to_the_end(data, seed):
    shape = st.just(data.draw(shapes(3, 2, 4)))
    one, other = data.draw(random_orders(shape)), data.draw(random_orders(shape))
    other = evolve(other, placement=one.placement)
    took = data.draw(st.lists(st.booleans(), min_size=one.ranks, max_size=one.ranks))
    actions = tuple(b if take else a for a, b, take in zip(one.actions, other.actions, took, strict=True))
    bound = (one.chunks * one.microbatches,) * one.ranks
    mixed = evolve(one, actions=actions, bound=bound)
    try:
        check_schedule(mixed)
    except Refused:
        # The other's order is made for other stages.
        event("another placement")
        return
    chain = default_messages(mixed.stages)
    programs = communicate(mixed, chain)
    machine = Machine(programs, chain)
    try:
        check_program(programs)
        valid = True
    except Refused as refused:
        valid = False
        codes = [each.code for each in refused.diagnostics]
    event("lawful" if valid else "deadlock")
    if valid:
        machine.execute(seed)
    else:
        assert codes == ["E0502"]
        with pytest.raises(Stuck):
            machine.execute(seed)


def plain_remainder(ranks: int, chunks: int, microbatches: int, group: int) -> Schedule:
    """Interleaved 1F1B with what is left over as a last group, however small."""
    groups = [range(a, min(a + group, microbatches)) for a in range(0, microbatches, group)]
    forwards = [Action("F", c, m) for members in groups for c in range(chunks) for m in members]
    backwards = [Action("BW", c, m) for members in groups for c in range(chunks)[::-1] for m in members]
    actions = tuple(
        alternate(forwards, backwards, 2 * (ranks - rank - 1) + (chunks - 1) * group) for rank in range(ranks)
    )
    bound = (chunks * microbatches,) * ranks
    return Schedule("plain", microbatches, loop_placement(ranks, chunks), actions, bound)


def test_a_small_last_group_makes_the_ranks_wait_for_each_other():
    diagnostic = refusal(plain_remainder(4, 3, 5, 4))
    assert diagnostic.render() == (
        "error[E0502]: deadlock: ranks 0, 3 wait for each other\n"
        "  = rank 0, before F2.4, waits for `activation` of microbatch 4, which rank 3 sends after F1.4"
        " (3->0 forward)\n"
        "  = rank 3, before BW1.0, waits for `gradient` of microbatch 0, which rank 0 sends after BW2.0"
        " (0->3 backward)\n"
        "  = invariant 2: no cyclic waits between ranks\n"
        "  help: run the action that is waited for before the one that waits"
    )
    assert_lawful(make("interleaved_1f1b", 4, 3, 5, group=4))


@pytest.mark.soak
def test_how_often_a_small_last_group_deadlocks():
    shapes_ = [
        (ranks, chunks, microbatches, group)
        for ranks in range(1, 9)
        for chunks in range(1, 5)
        for microbatches in range(1, 21)
        for group in {ranks, ranks + 1, 2 * ranks, microbatches}
        if group >= ranks
    ]
    stuck = 0
    for shape in shapes_:
        if shape[1] == 1:
            continue  # one chunk is 1F1B, without groups
        schedule = plain_remainder(*shape)
        check_schedule(schedule)
        programs = communicate(schedule, default_messages(schedule.stages))
        try:
            check_program(programs)
        except Refused as refused:
            stuck += [each.code for each in refused.diagnostics] == ["E0502"]
    assert (stuck, len(shapes_)) == (139, 2276)


def test_every_law_names_itself_the_rank_and_the_actions():
    whole = make("one_f_one_b", 2, 1, 3)

    def with_first_rank(text: str, bound: tuple[int, ...] = (9, 9)) -> Schedule:
        kinds = (word.rstrip("0123456789.") for word in text.split())
        numbers = (int(word.split(".")[1]) for word in text.split())
        actions = tuple(Action(kind, 0, m) for kind, m in zip(kinds, numbers, strict=True))
        return evolve(whole, actions=(actions, whole.actions[1]), bound=bound)

    cases = {
        "F0.0 F0.1 BW0.0 F0.2 BW0.1": ("E0501", "invariant 1", "rank 0", "never runs B0.2"),
        "F0.0 F0.1 BW0.0 F0.2 BW0.1 B0.2": ("E0501", "invariant 1", "rank 0", "never runs W0.2"),
        "F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2 W0.2": ("E0501", "invariant 1", "rank 0", "runs W0.2 2 times"),
        "F0.0 F0.1 BW0.0 BW0.2 F0.2 BW0.1": ("E0501", "invariant 1", "rank 0", "runs BW0.2 before F0.2"),
        "F0.0 F0.1 W0.0 B0.0 F0.2 BW0.1 BW0.2": ("E0501", "invariant 1", "rank 0", "runs W0.0 before B0.0"),
        "F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2 F0.3": ("E0501", "invariant 1", "rank 0", "runs F0.3, which"),
        "F0.1 F0.0 BW0.0 F0.2 BW0.1 BW0.2": ("E0501", "invariant 6", "rank 0", "runs F0.0 after F0.1"),
        "F0.0 F0.1 B0.0 B0.1 W0.1 W0.0 F0.2 BW0.2": ("E0501", "invariant 6", "rank 0", "runs W0.0 after W0.1"),
    }
    for text, (code, invariant, *words) in cases.items():
        diagnostic = refusal(with_first_rank(text))
        assert diagnostic.code == code
        assert invariant in diagnostic.notes[0], diagnostic.render()
        for word in words:
            assert word in diagnostic.message, diagnostic.render()
    diagnostic = refusal(with_first_rank("F0.0 F0.1 F0.2 BW0.0 BW0.1 BW0.2", bound=(2, 2)))
    assert diagnostic.code == "E0504"
    assert "rank 0" in diagnostic.message
    assert "3 live activations after F0.2" in diagnostic.message


def test_what_is_no_schedule_is_refused():
    whole = make("one_f_one_b", 2, 1, 3)
    assert "has no ranks" in refusal(evolve(whole, placement=(), actions=(), bound=())).message
    assert "orders 1 ranks and places stages on 2" in refusal(evolve(whole, actions=whole.actions[:1])).message
    assert "bounds the memory of 1 ranks and places" in refusal(evolve(whole, bound=whole.bound[:1])).message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 F1.0 BW0.0 BW1.0", "runs BW0.0 before B1.0"),
        ("F1.0 F0.0 BW1.0 BW0.0", "runs F1.0 before F0.0"),
        ("F0.0 BW0.0 F1.0 BW1.0", "runs BW0.0 before B1.0"),
    ],
)
def test_stages_of_one_rank_run_in_their_order(text, message):
    """What is handed over on a rank has no transfer whose wait could show that it is not there."""
    diagnostic = refusal(read(Source("mine.sched", text)))
    assert diagnostic.code == "E0501"
    assert diagnostic.message == f"rank 0 of schedule `mine.sched` {message}"


def test_transfers_of_other_sizes_do_not_match():
    schedule = make("one_f_one_b", 2, 1, 3)
    chain = default_messages(2)
    sender = communicate(schedule, [evolve(message, bytes=8) for message in chain])[0]
    receiver = communicate(schedule, chain)[1]
    with pytest.raises(Refused) as refused:
        check_program((sender, receiver))
    assert {each.code for each in refused.value.diagnostics} == {"E0503"}
    assert "8 bytes" in refused.value.diagnostics[0].message


def test_a_message_that_only_some_microbatches_send_is_missed():
    programs = communicate(make("gpipe", 2, 1, 3), default_messages(2))
    last = [
        [i for i in program if isinstance(i, Compute) or i.transfer.index < 2 or i.transfer.channel.source == 1]
        for program in programs
    ]
    with pytest.raises(Refused) as refused:
        check_program(last)
    assert "`activation` goes from stage 0 to 1 2 times, but stage 0 runs 3 times" in str(refused.value)


def test_instructions_in_the_wrong_place_are_refused():
    programs = communicate(make("one_f_one_b", 2, 1, 3), default_messages(2))
    sender, receiver = programs

    def at(program, kind: type, index: int) -> int:
        return next(i for i, each in enumerate(program) if type(each) is kind and each.transfer.index == index)

    def refused(*programs: list[Instruction]) -> str:
        with pytest.raises(Refused) as error:
            check_program(programs)
        return error.value.diagnostics[0].render()

    late = list(receiver)
    wait = at(late, WaitReceive, 1)
    late[wait], late[wait + 1] = late[wait + 1], late[wait]
    assert refused(sender, late).startswith(
        "error[E0501]: rank 1 waits for activation of microbatch 1 (0->1 forward) after stage 1 needed it"
    )

    early = list(sender)
    post = at(early, PostSend, 1)
    early[post - 1], early[post] = early[post], early[post - 1]
    assert refused(early, receiver).startswith(
        "error[E0501]: rank 0 sends activation of microbatch 1 (0->1 forward) before stage 0 has made it"
    )

    assert refused(receiver, sender).startswith("error[E0503]: rank 0 has post-receive activation")
    assert "for another rank" in refused(receiver, sender)

    misnumbered = list(receiver)
    for kind in (PostReceive, WaitReceive):
        position = at(misnumbered, kind, 1)
        transfer = misnumbered[position].transfer
        misnumbered[position] = kind(evolve(transfer, index=2))
    assert refused(sender, misnumbered).startswith("error[E0503]: rank 1 has post-receive activation")
    assert "as number 1, not 2" in refused(sender, misnumbered)


def test_a_placement_gives_every_rank_as_many_stages():
    ragged = evolve(make("looped_bfs", 3, 2, 1), placement=((0, 3), (1,), (2, 4, 5)))
    assert refusal(ragged).message == "schedule `looped_bfs` does not place each of its stages once"
    twice = evolve(make("looped_bfs", 2, 2, 1), placement=((0, 2), (1, 2)))
    assert refusal(twice).code == "E0501"
