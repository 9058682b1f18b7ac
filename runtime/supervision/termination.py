"""Handles SIGTERM, which schedulers send before they end a job: the run saves at the end of the step, then ends.

A Python handler runs between two bytecode instructions, but a rank may be blocked in a library: waiting for a rank that
is gone, say. So a thread watches, and ends the process if it makes no progress.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

from partita.runtime.supervision.statuses import TERMINATED
from partita.runtime.tracing.flight import Flight

QUIET_SECONDS = 10.0
POLL_SECONDS = 0.5


class Termination:
    """A context manager that records SIGTERM if the run `saves`; otherwise SIGTERM keeps its default effect.

    A second SIGTERM ends the process at once. `flight` shows whether the process makes progress.
    """

    def __init__(self, saves: bool, flight: Flight | None = None) -> None:
        self._saves = saves
        self._flight = flight
        self._asked = False
        self._before: Any = None
        self._pair: tuple[socket.socket, socket.socket] | None = None

    def asked(self) -> bool:
        """Whether this process was asked to end."""
        return self._asked

    def __enter__(self) -> Termination:
        if self._saves and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            if self._flight is not None:
                self._pair = socket.socketpair()
                self._pair[1].setblocking(False)
                signal.set_wakeup_fd(self._pair[1].fileno(), warn_on_full_buffer=False)
                arguments = self._pair[0], self._flight
                threading.Thread(target=self._look_on, args=arguments, name="termination", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGTERM, self._before)
        self._before = None
        if self._pair is not None:
            signal.set_wakeup_fd(-1)
            for end in self._pair:
                end.close()
            self._pair = None

    def end(self) -> None:
        """End by SIGTERM's default action, now that everything is saved."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            self.end()
        self._asked = True

    @staticmethod
    def _look_on(ours: socket.socket, flight: Flight) -> None:
        """Wait for SIGTERM on the wakeup socket, to which the system writes even if Python is blocked; then watch."""
        try:
            while signal.SIGTERM not in ours.recv(64):
                pass
        except OSError:
            return  # closed
        marks, since = -1, time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            if flight.marks != marks:
                marks, since = flight.marks, time.monotonic()
            time.sleep(POLL_SECONDS)
        os._exit(TERMINATED)
