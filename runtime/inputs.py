"""What one rank reads of a step's batches: its shard of each input, for every microbatch, on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import TypeAlias

import torch

from partita.compiler.program import InputPart, Program, StageProgram
from partita.runtime.data.own_rows import Rows
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.regions import Region, region_of

Batch: TypeAlias = Mapping[str, torch.Tensor]
NOTHING: Mapping[InputPart, torch.Tensor] = {}


def tensors_of(program: Program, batch: Mapping[str, object]) -> Batch:
    """A batch of a dataset as tensors on the host."""
    names = {each.name for each in program.inputs}
    return {name: torch.as_tensor(array) for name, array in batch.items() if name in names}


class Inputs:
    """The shards of a program's inputs that the given stages read, at given mesh coordinates; of groups that train
    apart, those of one `group`.
    """

    def __init__(
        self, program: Program, stages: Iterable[StageProgram], coordinates: Mapping[str, int], device: torch.device
    ) -> None:
        self._device = device
        self.group = 0
        self._groups = program.groups
        self._parts = program.batch_parts
        self._rounds, self._count = program.rounds, program.rows
        self._batch, self._batches = program.batch, program.batches
        self._types = {each.name: each.type for each in program.inputs}
        self._computed = types = {each.name: each.computed for each in program.inputs}
        parts = program.batch_parts * program.batches
        self._regions: dict[InputPart, Region] = {}
        self._batch_positions: dict[InputPart, int] = {}
        for stage in stages:
            for part in (*stage.inputs, *stage.full_inputs):
                type = types[part.name]
                if part.batch is not None:
                    self._batch_positions[part] = type.position(part.batch)
                    type = type.resized(part.batch, int(type.axis(part.batch).size // parts))
                self._regions[part] = region_of(type, part.layout, program.mesh.sizes, coordinates)

    def rows(self, groups: Iterable[int]) -> Rows:
        """The rows of a batch that are read for some of the groups: of each microbatch, or where all batches are read
        at once, all.
        """
        positions = {name: type.position(self._batch) for name, type in self._types.items() if type.has(self._batch)}
        count = self._count
        read = [False] * count
        for part, region in self._regions.items():
            if part.name not in positions:
                continue
            own, pieces = region[positions[part.name]], 1 if part.batch is None else self._parts
            rows, size = count // self._groups, self._rows_of(part) // pieces
            for group in groups:
                for start in range(0, size * pieces, size):
                    first, last = (min(start + each, rows) for each in (own.start, own.stop))
                    read[group * rows + first : group * rows + last] = [True] * (last - first)
        if self._rounds > 1 and any(part.batch is None and part.name in positions for part in self._regions):
            read = [True] * count
        runs = [list(run) for is_read, run in groupby(range(count), read.__getitem__) if is_read]
        return Rows([range(run[0], run[-1] + 1) for run in runs], count, positions)

    def whole(
        self, batches: Callable[[int], Batch], into: Mapping[InputPart, torch.Tensor] = NOTHING
    ) -> dict[InputPart, torch.Tensor]:
        """The parts that are not cut into microbatches, contiguous and on the device, or written `into` tensors there.
        A part with the batch axis has the rows of all batches; any other comes from the first batch.
        """
        parts = [part for part in self._regions if part.batch is None]
        joined = {part: self._room(part) for part in parts if self._rounds > 1 and self._has_rows(part)}
        for index in range(self._rounds) if joined else ():
            self._join(batches(index), index, joined)
        tensors = {part: self._sent(part, tensor, into) for part, tensor in joined.items()}
        others = [part for part in parts if part not in joined]
        first = batches(0) if others else {}
        for part in others:
            tensors[part] = self._sent(part, self._of_group(part, first)[self._regions[part]], into)
        return tensors

    def _of_group(self, part: InputPart, batch: Batch) -> torch.Tensor:
        """What a group computes with of a batch, padded with zeros."""
        tensor, type = batch[part.name], self._computed[part.name]
        if self._has_rows(part):
            tensor = tensor.chunk(self._groups, type.position(self._batch))[self.group]
            type = type.resized(self._batch, self._rows_of(part))
        more = [size - own for size, own in zip(type.shape, tensor.shape, strict=True)]
        if not any(more):
            return tensor
        return torch.nn.functional.pad(tensor, [each for size in reversed(more) for each in (0, size)])

    def _rows_of(self, part: InputPart) -> int:
        """The rows of a batch of one group, with its padding."""
        return int(self._computed[part.name].axis(self._batch).size / self._batches)

    def _has_rows(self, part: InputPart) -> bool:
        return self._types[part.name].has(self._batch)

    def _room(self, part: InputPart) -> torch.Tensor:
        """Memory of the host for a part."""
        shape = [own.stop - own.start for own in self._regions[part]]
        return torch.empty(shape, dtype=DTYPES[self._types[part.name].dtype])

    def _join(self, batch: Batch, index: int, joined: Mapping[InputPart, torch.Tensor]) -> None:
        """Write the rows of a batch that belong to parts which have those of all batches. Groups train apart on one."""
        assert self._groups == 1
        for part, tensor in joined.items():
            type, region, rows = self._types[part.name], self._regions[part], self._of_group(part, batch)
            position = type.position(self._batch)
            count = rows.shape[position]
            begins = index * count - region[position].start  # where in the part the batch does
            start, stop = max(0, begins), min(tensor.shape[position], begins + count)
            if start < stop:
                own = (*region[:position], slice(start - begins, stop - begins), *region[position + 1 :])
                tensor.narrow(position, start, stop - start).copy_(rows[own])

    def load(self, batch: Batch, into: Mapping[InputPart, torch.Tensor] = NOTHING) -> dict[InputPart, torch.Tensor]:
        """The parts of a batch that are cut into microbatches, contiguous and on the device, or written `into` tensors
        there; the microbatch is the leading dimension. Nothing else of the batch is copied to the device.
        """
        tensors = {}
        for part, position in self._batch_positions.items():
            rows = self._of_group(part, batch)
            cut = rows.unflatten(position, (self._parts, -1))  # type: ignore[no-untyped-call]
            tensor = cut.movedim(position, 0)[(slice(None), *self._regions[part])]
            tensors[part] = self._sent(part, tensor, into)
        return tensors

    def _sent(self, part: InputPart, tensor: torch.Tensor, into: Mapping[InputPart, torch.Tensor]) -> torch.Tensor:
        """A tensor of the host in the dtype of the computation, contiguous and on the device: a GPU copies it by
        itself, from pinned memory.
        """
        device, dtype = self._device, DTYPES[self._types[part.name].dtype]
        if device.type != "cpu":
            tensor = torch.empty(tensor.shape, dtype=dtype, pin_memory=True).copy_(tensor)
        if part in into:
            return into[part].copy_(tensor, non_blocking=True)
        tensor = tensor.to(dtype)
        return tensor.contiguous() if device.type == "cpu" else tensor.to(device, non_blocking=True)
