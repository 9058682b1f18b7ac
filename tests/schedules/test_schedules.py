"""The schedules: their laws in every shape, their closed forms, and their orders in examples that people
know.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.communication import communicate, default_messages
from partita.compiler.laws import check_program, check_schedule
from partita.compiler.schedules.registry import INTERNAL, SCHEDULES, make
from partita.compiler.schedules.schedule import LIMIT, Schedule
from partita.compiler.simulator import equal_costs, simulate
from partita.compiler.timeline import Timeline
from partita.dsl.diagnostic import Refused
from partita.testing import Shape, assert_lawful, shapes

RANKS, CHUNKS, MICROBATCHES = range(1, 9), range(1, 5), range(1, 21)
CHUNKED = ("interleaved_1f1b", "looped_bfs", "forward_only")


def hold_to_the_laws(schedule: Schedule) -> Timeline:
    check_schedule(schedule)
    programs = communicate(schedule, default_messages(schedule.stages, schedule.training))
    check_program(programs)
    return simulate(programs, equal_costs())


def all_lawful(ranks: int, chunks: int, groups: tuple[int, ...]) -> None:
    """Every schedule of these sizes passes its laws and reaches exactly its stated bound; interleaving has
    its bubble in Megatron-LM's legal cases.
    """
    for m in MICROBATCHES:
        for name in (*SCHEDULES, *INTERNAL):
            if name in CHUNKED or chunks == 1:
                legal: list[int | None] = [None]
                if name == "interleaved_1f1b":
                    legal = sorted({n for n in (*groups, m) if n >= ranks})
                for group in legal:
                    arguments = {"group": group} if group else {}
                    schedule = make(name, ranks, chunks, m, **arguments)
                    timeline = hold_to_the_laws(schedule)
                    assert timeline.peak_live == schedule.bound, (schedule, group)
                    if name == "interleaved_1f1b" and m % ranks == 0:
                        ideal = 3 * m * chunks
                        assert timeline.makespan - ideal == 3 * (ranks - 1), (schedule, group)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_schedule_is_lawful_in_every_small_shape(ranks, chunks):
    all_lawful(ranks, chunks, (ranks, ranks + 1, 2 * ranks))


@pytest.mark.soak
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_schedule_is_lawful_with_every_group(ranks, chunks):
    all_lawful(ranks, chunks, tuple(range(ranks, 3 * ranks + 2)))


@given(shapes(8, 4, 24), st.sampled_from(sorted(SCHEDULES)))
def test_bounds_are_the_closed_forms(shape: Shape, name: str):
    P, M, N = shape.ranks, shape.microbatches, shape.group
    V = shape.chunks if name in CHUNKED else 1
    schedule = make(name, P, V, M, **({"group": N} if name == "interleaved_1f1b" else {}))
    joined = M % N if M % N < P else 0
    first = min(N + joined, M) if joined else N
    one = [min(M, P - r) for r in range(P)]
    closed = {
        "gpipe": [M] * P,
        "one_f_one_b": one,
        "looped_bfs": [M * V] * P,
        "interleaved_1f1b": (one if V == 1 else [min(M * V, 2 * (P - r - 1) + (V - 1) * first + 1) for r in range(P)]),
    }
    assert list(schedule.bound) == closed[name]


@given(shapes(8, 4, 6), st.sampled_from(sorted(SCHEDULES)))
def test_bubbles_are_the_closed_forms_at_equal_costs(shape: Shape, name: str):
    """Time lost, in whole microbatches: (P−1)/V, with chunks only where there are P microbatches or more."""
    P, M = shape.ranks, shape.microbatches
    V = shape.chunks if name in CHUNKED else 1
    if V > 1:
        M *= P
    timeline = assert_lawful(make(name, P, V, M))
    lost = timeline.makespan - 3 * M * V
    assert lost == 3 * (P - 1)
    assert timeline.bubble == pytest.approx((P - 1) / (V * M + P - 1))


@given(shapes())
def test_one_chunk_is_the_schedule_without_chunks(shape: Shape):
    P, M = shape.ranks, shape.microbatches
    interleaved = make("interleaved_1f1b", P, 1, M, group=shape.group)
    assert interleaved.actions == make("one_f_one_b", P, 1, M).actions
    assert make("looped_bfs", P, 1, M).actions == make("gpipe", P, 1, M).actions


@given(shapes(8, 4, 6))
def test_forwards_alone_lose_no_more_than_the_way_to_the_last_rank(shape: Shape):
    P, V = shape.ranks, shape.chunks
    M = shape.microbatches * P
    timeline = assert_lawful(make("forward_only", P, V, M))
    assert timeline.makespan == M * V + P - 1
    # Each rank is occupied without a gap, the later ones later: nothing is lost between two steps.
    assert timeline.bubble == 0


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
    assert str(make("forward_only", 2, 2, 3)).splitlines()[0] == "F0.0 F0.1 F1.0 F1.1 F0.2 F1.2"


def test_what_is_left_over_joins_the_first_group():
    first = str(make("interleaved_1f1b", 2, 2, 5, group=2)).splitlines()[0].split()
    forwards = [action for action in first if action.startswith("F")]
    assert " ".join(forwards) == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 F0.3 F0.4 F1.3 F1.4"
    # P or more are a group like any other.
    first = str(make("interleaved_1f1b", 2, 2, 8, group=3)).splitlines()[0].split()
    forwards = [action for action in first if action.startswith("F")]
    assert " ".join(forwards[-4:]) == "F0.6 F0.7 F1.6 F1.7"


@pytest.mark.parametrize(
    ("call", "message", "help"),
    [
        (("one_f_one", 2, 1, 4, {}), "there is no schedule `one_f_one`", "did you mean `one_f_one_b`?"),
        (("gpipe", 2, 2, 4, {}), "schedule `gpipe` has one stage on each rank, not 2", "interleaved_1f1b and"),
        (("gpipe", 2, 1, 0, {}), "schedule `gpipe` needs at least 1 of `microbatches`, not 0", None),
        (("looped_bfs", 2, 1, 4, {"group": 3}), "schedule `looped_bfs` takes no argument `group`", None),
        (
            ("interleaved_1f1b", 4, 2, 8, {"group": 3}),
            "schedule `interleaved_1f1b`: group = 3 is less than the 4 ranks of the pipeline",
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
