"""Bucketed collectives among the processes along a mesh axis, over one process group.

All-gather and all-to-all move bytes, so a bucket of any dtypes is one operation; reductions take one per dtype in it.
NCCL reduces in the dtype of the tensor and in its own order, the same in every run. Gloo would too, but not in
coordinate order: there exchanged parts are summed here, which gives the same bits as the virtual transport.

A collective is a generator: it yields what it waits for and returns its results. It holds no operand that it has
copied, and frees the copy once all has arrived: the compiler knows what is held when as the `Buffers` of its operation
(`partita.compiler.ops.buffers`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, frozen

from partita.runtime.streams import Streams
from partita.runtime.transports.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE_ROWS,
    REDUCE_SCATTER,
    TURN,
    total,
)
from partita.runtime.transports.packing import pack, release_storage, unpack
from partita.runtime.transports.transport import Handle, Tensors

CollectiveSteps = Generator[list[Handle], None, Tensors]
# Starts an operation of torch.distributed, given it and its arguments.
Post = Callable[..., Handle]

# Renamed in torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@define(eq=False)
class CollectiveWork:
    """A posted collective; a `Collective`. Keeps what it sends and receives alive until that is done."""

    description: str
    launches: CollectiveSteps | None
    works: list[Handle]
    results: Tensors | None = None

    def done(self) -> bool:
        """Wait (on NCCL: make the compute stream wait) and return True. Raises `ConnectionLost`."""
        while self.launches is not None:
            while self.works:
                self.works.pop(0).done()  # with which its tensors are free
            try:
                self.works = next(self.launches)
            except StopIteration as end:
                self.results = end.value
                self.launches, self.works = None, []
        return True

    def result(self) -> Tensors:
        """The results; to be taken once."""
        self.done()
        assert self.results is not None, f"the result of {self.description} is taken again"
        results, self.results = self.results, None
        return results


@frozen(eq=False)
class AxisGroup:
    """This process and its peers along a mesh axis, in coordinate order. `sums`: the backend's reductions are used.

    Its operations are on a `stream` of their own; tensors are packed and unpacked on the compute stream.
    """

    axis: str
    size: int
    group: dist.ProcessGroup | None
    sums: bool
    streams: Streams
    stream: str
    posting: Callable[..., Handle]

    def collective(self, kind: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]) -> CollectiveWork:
        """Post a collective."""
        started: Mapping[str, Callable[..., CollectiveSteps]] = {
            ALL_GATHER: self._all_gather,
            REDUCE_SCATTER: partial(self._for_each_dtype, self._reduce_scatter),
            ALL_REDUCE: partial(self._for_each_dtype, self._all_reduce),
            ALL_TO_ALL: self._all_to_all,
            TURN: self._turn,
            # A GPU exchanges lists in whole: else it would have to tell the host how long they are.
            EXCHANGE_ROWS: self._all_to_all if self.sums else self._exchange_rows,
        }
        description = f"the {kind} along {self.axis}"
        launches = started[kind](partial(self._post, description), tensors, *zip(*arguments, strict=True))
        return CollectiveWork(description, launches, next(launches))

    # ------------------------------------------------------------ the collectives

    def _all_gather(self, post: Post, tensors: Tensors, dims: Sequence[int]) -> CollectiveSteps:
        sent = pack(tensors, dims, 1)
        del tensors
        received = sent.rows.new_empty(self.size, sent.rows.shape[1])
        yield [post(all_gather_single, received.view(-1), sent.rows.view(-1))]
        sent.free()
        return unpack(received, sent.pieces, dims)

    def _all_to_all(
        self, post: Post, tensors: Tensors, gathered_dims: Sequence[int], cut_dims: Sequence[int]
    ) -> CollectiveSteps:
        sent = pack(tensors, cut_dims, self.size)
        del tensors
        received = torch.empty_like(sent.rows)
        yield [post(dist.all_to_all_single, received, sent.rows)]
        sent.free()
        return unpack(received, sent.pieces, gathered_dims)

    def _exchange_rows(
        self, post: Post, tensors: Tensors, gathered_dims: Sequence[int], cut_dims: Sequence[int]
    ) -> CollectiveSteps:
        """The lengths of all lists first, then what is in them, rank by rank."""
        # Lists by the rank that they are for, or come from.
        sent = [torch.stack(each.chunk(self.size, cut)) for each, cut in zip(tensors, cut_dims, strict=True)]
        del tensors
        shapes = [each.shape for each in sent]
        valid = sent[0] >= 0
        lengths = valid.sum(-1)
        arriving = torch.empty_like(lengths)
        yield [post(dist.all_to_all_single, arriving, lengths)]
        received_mask = torch.arange(valid.shape[-1], device=valid.device) < arriving.unsqueeze(-1)
        counts = [each.flatten(1).sum(1).tolist() for each in (arriving, lengths)]
        flat = [sent.pop(0)[valid] for _ in shapes]
        filled = [each.new_empty(sum(counts[0]), *each.shape[1:]) for each in flat]
        yield [post(dist.all_to_all_single, into, each, *counts) for into, each in zip(filled, flat, strict=True)]
        for each in flat:
            release_storage(each)
        del valid, flat
        results = []
        for i, (shape, dim) in enumerate(zip(shapes, gathered_dims, strict=True)):
            each = filled.pop(0)
            whole = each.new_full(shape, 0 if i else -1)
            whole[received_mask] = each
            results.append(torch.cat(whole.unbind(), dim))
        return tuple(results)

    def _turn(self, post: Post, tensors: Tensors) -> CollectiveSteps:
        """An all-to-all in which everything is for the next rank."""
        dims = (0,) * len(tensors)
        sent = pack(tensors, dims, 1)
        del tensors
        received = torch.empty_like(sent.rows)
        rank = dist.get_rank(self.group)
        outgoing, incoming = [0] * self.size, [0] * self.size
        outgoing[(rank + 1) % self.size] = incoming[(rank - 1) % self.size] = received.numel()
        yield [post(dist.all_to_all_single, received.view(-1), sent.rows.view(-1), incoming, outgoing)]
        sent.free()
        return unpack(received, sent.pieces, dims)

    def _reduce_scatter(self, post: Post, tensors: Tensors, dims: Sequence[int]) -> CollectiveSteps:
        """For tensors of one dtype."""
        sent = pack(tensors, dims, self.size)
        del tensors
        numbers = sent.rows.view(sent.pieces[0].dtype)
        if self.sums:
            part = numbers.new_empty(numbers.shape[1])
            yield [post(reduce_scatter_single, part, numbers)]
            sent.free()
        else:
            received = torch.empty_like(numbers)
            yield [post(dist.all_to_all_single, received, numbers)]
            sent.free()
            part = total(received.unbind())
        return unpack(part.view(1, -1).view(torch.uint8), sent.pieces, (0,) * len(sent.pieces))

    def _all_reduce(self, post: Post, tensors: Tensors, operations: Sequence[bool]) -> CollectiveSteps:
        """For tensors of one dtype; `operations` are all equal."""
        maximum = operations[0]
        sent = pack(tensors, (0,) * len(tensors), 1)
        del tensors
        dtype = sent.pieces[0].dtype
        if self.sums:
            flat = sent.rows.view(-1).view(dtype)
            if not sent.copied:
                flat = flat.clone()  # in place, and others read the tensor
            yield [post(dist.all_reduce, flat, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)]
        else:
            # Each rank reduces a part, then all gather the parts: as many bytes as a ring sends.
            sent = sent.filled(self.size * dtype.itemsize)
            flat = torch.empty_like(sent.rows).view(-1).view(dtype)
            yield [post(dist.all_to_all_single, flat, sent.rows.view(-1).view(dtype))]
            sent.free()
            part = total(flat.view(self.size, -1).unbind(), maximum)
            yield [post(all_gather_single, flat.view(torch.uint8), part.view(torch.uint8))]
        return unpack(flat.view(1, -1).view(torch.uint8), sent.pieces, (0,) * len(sent.pieces))

    def _for_each_dtype(
        self,
        reduction: Callable[[Post, Tensors, Sequence[Any]], CollectiveSteps],
        post: Post,
        tensors: Tensors,
        arguments: Sequence[Any],
    ) -> CollectiveSteps:
        """Run a reduction for the tensors of each dtype, concurrently."""
        places: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            places.setdefault(tensor.dtype, []).append(i)
        running = {
            dtype: reduction(post, tuple(tensors[i] for i in own), [arguments[i] for i in own])
            for dtype, own in places.items()
        }
        count = len(tensors)
        del tensors, tensor
        results: dict[int, torch.Tensor] = {}
        while running:
            works = []
            for dtype, launches in tuple(running.items()):
                try:
                    works += next(launches)
                except StopIteration as end:
                    results.update(zip(places[dtype], end.value, strict=True))
                    del running[dtype]
            if works:
                yield works
        return tuple(results[i] for i in range(count))

    # ------------------------------------------------------------ posting

    def _post(self, description: str, operation: Callable[..., Any], *arguments: Any) -> Handle:
        begin = partial(self.posting, description, arguments, operation, *arguments)
        return self.streams.launch(self.stream, partial(begin, group=self.group, async_op=True))
