"""Channels between two processes of one machine, through memory that both map.

A message over Gloo goes through the kernel and wakes one of Gloo's threads on either side before it wakes the waiting
thread; here the sender and the receiver copy it once each. A receiver spins for a while, and then sleeps on a socket
until the sender wakes it. The socket also shows when the other process is gone.

The memory holds the number of messages sent, the number taken, whether the receiver sleeps, the place of each message,
and the messages. A send never blocks: there is room for all a step sends, and a step begins only after every message of
the previous one was taken (its statistics are summed over all ranks). So what runs under rendezvous runs here.
"""

from __future__ import annotations

import select
from collections import deque
from contextlib import suppress
from mmap import mmap
from socket import MSG_DONTWAIT, socket
from threading import Lock
from time import perf_counter, thread_time

import torch
from attrs import define

from partita.compiler.instructions import Traffic
from partita.runtime.streams import ENDED, CompletedHandle
from partita.runtime.transports.failures import ConnectionLost

LIMIT = 16 << 20  # bytes per step: for more, copying dominates, and Gloo copies nearly as well
POLL_SECONDS = 1e-3  # time to spin before sleeping
LINE = 64  # bytes of a cache line; messages are aligned to it
# Words of 8 bytes, each on its own cache line to avoid false sharing.
SENT, TAKEN, ASLEEP, PLACES = 0, 8, 16, 24  # `PLACES`: for each message its first byte, and its bytes


def size_for(traffic: Traffic) -> int:
    """The size of a channel's memory in bytes; not meant for traffic beyond `LIMIT`."""
    return _head(traffic) + traffic.bytes + LINE * traffic.messages


def _head(traffic: Traffic) -> int:
    """The offset of the first message."""
    return _whole_lines(8 * (PLACES + 2 * traffic.messages))


def _whole_lines(size: int) -> int:
    return size + -size % LINE


class _End:
    """One end of a channel: the connection to the other end, and the layout of the memory."""

    def __init__(self, description: str, connection: socket, memory: mmap, traffic: Traffic) -> None:
        self.description = description
        self.busy_wait = 0.0  # seconds
        self._connection = connection
        self.memory = memory
        self._words = memoryview(memory)[: _head(traffic)].cast("q")
        self._messages = traffic.messages
        self._head = _head(traffic)
        self._views: dict[int, torch.Tensor] = {}
        self._fence = Lock()

    def close(self) -> None:
        """Tell the other end that nothing more will come."""
        self._connection.close()

    def _view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """The message at a byte offset, as a tensor like another. Views are cached: there are usually few offsets, and
        never more than cache lines.
        """
        view = self._views.get(start)
        if view is None or view.dtype != like.dtype or view.shape != like.shape:
            with torch.inference_mode(False):  # writable in either mode
                flat = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=start)
                view = self._views[start] = flat.view(like.shape)
        return view

    def _place(self, number: int) -> int:
        """The index of the word with a message's offset; the next word has its size in bytes."""
        return PLACES + 2 * (number % self._messages)

    def _settle(self) -> None:
        """Make all earlier writes visible to the other end before any later read."""
        with self._fence:  # a locked instruction: a full memory barrier
            pass


class Outgoing(_End):
    """The sender's end."""

    sends = True

    def __init__(self, description: str, connection: socket, memory: mmap, traffic: Traffic) -> None:
        super().__init__(description, connection, memory, traffic)
        self._number = 0
        self._next = self._head

    def post(self, tensor: torch.Tensor) -> CompletedHandle:
        """Send a contiguous tensor: it has been copied. Raises `ConnectionLost`."""
        words, number, size = self._words, self._number, tensor.nbytes
        taken = words[TAKEN]
        if taken == number:
            self._next = self._head
        start = self._next
        stop = start + _whole_lines(size)
        fits = stop <= len(self.memory) and number - taken < self._messages
        assert fits, f"{self.description}: more messages than a step sends"
        self._view(start, tensor).copy_(tensor)
        place = self._place(number)
        words[place], words[place + 1] = start, size
        self._next, self._number = stop, number + 1
        words[SENT] = number + 1
        self._settle()
        if words[ASLEEP]:
            words[ASLEEP] = 0
            self._ring()
        return ENDED

    def _ring(self) -> None:
        try:
            self._connection.send(b"!", MSG_DONTWAIT)
        except BlockingIOError:
            pass  # enough wakeups are pending
        except OSError as error:
            raise ConnectionLost(f"{self.description} failed: {error.strerror}") from error


@define(eq=False, slots=True)
class Arriving:
    """A posted receive."""

    end: Incoming
    number: int

    def done(self) -> bool:
        """Wait for the message and return True. Raises `ConnectionLost`."""
        self.end.take(self.number)
        return True


class Incoming(_End):
    """The receiver's end."""

    sends = False

    def __init__(self, description: str, connection: socket, memory: mmap, traffic: Traffic, spins: bool) -> None:
        super().__init__(description, connection, memory, traffic)
        self._spins = spins
        self._buffers: deque[torch.Tensor] = deque()  # of receives posted but not yet taken
        self._posted = self._taken = 0
        self._looking = select.poll()

    def post(self, buffer: torch.Tensor) -> Arriving:
        """Post a receive of the next message into a contiguous tensor."""
        self._buffers.append(buffer)
        self._posted += 1
        return Arriving(self, self._posted - 1)

    def take(self, number: int) -> None:
        """Copy messages out of the memory, up to this one. Raises `ConnectionLost`."""
        words = self._words
        while self._taken <= number:
            if words[SENT] <= self._taken:
                self._wait(self._taken)
            place, buffer = self._place(self._taken), self._buffers.popleft()
            start, size = words[place], words[place + 1]
            assert size == buffer.nbytes, f"{self.description}: {size} bytes have come, not {buffer.nbytes}"
            buffer.copy_(self._view(start, buffer))
            self._taken += 1
            words[TAKEN] = self._taken

    def _wait(self, number: int) -> None:
        """Wait until a message is available."""
        words = self._words
        if self._spins:
            begin, until = thread_time(), perf_counter() + POLL_SECONDS
            while words[SENT] <= number and perf_counter() < until:
                self._looking.poll(0)  # releases the GIL for another thread of this process
            self.busy_wait += thread_time() - begin
        while words[SENT] <= number:
            words[ASLEEP] = 1
            self._settle()
            if words[SENT] > number:
                break
            rung = b""
            with suppress(OSError):
                rung = self._connection.recv(1)
            if not rung and words[SENT] <= number:  # it may have sent the message since, and exited
                raise ConnectionLost(f"{self.description} failed: the other process is gone")
        words[ASLEEP] = 0
