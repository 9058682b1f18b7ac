"""Reads the next batch while a step computes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from partita.runtime.data.dataset import Batch, Dataset, WrappedDataset


class Prefetcher(WrappedDataset):
    """A `Dataset` whose next training batch is read in the background, one at a time, up to the step `last`.

    What reading raises is raised where the batch is asked for. Whoever asks in another order gets the same batches.
    """

    def __init__(self, dataset: Dataset, last: int) -> None:
        super().__init__(dataset)
        self._last = last
        self._thread = ThreadPoolExecutor(1, "data")
        self._next: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The batch of a training step, or the given rows of it."""
        if rows is not None:
            return self.dataset.batch(step, rows)
        ready, self._next = self._next, None
        batch = ready[1].result() if ready is not None and ready[0] == step else self.dataset.batch(step)
        if step < self._last:
            self._next = step + 1, self._thread.submit(self.dataset.batch, step + 1)
        return batch

    def close(self) -> None:
        """Read nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
