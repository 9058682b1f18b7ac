"""Channels between two processes of one machine, through memory that both have mapped.

A message over Gloo goes through the kernel and wakes a thread of Gloo's on either side before it wakes who waits for
it; here it is copied once by who sends it and once by who waits. Who waits looks for a while, and then sleeps at a
socket until the sender rings. The socket says, too, when the other process is gone.

The memory holds a count of the messages that are there, a count of those that have been taken, whether the receiver
sleeps, where each message lies, and the messages. A send never waits: there is room for all that a step sends, and a
step begins when everything of the one before has been taken (its statistics are summed over all ranks). So whatever
runs under rendezvous runs here.
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
from partita.runtime.transports.failures import ConnectionLost

LIMIT = 16 << 20  # bytes: where a step sends more, copying is most of it, and Gloo does that nearly as well
LOOK_SECONDS = 1e-3  # what one looks for before one sleeps
LINE = 64  # bytes of a cache line; messages begin at one
# Words of 8 bytes, in cache lines of their own: who writes one does not slow down who reads another.
SENT, TAKEN, ASLEEP, PLACES = 0, 8, 16, 24  # `PLACES`: for each message its first byte, and its bytes


def size_for(traffic: Traffic) -> int:
    """Bytes of the memory of a channel; it is too much for any beyond `LIMIT`."""
    return _head(traffic) + traffic.bytes + LINE * traffic.messages


def _head(traffic: Traffic) -> int:
    """Where the messages begin."""
    return _whole_lines(8 * (PLACES + 2 * traffic.messages))


def _whole_lines(size: int) -> int:
    return size + -size % LINE


class _End:
    """One end of a channel: the connection with the other one, and what lies where in the memory."""

    def __init__(self, description: str, connection: socket, memory: mmap, traffic: Traffic) -> None:
        self.description = description
        self.spun = 0.0  # seconds
        self._connection = connection
        self.memory = memory
        self._words = memoryview(memory)[: _head(traffic)].cast("q")
        self._messages = traffic.messages
        self._head = _head(traffic)
        self._views: dict[int, torch.Tensor] = {}
        self._fence = Lock()

    def close(self) -> None:
        """Let the other end know that nothing comes any more."""
        self._connection.close()

    def _view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """The message that begins at a byte, as a tensor like another. They lie at few places as a rule, and views are
        kept: as many as there are cache lines at most."""
        view = self._views.get(start)
        if view is None or view.dtype != like.dtype or view.shape != like.shape:
            with torch.inference_mode(False):  # so that it may be written to in either mode
                flat = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=start)
                view = self._views[start] = flat.view(like.shape)
        return view

    def _place(self, number: int) -> int:
        """The word that says where a message begins; the next one says its bytes."""
        return PLACES + 2 * (number % self._messages)

    def _settle(self) -> None:
        """What was written before is seen by the other end before anything is read from now on."""
        with self._fence:  # a locked instruction, which waits for all writes
            pass


class Copied:
    """A send, which is done when it is posted: the message has been copied."""

    def done(self) -> bool:
        """Yes."""
        return True


COPIED = Copied()


class Outgoing(_End):
    """The sender's end."""

    sends = True

    def __init__(self, description: str, connection: socket, memory: mmap, traffic: Traffic) -> None:
        super().__init__(description, connection, memory, traffic)
        self._number = 0
        self._next = self._head

    def post(self, tensor: torch.Tensor) -> Copied:
        """Send a contiguous tensor. Raises `ConnectionLost`."""
        words, number, size = self._words, self._number, tensor.nbytes
        taken = words[TAKEN]
        if taken == number:
            self._next = self._head
        start = self._next
        stop = start + _whole_lines(size)
        room = stop <= len(self.memory) and number - taken < self._messages
        assert room, f"{self.description}: more messages than a step sends"
        self._view(start, tensor).copy_(tensor)
        place = self._place(number)
        words[place], words[place + 1] = start, size
        self._next, self._number = stop, number + 1
        words[SENT] = number + 1
        self._settle()
        if words[ASLEEP]:
            words[ASLEEP] = 0
            self._ring()
        return COPIED

    def _ring(self) -> None:
        try:
            self._connection.send(b"!", MSG_DONTWAIT)
        except BlockingIOError:
            pass  # it has been rung for often enough
        except OSError as error:
            raise ConnectionLost(f"{self.description} failed: {error.strerror}") from error


@define(eq=False, slots=True)
class Arriving:
    """A receive."""

    end: Incoming
    number: int

    def done(self) -> bool:
        """Wait for it, and answer True; raises `ConnectionLost`."""
        self.end.take(self.number)
        return True


class Incoming(_End):
    """The receiver's end."""

    sends = False

    def __init__(self, description: str, connection: socket, memory: mmap, traffic: Traffic, spins: bool) -> None:
        super().__init__(description, connection, memory, traffic)
        self._spins = spins
        self._buffers: deque[torch.Tensor] = deque()  # of what has been posted and not been taken
        self._posted = self._taken = 0
        self._looking = select.poll()

    def post(self, buffer: torch.Tensor) -> Arriving:
        """Have the next message put into a contiguous tensor."""
        self._buffers.append(buffer)
        self._posted += 1
        return Arriving(self, self._posted - 1)

    def take(self, number: int) -> None:
        """Take messages out of the memory up to this one. Raises `ConnectionLost`."""
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
        """Wait until a message is there."""
        words = self._words
        if self._spins:
            begin, until = thread_time(), perf_counter() + LOOK_SECONDS
            while words[SENT] <= number and perf_counter() < until:
                self._looking.poll(0)  # lets go of the interpreter: another thread of this process may get it
            self.spun += thread_time() - begin
        while words[SENT] <= number:
            words[ASLEEP] = 1
            self._settle()
            if words[SENT] > number:
                break
            rung = b""
            with suppress(OSError):
                rung = self._connection.recv(1)
            if not rung and words[SENT] <= number:  # it may have rung, and gone, since
                raise ConnectionLost(f"{self.description} failed: the other process is gone")
        words[ASLEEP] = 0
