"""Windows of a long sequence of ids: what `text`, `stdlib` and `tokens` yield.

Yields `tokens` and `targets`, the same window one id later. Row r of step s starts at a position in the training part
drawn from word r of the stream of (seed, s). Evaluation spreads its windows over the holdout by a Weyl sequence, the
multiples of the golden ratio modulo 1, which fill it evenly however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import frozen

from partita.dsl.check.exclusions import OWN_DATA, held_in_vain, nothing_held_out
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.dsl.types import INDICES
from partita.runtime.data.dataset import Batch, Dataset, Input
from partita.runtime.data.ids import Ids, parts_of
from partita.runtime.data.registry import Use
from partita.runtime.dtypes import NUMPY
from partita.runtime.philox import below, stream, words

SHIFT = {"tokens": 0, "targets": 1}  # what is yielded, and its offset in ids from the start of the window
ONE_SEGMENT = ("segments", "positions")  # what a model of packed rows reads as well: a window is one document
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
CHECKED_AT_ONCE = 1 << 26  # ids that are checked when the data is opened; more are checked as they are used


@frozen(eq=False)
class Windows(Dataset):
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
        return self.cut(self.training, self._starts(step, rows))

    def row_names(self, step: int) -> list[str]:
        """The position of each window's first id."""
        return [f"id {start}" for start in self._starts(step)]

    def _starts(self, step: int, rows: range | None = None) -> list[int]:
        assert step >= 1, "steps count from 1"
        rows = range(self.inputs[0].batch) if rows is None else rows
        choices = len(self.training) - self.length
        key = stream(self.seed, "windows", step)
        return [below(word, choices) for word in words(key, rows.start, len(rows))]

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The windows of an evaluation batch; the same for every seed."""
        return self.cut(self.holdout, self._held_out(index, rows))

    def holdout_row_names(self, index: int) -> list[str]:
        """The position of each window's first id."""
        return [f"id {len(self.training) + start}" for start in self._held_out(index)]

    def _held_out(self, index: int, rows: range | None = None) -> list[int]:
        batch = self.inputs[0].batch
        rows = range(batch) if rows is None else rows
        choices = len(self.holdout) - self.length
        assert choices > 0, "data that is opened to be evaluated has a holdout"
        return [below((index * batch + row) * GOLDEN % (1 << 64), choices) for row in rows]

    @property
    def held_out(self) -> int:
        """The windows that follow each other in the holdout; the last may end early, if targets can be ignored."""
        whole, rest = divmod(len(self.holdout) - 1, self.length)
        return whole + (rest > 0 and ignored_target(self.inputs) is not None)

    @property
    def left_out(self) -> int:
        """The ids at the end of the holdout that are targets of none of these windows."""
        return max(0, len(self.holdout) - 1 - self.held_out * self.length)

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """Windows of the holdout, one behind the other. Beyond its end, targets are ignored."""
        return self.cut(self.holdout, [number * self.length for number in numbers])

    def cut(self, ids: Ids, starts: list[int]) -> Batch:
        """The windows of ids that begin at these places."""
        windows = np.zeros((len(starts), self.length + 1), np.int64)
        short: dict[int, int] = {}  # rows that end early, and the number of their targets
        for row, start in enumerate(starts):
            window = ids[start : start + self.length + 1]
            windows[row, : len(window)] = window
            if len(window) <= self.length:
                short[row] = len(window) - 1
        batch: Batch = {}
        for model_input in self.inputs:
            if model_input.name in ONE_SEGMENT:
                row_of_it = (
                    np.arange(self.length) if model_input.name == "positions" else np.zeros(self.length, np.int64)
                )
                values = np.broadcast_to(row_of_it, (len(starts), self.length))
            else:
                values = windows[:, SHIFT[model_input.name] :][:, : self.length]
            if model_input.name == "targets" and short:
                values = values.copy()
                for row, end in short.items():
                    values[row, end:] = model_input.ignored[0]
            check_limit(values, model_input, self.what, self.span)
            batch[model_input.name] = arranged(values, model_input)
        return batch


def arranged(values: np.ndarray, model_input: Input) -> np.ndarray:
    """Rows of ids as an input has them."""
    ordered = values if model_input.type.names[0] == model_input.batch_axis else values.T
    return np.ascontiguousarray(ordered, NUMPY[model_input.type.dtype])


def ignored_target(inputs: tuple[Input, ...]) -> int | None:
    """What `targets` is where there is none; None if the model does not ignore any."""
    return next((each.ignored[0] for each in inputs if each.column == "targets" and each.ignored), None)


