"""Activations of microbatches in the host's memory: copied there and back while the rank computes.

A stage's values of a microbatch are copied as the memory behind them, each piece of memory once, and views of it are
made again with the same strides: kernels then read exactly what they would have read. On a GPU the copies are on
streams of their own, from and to pinned memory, after the events that the program lists (`partita.compiler.streams`).
Pinned memory is reused once its content has been copied back: a later copy into it waits for the compute stream, which
has waited for that copy. On a CPU both memories are one, and the copy is the memory itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field, frozen

from partita.runtime.stages import Frame
from partita.runtime.streams import Streams

Storage = torch.UntypedStorage
HOST = torch.device("cpu")


@frozen
class _View:
    """A tensor without its memory: where it is in which piece of memory."""

    memory: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]


@define(eq=False)
class Offloaded:
    """What a stage keeps of a microbatch: views of pieces of memory, on the `device`, with the `host`, or both."""

    views: tuple[_View, ...]
    device: list[Storage]
    host: list[Storage] = field(factory=list)


@define(eq=False)
class HostCopies:
    """The copies of one stage. Each is prepared by one call, which returns what `copied` then gets, and completed by
    another; the calls of a microbatch come in the order of these functions.
    """

    device: torch.device
    streams: Streams
    free: list[list[Storage]] = field(factory=list)  # memory of the host that may be used again

    def offload(self, frame: Frame, slots: Sequence[int]) -> Offloaded:
        """Prepare to copy the tensors in some slots of a frame to the host's memory."""
        pieces: dict[int, tuple[int, Storage]] = {}
        views = []
        tensors = [tensor for slot in slots if (tensor := frame[slot]) is not None]
        assert len(tensors) == len(slots), "a value to copy was not computed"
        for tensor in tensors:
            memory = tensor.untyped_storage()
            place, _ = pieces.setdefault(memory.data_ptr(), (len(pieces), memory))
            views.append(_View(place, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()))
        activations = Offloaded(tuple(views), [memory for _, memory in pieces.values()])
        activations.host = (
            self._host(activations.device) if self.streams.apart else list(map(to_host, activations.device))
        )
        return activations

    def offloaded(self, frame: Frame, slots: Sequence[int], activations: Offloaded) -> None:
        """Behind these copies: empty the slots."""
        activations.device = []
        for slot in slots:
            frame[slot] = None

    def load(self, frame: Frame, slots: Sequence[int], activations: Offloaded) -> None:
        """Prepare to copy the tensors back into the slots. Their content is undefined until that has ended."""
        if self.streams.apart:
            activations.device = [self.streams.memory(memory.nbytes(), self.device) for memory in activations.host]
        else:
            activations.device = list(map(to_device, activations.host))
        for slot, view in zip(slots, activations.views, strict=True):
            memory = activations.device[view.memory]
            tensor = torch.empty(0, dtype=view.dtype, device=memory.device)
            frame[slot] = tensor.set_(memory, view.offset, view.shape, view.strides)

    def loaded(self, activations: Offloaded) -> None:
        """Behind these copies: the host's memory may be used again."""
        activations.device = []
        if self.streams.apart:
            self.free.append(activations.host)

    def between(self, sources: Sequence[Storage], copies: Sequence[Storage]) -> list[torch.Tensor]:
        """What `copied` copies: pairs of all bytes of pieces of memory. None where both are one."""
        if not self.streams.apart:
            return []
        return [_bytes(each) for pair in zip(sources, copies, strict=True) for each in pair]

    def _host(self, device: Sequence[Storage]) -> list[Storage]:
        """Memory of the host for pieces of these sizes, which are those of every microbatch."""
        if self.free:
            return self.free.pop()
        return [self.streams.memory(memory.nbytes(), HOST) for memory in device]


def to_host(memory: Storage) -> Storage:
    """Memory of a CPU in the host's memory: the same."""
    return memory


def to_device(memory: Storage) -> Storage:
    """Memory of the host in a CPU's memory: the same."""
    return memory


def _bytes(memory: Storage) -> torch.Tensor:
    """All bytes of a piece of memory."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
