"""Interleaved 1F1B: several smaller stages on each rank, so that the pipeline fills in less time.

Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv
2104.04473 §2.2; the order in groups of microbatches is that of Megatron-LM's `get_schedule_table`. Which groups there
are where microbatches are left over is the rule of torch's `ScheduleInterleaved1F1B`, of any number of microbatches.
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
    WHOLE_BACKWARD,
    Action,
    Schedule,
    loop_placement,
)
from partita.dsl.builtins import CHUNKS, COUNT, MICROBATCHES, OVER, Setting
from partita.dsl.spec import Call


def interleaved_1f1b(ranks: int, chunks: int, microbatches: int, group: int | None = None) -> Schedule:
    """Forwards by groups of `group` microbatches (P unless given), in each group chunk by chunk; backwards
    likewise with the chunks reversed; one of each in turn after a warm-up.

    Rank r warms up with min(M·V, 2(P−r−1) + (V−1)·g) forwards, g the size of the first group, which is the largest.
    Live activations: one more than that, or M·V if that is less. At equal costs, with M a multiple of P, the pipeline
    idles for (P−1)/V of a microbatch's time. With one chunk it is one_f_one_b.

    Raises ValueError for a group smaller than the number of ranks: its first microbatch would be wanted by
    the next chunk before it is there.
    """
    if group is not None and group < ranks:
        raise ValueError(f"group = {group} is less than the {ranks} ranks of the pipeline")
    if chunks == 1:
        return evolve(one_f_one_b(ranks, microbatches), name="interleaved_1f1b")
    starts = [0, *accumulate(group_sizes(microbatches, group or ranks, ranks))]
    groups = [range(start, end) for start, end in pairwise(starts)]
    forwards = [Action(FORWARD, chunk, m) for members in groups for chunk in range(chunks) for m in members]
    backwards = [
        Action(WHOLE_BACKWARD, chunk, m) for members in groups for chunk in reversed(range(chunks)) for m in members
    ]
    warm_ups = _warm_ups(ranks, chunks, microbatches, starts[1])
    return Schedule(
        "interleaved_1f1b",
        microbatches,
        loop_placement(ranks, chunks),
        tuple(alternate(forwards, backwards, warm_up) for warm_up in warm_ups),
        live(ranks, chunks, microbatches, group),
    )


def _warm_ups(ranks: int, chunks: int, microbatches: int, first: int) -> list[int]:
    """The forwards that each rank begins with; `first` is the size of the first group."""
    return [min(microbatches * chunks, 2 * (ranks - rank - 1) + (chunks - 1) * first) for rank in range(ranks)]


def live(ranks: int, chunks: int, microbatches: int, group: int | None = None) -> tuple[int, ...]:
    """One more than a rank begins with, or all."""
    if chunks == 1:
        return one_f_one_b_live(ranks, 1, microbatches)
    first = group_sizes(microbatches, group or ranks, ranks)[0]
    return tuple(min(microbatches * chunks, each + 1) for each in _warm_ups(ranks, chunks, microbatches, first))


def group_sizes(microbatches: int, group: int, ranks: int) -> list[int]:
    """How many microbatches each group has, the larger ones first.

    As a last group, fewer than P would be wanted by the next chunk before the last rank can have run them, and the
    ranks would wait for each other (Megatron-LM refuses these shapes): they are spread over the others. P or more are a
    group like any other.
    """
    count, left = divmod(microbatches, group)
    if left >= ranks:
        return [group] * count + [left]
    each, more = divmod(microbatches, max(1, count))
    return [each + (i < more) for i in range(max(1, count))]


def _representative(ranks: int, microbatches: int) -> int:
    """In groups that are as large as those of all."""
    groups, left = divmod(microbatches, ranks)
    return min(microbatches, 3 * ranks + (ceil(3 * left / groups) if groups else 0))


def _planned(ranks: int, turns: int, microbatches: int) -> Iterator[int]:
    """Two chunks, and as many more as have equally many turns."""
    return (each for each in range(2, turns // ranks + 1) if each == 2 or turns % (ranks * each) == 0)


def _proxy(call: Call, sizes: Sizes) -> Call:
    """In groups of as many microbatches as ranks, or one more."""
    group = call.arguments["group"]
    kept = None if group is None else sizes.ranks + (group > sizes.before)
    return evolve(call, arguments={**call.arguments, "group": kept})


register(
    Generator(
        "interleaved_1f1b",
        (MICROBATCHES, CHUNKS, Setting("group", COUNT, None), OVER),
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
