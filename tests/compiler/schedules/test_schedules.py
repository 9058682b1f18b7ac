"""The schedules: their laws in every shape, their closed forms, and their orders in examples that people
know.
"""

from __future__ import annotations

from itertools import product
from math import ceil
from types import SimpleNamespace

import pytest
from attrs import evolve
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.conditions import Conditions
from partita.compiler.schedules.forward_only import FORWARD_ONLY
from partita.compiler.schedules.generator import OF_THE_STEP, SCHEDULES
from partita.compiler.schedules.interleaved_1f1b import group_sizes
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.one_f_one_b import alternate
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import LIMIT, Action, Schedule, loop_placement, peak_live, v_placement
from partita.compiler.schedules.simulator import equal_costs, simulate
from partita.compiler.schedules.timeline import Timeline
from partita.dsl.config.builtins import BOUND
from partita.dsl.diagnostic import Refused
from partita.testing import Shape, assert_lawful, costs, named_schedules, shapes
from tests.marks import every, examples

RANKS, CHUNKS, MICROBATCHES = range(1, 7), range(1, 5), range(1, 13)
BY_SHAPE = {name: each for name, each in SCHEDULES.items() if each.written is None} | {"forward_only": FORWARD_ONLY}
# Those that look for their orders take longer: in full in soak runs.
SEARCHED = ("auto", "policy")


def chunks_of(name: str) -> range:
    """The numbers of chunks that a schedule can have, up to four."""
    fixed = BY_SHAPE[name].chunks
    return CHUNKS if fixed is None else range(fixed, fixed + 1)


def hold_to_the_laws(schedule: Schedule) -> Timeline:
    check_schedule(schedule)
    programs = communicate(schedule, default_messages(schedule.stages, schedule.training))
    check_program(programs)
    return simulate(programs, equal_costs())


def in_all_shapes(name: str, ranks: int) -> None:
    """A schedule passes its laws and reaches exactly its stated bound, for so many ranks."""
    for chunks in chunks_of(name):
        for microbatches in MICROBATCHES:
            timeline = hold_to_the_laws(make(BY_SHAPE[name], ranks, chunks, microbatches))
            schedule = make(BY_SHAPE[name], ranks, chunks, microbatches)
            assert timeline.peak_live == schedule.bound, schedule


@pytest.mark.few(18)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", sorted(set(BY_SHAPE) - set(SEARCHED)))
def test_every_schedule_is_lawful_in_every_small_shape(name, ranks):
    in_all_shapes(name, ranks)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", SEARCHED)
def test_every_schedule_that_is_searched_for_is_too(name, ranks):
    in_all_shapes(name, ranks)


@examples(10)
@given(named_schedules(shapes(16, 4, 64), names=sorted(set(SCHEDULES) - {"auto", "from_file"})))
def test_every_schedule_is_lawful_in_large_shapes(schedule):
    assert hold_to_the_laws(schedule).peak_live == schedule.bound


@settings(max_examples=1)
@given(shapes(16, 4, 64), st.data())
def test_what_a_search_finds_is_lawful_in_large_shapes(shape: Shape, data):
    stages = shape.ranks * shape.chunks
    conditions = Conditions(data.draw(costs(stages)), default_messages(stages))
    schedule = make("auto", shape.ranks, shape.chunks, shape.microbatches, conditions=conditions)
    assert hold_to_the_laws(schedule).peak_live == schedule.bound


@pytest.mark.soak
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(named_schedules(shapes(16, 4, 64)))
def test_every_schedule_is_lawful_in_large_shapes_at_length(schedule):
    assert hold_to_the_laws(schedule).peak_live == schedule.bound


