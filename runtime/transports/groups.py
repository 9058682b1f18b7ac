"""Collectives among the processes along a mesh axis, in buckets, over one process group.

Gathers and exchanges move bytes, so a bucket of any dtypes is one operation; sums take one for each dtype in it. NCCL
sums in the dtype of the tensor and in an order of its own, the same in every run. Gloo would too, but not in the order
of the coordinate: there sums are made here, of exchanged parts, and so have the bits of the virtual transport's.

A collective is a generator here: it yields what it waits for and returns its results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, frozen

from partita.runtime.transports.collectives import total
from partita.runtime.transports.failures import post, wait
from partita.runtime.transports.packing import pack, unpack
from partita.runtime.transports.transport import Tensors

Launches = Generator[list[Any], None, Tensors]

# Renamed in torch 2.13.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@define(eq=False)
class Collecting:
    """A posted collective; a `Collective`. Keeps all that takes part alive until it is done."""

    description: str
    launches: Launches | None
    works: list[Any]
    results: Tensors | None = None

    def done(self) -> bool:
        """Wait (on NCCL: let the current stream wait) and answer True; raises `ConnectionLost`."""
        while self.launches is not None:
            for work in self.works:
                wait(work, self.description)
            try:
                self.works = next(self.launches)
            except StopIteration as end:
                self.results = end.value
                self.launches, self.works = None, []
        return True

    def result(self) -> Tensors:
        """What it gives, once."""
        self.done()
        assert self.results is not None, f"the result of {self.description} is taken again"
        results, self.results = self.results, None
        return results


@frozen(eq=False)
class AxisGroup:
    """This process and the others along a mesh axis, in order of their coordinate."""

    axis: str
    size: int
    group: dist.ProcessGroup
    nccl: bool

    def all_gather(self, tensors: Tensors, dims: Sequence[int]) -> Collecting:
        """Post a gather."""
        return self._start("all-gather", self._all_gather(tensors, dims))

    def reduce_scatter(self, tensors: Tensors, dims: Sequence[int]) -> Collecting:
        """Post a sum of which each rank gets a part."""
        return self._start("reduce-scatter", self._reduce_scatter(tensors, dims))

    def all_reduce(self, tensors: Tensors, maximum: bool) -> Collecting:
        """Post a sum or maximum."""
        return self._start("all-reduce", self._all_reduce(tensors, maximum))

    def all_to_all(self, tensors: Tensors, gathered_dims: Sequence[int], cut_dims: Sequence[int]) -> Collecting:
        """Post an exchange."""
        return self._start("all-to-all", self._all_to_all(tensors, gathered_dims, cut_dims))

    # ------------------------------------------------------------ the collectives

    def _all_gather(self, tensors: Tensors, dims: Sequence[int]) -> Launches:
        row, pieces = pack(tensors, dims, 1)
        rows = row.new_empty(self.size, row.shape[1])
        yield [self._post(_gather, rows.view(-1), row.view(-1))]
        return unpack(rows, pieces, dims)

    def _all_to_all(self, tensors: Tensors, gathered_dims: Sequence[int], cut_dims: Sequence[int]) -> Launches:
        sent, pieces = pack(tensors, cut_dims, self.size)
        rows = torch.empty_like(sent)
        yield [self._post(dist.all_to_all_single, rows, sent)]
        return unpack(rows, pieces, gathered_dims)

    def _reduce_scatter(self, tensors: Tensors, dims: Sequence[int]) -> Launches:
        found: dict[int, torch.Tensor] = {}
        buckets = []
        works = []
        for places in by_dtype(tensors):
            sent, pieces = pack(tuple(tensors[i] for i in places), [dims[i] for i in places], self.size)
            sent = sent.view(pieces[0].dtype)
            received = sent.new_empty(sent.shape[1]) if self.nccl else torch.empty_like(sent)
            works.append(self._post(_scatter if self.nccl else dist.all_to_all_single, received, sent))
            buckets.append((places, pieces, sent, received))
        yield works
        for places, pieces, _, received in buckets:
            summed = received if self.nccl else total(received.unbind())
            parts = unpack(summed.view(1, -1).view(torch.uint8), pieces, (0,) * len(pieces))
            found.update(zip(places, parts, strict=True))
        return tuple(found[i] for i in range(len(tensors)))

    def _all_reduce(self, tensors: Tensors, maximum: bool) -> Launches:
        found: dict[int, torch.Tensor] = {}
        buckets = []
        for places in by_dtype(tensors):
            bucket = tuple(tensors[i] for i in places)
            row, pieces = pack(bucket, (0,) * len(bucket), 1)
            flat = row.view(-1).view(pieces[0].dtype)
            # NCCL reduces in place, and a bucket of one is the tensor itself.
            buckets.append((places, pieces, flat.clone() if self.nccl and len(bucket) == 1 else flat))
        flats = [flat for _, _, flat in buckets]
        summed = yield from (self._reduced_by_nccl(flats, maximum) if self.nccl else self._reduced_here(flats, maximum))
        for (places, pieces, _), flat in zip(buckets, summed, strict=True):
            parts = unpack(flat.view(1, -1).view(torch.uint8), pieces, (0,) * len(pieces))
            found.update(zip(places, parts, strict=True))
        return tuple(found[i] for i in range(len(tensors)))

    def _reduced_by_nccl(self, flats: Sequence[torch.Tensor], maximum: bool) -> Launches:
        """In place."""
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        yield [self._post(dist.all_reduce, flat, operation) for flat in flats]
        return tuple(flats)

    def _reduced_here(self, flats: Sequence[torch.Tensor], maximum: bool) -> Launches:
        """Each rank reduces a part and all gather the parts: what a ring sends, in two launches."""
        padded = [torch.nn.functional.pad(flat, (0, -flat.numel() % self.size)) for flat in flats]
        exchanged = [torch.empty_like(flat) for flat in padded]
        pairs = zip(exchanged, padded, strict=True)
        yield [self._post(dist.all_to_all_single, into, flat) for into, flat in pairs]
        parts = [total(flat.view(self.size, -1).unbind(), maximum) for flat in exchanged]
        pairs = zip(exchanged, parts, strict=True)
        yield [self._post(_gather, into.view(torch.uint8), part.view(torch.uint8)) for into, part in pairs]
        return tuple(into[: flat.numel()] for into, flat in zip(exchanged, flats, strict=True))

    # ------------------------------------------------------------ posting

    def _start(self, kind: str, launches: Launches) -> Collecting:
        return Collecting(f"the {kind} along {self.axis}", launches, next(launches))

    def _post(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        return post(f"a collective along {self.axis}", operation, *arguments, group=self.group, async_op=True)


def by_dtype(tensors: Tensors) -> list[list[int]]:
    """The places of the tensors of each dtype, in order."""
    places: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(i)
    return list(places.values())
