"""A rank's stages while they run: emitted functions, lasting tensors, and the frames of microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from attrs import define, field

from partita.compiler.program import Program, StageProgram
from partita.dsl.types import Type
from partita.runtime.kernels.dtypes import DTYPES


@define(eq=False)
class Memory:
    """A rank's parts of lasting tensors: master parameters by name, optimizer states by (state, parameter)."""

    masters: dict[str, torch.Tensor] = field(factory=dict)
    states: dict[tuple[str, str], torch.Tensor] = field(factory=dict)


def load(program: Program) -> Mapping[str, Callable[..., Any]]:
    """The emitted functions by name. The source is the compiler's own; nothing of a user's text is in it."""
    return _functions(program.source, f"<emitted {program.name}>")


@lru_cache(maxsize=4)
def _functions(source: str, name: str) -> Mapping[str, Callable[..., Any]]:
    """The same for all ranks, which may be many in one process: they keep nothing, and torch compiles them once."""
    namespace: dict[str, Any] = {}
    exec(compile(source, name, "exec"), namespace)
    return namespace


def empty(type: Type, device: torch.device) -> torch.Tensor:
    """A tensor of a type, its content undefined."""
    return torch.empty(type.shape, dtype=DTYPES[type.dtype], device=device)


class Stage:
    """A stage under way: its constants of the step, accumulators, and a frame for each microbatch in flight."""

    def __init__(
        self,
        record: StageProgram,
        functions: Mapping[str, Callable[..., Any]],
        memory: Memory,
        device: torch.device,
    ) -> None:
        self.record = record
        self.functions = {kind: functions[name] for kind, name in record.functions.items()}
        self.masters = tuple(memory.masters[name] for name in record.parameters)
        self.accumulators = tuple(empty(each.type, device) for each in record.accumulators)
        self.constants: tuple[torch.Tensor, ...] = ()
        self.frames: dict[int, list[torch.Tensor | None]] = {}

    def frame(self, microbatch: int) -> list[torch.Tensor | None]:
        """The frame of a microbatch; a new one if it has none."""
        frame = self.frames.get(microbatch)
        if frame is None:
            frame = self.frames[microbatch] = [None] * self.record.frame
        return frame

    def clear(self) -> None:
        """Accumulators as a step begins."""
        for record, tensor in zip(self.record.accumulators, self.accumulators, strict=True):
            if record.maximum:
                floats = tensor.is_floating_point()
                tensor.fill_(float("-inf") if floats else torch.iinfo(tensor.dtype).min)
            else:
                tensor.zero_()
