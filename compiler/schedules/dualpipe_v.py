"""DualPipeV: overlapped pairs of a forward and a backward of different microbatches, with two chunks per rank in a V.

DualPipe (DeepSeek-V3, arXiv 2412.19437 §3.2.1) cut in half, so that no parameter is stored twice: Qi et al., Sea AI
Lab, "DualPipe could be better without the Dual". The order is that of `dualpipev.py` in
github.com/deepseek-ai/DualPipe, as is that of torch's DualPipeV.
"""

from __future__ import annotations

from collections.abc import Iterator

from partita.compiler.schedules.generator import Generator, register
from partita.compiler.schedules.schedule import Schedule, v_placement
from partita.compiler.schedules.v import PAIRED, Step, in_a_v
from partita.dsl.config.builtins import MICROBATCHES, OVER


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Full backwards overlap with forwards of other microbatches while there are any; B and W are split while the
    pipeline fills and drains.

    Live activations: min(2P+1, 2M, M+r+1) on rank r, of stages half as large. At equal costs (F, B and W take one unit
    each), with free transfers and M ≥ 2P, the bubble is (P−1)(F&B + BW − 3W), where F&B is the time of an overlapped
    pair and BW that of a full backward. If pairs run sequentially, the forward's output is sent before the backward
    runs, and the bubble is (P−1)(F + BW − 2W).
    """
    return in_a_v("dualpipe_v", ranks, microbatches, 2 * ranks, _steps, live(ranks, 2, microbatches))


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """min(2P+1, 2M, M+r+1) on rank r."""
    return tuple(min(2 * ranks + 1, 2 * microbatches, microbatches + rank + 1) for rank in range(ranks))


def _steps(ranks: int, microbatches: int, rank: int) -> Iterator[Step]:
    """The eight phases of the published code on a rank, for 2P microbatches or more."""
    after = ranks - rank - 1  # ranks between this one and the turn of the V
    pending: list[int] = []  # chunks whose B has run without its W

    for _ in range(2 * after):
        yield "F", 0
    for _ in range(rank + 1):
        yield from (("F", 0), ("F", 1))
    for _ in range(after):
        yield from (("B", 1), ("W", 1), ("F", 1))
    for i in range(microbatches - 2 * ranks + rank + 1):
        # On the last rank the first pair does not overlap: rank P−2 waits for the forward's output.
        yield ("F" if i == 0 and after == 0 else PAIRED), 0
        yield from (("BW", 1), (PAIRED, 1), ("BW", 0))
    for _ in range(after):
        yield from (("BW", 1), (PAIRED, 1), ("BW", 0))
    # The pipeline drains: from the middle on, B goes first, and W fills the gaps.
    for i in range(rank + 1):
        for chunk, late in ((1, i + rank % 2), (0, i + 1)):
            if late > (rank + 1) // 2:
                yield "B", chunk
                pending.append(chunk)
            else:
                yield "BW", chunk
    for _ in range(after):
        yield "W", pending.pop(0)
        yield "B", 0
        pending.append(0)
    for chunk in pending:
        yield "W", chunk


# `plan` omits it: it needs more memory than those considered and is no faster.
register(
    Generator(
        "dualpipe_v",
        (MICROBATCHES, OVER),
        order=dualpipe_v,
        chunks=2,
        placement=v_placement,
        split=True,
        live=live,
        lag=lambda ranks: ranks,
        bubble=lambda stage: max(0.0, stage.forward + stage.whole - 2 * stage.weight),
        role="compared",
    )
)
