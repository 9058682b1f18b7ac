"""Windows of a long sequence of ids: what `text`, `stdlib` and `tokens` yield.

Yields `tokens` and `targets`, the same window one id later. Row r of step s starts at a position in the training part
drawn from word r of the stream of (seed, s). Evaluation spreads its windows over the holdout by a Weyl sequence, the
multiples of the golden ratio modulo 1, which fill it evenly however many there are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import frozen

from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.source import Span
from partita.runtime.data.dataset import Batch, Input
from partita.runtime.data.ids import Ids, parts_of
from partita.runtime.dtypes import NUMPY
from partita.runtime.philox import below, stream, words

SHIFT = {"tokens": 0, "targets": 1}  # what is yielded, and its offset in ids from the start of the window
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
CHECKED_AT_ONCE = 1 << 26  # ids that are checked when the data is opened; more are checked as they are used


@frozen(eq=False)
class Windows:
    """A `Dataset` of windows. `training` and `holdout` are one-dimensional; an input has `length` ids per window."""

    inputs: tuple[Input, ...]
    training: Ids
    holdout: Ids
    length: int
    seed: int
    what: str
    span: Span | None

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The windows of a training step."""
        return self._cut(self.training, self._starts(step, rows))

    def row_names(self, step: int) -> list[str]:
        """The position of each window's first id."""
        return [f"id {start}" for start in self._starts(step)]

    def _starts(self, step: int, rows: range | None = None) -> list[int]:
        assert step >= 1, "steps count from 1"
        rows = range(self.inputs[0].batch) if rows is None else rows
        choices = len(self.training) - self.length
        key = stream(self.seed, "windows", step)
        drawn = words(key, rows.start, max(0, rows.stop - rows.start))[:: rows.step]
        return [below(word, choices) for word in drawn]

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The windows of an evaluation batch; the same for every seed."""
        return self._cut(self.holdout, self._held_out(index, rows))

    def holdout_row_names(self, index: int) -> list[str]:
        """The position of each window's first id."""
        return [f"id {len(self.training) + start}" for start in self._held_out(index)]

    def _held_out(self, index: int, rows: range | None = None) -> list[int]:
        batch = self.inputs[0].batch
        rows = range(batch) if rows is None else rows
        choices = len(self.holdout) - self.length
        assert choices > 0, "open_dataset(evaluates=True) makes sure that there is a holdout"
        return [below((index * batch + row) * GOLDEN % (1 << 64), choices) for row in rows]

    def _cut(self, ids: Ids, starts: list[int]) -> Batch:
        windows = np.empty((len(starts), self.length + 1), np.int64)
        for row, start in enumerate(starts):
            windows[row] = ids[start : start + self.length + 1]
        batch: Batch = {}
        for given in self.inputs:
            values = windows[:, SHIFT[given.name] :][:, : self.length]
            check_limit(values, given, self.what, self.span)
            ordered = values if given.type.names[0] == given.batch_axis else values.T
            batch[given.name] = np.ascontiguousarray(ordered, NUMPY[given.type.dtype])
        return batch


def open_windows(
    ids: Ids,
    what: str,
    inputs: tuple[Input, ...],
    seed: int,
    holdout: float,
    evaluates: bool,
    span: Span | None,
    describe: Callable[[int], str] = lambda number: f"the id {number}",
) -> Windows:
    """Windows of `ids`, a one-dimensional integer array; `what` names it in messages, `describe` a single id.

    Refuses inputs that are not integers over the batch and one more axis, out-of-range ids, and too few ids.
    """
    found = [diagnostic for given in inputs for diagnostic in _unfit(given, span)]
    if found:
        raise Refused(found)
    lengths = {given.name: given.type.elements // given.batch for given in inputs}
    if len({(given.batch, lengths[given.name]) for given in inputs}) > 1:
        raise refuse(
            "E0607",
            "`tokens` and `targets` must have the same size",
            span,
            notes=[f"{given.name}: {given.type}" for given in inputs],
        )
    length = lengths[inputs[0].name]
    if len(ids) <= CHECKED_AT_ONCE:
        for given in inputs:
            for part in parts_of(ids):
                check_limit(part, given, what, span, describe)
    held = round(len(ids) * holdout)
    training = ids[: len(ids) - held]
    if len(training) <= length:
        raise refuse(
            "E0604",
            f"{what} is too short: {len(training)} ids to train on, and one window takes {length + 1}",
            span,
            help="use more text, or a shorter sequence",
        )
    if evaluates and held <= length:
        holding = f"the holdout of {what} is too short: {held} ids, and one window takes {length + 1}"
        raise refuse(
            "E0608" if holdout == 0 else "E0604",
            "`eval` needs data that training does not see, and there is no `holdout`" if holdout == 0 else holding,
            span,
            help=f"hold out at least {max(1, -(-100 * (length + 1) // len(ids)))}%: `holdout = …%` in `data`",
        )
    return Windows(inputs, training, ids[len(ids) - held :], length, seed, what, span)


def check_limit(
    ids: np.ndarray,
    given: Input,
    what: str,
    span: Span | None,
    describe: Callable[[int], str] = lambda number: f"the id {number}",
) -> None:
    """Refuse (E0605) ids outside [0, limit) that are not ignored."""
    if given.ignored:
        ids = ids[~np.isin(ids, given.ignored)]
    if given.limit is None or ids.size == 0:
        return
    largest, smallest = int(ids.max()), int(ids.min())
    if smallest < 0:
        raise refuse("E0605", f"{what} has {describe(smallest)}; ids must not be negative", span)
    check_largest(largest, given, what, span, describe)


def check_largest(
    largest: int,
    given: Input,
    what: str,
    span: Span | None,
    describe: Callable[[int], str] = lambda number: f"the id {number}",
) -> None:
    """Refuse (E0605) a largest id that is out of range."""
    if given.limit is not None and largest >= given.limit:
        grow = f"`axis {given.limit_axis} = {largest + 1}` or more" if given.limit_axis else f"{largest + 1} or more"
        raise refuse(
            "E0605",
            f"{what} has {describe(largest)}, which is out of range for `{given.name}`: {given.bound}",
            span,
            help=f"make that axis larger: {grow}",
        )


def _unfit(given: Input, span: Span | None) -> list[Diagnostic]:
    if given.name not in SHIFT:
        return [
            Diagnostic(
                "E0606",
                f"the data has no input called `{given.name}`",
                span,
                (f"it yields: {', '.join(SHIFT)}",),
                "name the model's inputs after what the data yields",
            )
        ]
    if given.type.dtype not in ("i64", "i32") or len(given.type.axes) != 2 or given.batch_axis is None:
        return [
            Diagnostic(
                "E0607",
                f"`{given.name}` must be integers over the batch and one more axis",
                span,
                (f"{given.name}: {given.type}",),
                f"declare it as `{given.name}: i64[batch, seq]`",
            )
        ]
    return []
