"""Process groups that speak NCCL's interface, and send nothing.

What they are given is checked as NCCL needs it: tensors on the device, contiguous, of dtypes that it has, and as large
as the operation says. Operations run on a stream of the group's own, behind what the stream that computes was given
when they were posted; waiting for one makes the compute stream wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from partita.runtime.fake_gpu.streams import Event, Stream
from partita.runtime.fake_gpu.watch import Kind, Watch
from partita.runtime.transports.process import ProcessTransport

BACKEND = "partita_fake_nccl"
# `ncclDataType_t`; booleans are sent as bytes, and summed as none.
MOVED = {
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8,
    torch.bool,
}  # fmt: skip
SUMMED = MOVED - {torch.bool}


_AnyWork: Any = dist.Work  # its methods may be overridden in Python
_AnyGroup: Any = dist.ProcessGroup


class _Work(_AnyWork):  # type: ignore[misc]
    """A posted operation: waiting for it makes the stream that computes wait."""

    def __init__(self, watch: Watch, ended: Event, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._watch, self._ended = watch, ended
        self._tensors: Sequence[torch.Tensor] = tensors  # NCCL's work keeps them until it is waited for

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._watch.current.wait_event(self._ended)
        self._tensors = ()
        return True


class FakeNccl(_AnyGroup):  # type: ignore[misc]
    """A group of ranks, of which one is here."""

    def __init__(self, watch: Watch, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._watch = watch
        self._stream = Stream(watch.waited, "a stream of NCCL")

    def getBackendName(self) -> str:
        """The backend's."""
        return BACKEND

    def all_gather_single(self, output: torch.Tensor, part: torch.Tensor, options: Any = None) -> _Work:
        """All parts in one tensor."""
        self._expect(output.numel() == part.numel() * self.size(), "all_gather: as large as all parts")
        return self._post("all_gather", [part], [output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, options: Any = None) -> _Work:
        """A part of the sum."""
        self._expect(whole.numel() == output.numel() * self.size(), "reduce_scatter: as large as all parts")
        return self._post("reduce_scatter", [whole], [output], SUMMED)

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: Any, options: Any = None) -> _Work:
        """The sum or maximum, in place."""
        return self._post("all_reduce", tensors, tensors, SUMMED)

    def all_to_all_single(
        self, output: torch.Tensor, sent: torch.Tensor, received: Any, sizes: Any, options: Any = None
    ) -> _Work:
        """A part for each rank; all are of one size if none is given."""
        for tensor, own in ((output, received), (sent, sizes)):
            fits = sum(own) == len(tensor) if own else len(tensor) % self.size() == 0
            self._expect(fits, "all_to_all: parts that make up the tensor")
        return self._post("all_to_all", [sent], [output])

    alltoall_base = all_to_all_single

    def broadcast(self, tensors: Any, options: Any) -> _Work:
        """From a rank of the group to the others."""
        sent, received = (tensors, []) if options.rootRank == self.rank() else ([], tensors)
        return self._post("broadcast", sent, received)

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self._watch.fault(Kind.LIFETIME, f"NCCL is given something else than {what}")

    def _post(
        self,
        what: str,
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        dtypes: set[torch.dtype] = MOVED,
    ) -> _Work:
        watch = self._watch
        for tensor in (*read, *written):
            if tensor.device.type != "cuda":
                watch.fault(Kind.DEVICE, f"NCCL's {what} is given a tensor on the host")
            if not tensor.is_contiguous():
                watch.fault(Kind.DEVICE, f"NCCL's {what} is given a tensor that is not contiguous")
            if tensor.dtype not in dtypes:
                watch.fault(Kind.DTYPE, f"NCCL's {what} is given {tensor.dtype}, which it does not have")
        self._stream.wait_stream(watch.current)
        with watch.on(self._stream):
            watch.used(read, written)
        return _Work(watch, self._stream.record_event(), (*read, *written))


class FakeTransport(ProcessTransport):
    """The transport of processes over NCCL, of which one is here: nobody answers greetings."""

    def _handshake(
        self,
        what: str,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        device: torch.device | str | None = None,
    ) -> None:
        """Nobody is there."""

    def barrier(self) -> None:
        """Nobody is there."""
        self._streams.join()


@contextmanager
def fake_transport(watch: Watch, rank: int, ranks: int, device: torch.device) -> Iterator[ProcessTransport]:
    """The transport of one of so many ranks. There must be no other process group in this process."""

    def made(store: Any, own: int, size: int, timeout: timedelta) -> FakeNccl:
        return FakeNccl(watch, own, size)

    dist.Backend.register_backend(BACKEND, made, devices=["cuda"])
    dist.init_process_group(BACKEND, rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield FakeTransport(device, sums=True, shares=False)
    finally:
        dist.destroy_process_group()