def with_groups(ranks: int, chunks: int, microbatches: int, groups: set[int]) -> None:
    """Interleaving is lawful, and has its bubble in Megatron-LM's legal cases."""
    for group in sorted(n for n in groups if n >= ranks):
        schedule = make("interleaved_1f1b", ranks, chunks, microbatches, group=group)
        timeline = hold_to_the_laws(schedule)
        assert timeline.peak_live == schedule.bound, group
        if microbatches % ranks == 0:
            assert timeline.makespan - 3 * microbatches * chunks == 3 * (ranks - 1), group


@pytest.mark.few(3)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_interleaving_is_lawful_with_groups(ranks, chunks):
    for microbatches in MICROBATCHES:
        with_groups(ranks, chunks, microbatches, {ranks + 1, 2 * ranks, microbatches})


@pytest.mark.soak
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_interleaving_is_lawful_with_every_group(ranks, chunks):
    for microbatches in range(1, 21):
        with_groups(ranks, chunks, microbatches, {*range(ranks, 3 * ranks + 2), microbatches})


# ---------------------------------------------------------------- closed forms


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", every(5, range(2, 18)))
def test_schedules_of_controllable_memory_hold_and_lose_what_their_paper_says(ranks: int):
    """Qi et al., arXiv 2405.15362: half and a third of the activations of 1F1B in the limit, for so many slots."""
    for microbatches in (ranks, 3 * ranks):
        half, least = (make(name, ranks, 2, microbatches) for name in ("v_half", "v_min"))
        assert max(half.bound) <= 2 * (ranks // 2) + 2
        assert max(least.bound) <= 2 * ceil((ranks + 2) / 3)
        lost = [assert_lawful(each).cost - 6 * microbatches for each in (half, least)]
        assert lost[0] <= max(0, 3 * ranks - (4 if ranks % 2 else 7)) + (microbatches == ranks)
        assert lost[1] <= max(5, 4 * ranks - 5)


def hold_as_published(ranks: int, microbatches: int) -> None:
    """Memory in that of 1F1B's P microbatches, or 2P of their halves, and time in what it loses, 6(P−1) slots: a half
    of both with V-Half, and a third and two thirds with V-Min, in the limit of many ranks.
    """
    whole = 2 * make("one_f_one_b", ranks, 1, microbatches).bound[0]
    lost = 2 * (assert_lawful(make("one_f_one_b", ranks, 1, microbatches)).cost - 3 * microbatches)
    assert (whole, lost) == (2 * ranks, 6 * (ranks - 1))
    for name, memory, more, time in (("v_half", 1 / 2, 2, 1 / 2), ("v_min", 1 / 3, 8 / 3, 2 / 3)):
        timeline = assert_lawful(make(name, ranks, 2, microbatches))
        assert max(timeline.peak_live) <= memory * whole + more + 1e-9
        assert timeline.cost - 6 * microbatches <= time * lost
        if microbatches >= 2 * ranks:  # it reaches its steady state
            assert min(timeline.peak_live) >= memory * whole - 1e-9


@examples(3)
@given(st.integers(2, 9), st.integers(1, 12))
def test_v_half_and_v_min_hold_and_lose_their_part_of_1f1b(ranks: int, more: int):
    """arXiv 2405.15362 §3.2 and table 1, from P+1 microbatches on."""
    hold_as_published(ranks, ranks + more)


@pytest.mark.soak
@settings(max_examples=100, deadline=None)
@given(st.integers(2, 40), st.integers(1, 120))
def test_v_half_and_v_min_hold_and_lose_their_part_of_1f1b_at_length(ranks: int, more: int):
    hold_as_published(ranks, ranks + more)


@given(shapes(8, 4, 24))
def test_bounds_are_the_closed_forms(shape: Shape):
    P, M, N, V = shape.ranks, shape.microbatches, shape.group, shape.chunks
    # Fewer than P that are left over are spread over the other groups.
    first = min(M, N) if M % N >= P else ceil(M / max(1, M // N))
    one = [min(M, P - r) for r in range(P)]

    def bound(name: str, chunks: int = 1, **arguments: int) -> list[int]:
        return list(make(name, P, chunks, M, **arguments).bound)

    assert bound("gpipe") == [M] * P
    assert bound("one_f_one_b") == one
    assert bound("looped_bfs", V) == [M * V] * P
    interleaved = one if V == 1 else [min(M * V, 2 * (P - r - 1) + (V - 1) * first + 1) for r in range(P)]
    assert bound("interleaved_1f1b", V, group=N) == interleaved
    assert bound("zb_h1") == [min(M, P)] * P
    assert bound("zb_h2") == [min(M, 2 * P - 1)] * P
    assert bound("zb_v", 2) == [min(2 * P, 2 * M, M + r + 1) for r in range(P)]
    assert bound("dualpipe_v", 2) == [min(2 * P + 1, 2 * M, M + r + 1) for r in range(P)]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs"])
@given(shapes(8, 4, 6))
def test_bubbles_are_the_closed_forms_at_equal_costs(name: str, shape: Shape):
    """Time lost, in whole microbatches: (P−1)/V, with chunks only where there are P microbatches or more."""
    P, M = shape.ranks, shape.microbatches
    V = shape.chunks if len(chunks_of(name)) > 1 else 1
    if V > 1:
        M *= P
    timeline = assert_lawful(make(name, P, V, M))
    lost = timeline.makespan - 3 * M * V
    assert lost == 3 * (P - 1)
    assert timeline.bubble == pytest.approx((P - 1) / (V * M + P - 1))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [name for name, each in SCHEDULES.items() if each.live is not None])
@examples(15)
@given(shapes(6, 3, 12))
def test_what_a_schedule_states_of_itself_is_so(name: str, shape: Shape):
    """Placement, whether B and W are apart, live activations, the W put off, and the bubble at equal costs."""
    generator = SCHEDULES[name]
    P, V, M = shape.ranks, generator.chunks or shape.chunks, shape.microbatches
    schedule = make(name, P, V, M)
    assert schedule.placement == generator.placement(P, V)
    assert schedule.bound == generator.live(P, V, M)
    apart = any(action.kind == "B" for line in schedule.actions for action in line)
    assert apart == generator.split or P == 1
    for line in schedule.actions:
        left = most = 0
        for action in line:
            left += {"B": 1, "W": -1}.get(action.kind, 0)
            most = max(most, left)
        assert most <= generator.lag(P) + 1, "just after its B, that of a microbatch is put off as well"
    M = 2 * P * (1 + M % 3)
    timeline = assert_lawful(make(name, P, V, M))
    stage = SimpleNamespace(forward=1.0, backward=1.0, weight=1.0, whole=2.0)
    assert timeline.cost - 3 * M * V == (P - 1) * generator.bubble(stage)


@examples(20)
@given(shapes(8, 1, 12), st.integers(4, 20), st.integers(4, 20), st.integers(1, 20))
def test_zb_h1_and_h2_idle_as_published(shape: Shape, forward: int, backward: int, weight: int):
    """(P−1)(F + B − W) and (P−1)(F + B − 2W), of arXiv 2401.10241 table 1, for W no longer than F and B, and enough
    microbatches to fill the pipeline: the longest that any rank is occupied, less its work.
    """
    P, W = shape.ranks, min(weight, forward, backward)
    costs = equal_costs(float(forward), float(backward), float(W))
    for name, least, idle in (
        ("zb_h1", P, (P - 1) * (forward + backward - W)),
        ("zb_h2", 2 * P, (P - 1) * (forward + backward - 2 * W)),
    ):
        M = least + shape.microbatches
        timeline = assert_lawful(make(name, P, 1, M), costs)
        assert timeline.cost - M * (forward + backward + W) == idle


@pytest.mark.soak
@examples(20)
@given(shapes(8, 1, 24))
def test_zb_v_has_no_bubble_at_equal_costs(shape: Shape):
    """No rank waits between its first and its last action, from 2P−1 microbatches on; in the memory of 1F1B: P of the
    first rank's microbatches, which are 2P of its halves.
    """
    P, M = shape.ranks, 2 * shape.ranks - 2 + shape.microbatches
    timeline = assert_lawful(make("zb_v", P, 2, M))
    assert timeline.bubble == 0
    assert timeline.cost == 6 * M
    assert max(timeline.peak_live) == 2 * P


@pytest.mark.parametrize("ranks", range(2, 9))
def test_zb_v_has_a_bubble_with_fewer_microbatches(ranks: int):
    assert assert_lawful(make("zb_v", ranks, 2, 2 * ranks - 2)).bubble > 0


@examples(20)
@given(shapes(8, 1, 24), st.sampled_from((2.0, 2.25, 2.5, 3.0)))
def test_dualpipe_v_idles_as_published(shape: Shape, pair: float):
    """(P−1)(F&B + B − 3W) with B the whole backward, of DeepSeek's table, beside the work of the rank with the most
    pairs: F, B's gradients of activations and W take one unit each, a pair `pair`, transfers nothing, and there are 2P
    microbatches or more.
    """
    P, M = shape.ranks, 2 * shape.ranks - 1 + shape.microbatches
    schedule = make("dualpipe_v", P, 2, M)
    check_schedule(schedule)
    programs = communicate(schedule, default_messages(2 * P), overlap=True)
    check_program(programs)
    timeline = simulate(programs, equal_costs(1.0, 1.0, 1.0, 0.0, pair))
    most = max(range(P), key=lambda rank: len(schedule.pairs[rank]))
    assert timeline.busy[most] == 6 * M - (3 - pair) * len(schedule.pairs[most])
    assert timeline.cost - timeline.busy[most] == (P - 1) * (pair + 2 - 3)
    assert timeline.peak_live == (2 * P + 1,) * P


@pytest.mark.soak
@given(shapes(8, 1, 24))
def test_dualpipe_v_one_after_the_other_idles_less(shape: Shape):
    """Where pairs do not overlap, what their forwards make leaves before their backwards run: (P−1)(F + B − 2W)."""
    P, M = shape.ranks, 2 * shape.ranks - 1 + shape.microbatches
    timeline = assert_lawful(make("dualpipe_v", P, 2, M))
    assert timeline.cost - 6 * M == (P - 1) * (1 + 2 - 2)


@examples(20)
@given(shapes(8, 1, 24))
def test_an_overlapped_pair_waits_before_and_sends_after_both(shape: Shape):
    P, M = shape.ranks, 2 * shape.ranks - 1 + shape.microbatches
    schedule = make("dualpipe_v", P, 2, M)
    programs = communicate(schedule, default_messages(2 * P), overlap=True)
    timeline = simulate(programs, equal_costs(1.0, 1.0, 1.0, 0.5, 2.25))
    for rank, line in enumerate(timeline.actions):
        for i in schedule.pairs[rank]:
            forward, backward = line[i], line[i + 1]
            assert (forward.work.kind, backward.work.kind) == ("F", "BW")
            assert forward.work.chunk != backward.work.chunk
            assert backward.end - forward.start == 2.25
            for channel, transfers in timeline.transfers.items():
                for each in transfers:
                    made = each.work.microbatch, each.work.message.source
                    for work in (forward.work, backward.work):
                        if channel.source == rank and made == (work.microbatch, schedule.placement[rank][work.chunk]):
                            direction = "forward" if work.kind == "F" else "backward"
                            assert direction != channel.direction or each.start >= backward.end


@examples(20)
@given(shapes())
def test_one_chunk_is_the_schedule_without_chunks(shape: Shape):
    P, M = shape.ranks, shape.microbatches
    interleaved = make("interleaved_1f1b", P, 1, M, group=shape.group)
    assert interleaved.actions == make("one_f_one_b", P, 1, M).actions
    assert make("looped_bfs", P, 1, M).actions == make("gpipe", P, 1, M).actions


@examples(20)
@given(shapes(8, 4, 6))
def test_forwards_alone_lose_no_more_than_the_way_to_the_last_rank(shape: Shape):
    P, V = shape.ranks, shape.chunks
    M = shape.microbatches * P
    timeline = assert_lawful(make(FORWARD_ONLY, P, V, M))
    assert timeline.makespan == M * V + P - 1
    # Each rank is occupied without a gap, the later ones later: nothing is lost between two steps.
    assert timeline.bubble == 0


@examples(20)
@given(shapes(8, 4, 12))
def test_forwards_alone_are_lawful_in_a_v(shape: Shape):
    """Evaluation runs where training has its stages."""
    placement = v_placement(shape.ranks, shape.chunks)
    hold_to_the_laws(make(FORWARD_ONLY, shape.ranks, shape.chunks, shape.microbatches, placement=placement))


def test_placements():
    assert loop_placement(3, 2) == ((0, 3), (1, 4), (2, 5))
    assert v_placement(3) == ((0, 5), (1, 4), (2, 3))
    assert v_placement(2, 3) == ((0, 3, 4), (1, 2, 5))


# ---------------------------------------------------------------- orders


def test_orders():
    """gpipe and 1F1B as every paper draws them; interleaving as Megatron-LM's table for 2 ranks, 2 chunks."""
    assert str(make("gpipe", 2, 1, 2)) == "F0.0 F0.1 BW0.0 BW0.1\nF0.0 F0.1 BW0.0 BW0.1"
    assert str(make("one_f_one_b", 3, 1, 4)) == (
        "F0.0 F0.1 F0.2 BW0.0 F0.3 BW0.1 BW0.2 BW0.3\n"
        "F0.0 F0.1 BW0.0 F0.2 BW0.1 F0.3 BW0.2 BW0.3\n"
        "F0.0 BW0.0 F0.1 BW0.1 F0.2 BW0.2 F0.3 BW0.3"
    )
    assert str(make("interleaved_1f1b", 2, 2, 4)) == (
        "F0.0 F0.1 F1.0 F1.1 F0.2 BW1.0 F0.3 BW1.1 F1.2 BW0.0 F1.3 BW0.1 BW1.2 BW1.3 BW0.2 BW0.3\n"
        "F0.0 F0.1 F1.0 BW1.0 F1.1 BW1.1 F0.2 BW0.0 F0.3 BW0.1 F1.2 BW1.2 F1.3 BW1.3 BW0.2 BW0.3"
    )
    assert str(make("looped_bfs", 1, 2, 2)) == "F0.0 F0.1 F1.0 F1.1 BW1.0 BW1.1 BW0.0 BW0.1"
    assert str(make(FORWARD_ONLY, 2, 2, 3)).splitlines()[0] == "F0.0 F0.1 F1.0 F1.1 F0.2 F1.2"


def test_orders_with_b_and_w():
    """ZB-H1, ZB-H2 as figures 3 of arXiv 2401.10241 draw their beginnings; ZB-V as torch's ZBV for 2 ranks."""
    assert str(make("zb_h1", 3, 1, 4)) == (
        "F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3\n"
        "F0.0 F0.1 B0.0 F0.2 B0.1 W0.0 F0.3 B0.2 W0.1 B0.3 W0.2 W0.3\n"
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 W0.0 F0.3 B0.3 W0.1 W0.2 W0.3"
    )
    assert str(make("zb_h2", 2, 1, 4)) == (
        "F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3\n"
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 W0.0 F0.3 B0.3 W0.1 W0.2 W0.3"
    )
    assert str(make("zb_v", 2, 2, 3)) == (
        "F0.0 F0.1 F0.2 F1.0 B1.0 W1.0 F1.1 B1.1 W1.1 B0.0 W0.0 F1.2 B1.2 W1.2 B0.1 W0.1 B0.2 W0.2\n"
        "F0.0 F1.0 F0.1 F1.1 B1.0 W1.0 F0.2 B0.0 W0.0 F1.2 B1.1 W1.1 B0.1 B1.2 B0.2 W0.1 W1.2 W0.2"
    )
    assert str(make("dualpipe_v", 2, 2, 4)).splitlines()[1] == (
        "F0.0 F1.0 F0.1 F1.1 F0.2 BW1.0 F1.2 BW0.0 F0.3 BW1.1 F1.3 BW0.1 BW1.2 BW0.2 B1.3 B0.3 W1.3 W0.3"
    )


@pytest.mark.parametrize("name", ["zb_v", "dualpipe_v"])
def test_orders_in_a_v_are_those_of_torch(name):
    """Of another implementation of the same publications; with its marks for what overlaps."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = {"zb_v": theirs.ScheduleZBVZeroBubble, "dualpipe_v": theirs.ScheduleDualPipeV}[name]
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    for ranks in RANKS:
        for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks + 2):
            size = SimpleNamespace(pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=microbatches)
            schedule = make(name, ranks, 2, microbatches)
            for rank in range(ranks):
                order: list[str] = []
                pairs = set()
                for action in kind._calculate_single_rank_operations(size, rank):
                    parts = getattr(action, "sub_actions", None) or (action,)
                    pairs |= {len(order)} if len(parts) > 1 else set()
                    for part in filter(None, parts):
                        chunk = schedule.placement[rank].index(part.stage_index)
                        order.append(f"{kinds[part.computation_type.name]}{chunk}.{part.microbatch_index}")
                assert " ".join(order) == " ".join(map(str, schedule.actions[rank]))
                assert pairs == (schedule.pairs[rank] if schedule.pairs else set())


def forwards_of(ranks: int, chunks: int, microbatches: int, group: int) -> str:
    first = str(make("interleaved_1f1b", ranks, chunks, microbatches, group=group)).splitlines()[0].split()
    return " ".join(action for action in first if action.startswith("F"))


def test_what_is_left_over_is_spread_over_the_groups():
    assert forwards_of(2, 2, 5, 2) == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 F0.3 F0.4 F1.3 F1.4"
    assert [group_sizes(microbatches, 4, 4) for microbatches in (3, 4, 10, 11, 19)] == [
        [3],
        [4],
        [5, 5],
        [6, 5],
        [5, 5, 5, 4],
    ]
    # P or more are a group like any other.
    assert forwards_of(2, 2, 8, 3).endswith("F0.6 F0.7 F1.6 F1.7")
    assert group_sizes(11, 8, 2) == [8, 3]


def test_interleaved_orders_are_those_of_torch():
    """Wherever torch has one: where the microbatches divide by the rounds of at least P."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules").ScheduleInterleaved1F1B
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "BW"}
    for ranks, chunks, microbatches in product(range(2, 6), range(2, 4), range(1, 26)):
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            continue
        size = SimpleNamespace(pp_group_size=ranks, n_local_stages=chunks, _n_microbatches=microbatches)
        size.microbatches_per_round = microbatches // rounds
        schedule = make("interleaved_1f1b", ranks, chunks, microbatches)
        for rank in range(ranks):
            order = [
                f"{kinds[each.computation_type.name]}{each.stage_index // ranks}.{each.microbatch_index}"
                for each in theirs._calculate_single_rank_operations(size, rank)
                if each is not None
            ]
            assert order == list(map(str, schedule.actions[rank]))


