"""One microbatch at a time: the minimum of memory. Not selectable by users."""

from __future__ import annotations

from partita.compiler.schedules.schedule import BACKWARD, FORWARD, WEIGHT, Action, Schedule


def one_by_one(placement: tuple[tuple[int, ...], ...], microbatches: int) -> Schedule:
    """Every rank runs all F of a microbatch, then all its B and W. Live activations: V."""
    orders = []
    for stages in placement:
        chunks = sorted(range(len(stages)), key=stages.__getitem__)
        order = []
        for m in range(microbatches):
            order += [Action(FORWARD, chunk, m) for chunk in chunks]
            for chunk in reversed(chunks):
                order += [Action(BACKWARD, chunk, m), Action(WEIGHT, chunk, m)]
        orders.append(tuple(order))
    return Schedule("one_by_one", microbatches, placement, tuple(orders), tuple(map(len, placement)))
