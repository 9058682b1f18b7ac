"""What a run reads that evaluates other data than it holds out, or all of it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from partita.runtime.data.dataset import Batch, Dataset


@frozen(eq=False)
class SeparateEvaluationData:
    """A `Dataset`: training batches of one, evaluation batches of another.

    With `rows`, these are all of that one's evaluation data, in order; the rows of a batch are `size`. Where a batch
    goes beyond the end, it is filled up with copies of the last row.
    """

    training: Dataset
    evaluated: Dataset
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
            return self.evaluated.holdout_batch(index, rows)
        return self.evaluated.held_out_rows(self._numbers(index, rows, self.rows))

    def holdout_row_names(self, index: int) -> list[str]:
        """Where each row of an evaluation batch is."""
        if self.rows is None:
            return self.evaluated.holdout_row_names(index)
        return [f"evaluation row {number}" for number in self._numbers(index, None, self.rows)]

    @property
    def held_out(self) -> int | None:
        """The rows of all evaluation data."""
        return self.evaluated.held_out

    @property
    def left_out(self) -> int:
        """The ids at the end of the evaluation data that are in none of its rows."""
        return self.evaluated.left_out

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """Rows of all evaluation data."""
        return self.evaluated.held_out_rows(numbers)

    def _numbers(self, index: int, rows: range | None, end: int) -> list[int]:
        return [min(index * self.size + row, end - 1) for row in (range(self.size) if rows is None else rows)]