def joined(schedule: Schedule, group: int) -> Schedule:
    """An interleaved schedule whose remainder joins its first group, instead of being spread."""
    ranks, chunks, microbatches = schedule.ranks, schedule.chunks, schedule.microbatches
    first = group + microbatches % group
    groups = [range(first), *(range(start, start + group) for start in range(first, microbatches, group))]
    forwards = [Action("F", chunk, m) for members in groups for chunk in range(chunks) for m in members]
    backwards = [Action("BW", chunk, m) for members in groups for chunk in reversed(range(chunks)) for m in members]
    warm_ups = [min(microbatches * chunks, 2 * (ranks - r - 1) + (chunks - 1) * first) for r in range(ranks)]
    lines = tuple(alternate(forwards, backwards, warm_up) for warm_up in warm_ups)
    return evolve(schedule, actions=lines, bound=tuple(map(peak_live, lines)))


@pytest.mark.soak
@examples(15)
@given(shapes(6, 3, 30), st.integers(1, 6), st.integers(1, 6))
def test_spreading_what_is_left_over_takes_less_memory_and_no_longer(shape: Shape, forward: int, backward: int):
    """Than to put it into the first group: whatever F and BW take, if transfers are free and stages alike."""
    P, V, M, N = shape.ranks, shape.chunks, shape.microbatches, shape.group
    assume(V > 1 and M >= N and 0 < M % N < P)
    schedule = make("interleaved_1f1b", P, V, M, group=N)
    before = joined(schedule, N)
    costs = equal_costs(float(forward), backward / 2, backward / 2)
    assert assert_lawful(schedule, costs).makespan <= assert_lawful(before, costs).makespan * (1 + 1e-9)
    assert schedule.bound <= before.bound
    if M // N > 1 and M % N > 1 and max(before.bound) < M * V:
        assert max(schedule.bound) < max(before.bound)


