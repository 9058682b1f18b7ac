"""Enqueues the operations of a rank as its program says: on which stream, and after which events (`compiler.streams`).

On a GPU these are CUDA's streams and events, and only events make operations wait. On a CPU a computation has ended
when its call returns, and a stream of communication is a connection that works independently: an operation is
started at once, and its event is its handle. Tests have a virtual cluster of devices whose operations run in any order
that streams and events permit (`tests.runtime.transports.interleaved`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from attrs import define, field, frozen

from partita.compiler.instructions import COMPUTE
from partita.compiler.streams import START, Launch, of_channel
from partita.runtime.declared import waits

Coroutine = Generator[None, None, Any]
Bound = Callable[[], Coroutine | None]
# From what is enqueued to what that returns, and what launches all of it.
Capture = Callable[[Callable[[], Coroutine]], tuple[Any, Callable[[], None]]]


class Handle(Protocol):
    """A posted operation. It keeps its tensors alive until it is done."""

    def done(self) -> bool:
        """Wait for the operation and return True; a virtual transport returns whether it is complete. On a GPU the
        compute stream waits, not the host.
        """


@frozen(eq=False)
class Posting:
    """A post in parts: `prepare` finds tensors or allocates them, in the order of the compute stream; `launch` starts
    the operation on them, on its stream; `keep` gets what keeps them until the wait.
    """

    prepare: Callable[[], Sequence[torch.Tensor]]
    launch: Callable[..., Handle]
    keep: Callable[[Handle], None]

    def at_once(self) -> Bound:
        """A function that does all parts at once."""
        prepare, launch, keep = self.prepare, self.launch, self.keep

        def run() -> None:
            keep(launch(*prepare()))

        return run


class Streams(ABC):
    """The streams of one rank's device; `apart`: host and device have separate memories."""

    apart: bool
    # Captures enqueued operations as a graph instead of running them; None without graphs.
    capture: Capture | None = None

    @abstractmethod
    def bound(self, launches: Sequence[Launch], parts: Sequence[Bound | Posting]) -> tuple[Bound, ...]:
        """Functions that enqueue the instructions of a list: a `Posting` for each that is not on `compute`."""

    @abstractmethod
    def launch(self, stream: str, operation: Callable[..., Handle], *tensors: torch.Tensor) -> Handle:
        """Start an operation on tensors after the current compute, which then waits for the handle."""

    def drained(self) -> Coroutine | None:
        """Wait until the host may continue after a list of instructions; None if it may at once, or runs ahead."""
        return None

    def join(self) -> None:
        """What is computed next is behind all that is under way: by default nothing is."""
        return

    def allocator(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
        """What makes new tensors that another stream writes: uninitialized, from the memory of the compute stream."""
        return partial(torch.empty, shape, dtype=dtype, device=device)

    def memory(self, size: int, device: torch.device) -> torch.UntypedStorage:
        """New memory that another stream writes; the host's is pinned: the device can copy from and to it."""
        pinned = device.type == "cpu"
        return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned).untyped_storage()


class CompletedHandle:
    """A handle that is always complete: other means order what it stands for."""

    def done(self) -> bool:
        """Always True."""
        return True


ENDED = CompletedHandle()


@frozen(eq=False)
class OnHost:
    """A copy to the host's memory, which ends with an event: it is the host that waits for it."""

    event: torch.cuda.Event

    def done(self) -> bool:
        """Wait for it."""
        self.event.synchronize()
        return True


def copied(*memory: torch.Tensor) -> Handle:
    """Start to copy memory in the current stream: of each pair, the first into the second."""
    for source, copy in zip(memory[::2], memory[1::2], strict=True):
        copy.copy_(source, non_blocking=True)
    return ENDED


@frozen
class HostStreams(Streams):
    """Those of a CPU; or all as one, in the order in which the host enqueues."""

    apart: bool = False

    def bound(self, launches: Sequence[Launch], parts: Sequence[Bound | Posting]) -> tuple[Bound, ...]:
        """The parts: each does what it is at once, and waits for its handle."""
        assert len(launches) == len(parts), "a launch for each instruction"
        return tuple(part.at_once() if isinstance(part, Posting) else part for part in parts)

    def launch(self, stream: str, operation: Callable[..., Handle], *tensors: torch.Tensor) -> Handle:
        """Start an operation."""
        return operation(*tensors)


