"""Static orders with two integers per rank: the number of warm-up forwards, and the lag of W behind B.

The previous rank waits for B, but no rank waits for W, so W can fill bubbles: Qi et al., Zero Bubble Pipeline
Parallelism, arXiv 2401.10241. With k warm-up forwards and a lag of l, a rank runs

    k forwards; then, for each microbatch: its B, the W of l microbatches earlier, and a forward while any are left;
    then the remaining W

and holds at most k + l live activations. The handcrafted schedules of the paper have this form, and `auto` searches
over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from partita.compiler.schedules.schedule import BACKWARD, FORWARD, WEIGHT, Action, Schedule, loop_placement

Each = TypeVar("Each")


def lagged(
    forwards: Sequence[Each], backwards: Sequence[Each], weights: Sequence[Each], warm_up: int, lag: int
) -> tuple[Each, ...]:
    """The order above, from forwards and either B and W, or full backwards and no `weights`."""
    order = [*forwards[:warm_up]]
    for i, backward in enumerate(backwards):
        order.append(backward)
        if weights and i >= lag:
            order.append(weights[i - lag])
        if warm_up + i < len(forwards):
            order.append(forwards[warm_up + i])
    return (*order, *weights[max(0, len(backwards) - lag) :])


def one_chunk(
    name: str, microbatches: int, warm_ups: Sequence[int], lags: Sequence[int], bound: tuple[int, ...]
) -> Schedule:
    """The schedule with one stage per rank and these integers for each rank."""
    forwards, backwards, weights = (
        [Action(kind, 0, m) for m in range(microbatches)] for kind in (FORWARD, BACKWARD, WEIGHT)
    )
    numbers = tuple(zip(warm_ups, lags, strict=True))
    return Schedule(
        name,
        microbatches,
        loop_placement(len(numbers), 1),
        tuple(lagged(forwards, backwards, weights, warm_up, lag) for warm_up, lag in numbers),
        bound,
    )