def open_windows(
    ids: Ids,
    what: str,
    inputs: tuple[Input, ...],
    seed: int,
    holdout: float,
    use: Use,
    span: Span | None,
    describe: Callable[[int], str] = lambda number: f"the id {number}",
) -> Windows:
    """Windows of `ids`, a one-dimensional integer array; `what` names it in messages, `describe` a single id.

    Refuses inputs that are not integers over the batch and one more axis, out-of-range ids, and too few ids.
    """
    length = length_of(inputs, span)
    if len(ids) <= CHECKED_AT_ONCE:
        for model_input in inputs:
            for part in parts_of(ids) if model_input.name in SHIFT else ():
                check_limit(part, model_input, what, span, describe)
    held_out = round(len(ids) * holdout)
    training = ids[: len(ids) - held_out]
    fits = fitting_holdout(lambda share: length < round(len(ids) * share) < len(ids) - length)
    longer = "use more text, or a shorter sequence"
    if len(training) <= length and use != Use.EVALUATE:
        rest = f": {len(training)} of {len(ids)} ids are left to train on" if held_out else f": {len(ids)} ids"
        raise refuse(
            "E0604",
            f"{what} is too short{rest}, and one window takes {length + 1}",
            span,
            help=other_holdout(fits, longer) if held_out and len(ids) > length else longer,
        )
    if use and held_out <= length:
        which = what if use is Use.EVALUATE else f"the holdout of {what}"
        raise refuse(
            "E0604",
            f"{which} is too short: {held_out} ids, and one window takes {length + 1}",
            span,
            help=longer if use is Use.EVALUATE else other_holdout(fits, longer),
        )
    return Windows(inputs, training, ids[len(ids) - held_out :], length, seed, what, span)


def length_of(inputs: tuple[Input, ...], span: Span | None) -> int:
    """The number of ids of a row. Raises Refused (E0606, E0607) for inputs that are not rows of ids, all alike."""
    diagnostics = [diagnostic for model_input in inputs for diagnostic in _unfit(model_input, span)]
    if diagnostics:
        raise Refused(diagnostics)
    if len({(model_input.batch, model_input.type.elements) for model_input in inputs}) > 1:
        names = [f"`{model_input.name}`" for model_input in inputs]
        raise refuse(
            "E0607",
            f"{', '.join(names[:-1])} and {names[-1]} must have the same size",
            span,
            notes=[f"{model_input.name}: {model_input.type}" for model_input in inputs],
        )
    return inputs[0].type.elements // inputs[0].batch


def share_held_out(call: Call, use: Use) -> float:
    """The share of a source that is held out. Raises Refused (E0608) if all is evaluated, and it holds out some; or
    none is held out, and some is to be evaluated.
    """
    share = float(call.arguments.get("holdout") or 0.0)
    if share and use is Use.EVALUATE:
        raise Refused([held_in_vain(call)])
    if not share and use is Use.HOLD_OUT:
        raise Refused([nothing_held_out(call)])
    return 1.0 if use is Use.EVALUATE else share


def fitting_holdout(fits: Callable[[float], bool]) -> int | None:
    """A percentage that can be held out: the usual one, or else the least; None if none can."""
    return next((percent for percent in (10, *range(1, 100)) if fits(percent / 100)), None)


def other_holdout(percent: int | None, otherwise: str) -> str:
    """What to do about a holdout that is missing, too small or too large, if this percentage would do."""
    return f"`holdout = {percent}%`, or {OWN_DATA}" if percent is not None else f"{OWN_DATA}; or {otherwise}"


def check_limit(
    ids: np.ndarray,
    model_input: Input,
    what: str,
    span: Span | None,
    describe: Callable[[int], str] = lambda number: f"the id {number}",
) -> None:
    """Refuse (E0605) ids outside [0, limit) that are not ignored."""
    if model_input.ignored:
        ids = ids[~np.isin(ids, model_input.ignored)]
    if model_input.limit is None or ids.size == 0:
        return
    largest, smallest = int(ids.max()), int(ids.min())
    if smallest < 0:
        none = f"targets that do not count are told to `cross_entropy`: `ignore = {smallest}`"
        raise refuse("E0605", f"{what} has {describe(smallest)}; ids must not be negative", span, help=none)
    check_largest(largest, model_input, what, span, describe)


def check_largest(
    largest: int,
    model_input: Input,
    what: str,
    span: Span | None,
    describe: Callable[[int], str] = lambda number: f"the id {number}",
) -> None:
    """Refuse (E0605) a largest id that is out of range."""
    if model_input.limit is not None and largest >= model_input.limit:
        grow = (
            f"`axis {model_input.limit_axis} = {largest + 1}` or more"
            if model_input.limit_axis
            else f"{largest + 1} or more"
        )
        raise refuse(
            "E0605",
            f"{what} has {describe(largest)}, which is out of range for `{model_input.name}`: {model_input.bound}",
            span,
            help=f"make that axis larger: {grow}; or correct the data",
        )


def _unfit(model_input: Input, span: Span | None) -> Iterator[Diagnostic]:
    if model_input.column not in (*SHIFT, *ONE_SEGMENT):
        yield Diagnostic(
            "E0606",
            f"the data has no input called `{model_input.name}`",
            span,
            (f"it yields: {', '.join(SHIFT)}",),
            "name the model's inputs after what the data yields",
        )
    elif model_input.type.dtype not in INDICES or len(model_input.type.axes) != 2 or model_input.batch_axis is None:
        yield Diagnostic(
            "E0607",
            f"`{model_input.name}` must be integers over the batch and one more axis",
            span,
            (f"{model_input.name}: {model_input.type}",),
            f"declare it as `{model_input.name}: i64[batch, seq]`",
        )
