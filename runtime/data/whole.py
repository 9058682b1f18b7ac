"""What a run reads that evaluates other data than it holds out, or all of it."""

from __future__ import annotations

from attrs import define

from partita.runtime.data.dataset import Batch, Dataset, WrappedDataset


@define(eq=False)
class SeparateEvaluationData(WrappedDataset):
    """A `Dataset`: training batches of one, and the evaluation data of another.

    With `rows`, these are all of that one's evaluation data, in order; the rows of a batch are `size`. Where a batch
    goes beyond the end, it is filled up with copies of the last row.
    """

    training: Dataset
    rows: int | None = None
    size: int = 1

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The batch of a training step."""
        return self.training.batch(step, rows)

    def row_names(self, step: int) -> list[str]:
        """Where each row of a training batch is."""
        return self.training.row_names(step)

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """An evaluation batch."""
        if self.rows is None:
            return super().holdout_batch(index, rows)
        return self.held_out_rows(self._numbers(index, rows, self.rows))

    def holdout_row_names(self, index: int) -> list[str]:
        """Where each row of an evaluation batch is."""
        if self.rows is None:
            return super().holdout_row_names(index)
        return [f"evaluation row {number}" for number in self._numbers(index, None, self.rows)]

    def _numbers(self, index: int, rows: range | None, end: int) -> list[int]:
        return [min(index * self.size + row, end - 1) for row in (range(self.size) if rows is None else rows)]
