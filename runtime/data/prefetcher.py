"""Reads the next batch while a step computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from partita.runtime.data.dataset import Batch, Dataset


class Prefetcher:
    """A `Dataset` whose next training batch is read in the background, one at a time, up to the step `last`.

    What reading raises is raised where the batch is asked for. Whoever asks in another order gets the same batches.
    """

    def __init__(self, dataset: Dataset, last: int) -> None:
        self._dataset, self._last = dataset, last
        self._thread = ThreadPoolExecutor(1, "data")
        self._next: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The batch of a training step, or the given rows of it."""
        if rows is not None:
            return self._dataset.batch(step, rows)
        ready, self._next = self._next, None
        batch = ready[1].result() if ready is not None and ready[0] == step else self._dataset.batch(step)
        if step < self._last:
            self._next = step + 1, self._thread.submit(self._dataset.batch, step + 1)
        return batch

    def close(self) -> None:
        """Read nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """An evaluation batch."""
        return self._dataset.holdout_batch(index, rows)

    def row_names(self, step: int) -> list[str]:
        """Where each row of a training batch is."""
        return self._dataset.row_names(step)

    def holdout_row_names(self, index: int) -> list[str]:
        """Where each row of an evaluation batch is."""
        return self._dataset.holdout_row_names(index)

    @property
    def held_out(self) -> int | None:
        """The rows of all evaluation data."""
        return self._dataset.held_out

    @property
    def left_out(self) -> int:
        """The ids at the end of the evaluation data that are in none of its rows."""
        return self._dataset.left_out

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """Rows of all evaluation data."""
        return self._dataset.held_out_rows(numbers)
