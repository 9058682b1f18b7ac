"""Interleaved 1F1B: several smaller stages on each rank, so that the pipeline fills in less time.

Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv
2104.04473 §2.2; the order in groups of microbatches is that of Megatron-LM's `get_schedule_table`. Which groups there
are where microbatches are left over is the rule of torch's `ScheduleInterleaved1F1B`, of any number of microbatches.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from attrs import evolve

from partita.compiler.schedules.one_f_one_b import alternate, one_f_one_b
from partita.compiler.schedules.schedule import (
    FORWARD,
    WHOLE_BACKWARD,
    Action,
    Schedule,
    loop_placement,
)


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
    warm_ups = [min(microbatches * chunks, 2 * (ranks - rank - 1) + (chunks - 1) * starts[1]) for rank in range(ranks)]
    return Schedule(
        "interleaved_1f1b",
        microbatches,
        loop_placement(ranks, chunks),
        tuple(alternate(forwards, backwards, warm_up) for warm_up in warm_ups),
        tuple(min(microbatches * chunks, warm_up + 1) for warm_up in warm_ups),
    )


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
