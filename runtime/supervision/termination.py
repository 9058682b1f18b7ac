"""SIGTERM, as schedulers send it before they end a job: the run saves at the end of the step, and ends then.

A handler runs between two instructions of the interpreter, and a rank may wait in a library where there are none: for a
rank that is gone, say. So a thread looks on, and ends the process where nothing moves.
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
LOOK_SECONDS = 0.5


class Termination:
    """Notes SIGTERM while it is entered, if the run `saves`; without, the system ends the process, as ever.

    A second SIGTERM ends it at once. `flight` says whether anything moves.
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
        """End as whoever is asked to ends, now that all is saved."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            self.end()
        self._asked = True

    @staticmethod
    def _look_on(ours: socket.socket, flight: Flight) -> None:
        """Written by the system, whatever the interpreter does: the numbers of signals."""
        try:
            while signal.SIGTERM not in ours.recv(64):
                pass
        except OSError:
            return  # closed
        marks, since = -1, time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            if flight.marks != marks:
                marks, since = flight.marks, time.monotonic()
            time.sleep(LOOK_SECONDS)
        os._exit(TERMINATED)
