"""Runs a program's steps on one rank: a loop over the rank's instructions.

All that can be decided beforehand is: the loop calls closures bound once, and waits on the handles that they
return. A step is a generator that yields while a handle is not done; real transports wait inside `done`, so
there it never yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import define, field

from partita.compiler.instructions import Compute, PostReceive, PostSend, Transfer, WaitReceive
from partita.compiler.program import Program, StageProgram
from partita.dsl.types import Type
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.transports.transport import Handle, Transport

Bound = Callable[[], Handle | None]


@define
class Context:
    """What emitted functions read of the moment: `c` in their signatures."""

    seed: int
    device: torch.device
    step: int = 0
    microbatch: int = 0
    rate: float = 0.0


@define(eq=False)
class Memory:
    """A rank's lasting tensors: master parameters by name, optimizer states by (state, parameter)."""

    masters: dict[str, torch.Tensor] = field(factory=dict)
    states: dict[tuple[str, str], torch.Tensor] = field(factory=dict)


def load(program: Program) -> Mapping[str, Callable[..., Any]]:
    """The emitted functions by name. The source is the compiler's own; nothing of a user's text is in it."""
    namespace: dict[str, Any] = {}
    exec(compile(program.source, f"<emitted {program.name}>", "exec"), namespace)
    return namespace


def empty(type: Type, device: torch.device) -> torch.Tensor:
    """A tensor of a type, its content undefined."""
    return torch.empty(type.shape, dtype=DTYPES[type.dtype], device=device)


@define(eq=False, slots=True)
class _Cell:
    """A transfer under way: its handle, and the tensor that must live until it is done."""

    handle: Handle | None = None
    tensor: torch.Tensor | None = None

    def posted(self) -> Handle | None:
        """The handle to wait for."""
        return self.handle

    def forget(self) -> None:
        """Let go of the tensor."""
        self.handle = self.tensor = None


class _Stage:
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