# ---------------------------------------------------------------- names and arguments


@pytest.mark.parametrize("name", SCHEDULES)
def test_files_give_a_schedule_the_arguments_that_it_takes(name):
    generator = SCHEDULES[name]
    given = set(generator.names) - set(OF_THE_STEP)
    # The memory is a part of the conditions of those that are made within it.
    assert given - ({BOUND.name} if generator.bounded else set()) == set(generator.own)
    if generator.written is None:  # a file says how large it is
        assert {"microbatches", "over"} <= set(generator.names)
        assert ("chunks" in generator.names) == (generator.chunks is None)


@pytest.mark.parametrize(
    ("call", "message", "help"),
    [
        (("one_f_one", 2, 1, 4, {}), "there is no schedule `one_f_one`", "did you mean `one_f_one_b`?"),
        (("gpipe", 2, 2, 4, {}), "schedule `gpipe` has one stage on each rank, not 2", "interleaved_1f1b, looped_bfs,"),
        (("zb_v", 2, 3, 4, {}), "schedule `zb_v` has 2 stages on each rank, not 3", "interleaved_1f1b, looped_bfs,"),
        (("gpipe", 2, 1, 0, {}), "schedule `gpipe` needs at least 1 of `microbatches`, not 0", None),
        (("looped_bfs", 2, 1, 4, {"group": 3}), "schedule `looped_bfs` takes no argument `group`", None),
        (("auto", 2, 1, 4, {"conditions_": 3}), "schedule `auto` takes no argument `conditions_`", "it takes minimize"),
        (
            ("interleaved_1f1b", 4, 2, 8, {"group": 3}),
            "schedule `interleaved_1f1b`: group = 3 is less than the 4 ranks of the pipeline",
            None,
        ),
        (
            ("policy", 4, 3, 8, {"in_flight": 2}),
            "schedule `policy`: in_flight = 2 is too small for one microbatch on 3 chunks",
            None,
        ),
        (
            ("gpipe", 4, 1, 10**12, {}),
            "schedule `gpipe` would have 4 ranks × 1 chunks × 1000000000000 microbatches",
            f"at most {LIMIT}",
        ),
    ],
)
def test_impossible_arguments_are_refused(call, message, help):
    name, ranks, chunks, microbatches, arguments = call
    with pytest.raises(Refused) as refused:
        make(name, ranks, chunks, microbatches, **arguments)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E0505"
    assert diagnostic.message == message
    assert diagnostic.help is None if help is None else diagnostic.help.startswith(help)
