"""Streams and events of a GPU that is not there: what is ordered before what, by vector clocks.

Every stream counts what it is given. An event is what a stream has been given so far, and what that is behind, on any
stream; a stream that waits for it is behind all that, too; and where the host waits for it, so is all that comes later.
Two operations of which neither is behind the other may run in either order, or at once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from attrs import define, field

Clock = dict[int, int]
Host = Callable[[str, Clock], None]  # told how the host waits, and for what

_numbers = count()


@define(eq=False)
class Event:
    """A moment of a stream."""

    clock: Clock
    host: Host

    def synchronize(self) -> None:
        """The host waits."""
        self.host("Event.synchronize", self.clock)

    def query(self) -> bool:
        """Whether the moment has passed: one cannot know, so the host goes on as if it had not."""
        return False


@define(eq=False)
class Stream:
    """A stream; `host` is told that the host waits for it, and how."""

    host: Host = lambda what, clock: None
    name: str = "a stream"
    number: int = field(factory=lambda: next(_numbers), init=False)
    clock: Clock = field(factory=dict, init=False)

    @property
    def cuda_stream(self) -> int:
        """Its handle."""
        return self.number

    def step(self) -> tuple[int, int]:
        """Something is launched; returns the stream and its count."""
        now = self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.number, now

    def behind(self, moment: tuple[int, int]) -> bool:
        """Whether what is launched now is behind something that was launched."""
        return self.clock.get(moment[0], 0) >= moment[1]

    def wait_event(self, event: Event) -> None:
        """What is launched later is behind the event."""
        for stream, reached in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), reached)

    def wait_stream(self, other: Stream) -> None:
        """What is launched later is behind all that another stream was given."""
        self.wait_event(other.record_event())

    def record_event(self, event: Any = None) -> Event:
        """The moment behind all that was launched so far."""
        return Event(dict(self.clock), self.host)

    def synchronize(self) -> None:
        """The host waits."""
        self.host("Stream.synchronize", self.clock)


class Timed(Event):
    """`torch.cuda.Event` as programs make it: it is recorded later."""

    def __init__(self, current: Callable[[], Stream], host: Host) -> None:
        super().__init__({}, host)
        self._current = current

    def record(self, stream: Stream | None = None) -> None:
        """The moment of now."""
        self.clock = dict((stream or self._current()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        """A stream waits for it."""
        (stream or self._current()).wait_event(self)

    def elapsed_time(self, other: Timed) -> float:
        """Milliseconds between two events; nothing takes time here."""
        return 0.0
