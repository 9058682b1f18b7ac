"""Property-based testing of pipeline schedules with Hypothesis, for users' own schedules and for Partita's.

To test a schedule:

    from hypothesis import given
    from partita.testing import Shape, assert_lawful, shapes

    @given(shapes(max_chunks=1))
    def test_my_schedule_is_lawful(shape: Shape) -> None:
        schedule = my_schedule(shape.ranks, shape.microbatches)
        timeline = assert_lawful(schedule)
        assert timeline.bubble <= 0.5

`assert_lawful` checks a schedule against all invariants of `partita.compiler.schedules.invariants`, with any messages.
The strategies generate shapes, valid schedules (named ones, random orders, orders that sum gradients differently, and
orders of ranks that share a vocabulary), copies to the host's memory in them, mutants of them, messages that skip
stages, costs, and memory limits. Shapes have slices of the sequence if asked to, `shapes(max_slices=4)`.
"""

from partita.testing.assertions import assert_lawful, dependency_bound
from partita.testing.strategies import (
    Shape,
    copied_schedules,
    costs,
    descending_orders,
    memories,
    messages,
    mutants,
    named_schedules,
    random_orders,
    schedules,
    shapes,
    shared_schedules,
)

__all__ = [
    "Shape",
    "assert_lawful",
    "copied_schedules",
    "costs",
    "dependency_bound",
    "descending_orders",
    "memories",
    "messages",
    "mutants",
    "named_schedules",
    "random_orders",
    "schedules",
    "shapes",
    "shared_schedules",
]
