"""What microbatches keep in the host's memory: copied there and back beside what the rank computes.

A stage's values of a microbatch are copied as the memory behind them, each piece of memory once, and views of it are
made again with the same strides: kernels then read exactly what they would have read. On a GPU a stream of its own for
each direction copies from and to pinned memory, and the stream that computes waits for it, not the host. On a CPU both
memories are one, and the copy is the memory itself.
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
class HostCopies:
    """The copies of one rank. Each is started by one call and completed by another; the calls of a microbatch come in
    the order of these functions.
    """

    device: torch.device
    outward: torch.cuda.Stream | None = field(init=False)
    inward: torch.cuda.Stream | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        gpu = self.device.type == "cuda"
        self.outward = torch.cuda.Stream(self.device) if gpu else None  # type: ignore[no-untyped-call]
        self.inward = torch.cuda.Stream(self.device) if gpu else None  # type: ignore[no-untyped-call]

    def offload(self, frame: Frame, slots: Sequence[int]) -> Kept:
        """Start to copy the tensors in some slots of a frame to the host's memory."""
        pieces: dict[int, tuple[int, Storage]] = {}
        views = []
        for slot in slots:
            tensor = frame[slot]
            assert tensor is not None, "a value to copy was not computed"
            memory = tensor.untyped_storage()
            place, _ = pieces.setdefault(memory.data_ptr(), (len(pieces), memory))
            views.append(_View(place, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()))
        kept = Kept(tuple(views), [memory for _, memory in pieces.values()])
        if self.outward is None:
            kept.copies = list(map(to_host, kept.sources))
        else:
            kept.ended = self._copied(kept, torch.device("cpu"), self.outward)
        return kept

    def offloaded(self, frame: Frame, slots: Sequence[int], kept: Kept) -> None:
        """Wait for these copies, and empty the slots."""
        self._wait(kept)
        for slot in slots:
            frame[slot] = None

    def load(self, frame: Frame, slots: Sequence[int], kept: Kept) -> None:
        """Start to copy the tensors back into the slots. Their content is undefined until the wait."""
        if self.inward is None:
            kept.copies = list(map(to_device, kept.sources))
        else:
            kept.ended = self._copied(kept, self.device, self.inward)
        for slot, view in zip(slots, kept.views, strict=True):
            tensor = torch.empty(0, dtype=view.dtype, device=self.device)
            frame[slot] = tensor.set_(kept.copies[view.memory], view.offset, view.shape, view.strides)

    def loaded(self, kept: Kept) -> None:
        """Wait for these copies; the host's memory is free again."""
        self._wait(kept)

    def _copied(self, kept: Kept, target: torch.device, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Start to copy `kept.sources`; returns what says that it is done."""
        # Storage for what arrives is that of the stream that computes, so the copy starts behind what runs there now.
        kept.copies = [_empty(memory.nbytes(), target) for memory in kept.sources]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for memory, new in zip(kept.sources, kept.copies, strict=True):
                _bytes(new, target).copy_(_bytes(memory, memory.device), non_blocking=True)
            ended: torch.cuda.Event = stream.record_event()
        return ended

    def _wait(self, kept: Kept) -> None:
        if kept.ended is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.ended)
        kept.sources, kept.copies, kept.ended = kept.copies, [], None


@define(eq=False)
class Kept:
    """What a stage keeps of a microbatch: views of the memory `sources`, or after a copy of `copies`. The copy under
    way has `ended` when the event says so.
    """

    views: tuple[_View, ...]
    sources: list[Storage]
    copies: list[Storage] = field(factory=list)
    ended: torch.cuda.Event | None = None


def to_host(memory: Storage) -> Storage:
    """Memory of a CPU in the host's memory: the same."""
    return memory


def to_device(memory: Storage) -> Storage:
    """Memory of the host in a CPU's memory: the same."""
    return memory


def _empty(size: int, device: torch.device) -> Storage:
    pinned = device.type == "cpu"
    return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned).untyped_storage()


def _bytes(memory: Storage, device: torch.device) -> torch.Tensor:
    """All bytes of a piece of memory."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(memory)