class Executor:
    """One rank's part of a program. `statistics` holds the last step's loss, metrics and squared norms (f64)."""

    def __init__(
        self,
        program: Program,
        rank: int,
        transport: Transport,
        memory: Memory,
        seed: int,
        device: torch.device,
    ) -> None:
        self.program = program
        self.record = program.ranks[rank]
        self.transport = transport
        self.context = Context(seed, device)
        self.device = device
        functions = load(program)
        self.stages = {i: _Stage(program.stages[i], functions, memory, device) for i in self.record.stages}
        self._finish = functions[self.record.finish]
        self._update = functions[self.record.update] if self.record.update else None
        self._tied = tuple(empty(each.type, device) for each in self.record.receives)
        self._totals = self._all_totals()
        self.statistics = torch.zeros(len(program.statistics), dtype=torch.float64, device=device)
        self._batch: dict[str, torch.Tensor] = {}
        self._instructions = self._bind()
        names = self.record.parameters
        self._masters = tuple(memory.masters[name] for name in names)
        self._states = tuple(memory.states[state, name] for name in names for state in program.parameter(name).states)

    def _all_totals(self) -> tuple[torch.Tensor, ...]:
        totals: list[torch.Tensor] = []
        for stage in self.record.stages:
            totals.extend(self.stages[stage].accumulators)
        return (*totals, *self._tied)

    # ------------------------------------------------------------ one step

    def step(self, number: int, batch: Mapping[str, torch.Tensor], rate: float = 0.0) -> Iterator[None]:
        """Run step `number` on a whole batch. Afterwards parameters are updated and `statistics` is set."""
        context = self.context
        context.step, context.rate = number, rate
        self._batch = dict(batch)
        for stage in self.stages.values():
            stage.clear()
            record = stage.record
            whole = tuple(batch[each.name] for each in record.whole_inputs)
            stage.constants = stage.functions["P"](stage.masters, whole, context)
        for run in self._instructions:
            handle = run()
            if handle is not None:
                while not handle.done():
                    yield
        yield from self._exchange_tied()
        vector = torch.zeros_like(self.statistics)
        for index, scalar in zip(self.record.statistics, self._finish(self._totals, context), strict=True):
            vector[index] = scalar
        handle = self.transport.all_reduce(vector)
        while not handle.done():
            yield
        self.statistics = vector
        if self._update is not None:
            self._update(self._masters, self._totals, self._states, vector, context)

    def _exchange_tied(self) -> Iterator[None]:
        """Totals of tied parameters go to every rank that holds the parameter. All are posted, then waited for."""
        handles = [
            self.transport.receive(each.transfer.channel, buffer)
            for each, buffer in zip(self.record.receives, self._tied, strict=True)
        ]
        positions = {key: i for i, key in enumerate(self.record.totals)}
        for each in self.record.sends:
            total = self._totals[positions[each.stage, each.accumulator]]
            handles.append(self.transport.send(each.transfer.channel, total))
        for handle in handles:
            while not handle.done():
                yield

    # ------------------------------------------------------------ binding

    def _bind(self) -> tuple[Bound, ...]:
        """A closure for each instruction, two for a wait."""
        last_send: dict[tuple[int, int, int], int] = {}
        last_touch: dict[tuple[int, int], int] = {}
        for i, instruction in enumerate(self.record.instructions):
            if isinstance(instruction, PostSend):
                message, microbatch = instruction.transfer.message, instruction.transfer.microbatch
                slot = self.program.stages[message.source].sends[message]
                last_send[message.source, slot, microbatch] = i
                last_touch[message.source, microbatch] = i
            elif isinstance(instruction, Compute):
                last_touch[instruction.stage, instruction.action.microbatch] = i
        cells: dict[Transfer, _Cell] = {}
        bound: list[Bound] = []
        for i, instruction in enumerate(self.record.instructions):
            if isinstance(instruction, Compute):
                final = last_touch[instruction.stage, instruction.action.microbatch] == i
                bound.append(self._compute(instruction, final))
                continue
            transfer = instruction.transfer
            cell = cells.setdefault(transfer, _Cell())
            if isinstance(instruction, PostSend):
                source = transfer.message.source
                slot = self.program.stages[source].sends[transfer.message]
                release = last_send[source, slot, transfer.microbatch] == i
                final = last_touch[source, transfer.microbatch] == i
                bound.append(self._post_send(transfer, cell, release, final))
            elif isinstance(instruction, PostReceive):
                bound.append(self._post_receive(transfer, cell))
            else:
                bound.append(cell.posted)
                if isinstance(instruction, WaitReceive):
                    bound.append(self._arrive(transfer, cell))
                else:
                    bound.append(cell.forget)
        return tuple(bound)

    def _compute(self, instruction: Compute, final: bool) -> Bound:
        """Run a function of a stage on a microbatch; `final`: nothing later touches its frame."""
        stage = self.stages[instruction.stage]
        kind, microbatch = instruction.action.kind, instruction.action.microbatch
        function = stage.functions.get(kind)
        context, record = self.context, stage.record
        whole = {each.name: each.type for each in self.program.inputs}
        parts = []
        if kind == "F":
            for each in record.inputs:
                name, slot, axis = each.name, each.slot, each.batch
                assert slot is not None
                assert axis is not None
                size = whole[name].axis(axis).size // self.program.microbatches
                parts.append((name, slot, whole[name].position(axis), microbatch * size, size))
        direction = "F" if kind == "F" else "B"
        sent = set(record.sends.values())
        overs = [
            (each.slot, self.stages[each.stage], each.target_slot)
            for each in record.hand_overs
            if each.kind == direction and kind != "W"
        ]
        over = [slot for slot, _, _ in overs if slot in record.released and slot not in sent]

        def run() -> None:
            frame = stage.frame(microbatch)
            for name, slot, dimension, start, size in parts:
                frame[slot] = self._batch[name].narrow(dimension, start, size)
            context.microbatch = microbatch
            if function is not None:
                function(stage.constants, frame, stage.accumulators, context)
            for slot, target, target_slot in overs:
                target.frame(microbatch)[target_slot] = frame[slot]
            for slot in over:
                frame[slot] = None
            if final:
                del stage.frames[microbatch]

        return run

    def _post_send(self, transfer: Transfer, cell: _Cell, release: bool, final: bool) -> Bound:
        """Post a send from a frame; `release`: the slot is not needed after it, unless the backward pass reads it."""
        stage = self.stages[transfer.message.source]
        slot = stage.record.sends[transfer.message]
        release = release and slot in stage.record.released
        channel, microbatch = transfer.channel, transfer.microbatch

        def run() -> None:
            frame = stage.frames[microbatch]
            tensor = frame[slot]
            assert tensor is not None, f"{transfer} was not computed"
            if release:
                frame[slot] = None
            if final:
                del stage.frames[microbatch]
            cell.tensor = tensor
            cell.handle = self.transport.send(channel, tensor)

        return run

    def _post_receive(self, transfer: Transfer, cell: _Cell) -> Bound:
        """Post a receive into a new buffer."""
        _, type = self.program.stages[transfer.message.destination].receives[transfer.message]

        def run() -> None:
            cell.tensor = empty(type, self.device)
            cell.handle = self.transport.receive(transfer.channel, cell.tensor)

        return run

    def _arrive(self, transfer: Transfer, cell: _Cell) -> Bound:
        """Put what has arrived into its frame."""
        stage = self.stages[transfer.message.destination]
        slot, _ = stage.record.receives[transfer.message]
        microbatch = transfer.microbatch

        def run() -> None:
            stage.frame(microbatch)[slot] = cell.tensor
            cell.forget()

        return run
