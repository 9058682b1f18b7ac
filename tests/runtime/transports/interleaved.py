"""A virtual cluster whose ranks have devices with streams and events, as CUDA and NCCL order them; operations that
nothing orders run in an order that a seed chooses.

The host of a rank enqueues its instructions and runs ahead of its device; but in any action it may wait for all that
its device has been given, before it enqueues the action or before it goes on behind it: as where memory is freed, or a
kernel is loaded. Then, at any moment, the first operation of any stream may start whose events have occurred:

- What computes runs to its end, or until it waits for a collective. Copies are made at once.
- A send, a receive or a collective occupies its stream until all its ends have started and it has completed, which it
  does at some moment afterwards. Operations of one communicator complete in the order in which each end has started
  them, and what they move is read and written at that moment.
- Memory is given and taken back in the order of what computes, whatever other streams do with it. What is freed is
  overwritten at once, and handed out to the next that asks for as much memory for another stream to write to, as a
  caching allocator does. An operation that has not ended does not keep its memory.
- What does not start behind the event that makes its operand finds nothing there (`Race`).
- Streams may share *connections* to the hardware, which takes the operations of a connection in the order in which the
  host has enqueued them: one that cannot start yet keeps those behind it from starting. What an action launches comes
  right behind what the action has enqueued before.

A program without races computes the same bits in every order, whenever hosts wait. What the host does itself, between
the instructions of one step and the next, it does when all that computes has ended; the operations that it starts then
are on streams as well, and end when they do. Orders are drawn as in probabilistic concurrency testing (Burckhardt et
al., ASPLOS 2010): whatever has the highest of random priorities moves, which change now and then. So one stream may be
far behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf, prod
from sys import getrefcount
from typing import Any, cast

import torch
from attrs import define, field

from partita.compiler.instructions import COMPUTE, Channel
from partita.compiler.mesh import Mesh
from partita.compiler.streams import START, SUMS, Launch, along
from partita.runtime.streams import Bound, Coroutine, Handle, Posting
from partita.runtime.transports.collectives import ALL_GATHER
from partita.runtime.transports.lines import (
    CommunicationError,
    Deadlock,
    OrderedQueue,
    PostedOperation,
    UnmatchedOperation,
)
from partita.runtime.transports.transport import NO_STREAMS, Tensors
from partita.runtime.transports.virtual import VirtualCluster, VirtualTransport

HOST = "the host"
RESTLESS = 1 / 8  # how often what has moved gets another priority


class Race(CommunicationError):
    """An operation has started before what it works on was there."""


@define(eq=False, slots=True)
class Operation:
    """What is on a stream, behind the ends of the operations `after`."""

    name: str
    after: tuple[Operation, ...]
    begin: Callable[[Operation], object]  # ends it, or returns what it then waits for
    steps: Iterator[None] | None = None
    place: tuple[float, float] = (0, 0)  # in the order in which the host enqueues
    post: Any = None
    started: bool = False
    complete: bool = False
    operands: tuple[_Operand, ...] | None = None

    def may_start(self) -> bool:
        """Whether it may start, once it is the first on its stream."""
        return not self.started and all(each.complete for each in self.after)


@define(eq=False, slots=True)
class _Kept:
    """The program's hold on the tensors of a post, until it waits. What orders the two is an event."""

    tensors: Sequence[torch.Tensor]

    def done(self) -> bool:
        return True


@define(eq=False, slots=True)
class _Launched:
    """An operation for which what computes waits itself; a `Collective`. Keeps its tensors until it is done."""

    operation: Operation
    tensors: Tensors
    waiting: list[Any]

    def done(self) -> bool:
        if not self.operation.complete:
            self.waiting.append(self.operation)
            return False
        self.tensors = ()
        return True

    def result(self) -> Tensors:
        found: Tensors = self.operation.post.result()
        return found


@define(eq=False, slots=True)
class _Piece:
    """A piece of memory that operations of other streams work on, and how many of their tensors refer to it."""

    storage: torch.UntypedStorage
    own: int = 0

    def free(self) -> bool:
        """Whether the program has let go of it."""
        # References are one of the object, those of operands, and none of the program, by tensors or by the object: all
        # of Python's storages of one memory are one.
        count = torch._C._storage_Use_Count(self.storage._cdata)
        return count == 1 + self.own and getrefcount(self.storage) == (_SHARED if self.own else _ALONE)


