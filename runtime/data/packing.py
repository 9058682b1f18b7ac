"""Rows filled with several documents: what sources of documents yield with `pack = true`.

Yields `tokens`; `targets`, the next id of the same document, ignored where there is none; `segments`, the number of the
document in its row; and `positions`, which count from 0 in each document. The ids that fill up a row are a document of
their own, without targets. A document that is longer than a row is cut into pieces of a row's length, each a document
from then on; the last target of a piece is the first id of the next, so that no id goes untrained. Nothing else is cut.

Documents are packed once, whatever the seed (`partita.runtime.data.packed_rows`). Training goes through all rows in a
new order every epoch, evaluation through those of held-out documents in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import Factory, field, frozen

from partita.dsl.diagnostic import refuse
from partita.dsl.reprs import count
from partita.dsl.syntax.source import Span
from partita.runtime.data.cache import starts_of
from partita.runtime.data.dataset import Batch, Dataset, Input, positions
from partita.runtime.data.epochs import Order
from partita.runtime.data.ids import Ids
from partita.runtime.data.packed_rows import Rows, packed_once
from partita.runtime.data.registry import Use
from partita.runtime.data.windows import (
    arranged,
    check_limit,
    fitting_holdout,
    ignored_target,
    length_of,
    other_holdout,
)

MAX_NAMED = 4  # documents of a row
NAMES = ("tokens", "targets", "segments", "positions")
NONE = -1  # where there is no target, if the model does not say which it ignores


@frozen(eq=False)
class Packed(Dataset):
    """A `Dataset` of packed rows of `length` ids."""

    inputs: tuple[Input, ...]
    ids: Ids
    learned: Ids | None  # 1 where an id is a target; all are without it
    training: Rows
    holdout: Rows
    length: int
    seed: int
    what: str
    span: Span | None
    _order: Order = field(
        init=False, default=Factory(lambda self: Order(self.seed, len(self.training)), takes_self=True)
    )

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The rows of a training step."""
        return self.filled(self.training, self.trained(step, rows))

    def row_names(self, step: int) -> list[str]:
        """The documents of each row."""
        return [_named(self.training, row) for row in self.trained(step)]

    def trained(self, step: int, rows: range | None = None) -> np.ndarray:
        """The numbers of the rows of a training step, or of the given ones of it."""
        assert step >= 1, "steps count from 1"
        return self._order.at(positions(self.inputs, step - 1, rows))

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The rows of an evaluation batch."""
        return self.filled(self.holdout, self.evaluated(index, rows))

    def holdout_row_names(self, index: int) -> list[str]:
        """The documents of each row."""
        return [_named(self.holdout, row) for row in self.evaluated(index)]

    def evaluated(self, index: int, rows: range | None = None) -> np.ndarray:
        """The numbers of the rows of an evaluation batch, or of the given ones of it, among those held out."""
        return np.asarray(positions(self.inputs, index, rows) % len(self.holdout))

    @property
    def held_out(self) -> int:
        """The rows of held-out documents."""
        return len(self.holdout)

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """Rows of held-out documents."""
        return self.filled(self.holdout, np.asarray(numbers, np.int64))

    def filled(self, rows: Rows, chosen: np.ndarray) -> Batch:
        """The inputs of the chosen rows."""
        shape = len(chosen), self.length
        tokens, places = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        segments = np.zeros(shape, np.int64)
        ignored = ignored_target(self.inputs)
        ignored = NONE if ignored is None else ignored
        targets = np.full(shape, ignored, np.int64)
        for i, row in enumerate(chosen):
            place, segment = 0, 0
            for piece in range(rows.first[row], rows.first[row + 1]):
                start, count = int(rows.starts[piece]), int(rows.lengths[piece])
                known = count - (not rows.goes_on[piece])  # targets
                ids = np.asarray(self.ids[start : start + known + 1], np.int64)
                end = place + count
                tokens[i, place:end] = ids[:count]
                targets[i, place : place + known] = ids[1:]
                if self.learned is not None:
                    own = np.asarray(self.learned[start + 1 : start + known + 1])
                    targets[i, place : place + known][own == 0] = ignored
                segments[i, place:end] = segment
                places[i, place:end] = np.arange(count)
                place, segment = end, segment + 1
            segments[i, place:] = segment
            places[i, place:] = np.arange(self.length - place)
        values = {"tokens": tokens, "targets": targets, "segments": segments, "positions": places}
        batch: Batch = {}
        for model_input in self.inputs:
            found = values[model_input.column]
            check_limit(found, model_input, f"`{model_input.name}` of {self.what}", self.span)
            batch[model_input.name] = arranged(found, model_input)
        return batch


def _named(rows: Rows, row: int) -> str:
    numbers = rows.numbers[rows.first[row] : rows.first[row + 1]]
    more = ", …" if len(numbers) > MAX_NAMED else ""
    return f"row {row} (documents {', '.join(map(str, numbers[:MAX_NAMED]))}{more})"


def check_ignored(inputs: Sequence[Input], why: str, span: Span | None) -> None:
    """Refuse (E0607) targets of which the model ignores none, where some rows have none."""
    for each in inputs:
        if each.column == "targets" and each.limit is not None and not each.ignored:
            help = f"`cross_entropy(…, ignore = -1)`, or `token_nll(…, ignore = -1)`, where `{each.name}` is used"
            raise refuse("E0607", f"{why}, and this model ignores none", span, help=help)


def open_packed(
    ids: Ids,
    ends: np.ndarray,
    what: str,
    inputs: tuple[Input, ...],
    seed: int,
    holdout: float,
    use: Use,
    span: Span | None,
    learned: Ids | None = None,
    alone: bool = False,
) -> Packed:
    """Packed rows of documents, of which those at the end are held out; or with `alone`, one in each row. Raises
    Refused (E0604, E0606, E0607).
    """
    length = length_of(inputs, span)
    check_ignored(inputs, "the last id of a document has no target", span)
    starts = starts_of(ends)

    # A document belongs to the side on which it begins.
    def sides(share: float) -> tuple[slice, slice]:
        training = int(np.searchsorted(starts, round(len(ids) * (1 - share)), "left"))
        return slice(0, training), slice(training, len(ends))

    documents = ends > starts
    fits = fitting_holdout(lambda share: all(bool(documents[part].any()) for part in sides(share)))
    longer, known = "use more documents", f"it has {count(int(documents.sum()), 'document')} with text"
    parts = [packed_once(starts[part], ends[part], length, part.start, span, alone) for part in sides(holdout)]
    if len(parts[0]) == 0 and use is not Use.EVALUATE:
        raise refuse(
            "E0604",
            f"{what} has no documents to train on",
            span,
            notes=[known],
            help=other_holdout(fits, longer) if documents.any() else longer,
        )
    if use and len(parts[1]) == 0:
        whole = use is Use.EVALUATE
        raise refuse(
            "E0604",
            f"{what if whole else f'the holdout of {what}'} has no documents",
            span,
            notes=[known],
            help=longer if whole else other_holdout(fits, longer),
        )
    return Packed(inputs, ids, learned, parts[0], parts[1], length, seed, what, span)
