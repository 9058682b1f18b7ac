"""A rank's stages at run time: emitted functions, persistent tensors, and the frames of microbatches in flight."""

from __future__ import annotations

import linecache
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from attrs import define, field

from partita.compiler.program import InputPart, Program, StageProgram
from partita.dsl.types import Type
from partita.runtime.context import Context
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.transports.transport import Collective

Frame = list[torch.Tensor | None]


@define(eq=False)
class ParameterStore:
    """A rank's shards of persistent tensors: master parameters by name, optimizer states by (state, parameter). `files`
    are those that are mapped into memory, by name; a state by its name in a checkpoint.
    """

    masters: dict[str, torch.Tensor] = field(factory=dict)
    states: dict[tuple[str, str], torch.Tensor] = field(factory=dict)
    files: dict[str, Path] = field(factory=dict)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor with the same values, in the same memory: pinned if the tensor is."""
    return torch.empty_like(tensor, pin_memory=tensor.is_pinned()).copy_(tensor)


def load(program: Program) -> Mapping[str, Callable[..., Any]]:
    """The emitted functions by name. The source is the compiler's own and contains no user text."""
    return load_source(program.source, f"<emitted {program.name} {crc32(program.source.encode()):08x}>")


@lru_cache(maxsize=4)
def load_source(source: str, name: str) -> Mapping[str, Callable[..., Any]]:
    """Shared by all ranks of a process: the functions are stateless, and torch compiles them once."""
    namespace: dict[str, Any] = {}
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # for tracebacks
    exec(compile(source, name, "exec"), namespace)
    return namespace


def allocator(type: Type, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that makes uninitialized tensors of a type."""
    return partial(torch.empty, type.shape, dtype=DTYPES[type.dtype], device=device)


class Stage:
    """A stage at run time: its constants of the step, accumulators, a frame for each microbatch, and what the slices of
    each part of the batch share.
    """

    def __init__(
        self,
        record: StageProgram,
        functions: Mapping[str, Callable[..., Any]],
        memory: ParameterStore,
        device: torch.device,
        microbatches: int,
        slices: int = 1,
        delay: int = 0,
    ) -> None:
        self.record = record
        self.functions = {kind: functions[name] for kind, name in record.functions.items()}
        self.masters = tuple(memory.masters[name] for name in record.parameters)
        # Gradients of earlier steps, of which updates are still to be made, have accumulators of their own.
        self.accumulators = tuple(allocator(each.type, device)() for each in record.accumulators)
        others = [
            tuple(
                allocator(each.type, device)() if each.parameter else own
                for each, own in zip(record.accumulators, self.accumulators, strict=True)
            )
            for _ in range(delay)
        ]
        self._next = deque((*others, self.accumulators))
        self.constants: Sequence[torch.Tensor | None] = ()
        self.gathering: tuple[Collective, ...] | None = None  # of what the constants still lack
        self.frames: tuple[Frame, ...] = tuple([None] * record.frame for _ in range(microbatches))
        self.on_host: set[int] = set()  # the microbatches of which the host's memory keeps something
        self.slices = slices
        self.shared: tuple[dict[str, torch.Tensor], ...] = tuple({} for _ in range(microbatches // slices))

    @property
    def in_flight(self) -> list[int]:
        """The microbatches whose frame, or what it shares, or the host's memory, holds anything; none between steps."""
        return [
            i
            for i, frame in enumerate(self.frames)
            if self.shared[i // self.slices] or i in self.on_host or any(slot is not None for slot in frame)
        ]

    def gather(self, context: Context) -> None:
        """Before a step: start to gather its parameters, unless that is already in flight."""
        if self.gathering is None and "G" in self.functions:
            self.gathering = self.functions["G"](self.masters, context)

    def fill(self, inputs: Mapping[InputPart, torch.Tensor]) -> None:
        """At the start of a batch: give every frame its microbatch's part of the inputs."""
        for part, slot in zip(self.record.inputs, self.record.input_slots, strict=True):
            for i, own in enumerate(inputs[part].unbind()):
                for frame in self.frames[i * self.slices : (i + 1) * self.slices]:
                    frame[slot] = own

    def scale(self, factor: Fraction) -> None:
        """Multiply all sums so far."""
        for record, tensor in zip(self.record.accumulators, self.accumulators, strict=True):
            if not record.maximum and tensor.is_floating_point():
                tensor.mul_(float(factor))

    def reset(self) -> None:
        """At the start of a step: clear the accumulators, or those of the step before the oldest that is kept."""
        self.accumulators = self._next[0]
        self._next.rotate(-1)
        sums = []
        for record, tensor in zip(self.record.accumulators, self.accumulators, strict=True):
            if record.maximum:
                floats = tensor.is_floating_point()
                tensor.fill_(float("-inf") if floats else torch.iinfo(tensor.dtype).min)
            else:
                sums.append(tensor)
        if sums:
            torch._foreach_zero_(sums)