@define(eq=False)
class Memory:
    """The memory of a rank's device, as far as streams other than that of what computes read or write it."""

    pieces: dict[int, _Piece] = field(factory=dict)  # that the program has not let go of, by storage
    freed: dict[int, list[_Piece]] = field(factory=dict)  # by size

    def take(self, size: int) -> torch.UntypedStorage:
        """Memory that was freed last, or new memory; with garbage."""
        there = self.freed.get(size)
        piece = there.pop() if there else _Piece(torch.empty(size, dtype=torch.uint8).untyped_storage())
        self.pieces[piece.storage._cdata] = piece
        _spoil(piece.storage)
        return piece.storage

    def operands(self, tensors: Iterable[torch.Tensor]) -> tuple[_Operand, ...]:
        """Tensors of the same memory, which do not keep it."""
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            piece = self.pieces.get(storage._cdata)
            if piece is None:
                piece = self.pieces[storage._cdata] = _Piece(storage)
            piece.own += 1
            other = torch.empty(0, dtype=tensor.dtype)
            other.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            found.append(_Operand(piece, other))
        return tuple(found)

    def look(self) -> None:
        """Take what the program has let go of."""
        for key, piece in tuple(self.pieces.items()):
            if piece.free():
                _spoil(piece.storage)
                self.freed.setdefault(piece.storage.nbytes(), []).append(self.pieces.pop(key))


@define(eq=False, slots=True)
class _Operand:
    """A tensor that an operation works on."""

    piece: _Piece
    tensor: torch.Tensor


def _references(tensors: int) -> int:
    """The references to a storage's object that has one here, with so many tensors of its memory: torch has one, too,
    while there are any.
    """
    storage = torch.empty(1, dtype=torch.uint8).untyped_storage()
    others = [torch.empty(0, dtype=torch.uint8).set_(storage) for _ in range(tensors)]
    found = getrefcount(storage)
    others.clear()
    return found


_ALONE, _SHARED = _references(0), _references(1)


def _spoil(storage: torch.UntypedStorage) -> None:
    """Overwrite memory: NaN, or −1."""
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)


