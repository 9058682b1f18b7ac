"""What one rank reads of a batch: its part of each input, for every microbatch, on its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from attrs import evolve

from partita.compiler.program import InputPart, Program, StageProgram
from partita.dsl.types import Type
from partita.runtime.regions import Region, region_of


class Inputs:
    """The parts of a program's inputs that some stages of it read, at given coordinates of the mesh."""

    def __init__(
        self, program: Program, stages: Iterable[StageProgram], coordinates: Mapping[str, int], device: torch.device
    ) -> None:
        self._device = device
        self._microbatches = program.microbatches
        types = {each.name: each.type for each in program.inputs}
        self._regions: dict[InputPart, Region] = {}
        self._batch_positions: dict[InputPart, int] = {}
        for stage in stages:
            for each in (*stage.inputs, *stage.whole_inputs):
                part, type = part_read(each), types[each.name]
                if part.batch is not None:
                    self._batch_positions[part] = type.position(part.batch)
                    type = _of_microbatch(type, part.batch, program.microbatches)
                self._regions[part] = region_of(type, part.layout, program.mesh.sizes, coordinates)

    def load(self, batch: Mapping[str, torch.Tensor]) -> dict[InputPart, torch.Tensor]:
        """The parts of a batch, contiguous and on the device; those that are cut along the batch axis lead with the
        microbatch. Nothing else of the batch is moved there."""
        found = {}
        for part, region in self._regions.items():
            tensor = batch[part.name]
            if part.batch is None:
                tensor = tensor[region]
            else:
                position = self._batch_positions[part]
                cut = tensor.unflatten(position, (self._microbatches, -1))  # type: ignore[no-untyped-call]
                tensor = cut.movedim(position, 0)
                tensor = tensor[(slice(None), *region)]
            found[part] = tensor.contiguous().to(self._device)
        return found


def part_read(part: InputPart) -> InputPart:
    """The part itself, whichever slot it goes to: stages that read the same share it."""
    return evolve(part, slot=None)


def _of_microbatch(type: Type, batch: str, microbatches: int) -> Type:
    return type.resized(batch, type.axis(batch).size // microbatches)
