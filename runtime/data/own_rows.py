"""Batches of which a rank reads the rows that it computes with.

Otherwise every rank of a large job would read the whole batch. Arrays have all rows, so that the place of a row stays
what it is; what a rank does not read holds anything, and takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from attrs import define, frozen

from partita.dsl.diagnostic import Refused
from partita.runtime.data.dataset import Batch, WrappedDataset
from partita.runtime.data_files import ReadFailed


@frozen
class Rows:
    """The rows of a batch that a rank reads, of so many in all; inputs have the axis of the batch at `positions`."""

    own: Sequence[range]
    count: int
    positions: Mapping[str, int]

    def read(self, from_rows: Callable[[range], Batch]) -> Batch:
        """A batch with these rows. Raises ReadFailed."""
        batch: Batch = {}
        for rows in self.own or (range(1),):  # for what has no such axis
            try:
                part = from_rows(rows)
            except Refused as refused:
                raise ReadFailed(refused.diagnostics) from refused
            for name, array in part.items():
                if (position := self.positions.get(name)) is None:
                    batch[name] = array
                    continue
                if name not in batch:
                    shape = (*array.shape[:position], self.count, *array.shape[position + 1 :])
                    batch[name] = np.empty(shape, array.dtype)
                batch[name][(slice(None),) * position + (slice(rows.start, rows.stop),)] = array
        return batch


@define(eq=False)
class OwnRows(WrappedDataset):
    """A `Dataset` that reads the rows of a rank, and others where they are asked for."""

    training: Rows
    evaluation: Rows | None

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The batch of a training step."""
        read = partial(self.dataset.batch, step)
        return self.training.read(read) if rows is None else read(rows)

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """An evaluation batch."""
        read = partial(self.dataset.holdout_batch, index)
        return read(rows) if rows is not None or self.evaluation is None else self.evaluation.read(read)