@define(eq=False)
class VirtualStreams:
    """The streams of a virtual rank's device; a `Streams`."""

    waiting: list[Any]  # what the rank waits for
    cluster: StreamCluster
    apart: bool = True
    memory_: Memory = field(factory=Memory)
    queues: dict[str, deque[Operation]] = field(factory=dict)
    pending: deque[tuple[str, Operation] | None] = field(factory=deque)  # None: the host waits
    running: Operation | None = None  # what computes now
    count: int = 0  # of operations that the host has enqueued

    @property
    def capture(self) -> None:
        """There are no graphs."""
        return None

    def bound(self, launches: Sequence[Launch], parts: Sequence[Bound | Posting]) -> tuple[Bound, ...]:
        """What enqueues each instruction. A post is two operations: the first, in the order of what computes, finds or
        takes memory for the other.
        """
        ends: dict[int, Operation] = {}
        later: dict[int, list[tuple[str, Operation]]] = {}

        def enqueue(i: int, launch: Launch, part: Any) -> None:
            after = tuple(ends[each] for each in launch.after if each != START)
            operation = ends[i] = Operation(f"instruction {i}", after, partial(_run, part))
            if isinstance(part, Posting):
                operation.begin = partial(self._start, part.launch)
                self._put(COMPUTE, Operation(HOST, (), self._preparing(part, operation)))
                if launch.behind is not None:
                    later.setdefault(launch.behind, []).append((launch.stream, operation))
                    return
            acts = launch.stream == COMPUTE and not launch.after  # what waits is behind an event
            self._wait(acts)
            self._put(launch.stream, operation)
            self._wait(acts)
            for each in later.pop(i, ()):
                self._put(*each)

        return tuple(partial(enqueue, *each) for each in zip(range(len(parts)), launches, parts, strict=True))

    def launch(self, stream: str, operation: Callable[..., Handle], *tensors: torch.Tensor) -> _Launched:
        """Start an operation behind what computes now."""
        own = Operation(f"an operation on {stream}", (), partial(self._start, operation))
        own.operands = self.memory_.operands(tensors)
        if self.running is None:
            self._put(stream, own)
        else:  # the host was there when it enqueued what runs now
            self._give(stream, own, (self.running.place[0], self._next()))
        return _Launched(own, tensors, self.waiting)

    def drained(self) -> Coroutine:
        """Wait for what computes."""
        while self.computing():
            yield

    def join(self) -> None:
        """No step is taken back here while anything is under way."""
        assert not any(self.queues.values())

    def allocator(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
        """What makes tensors with garbage, if possible of memory that was freed just now."""
        size = prod(shape) * dtype.itemsize

        def allocate() -> torch.Tensor:
            return torch.empty(0, dtype=dtype).set_(self.memory_.take(size)).view(tuple(shape))

        return allocate

    def memory(self, size: int, device: torch.device) -> torch.UntypedStorage:
        """Memory with garbage, as that of tensors."""
        return self.memory_.take(size)

    def computing(self) -> bool:
        """Whether there is something left to compute, or to enqueue."""
        return bool(self.pending or self.queues.get(COMPUTE))

    def _put(self, stream: str, operation: Operation) -> None:
        self.pending.append((stream, operation))
        self.go_on()

    def _wait(self, may: bool) -> None:
        if may and self.cluster.host_waits():
            self.pending.append(None)

    def go_on(self) -> None:
        """Let the host enqueue all until it waits for its device. Later would be as good: its device may be slow."""
        while self.pending and (self.pending[0] is not None or not any(self.queues.values())):
            own = self.pending.popleft()
            if own is not None:
                self._give(*own, (self._next(), 0))
                self.prepare()

    def _next(self) -> int:
        self.count += 1
        return self.count

    def _give(self, stream: str, operation: Operation, place: tuple[float, float]) -> None:
        operation.place = place
        self.queues.setdefault(stream, deque()).append(operation)

    def taken(self) -> list[Operation]:
        """What the hardware takes next of each connection, or resumes; streams have connections in turn."""
        found: dict[int, Operation] = {}
        for i, queue in enumerate(self.queues.values()):
            first = next((each for each in queue if not each.started or each.steps is not None), None)
            connection = i % (self.cluster.connections or len(self.queues))
            if first is not None and (connection not in found or first.place < found[connection].place):
                found[connection] = first
        return list(found.values())

    def prepare(self) -> None:
        """Do what the host does before what is next on the stream that computes: it has done so long before."""
        queue = self.queues.get(COMPUTE)
        while queue and queue[0].name == HOST:
            host = queue.popleft()
            host.begin(host)
            host.complete = True

    def _preparing(self, part: Posting, operation: Operation) -> Callable[[Operation], object]:
        def prepare(_: Operation) -> None:
            tensors = part.prepare()
            operation.operands = self.memory_.operands(tensors)
            part.keep(_Kept(tensors))

        return prepare

    def _start(self, launch: Callable[..., Handle], operation: Operation) -> object:
        if operation.operands is None:
            raise Race(f"{operation.name} starts before the memory that it works on is there")
        handle = launch(*(each.tensor for each in operation.operands))
        return handle if isinstance(handle, PostedOperation) else None

    def ended(self, operation: Operation) -> None:
        """Let go of what an operation works on."""
        operation.complete = True
        for each in operation.operands or ():
            each.piece.own -= 1
        operation.operands = ()


def _run(part: Bound, _: Operation) -> object:
    return part()


@define(eq=False)
class StreamTransport(VirtualTransport):
    """One rank's end of a `StreamCluster`."""

    names: Mapping[str, str] = NO_STREAMS
    device: VirtualStreams = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.device = VirtualStreams(self.waiting, cast("StreamCluster", self.cluster))

    def streams(self, device: torch.device) -> VirtualStreams:
        """Those of the rank."""
        return self.device

    def open(self, mesh: Mesh, channels: Iterable[Channel], streams: Mapping[str, str] = NO_STREAMS) -> None:
        """Open what the rank is an end of."""
        super().open(mesh, channels)
        self.names = streams

    def collective(  # type: ignore[override]
        self, kind: str, axis: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]
    ) -> _Launched:
        """Post a collective along a mesh axis, on its stream."""
        post = partial(self._post, kind, self.groups[axis], arguments=tuple(arguments))
        name = along(axis)
        return self.device.launch(self.names.get(name, name), lambda *own: post(own), *tensors)

    def gather_over_ranks(self, tensor: torch.Tensor) -> _Launched:  # type: ignore[override]
        """Post an all-gather over all ranks, on its stream."""
        assert tensor.is_contiguous(), "a gather over all ranks of a tensor that is not contiguous"
        post = partial(self._post, ALL_GATHER, self.cluster.all_ranks, arguments=((0,),))
        return self.device.launch(self.names.get(SUMS, SUMS), lambda *own: post(own), tensor.unsqueeze(0))


# What may happen next: who moves, by rank and stream or by line, and how; which tells for which ranks more is possible.
_Move = tuple[object, Callable[[], Iterable[int]]]


