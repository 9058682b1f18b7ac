"""A rank's instructions as closures, bound once: all that can be decided before a step is decided here.

A closure returns None, or the handle to wait for, or (where an emitted function communicates along the mesh) a
generator that is to be run to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from inspect import isgeneratorfunction
from typing import Any

import torch
from attrs import define, frozen

from partita.compiler.instructions import Compute, PostReceive, PostSend, Transfer, WaitReceive
from partita.compiler.program import InputPart, Program, RankProgram
from partita.runtime.context import Context, begun
from partita.runtime.inputs import part_read
from partita.runtime.stages import Stage, empty
from partita.runtime.transports.transport import Handle, Transport

Waits = Generator[None, None, Any]
Bound = Callable[[], Handle | Waits | None]


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


@frozen(eq=False)
class Binder:
    """Binds a rank's instructions. `inputs` will hold the parts of the step's batch, and `reducing` the stages whose
    `reduce` has begun, with the rest of it."""

    program: Program
    record: RankProgram
    stages: Mapping[int, Stage]
    transport: Transport
    context: Context
    inputs: Mapping[InputPart, torch.Tensor]
    reducing: dict[int, Waits]

    def bind(self) -> tuple[tuple[Bound, ...], ...]:
        """The closures of each instruction: one, two for a wait, and one more for each stage that begins to reduce."""
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
        bound: list[tuple[Bound, ...]] = []
        for i, instruction in enumerate(self.record.instructions):
            if isinstance(instruction, Compute):
                final = last_touch[instruction.stage, instruction.action.microbatch] == i
                own: tuple[Bound, ...] = (self._compute(instruction, final),)
            else:
                transfer = instruction.transfer
                cell = cells.setdefault(transfer, _Cell())
                if isinstance(instruction, PostSend):
                    source = transfer.message.source
                    slot = self.program.stages[source].sends[transfer.message]
                    release = last_send[source, slot, transfer.microbatch] == i
                    final = last_touch[source, transfer.microbatch] == i
                    own = (self._post_send(transfer, cell, release, final),)
                elif isinstance(instruction, PostReceive):
                    own = (self._post_receive(transfer, cell),)
                else:
                    arrives = isinstance(instruction, WaitReceive)
                    own = (cell.posted, self._arrive(transfer, cell) if arrives else cell.forget)
            bound.append((*own, *(self._reduce(stage) for stage in self.record.reductions.get(i, ()))))
        return tuple(bound)

    def _compute(self, instruction: Compute, final: bool) -> Bound:
        """Run a function of a stage on a microbatch; `final`: nothing later touches its frame."""
        stage = self.stages[instruction.stage]
        kind, microbatch = instruction.action.kind, instruction.action.microbatch
        function = stage.functions.get(kind)
        context, record = self.context, stage.record
        parts = [(part_read(each), each.slot) for each in record.inputs] if kind == "F" else []
        direction = "F" if kind == "F" else "B"
        sent = set(record.sends.values())
        overs = [
            (each.slot, self.stages[each.stage], each.target_slot)
            for each in record.hand_overs
            if each.kind == direction and kind != "W"
        ]
        over = [slot for slot, _, _ in overs if slot in record.released and slot not in sent]

        def call() -> Any:
            frame = stage.frame(microbatch)
            for part, slot in parts:
                frame[slot] = self.inputs[part][microbatch]  # type: ignore[index]
            context.microbatch = microbatch
            return function(stage.constants, frame, stage.accumulators, context) if function is not None else None

        def hand_over() -> None:
            frame = stage.frame(microbatch)
            for slot, target, target_slot in overs:
                target.frame(microbatch)[target_slot] = frame[slot]
            for slot in over:
                frame[slot] = None
            if final:
                del stage.frames[microbatch]

        def run() -> None:
            call()
            hand_over()

        def run_communicating() -> Waits:
            yield from begun(call())
            hand_over()

        return run_communicating if isgeneratorfunction(function) else run

    def _reduce(self, index: int) -> Bound:
        """Begin a stage's reduction: it starts its collectives, which go on beside what follows."""
        stage = self.stages[index]

        def run() -> None:
            self.reducing[index] = begun(stage.functions["R"](stage.accumulators, self.context))

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
        device = self.context.device

        def run() -> None:
            cell.tensor = empty(type, device)
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
