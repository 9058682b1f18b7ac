"""DualPipeV: pairs of a forward and a backward of different microbatches that overlap, on two chunks a rank in a V.

DualPipeV is DualPipe (DeepSeek-V3, arXiv 2412.19437 §3.2.1) cut in half, so that no parameter is stored twice: Qi et
al., Sea AI Lab, "DualPipe could be better without the Dual"; the order is that of `dualpipev.py` in
github.com/deepseek-ai/DualPipe, which torch's DualPipeV has too.
"""

from __future__ import annotations

from collections.abc import Iterator

from partita.compiler.schedules.generator import Generator, register
from partita.compiler.schedules.schedule import Schedule, v_placement
from partita.compiler.schedules.v import PAIRED, Step, in_a_v
from partita.dsl.builtins import MICROBATCHES, OVER


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Whole backwards beside forwards of other microbatches while there are any; B and W apart while the pipeline fills
    and drains.

    Live activations: 2P+1 on every rank, and fewer with fewer microbatches: min(2M, M+r+1); of stages half as large. At
    equal costs (F, B and W take one unit each), with free transfers and M ≥ 2P, the pipeline idles for (P−1)(F&B + BW −
    3W), where F&B is the time of an overlapped pair and BW that of a whole backward. Run one after the other, pairs
    send what the forward makes before the backward runs, and it idles for (P−1)(F + BW − 2W).
    """
    return in_a_v("dualpipe_v", ranks, microbatches, 2 * ranks, _steps, live(ranks, 2, microbatches))


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """One more than ZB-V."""
    return tuple(min(2 * ranks + 1, 2 * microbatches, microbatches + rank + 1) for rank in range(ranks))


def _steps(ranks: int, microbatches: int, rank: int) -> Iterator[Step]:
    """The eight steps of the published code, on a rank, for 2P microbatches or more."""
    after = ranks - rank - 1  # ranks between this one and the turn of the V
    pending: list[int] = []  # chunks whose B has run without its W

    for _ in range(2 * after):
        yield "F", 0
    for _ in range(rank + 1):
        yield from (("F", 0), ("F", 1))
    for _ in range(after):
        yield from (("B", 1), ("W", 1), ("F", 1))
    for i in range(microbatches - 2 * ranks + rank + 1):
        # On the last rank the first pair does not overlap: rank P−2 waits for its forward.
        yield ("F" if i == 0 and after == 0 else PAIRED), 0
        yield from (("BW", 1), (PAIRED, 1), ("BW", 0))
    for _ in range(after):
        yield from (("BW", 1), (PAIRED, 1), ("BW", 0))
    # It drains: from the middle on, B goes first, and W follows where there is time.
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


# It keeps more than what `plan` considers, and ends no sooner.
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
