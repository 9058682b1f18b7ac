"""Handles SIGTERM and SIGUSR1, which schedulers send before they end a job, and Ctrl-C: the run saves at the end of the
step, then ends.

A Python handler runs between two bytecode instructions, but a rank may be blocked in a library: waiting for a rank that
is gone, say. So a thread watches, and ends the process if it makes no progress, or if its grace time is over. A save
that is cut off leaves no checkpoint, and those before it as they were.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from partita.runtime.supervision.statuses import ASKING
from partita.runtime.tracing.flight import Flight

QUIET_SECONDS = 10.0
POLL_SECONDS = 0.5
SAME_SECONDS = 5.0  # signals this close are one: srun signals torchrun and the ranks, and torchrun the ranks again


class Termination:
    """A context manager that records the signals which ask this process to end, if the run `saves`; otherwise they keep
    their effect. Ctrl-C is recorded where it would interrupt Python.

    A second signal ends the process at once, and a second Ctrl-C interrupts Python. Where a `launcher` passes signals
    on, those within some seconds are one; the supervisor (`partita`) ends its ranks itself. `flight` shows whether the
    process makes progress, for as long as which it may save, but no longer than `grace` seconds. `heard` is called with
    the first signal, within its handler.
    """

    def __init__(
        self,
        saves: bool,
        flight: Flight | None = None,
        grace: float | None = None,
        launcher: str | None = None,
        numbers: Sequence[int] = (signal.SIGINT, *ASKING),
        on_signal: Callable[[int], object] | None = None,
    ) -> None:
        self._saves = saves
        self._flight = flight
        self._grace = grace
        self._launcher = launcher
        self._numbers = [each for each in numbers if each != signal.SIGINT or _interrupts()]
        self._heard = on_signal
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self.number: int | None = None  # of the signal that has asked this process to end

    def stop_requested(self) -> bool:
        """Whether this process was asked to end."""
        return self.number is not None

    def __enter__(self) -> Termination:
        if self._saves and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self._numbers}
            if self._flight is not None or self._grace is not None:
                self._pair = socket.socketpair()
                self._pair[1].setblocking(False)
                signal.set_wakeup_fd(self._pair[1].fileno(), warn_on_full_buffer=False)
                arguments = self._pair[0], self._numbers, self._flight, self._grace
                threading.Thread(target=self._look_on, args=arguments, name="termination", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._pair is not None:
            signal.set_wakeup_fd(-1)
            for end in self._pair:
                end.close()
            self._pair = None

    def end(self) -> None:
        """End by the signal's default action, now that everything is saved."""
        number = self.number or signal.SIGTERM
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        # The first process of a container, for which the kernel has no default action.
        os._exit(128 + number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._since = number, now
            if self._heard is not None:
                self._heard(number)
        elif self._launcher is None and number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            raise KeyboardInterrupt
        elif self._launcher != "partita" and now - self._since > SAME_SECONDS:
            self.end()

    @staticmethod
    def _look_on(ours: socket.socket, numbers: Sequence[int], flight: Flight | None, grace: float | None) -> None:
        """Wait for a signal on the wakeup socket, to which the system writes even if Python is blocked; then watch."""
        try:
            while not (signals := set(ours.recv(64)) & set(numbers)):
                pass
        except OSError:
            return  # closed
        begun = since = time.monotonic()
        marks = -1
        while flight is None or time.monotonic() - since < QUIET_SECONDS:
            if flight is not None and flight.marks != marks:
                marks, since = flight.marks, time.monotonic()
            if grace is not None and time.monotonic() - begun > grace:
                break
            time.sleep(POLL_SECONDS)
        os._exit(128 + min(signals))


def _interrupts() -> bool:
    """Whether Ctrl-C interrupts Python: it may be ignored, as in the background, or left to a supervisor."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def end_when_asked() -> None:
    """Let a process that is the first of its container end when it is asked to, before it has anything to save: the
    kernel has no default action for it.
    """
    if os.getpid() == 1:
        for number in ASKING:
            signal.signal(number, lambda number, frame: os._exit(128 + number))
