"""What microbatches keep in the host's memory: copied there and back beside what the rank computes.

A stage's values of a microbatch are copied as the memory behind them, each piece of memory once, and views of it are
made again with the same strides: kernels then read exactly what they would have read. On a GPU a stream of its own for
each direction copies from and to pinned memory, and the stream that computes waits for it, not the host. Pinned memory
of what has come back is used again: a later copy into it starts behind that one, as that starts behind what computes.
On a CPU both memories are one, and the copy is the memory itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field, frozen

from partita.runtime.stages import Frame

Storage = torch.UntypedStorage


@frozen
class _View:
    """A tensor without its memory: where it is in which piece of memory."""

    memory: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]


@define(eq=False)
class Kept:
    """What a stage keeps of a microbatch: views of pieces of memory, on the `device`, with the `host`, or both. The
    copy under way has `ended` when the event says so.
    """

    views: tuple[_View, ...]
    device: list[Storage]
    host: list[Storage] = field(factory=list)
    ended: torch.cuda.Event | None = None


@define(eq=False)
class HostCopies:
    """The copies of one stage. Each is started by one call and completed by another; the calls of a microbatch come in
    the order of these functions.
    """

    device: torch.device
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None  # outward and inward, of the rank
    free: list[list[Storage]] = field(factory=list)  # memory of the host that may be used again

    def offload(self, frame: Frame, slots: Sequence[int]) -> Kept:
        """Start to copy the tensors in some slots of a frame to the host's memory."""
        pieces: dict[int, tuple[int, Storage]] = {}
        views = []
        tensors = [tensor for slot in slots if (tensor := frame[slot]) is not None]
        assert len(tensors) == len(slots), "a value to copy was not computed"
        for tensor in tensors:
            memory = tensor.untyped_storage()
            place, _ = pieces.setdefault(memory.data_ptr(), (len(pieces), memory))
            views.append(_View(place, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()))
        kept = Kept(tuple(views), [memory for _, memory in pieces.values()])
        if self.streams is None:
            kept.host = list(map(to_host, kept.device))
        else:
            kept.host = self._host(kept.device)
            kept.ended = self._copied(kept.device, kept.host, self.streams[0])
        return kept

    def offloaded(self, frame: Frame, slots: Sequence[int], kept: Kept) -> None:
        """Wait for these copies, and empty the slots."""
        self._wait(kept)
        kept.device = []
        for slot in slots:
            frame[slot] = None

    def load(self, frame: Frame, slots: Sequence[int], kept: Kept) -> None:
        """Start to copy the tensors back into the slots. Their content is undefined until the wait."""
        if self.streams is None:
            kept.device = list(map(to_device, kept.host))
        else:
            kept.device = [allocated(memory.nbytes(), self.device) for memory in kept.host]
            kept.ended = self._copied(kept.host, kept.device, self.streams[1])
        for slot, view in zip(slots, kept.views, strict=True):
            memory = kept.device[view.memory]
            tensor = torch.empty(0, dtype=view.dtype, device=memory.device)
            frame[slot] = tensor.set_(memory, view.offset, view.shape, view.strides)

    def loaded(self, kept: Kept) -> None:
        """Wait for these copies; the host's memory may be used again."""
        self._wait(kept)
        kept.device = []
        if self.streams is not None:
            self.free.append(kept.host)

    def _host(self, device: Sequence[Storage]) -> list[Storage]:
        """Pinned memory of the host for pieces of these sizes, which are those of every microbatch."""
        if self.free:
            return self.free.pop()
        return [allocated(memory.nbytes(), torch.device("cpu")) for memory in device]

    def _copied(
        self, sources: Sequence[Storage], copies: Sequence[Storage], stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        """Start to copy pieces of memory; returns what says that they are copied.

        Memory of the device is that of the stream that computes, so the copy starts behind what runs there now.
        """
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for source, copy in zip(sources, copies, strict=True):
                transfer(source, copy)
            ended: torch.cuda.Event = stream.record_event()
        return ended

    def _wait(self, kept: Kept) -> None:
        if kept.ended is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.ended)


def streams_of(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
    """The streams in which a rank copies outward and inward; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_host(memory: Storage) -> Storage:
    """Memory of a CPU in the host's memory: the same."""
    return memory


def to_device(memory: Storage) -> Storage:
    """Memory of the host in a CPU's memory: the same."""
    return memory


def allocated(size: int, device: torch.device) -> Storage:
    """Memory of a GPU, or pinned memory of the host."""
    pinned = device.type == "cpu"
    return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned).untyped_storage()


def transfer(source: Storage, copy: Storage) -> None:
    """Start to copy memory in the current stream."""
    _bytes(copy).copy_(_bytes(source), non_blocking=True)


def _bytes(memory: Storage) -> torch.Tensor:
    """All bytes of a piece of memory."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
