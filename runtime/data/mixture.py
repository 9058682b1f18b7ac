"""Rows of several sources in fixed proportions: what `mix` yields (`partita.runtime.data.mix`).

The rows of all batches, one after the other, are dealt to the sources in blocks of `BLOCK`: in each, every source has
its share of the rows, rounded so that the number of its rows up to any block's end is within one of its share of them;
their order in the block is a permutation by (seed, block). The n-th row of a source is the n-th that it would yield
alone with a seed of its own: so each goes through its own epochs, however seldom it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from attrs import Factory, field, frozen

from partita.dsl.spec import Call
from partita.runtime.data.dataset import Batch, Dataset, Input, check_rows, positions
from partita.runtime.data.registry import SOURCES, Use
from partita.runtime.philox import stream, words

BLOCK = 256  # rows
ONE = 1 << 32  # all shares together

# Some rows of a step or an evaluation batch of a dataset.
Reader: TypeAlias = Callable[[Dataset, int, range], Batch]


@frozen(eq=False)
class Mixture(Dataset):
    """A `Dataset` of rows of other ones. `bounds` are the shares, added up, in units of 1 / `ONE`."""

    inputs: tuple[Input, ...]
    names: tuple[str, ...]
    sources: tuple[Dataset, ...]
    bounds: tuple[int, ...]
    seed: int
    _block: Callable[[int, int], np.ndarray] = field(
        init=False, default=Factory(lambda self: lru_cache(maxsize=4)(self._dealt), takes_self=True)
    )

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The rows of a training step."""
        assert step >= 1, "steps count from 1"
        return self._read(self._assigned(self.seed, step - 1, rows), lambda each, at, own: each.batch(at + 1, own))

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The rows of an evaluation batch."""
        return self._read(self._assigned(0, index, rows), lambda each, at, own: each.holdout_batch(at, own))

    def row_names(self, step: int) -> list[str]:
        """The source of each row, and where it is there."""
        return self._named(self._assigned(self.seed, step - 1, None), lambda each, at: each.row_names(at + 1))

    def holdout_row_names(self, index: int) -> list[str]:
        """The source of each row, and where it is there."""
        return self._named(self._assigned(0, index, None), lambda each, at: each.holdout_row_names(at))

    @property
    def held_out(self) -> int | None:
        """The rows of all sources."""
        counts = [each.held_out for each in self.sources]
        known = [each for each in counts if each is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def left_out(self) -> int:
        """Of all sources together."""
        return sum(each.left_out for each in self.sources)

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """Rows of all sources, one source behind the other."""
        ends = np.cumsum([each.held_out for each in self.sources])
        owners = np.searchsorted(ends, numbers, "right")
        begins = ends - [each.held_out for each in self.sources]
        parts = {}
        for source in np.unique(owners).tolist():
            places = np.flatnonzero(owners == source)
            own = (np.asarray(numbers)[places] - begins[source]).tolist()
            parts[source] = [(places, self.sources[source].held_out_rows(own))]
        return self._together(len(numbers), parts)

    # ------------------------------------------------------------ whose turn it is

    def _assigned(self, seed: int, index: int, rows: range | None) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row of a batch, and its number among all rows of that source."""
        places = positions(self.inputs, index, rows)
        sources, numbers = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
        for block in np.unique(places // BLOCK).tolist():
            here = places // BLOCK == block
            dealt = self._block(seed, block)
            earlier = np.zeros(BLOCK, np.int64)
            for source in range(len(self.sources)):
                own = dealt == source
                earlier[own] = self._count(block, source) + np.arange(own.sum())
            sources[here], numbers[here] = dealt[places[here] % BLOCK], earlier[places[here] % BLOCK]
        return sources, numbers

    def _dealt(self, seed: int, block: int) -> np.ndarray:
        """The source of each row of a block."""
        counts = [self._count(block + 1, each) - self._count(block, each) for each in range(len(self.sources))]
        order = np.argsort(words(stream(seed, "mixture", block), 0, BLOCK), kind="stable")
        return np.repeat(np.arange(len(counts)), counts)[order]

    def _count(self, blocks: int, source: int) -> int:
        """The rows of a source in the first blocks."""
        below = 0 if source == 0 else self.bounds[source - 1]
        return (blocks * BLOCK * self.bounds[source] // ONE) - (blocks * BLOCK * below // ONE)

    # ------------------------------------------------------------ reading

    def _read(self, assigned: tuple[np.ndarray, np.ndarray], read: Reader) -> Batch:
        sources, numbers = assigned
        batch = self.inputs[0].batch
        parts: dict[int, list[tuple[np.ndarray, Batch]]] = {}
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            own = numbers[places]
            for at in np.unique(own // batch).tolist():
                here = own // batch == at
                # Rows that follow each other have numbers that do, in each source.
                first, last = (int(each) % batch for each in own[here][[0, -1]])
                part = read(self.sources[source], at, range(first, last + 1))
                parts.setdefault(source, []).append((places[here], part))
        return self._together(len(sources), parts)

    def _together(self, count: int, parts: dict[int, list[tuple[np.ndarray, Batch]]]) -> Batch:
        """A batch of rows, from the places and the rows of each source."""
        batch: Batch = {}
        for model_input in self.inputs:
            axis = model_input.batch_position
            shape = [count if i == axis else size for i, size in enumerate(model_input.type.shape)]
            first = next(iter(parts.values()), [])
            result = np.empty(shape, first[0][1][model_input.name].dtype if first else np.int64)
            moved = np.moveaxis(result, axis, 0)
            for places, part in (each for own in parts.values() for each in own):
                moved[places] = np.moveaxis(part[model_input.name], axis, 0)
            batch[model_input.name] = result
        return batch

    def _named(self, assigned: tuple[np.ndarray, np.ndarray], names: Callable[[Dataset, int], list[str]]) -> list[str]:
        batch = self.inputs[0].batch
        known: dict[tuple[int, int], list[str]] = {}
        row_names = []
        for source, number in zip(*(each.tolist() for each in assigned), strict=True):
            at, row = divmod(number, batch)
            if (source, at) not in known:
                known[source, at] = names(self.sources[source], at)
            own = known[source, at]
            row_names.append(f"{self.names[source]}: {own[row] if own else f'row {number}'}")
        return row_names


def open_mixture(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Mixture:
    """The sources of a call, opened. Raises Refused (E06xx), at the source that is wrong."""
    check_rows(inputs, "`mix` takes rows", call.span)
    shares = call.arguments["sources"]
    bounds = [round(ONE * float(each)) for each in np.cumsum([each.share for each in shares])]
    opened = [
        SOURCES[each.call.name].open(each.call, inputs, int(stream(seed, "source", i)[0] >> np.uint64(1)), root, use)
        for i, each in enumerate(shares)
    ]
    names = tuple(f"source {i + 1} (`{each.call.name}`)" for i, each in enumerate(shares))
    return Mixture(inputs, names, tuple(opened), tuple(bounds), seed)
