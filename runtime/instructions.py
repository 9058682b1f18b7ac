"""A rank's instructions as closures, bound once: everything static is decided here.

A closure returns None or, if it has to wait, a generator to be run to its end. On which stream of the device each is
enqueued, and behind what, is what the program says (`partita.runtime.streams`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import isgeneratorfunction
from typing import Any

import torch
from attrs import define, field, frozen

from partita.compiler.instructions import Compute, Copy, PostCopy, PostReceive, PostSend, Transfer, WaitCopy
from partita.compiler.program import Program, RankProgram
from partita.compiler.schedules.schedule import OFFLOAD
from partita.runtime.context import Context, begun
from partita.runtime.host_copies import HostCopies, Offloaded
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.stages import Stage
from partita.runtime.streams import Bound, Coroutine, Handle, Posting, Streams, copied
from partita.runtime.transports.transport import Transport

__all__ = ["Binder", "Bound", "Coroutine"]


@define(eq=False, slots=True)
class _UnderWay:
    """A transfer under way. Its handle exists from the post to the wait, and keeps the tensor alive."""

    handles: list[Handle] = field(factory=list)

    def wait(self) -> Coroutine | None:
        """Wait for the transfer, and drop its handle."""
        handle = self.handles.pop()
        return None if handle.done() else _rest(handle)


def _rest(handle: Handle) -> Coroutine:
    """Wait for a handle that was not done when first asked."""
    yield
    while not handle.done():
        yield


@frozen(eq=False)
class Binder:
    """Binds a rank's instructions. `reducing` will hold the rest of each `reduce` that has begun, by stage.

    The first action of a stage waits for what is gathered for it, and the last starts to reduce its gradients.

    An instruction clears the frame slots that nothing needs afterwards: all of them, if it is the frame's last.
    """

    program: Program
    record: RankProgram
    stages: Mapping[int, Stage]
    transport: Transport
    streams: Streams
    context: Context
    reducing: dict[int, Coroutine]

    def bind(self) -> tuple[Bound, ...]:
        """The closure of each instruction."""
        first: dict[int, int] = {}
        last_send: dict[tuple[int, int, int], int] = {}
        last_touch: dict[tuple[int, int], int] = {}
        last_of_slices: dict[tuple[int, int], int] = {}
        for i, instruction in enumerate(self.record.instructions):
            if isinstance(instruction, PostSend):
                message, microbatch = instruction.transfer.message, instruction.transfer.microbatch
                slot = self.program.stages[message.source].sends[message]
                last_send[message.source, slot, microbatch] = i
                last_touch[message.source, microbatch] = i
            elif isinstance(instruction, Compute):
                last_touch[instruction.stage, instruction.action.microbatch] = i
                last_of_slices[instruction.stage, instruction.action.microbatch // self.program.slices] = i
                first.setdefault(instruction.stage, i)
        transfers: dict[Transfer, _UnderWay] = {}
        copies = {index: HostCopies(self.context.device, self.streams) for index in self.stages}
        activations: dict[tuple[int, int], Offloaded] = {}
        parts: list[Bound | Posting] = []
        for i, instruction in enumerate(self.record.instructions):
            if isinstance(instruction, Compute):
                microbatch = instruction.action.microbatch
                final = last_touch[instruction.stage, microbatch] == i
                whole = last_of_slices[instruction.stage, microbatch // self.program.slices] == i
                opening = first[instruction.stage] == i
                closing = instruction.stage in self.record.reductions.get(i, ())
                own: Bound | Posting = self._compute(instruction, final, whole, opening, closing)
            elif isinstance(instruction, (PostCopy, WaitCopy)):
                own = self._copy(instruction, copies[instruction.stage], activations)
            else:
                transfer = instruction.transfer
                under_way = transfers.setdefault(transfer, _UnderWay())
                if isinstance(instruction, PostSend):
                    source = transfer.message.source
                    slot = self.program.stages[source].sends[transfer.message]
                    last = last_send[source, slot, transfer.microbatch] == i
                    final = last_touch[source, transfer.microbatch] == i
                    own = self._post_send(transfer, under_way, last, final)
                elif isinstance(instruction, PostReceive):
                    own = self._post_receive(transfer, under_way)
                else:
                    own = under_way.wait
            parts.append(own)
        return self.streams.bound(self.record.launches, parts)

    def _compute(self, instruction: Compute, final: bool, whole: bool, opening: bool, closing: bool) -> Bound:
        """Run a function of a stage on a microbatch, and do its local transfers; `final`: the last use of the frame,
        `whole`: the last function of all slices of its part of the batch; `opening` and `closing`: the first and the
        last of its stage.
        """
        stage, context = self.stages[instruction.stage], self.context
        kind, microbatch = instruction.action.kind, instruction.action.microbatch
        function: Callable[..., Any] = stage.functions.get("C" if closing else kind, _nothing)
        record, frame = stage.record, stage.frames[microbatch]
        direction = "F" if kind == "F" else "B"
        sent = set(record.sends.values())
        overs = [
            (each.slot, self.stages[each.stage].frames[microbatch], each.target_slot)
            for each in record.local_transfers
            if each.kind == direction and kind != "W"
        ]
        ended = [slot for slot, _, _ in overs if slot in record.released and slot not in sent]
        empty = [None] * record.frame
        part, own = divmod(microbatch, self.program.slices)
        shared = stage.shared[part]
        ends = whole and self.program.slices > 1

        def begin() -> None:
            context.microbatch = context.first + part
            context.slice, context.shared = own, shared

        def transfer_locally() -> None:
            for slot, target, target_slot in overs:
                target[target_slot] = frame[slot]
            for slot in ended:
                frame[slot] = None
            if final:
                frame[:] = empty
            if ends:
                shared.clear()

        def run() -> None:
            begin()
            function(stage.constants, frame, stage.accumulators, context)
            if final or overs or ends:
                transfer_locally()

        def run_communicating() -> Coroutine:
            begin()
            yield from begun(function(stage.constants, frame, stage.accumulators, context), context)
            transfer_locally()

        def open() -> Coroutine:
            begin()
            gathering = stage.gathering
            if gathering is None:  # by an earlier batch of the step
                yield from begun(function(stage.constants, frame, stage.accumulators, context), context)
            else:
                stage.gathering = None
                called = stage.functions["O"](stage.constants, gathering, frame, stage.accumulators, context)
                yield from begun(called, context)
            transfer_locally()

        def close() -> Coroutine:
            begin()
            reducing = yield from begun(function(stage.constants, frame, stage.accumulators, context), context)
            self.reducing[instruction.stage] = begun(
                stage.functions["R"](stage.accumulators, reducing, context), context
            )
            transfer_locally()

        if closing:
            return close
        if opening and "O" in stage.functions:
            return open
        return run_communicating if isgeneratorfunction(function) else run

    def _copy(
        self, instruction: Copy, copies: HostCopies, activations: dict[tuple[int, int], Offloaded]
    ) -> Bound | Posting:
        """Post a copy to the host's memory or back, or wait for it; `activations` is what is there."""
        stage, microbatch = self.stages[instruction.stage], instruction.action.microbatch
        frame, slots, key = stage.frames[microbatch], stage.record.copied, (instruction.stage, microbatch)

        def offload() -> list[torch.Tensor]:
            own = activations[key] = copies.offload(frame, slots)
            stage.on_host.add(microbatch)
            return copies.between(own.device, own.host)

        def offloaded() -> None:
            copies.offloaded(frame, slots, activations[key])

        def load() -> list[torch.Tensor]:
            own = activations[key]
            copies.load(frame, slots, own)
            return copies.between(own.host, own.device)

        def loaded() -> None:
            copies.loaded(activations.pop(key))
            stage.on_host.remove(microbatch)

        if instruction.action.kind == OFFLOAD:
            return Posting(offload, copied, _forgotten) if isinstance(instruction, PostCopy) else offloaded
        return Posting(load, copied, _forgotten) if isinstance(instruction, PostCopy) else loaded

    def _post_send(self, transfer: Transfer, under_way: _UnderWay, last: bool, final: bool) -> Posting:
        """Post a send from a frame; `last`: the last send of this slot."""
        stage = self.stages[transfer.message.source]
        slot = stage.record.sends[transfer.message]
        frame = stage.frames[transfer.microbatch]
        released = last and slot in stage.record.released
        empty = [None] * stage.record.frame

        def prepare() -> tuple[torch.Tensor]:
            tensor = frame[slot]
            assert tensor is not None, f"{transfer} was not computed"
            if final:
                frame[:] = empty
            elif released:
                frame[slot] = None
            return (tensor,)

        return Posting(prepare, partial(self.transport.send, transfer.channel), under_way.handles.append)

    def _post_receive(self, transfer: Transfer, under_way: _UnderWay) -> Posting:
        """Post a receive into a new buffer. The frame gets it at once; its content is undefined until the wait."""
        stage = self.stages[transfer.message.destination]
        slot, type = stage.record.receives[transfer.message]
        frame = stage.frames[transfer.microbatch]
        new = self.streams.allocator(type.shape, DTYPES[type.dtype], self.context.device)

        def prepare() -> tuple[torch.Tensor]:
            frame[slot] = buffer = new()
            return (buffer,)

        return Posting(prepare, partial(self.transport.receive, transfer.channel), under_way.handles.append)


def _forgotten(_: Handle) -> None:
    """For copies, whose memory is kept by what they are of."""


def _nothing(*_: Any) -> None:
    """The function of an action that computes nothing."""