class StreamCluster(VirtualCluster):
    """`ranks` virtual ranks with streams. `seed` chooses the order of what nothing orders, how often hosts wait where
    they may (one of `waits`), and how many connections the streams of a rank share (one of `connections`; None: each
    has its own).
    """

    transports = StreamTransport

    def __init__(
        self,
        ranks: int,
        strict: bool = True,
        seed: int = 0,
        waits: Sequence[float] = (0.0, 0.2, 1.0),
        connections: Sequence[int | None] = (None, 1, 2, 3),
    ) -> None:
        self._choices = waits, connections
        super().__init__(ranks, strict, seed)

    def begin(self, seed: int) -> None:
        """Choose anew, by this seed."""
        super().begin(seed)
        self._waits, self.connections = map(self._random.choice, self._choices)

    def host_waits(self) -> bool:
        """Whether a host waits where it may."""
        return self._random.random() < self._waits

    @property
    def _ends(self) -> tuple[StreamTransport, ...]:
        return cast("tuple[StreamTransport, ...]", self._transports)

    def run(self, steps: Sequence[Iterator[None]]) -> None:
        """Run one generator per rank until all are exhausted, and every operation has ended.

        Raises `Deadlock`, `Mismatch`, `BufferReused`, `Race` or `UnmatchedOperation`.
        """
        assert len(steps) == self.ranks, "one step per rank"
        hosts = dict(enumerate(steps))
        priorities: dict[object, float] = {}
        for transport in self._ends:
            transport.waiting.clear()
        # What a rank does changes what it can do next, and which of its lines are ready; a line, what its ends can do.
        ranks: Iterable[int] = range(self.ranks)
        moves: dict[int, list[_Move]] = {}
        while True:
            for rank in ranks:
                moves[rank] = self._moves(rank, hosts)
            ready: list[_Move] = [
                (line.name, partial(self._complete, line)) for line in self.lines.values() if line.ready()
            ]
            every = [*ready, *(move for own in moves.values() for move in own)]
            if not every:
                break
            for who, _ in every:
                if who not in priorities:
                    priorities[who] = self._random.random()
            who, move = max(every, key=lambda each: priorities[each[0]])
            ranks = move()
            if self._random.random() < RESTLESS:
                priorities[who] = self._random.random()
        self._end(hosts)

    def _moves(self, rank: int, hosts: dict[int, Iterator[None]]) -> list[_Move]:
        """What a rank can do next."""
        found: list[_Move] = []
        transport = self._ends[rank]
        device, waiting = transport.device, transport.waiting
        for queue in device.queues.values():
            while queue and queue[0].post is not None and queue[0].post.complete:
                device.ended(queue.popleft())
        device.go_on()
        heard = not waiting or any(each.complete for each in waiting)
        taken = device.taken()
        for stream, queue in device.queues.items():
            first = queue[0] if queue else None
            if first is None or not any(first is each for each in taken):
                continue
            if first.may_start() or (first.steps is not None and heard):
                found.append(((rank, stream), partial(self._advance, rank, queue)))
        if rank in hosts and not device.computing() and heard:
            found.append(((rank, "host"), partial(self._host, hosts, rank)))
        return found

    def _complete(self, line: OrderedQueue) -> tuple[int, ...]:
        line.complete()
        return line.ends

    def _host(self, hosts: dict[int, Iterator[None]], rank: int) -> tuple[int, ...]:
        transport = self._ends[rank]
        transport.waiting.clear()
        if next(hosts[rank], _EXHAUSTED) is _EXHAUSTED:
            transport.waiting.clear()
            del hosts[rank]
        transport.device.memory_.look()
        return (rank,)

    @torch.inference_mode()
    def _advance(self, rank: int, queue: deque[Operation]) -> tuple[int, ...]:
        """Start the first operation of a stream, or resume it."""
        device, waiting = self._ends[rank].device, self._ends[rank].waiting
        first = queue[0]
        computes = queue is device.queues.get(COMPUTE)
        if computes:
            waiting.clear()
            device.running = first
        if first.steps is None:
            first.started = True
            begun = first.begin(first)
            if isinstance(begun, PostedOperation):
                first.post = begun
                return begun.line.ends  # which may have completed it at once
            first.steps = begun  # type: ignore[assignment]
            first.place = first.place[0], inf  # what it launches comes before the rest of it
        ended = first.steps is None or next(first.steps, _EXHAUSTED) is _EXHAUSTED
        device.running = None
        if ended:
            if computes:
                waiting.clear()
            queue.popleft()
            device.ended(first)
            if computes:
                device.prepare()
        if computes:
            device.memory_.look()
        return (rank,)

    def _end(self, hosts: Mapping[int, Iterator[None]]) -> None:
        """Nothing can move: all has ended, or nothing ever will."""
        left = [
            f"rank {rank}: {queue[0].name}, first on stream `{stream}`"
            for rank, transport in enumerate(self._ends)
            for stream, queue in transport.device.queues.items()
            if queue
        ]
        if hosts:
            waits = [f"rank {rank} has not ended" for rank in hosts]
            raise Deadlock("deadlock: nothing can move:\n  " + "\n  ".join((*waits, *left)), ())
        if left:
            raise UnmatchedOperation("operations that no other rank has matched:\n  " + "\n  ".join(left))


_EXHAUSTED = object()