@define(eq=False)
class DeviceStreams(Streams):
    """Those of a GPU, made when they are first used. What computes is on the stream that is current."""

    device: torch.device
    apart: bool = True
    _streams: dict[str, torch.cuda.Stream] = field(factory=dict)

    def bound(self, launches: Sequence[Launch], parts: Sequence[Bound | Posting]) -> tuple[Bound, ...]:
        """An event is recorded where something is behind it, in each step anew."""
        events = {each: _event() for launch in launches for each in launch.after}
        bound: list[Bound] = []
        later: dict[int, list[Callable[[], None]]] = {}
        for i, (launch, part) in enumerate(zip(launches, parts, strict=True)):
            after = tuple(events[each] for each in launch.after)
            if launch.stream == COMPUTE:
                bound.append(self._on_compute(after, part, events.get(i)))
                continue
            prepare, start = self._beside(launch.stream, after, part, events.get(i))
            bound.append(prepare if launch.behind is not None else _with(prepare, [start]))
            if launch.behind is not None:
                later.setdefault(launch.behind, []).append(start)
        for i, starts in later.items():
            bound[i] = _with(bound[i], starts)
        if START in events and bound:
            bound[0] = self._from_start(events[START], bound[0])
        return tuple(bound)

    def _from_start(self, event: torch.cuda.Event, own: Bound) -> Bound:
        def run() -> Coroutine | None:
            event.record(self._current)
            return own()

        return run

    def _on_compute(self, after: tuple[torch.cuda.Event, ...], own: Any, event: torch.cuda.Event | None) -> Bound:
        if not after and event is None:
            return own  # type: ignore[no-any-return]

        def run() -> Coroutine | None:
            for each in after:
                self._current.wait_event(each)
            return own()  # type: ignore[no-any-return]

        return run if event is None else _with(run, [lambda: event.record(self._current)])

    def _beside(
        self, stream: str, after: tuple[torch.cuda.Event, ...], post: Any, event: torch.cuda.Event | None
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """What prepares a post, and what then launches it."""
        own = self._stream(stream)
        tensors: list[torch.Tensor] = []

        def prepare() -> None:
            tensors[:] = post.prepare()

        def start() -> None:
            for each in after:
                own.wait_event(each)
            with torch.cuda.stream(own):
                post.keep(post.launch(*tensors))
            tensors.clear()
            if event is not None:
                event.record(own)

        return prepare, start

    @waits("a graph is captured once, with nothing under way")
    def capture(self, enqueued: Callable[[], Coroutine]) -> tuple[Any, Callable[[], None]]:
        """A CUDA graph of all streams: those of communication begin after the compute stream, and end before it does.
        Other threads of the process may use CUDA meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = _at_once(enqueued())
        return result, graph.replay

    def launch(self, stream: str, operation: Callable[..., Handle], *tensors: torch.Tensor) -> Handle:
        """Start an operation on a stream after the current compute."""
        own = self._stream(stream)
        own.wait_stream(self._current)
        with torch.cuda.stream(own):
            handle = operation(*tensors)
        return _Behind(self, own.record_event(), handle)

    def join(self) -> None:
        """Make the current stream wait for all work that is enqueued on the others."""
        for each in self._streams.values():
            self._current.wait_stream(each)

    @property
    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            # Another rank waits for a message, which therefore goes ahead of what else finds no multiprocessor free.
            new = torch.cuda.Stream(self.device, priority=-of_channel(name))  # type: ignore[no-untyped-call]
            # torch hands the streams of a pool out in turn: two names of one would wait for each other.
            existing = {each.cuda_stream for each in self._streams.values()}
            assert new.cuda_stream not in existing, (
                f"torch has {len(existing)} streams, and `{name}` would be one of them again"
            )
            self._streams[name] = new
        return self._streams[name]


@frozen(eq=False)
class _Behind:
    """An operation that ends with an event. Keeps what it works on."""

    streams: DeviceStreams
    event: torch.cuda.Event
    handle: Handle

    def done(self) -> bool:
        """Make the compute stream wait."""
        torch.cuda.current_stream(self.streams.device).wait_event(self.event)
        return True


def _with(own: Bound, then: Sequence[Callable[[], None]]) -> Bound:
    """What does something, and then more."""

    def ended(waits: Coroutine) -> Coroutine:
        yield from waits
        for each in then:
            each()

    def run() -> Coroutine | None:
        waits = own()
        if waits is not None:
            return ended(waits)
        for each in then:
            each()
        return None

    return run


def _at_once(waits: Coroutine) -> Any:
    """What is returned in the end, where the host waits for nothing."""
    try:
        next(waits)
    except StopIteration as end:
        return end.value
    raise AssertionError("the host waits while a graph is captured")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    return DeviceStreams(device) if device.type == "cuda" else HostStreams()
