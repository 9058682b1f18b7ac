"""The interface of datasets: batches as a pure function of (seed, step), of which any rows can be read alone.

Steps count from 1, evaluation batches from 0. The *rows* of a batch are its indices along the batch axis. An input
without the batch axis is returned in full, whichever rows are asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import Factory, define, frozen

from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

Batch = dict[str, np.ndarray]


@frozen
class Input:
    """An input of the model, to be bound by name to what the source yields.

    `type` has the sizes of the global batch; `batch_axis` is None if the input lacks that axis. `limit` is the size of
    the axis that an integer input indexes (its values must be below it, or `ignored`), `limit_axis` the name of that
    axis. `column` is what the source calls it, where that is not the name.
    """

    name: str
    type: Type
    batch_axis: str | None = None
    limit: int | None = None
    limit_axis: str | None = None
    ignored: tuple[int, ...] = ()
    column: str = Factory(lambda self: self.name, takes_self=True)

    @property
    def batch(self) -> int:
        """The number of rows of the global batch; 1 without a batch axis."""
        return 1 if self.batch_axis is None else self.type.axis(self.batch_axis).size

    @property
    def batch_position(self) -> int:
        """The dimension of the batch axis, of an input that has one."""
        return next(i for i, axis in enumerate(self.type.axes) if axis.name == self.batch_axis)

    @property
    def bound(self) -> str:
        """`limit` as text, for messages."""
        return f"`{self.limit_axis}` has size {self.limit}" if self.limit_axis else f"it must be below {self.limit}"


def positions(inputs: Sequence[Input], index: int, rows: range | None) -> np.ndarray:
    """The places of some rows of the batch `index`, or of all, among those of all batches."""
    batch = next(each.batch for each in inputs if each.batch_axis is not None)
    return index * batch + np.asarray(range(batch) if rows is None else rows, np.int64)


def check_rows(inputs: Sequence[Input], what: str, span: Span | None) -> None:
    """Refuse (E0607) an input without the batch axis, as `what` has rows."""
    for each in inputs:
        if each.batch_axis is None:
            message = f"{what}, and `{each.name}` has none: it lacks the batch axis"
            raise refuse("E0607", message, span, notes=[f"{each.name}: {each.type}"])


class Dataset(ABC):
    """Batches by input name: arrays in the declared axis order, with the numpy dtype of the input's type.

    Rows of a batch that are asked for alone follow each other. By default evaluation data has no end, and rows have no
    place in the data.
    """

    @abstractmethod
    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The batch of a training step, or the given rows of it."""

    @abstractmethod
    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The evaluation batch `index`, or the given rows of it, from data that training never sees."""

    @property
    def held_out(self) -> int | None:
        """The number of rows that make up all evaluation data; None if there is no end to it."""
        return None

    @property
    def left_out(self) -> int:
        """The ids at the end of all evaluation data that none of these rows has."""
        return 0

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """These rows of all evaluation data, in place of a batch's."""
        raise AssertionError("this data has no end")

    def row_names(self, step: int) -> list[str]:
        """Where in the data each row of a training batch is, as text; empty if there is no such place."""
        return []

    def holdout_row_names(self, index: int) -> list[str]:
        """Where in the data each row of an evaluation batch is."""
        return []


@define(eq=False)
class WrappedDataset(Dataset):
    """What another dataset yields, but for the methods that a subclass has of its own."""

    dataset: Dataset

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The batch of a training step."""
        return self.dataset.batch(step, rows)

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """An evaluation batch."""
        return self.dataset.holdout_batch(index, rows)

    @property
    def held_out(self) -> int | None:
        """The rows of all evaluation data."""
        return self.dataset.held_out

    @property
    def left_out(self) -> int:
        """The ids at the end of the evaluation data that are in none of its rows."""
        return self.dataset.left_out

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """Rows of all evaluation data."""
        return self.dataset.held_out_rows(numbers)

    def row_names(self, step: int) -> list[str]:
        """Where each row of a training batch is."""
        return self.dataset.row_names(step)

    def holdout_row_names(self, index: int) -> list[str]:
        """Where each row of an evaluation batch is."""
        return self.dataset.holdout_row_names(index)


Arrays = Mapping[str, np.ndarray]
