"""Interleaved 1F1B: several smaller stages per rank, so that the pipeline fills faster.

Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv 2104.04473
§2.2. The order within groups of microbatches is that of Megatron-LM's `get_schedule_table`; a remainder is grouped as
in torch's `ScheduleInterleaved1F1B`, for any number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import ceil

from attrs import evolve

from partita.compiler.schedules.generator import Generator, Sizes, register, whole_stage
from partita.compiler.schedules.one_f_one_b import alternate, one_f_one_b
from partita.compiler.schedules.one_f_one_b import live as one_f_one_b_live
from partita.compiler.schedules.schedule import (
    FORWARD,
    FULL_BACKWARD,
    Action,
    Schedule,
    loop_placement,
    turn,
)
from partita.dsl.config.builtins import CHUNKS, COUNT, MICROBATCHES, OVER_BOTH, SLICES, Setting
from partita.dsl.spec import Call

# The least ratio of two numbers of chunks that `plan` compares if neither gives all chunks as many layers.
CHUNKS_BETWEEN = 1.5


def interleaved_1f1b(ranks: int, chunks: int, microbatches: int, group: int | None = None, slices: int = 1) -> Schedule:
    """Forwards in groups of `group` microbatches (default: P), chunk by chunk within a group; backwards likewise with
    the chunks reversed; after a warm-up, forwards and backwards alternate.

    Rank r warms up with min(M·V, 2(P−r−1) + (V−1)·g) forwards, where g is the size of the first and largest group.
    Live activations: one more than that, at most M·V. At equal costs, with M a multiple of P, the bubble is (P−1)/V of
    a microbatch's time. With one chunk it is one_f_one_b.

    The same with S slices of each microbatch, S−1 more of which warm up, and P/S microbatches to a group.

    Raises ValueError for a group of fewer slices than ranks: the next chunk would need its first one before it arrives.
    """
    if group is not None and group * slices < ranks:
        raise ValueError(f"group = {group} is less than the {ranks} ranks of the pipeline")
    if chunks == 1:
        return evolve(one_f_one_b(ranks, microbatches, slices), name="interleaved_1f1b")
    starts = [0, *accumulate(_groups(ranks, microbatches, group, slices))]
    groups = [range(start * slices, end * slices) for start, end in pairwise(starts)]
    forwards = [Action(FORWARD, chunk, m) for members in groups for chunk in range(chunks) for m in members]
    backwards = [
        Action(FULL_BACKWARD, chunk, turn(FULL_BACKWARD, m, slices))
        for members in groups
        for chunk in reversed(range(chunks))
        for m in members
    ]
    warm_ups = _warm_ups(ranks, chunks, microbatches, starts[1], slices)
    return Schedule(
        "interleaved_1f1b",
        microbatches * slices,
        loop_placement(ranks, chunks),
        tuple(alternate(forwards, backwards, warm_up) for warm_up in warm_ups),
        tuple(min(microbatches * slices * chunks, warm_up + 1) for warm_up in warm_ups),
        slices=slices,
    )


def _warm_ups(ranks: int, chunks: int, microbatches: int, first: int, slices: int = 1) -> list[int]:
    """The number of warm-up forwards of each rank; `first` is the size of the first group."""
    total, fill = microbatches * slices * chunks, (chunks - 1) * first * slices + slices - 1
    return [min(total, 2 * (ranks - rank - 1) + fill) for rank in range(ranks)]


def _groups(ranks: int, microbatches: int, group: int | None = None, slices: int = 1) -> list[int]:
    """The number of microbatches in each group: at least P slices."""
    minimum = ceil(ranks / slices)
    return group_sizes(microbatches, group or minimum, minimum)


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """One more than the warm-up, at most M·V."""
    if chunks == 1:
        return one_f_one_b_live(ranks, 1, microbatches)
    first = _groups(ranks, microbatches)[0]
    return tuple(min(microbatches * chunks, each + 1) for each in _warm_ups(ranks, chunks, microbatches, first))


def group_sizes(microbatches: int, group: int, ranks: int) -> list[int]:
    """The number of microbatches in each group, larger ones first.

    A remainder of P or more is a group of its own. A smaller one is spread over the other groups: as the last group,
    the next chunk would need it before the last rank can have run it, and the ranks would deadlock (Megatron-LM rejects
    such shapes).
    """
    count, left = divmod(microbatches, group)
    if left >= ranks:
        return [group] * count + [left]
    each, more = divmod(microbatches, max(1, count))
    return [each + (i < more) for i in range(max(1, count))]


def _representative(ranks: int, microbatches: int) -> int:
    """Enough microbatches to form groups as large as those of M."""
    groups, left = divmod(microbatches, ranks)
    return min(microbatches, 3 * ranks + (ceil(3 * left / groups) if groups else 0))


def _planned(ranks: int, layers: int, microbatches: int) -> Iterator[int]:
    """Two chunks, every larger number that gives all chunks the same number of layers, and some between: layers that
    do not divide evenly over chunks may over ranks.
    """
    limit, last = layers // ranks, 1
    for each in range(2, limit + 1):
        if layers % (ranks * each) == 0 or each >= CHUNKS_BETWEEN * last or each == limit:
            last = each
            yield each


def _proxy(call: Call, sizes: Sizes) -> Call:
    """With groups of P microbatches, or P + 1 if the original's were larger than its P."""
    group = call.arguments["group"]
    proxy_group = None if group is None else sizes.ranks + (group > sizes.before)
    return evolve(call, arguments={**call.arguments, "group": proxy_group})


INTERLEAVED = register(
    Generator(
        "interleaved_1f1b",
        (MICROBATCHES, CHUNKS, Setting("group", COUNT, None), OVER_BOTH, SLICES),
        others=("interleaved",),
        order=interleaved_1f1b,
        chunks=None,
        live=live,
        bubble=whole_stage,
        representative=_representative,
        planned=_planned,
        role="varied",
        proxy=_proxy,
        fewest=lambda call: call.arguments["group"] or 0,
        legal=lambda ranks, chunks: {"group": range(ranks, 2 * ranks + 1)},
    )
)
