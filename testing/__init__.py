"""Property testing of pipeline schedules, with Hypothesis: for users' own schedules, and for Partita's.

A test of one's own schedule:

    from hypothesis import given
    from partita.testing import Shape, assert_lawful, shapes

    @given(shapes(max_chunks=1))
    def test_my_schedule_is_lawful(shape: Shape) -> None:
        schedule = my_schedule(shape.ranks, shape.microbatches)
        timeline = assert_lawful(schedule)
        assert timeline.bubble <= 0.5

`assert_lawful` holds a schedule to all laws of `partita.compiler.laws`, with and without bounded buffers and
with any messages; the strategies give shapes, lawful schedules (named ones, and random orders that no rule
would write), mutants of them, messages that skip stages, costs, and memory.
"""

from partita.testing.assertions import assert_lawful, dependency_bound
from partita.testing.strategies import (
    Shape,
    costs,
    memories,
    messages,
    mutants,
    named_schedules,
    random_orders,
    schedules,
    shapes,
)

__all__ = [
    "Shape",
    "assert_lawful",
    "costs",
    "dependency_bound",
    "memories",
    "messages",
    "mutants",
    "named_schedules",
    "random_orders",
    "schedules",
    "shapes",
]
