"""Watching ranks by their flight recorders: notices that a run stands still, and says who holds it up.

A run stands still when no rank has taken a mark for the stall timeout: while one waits, another must work. Before all
ranks have begun their first step they compile, connect and load, for which they have `STARTING_SECONDS` at least.

The supervisor watches the ranks that it has started. Under another launcher every rank watches all whose recorders it
can see, and the first one to notice speaks for all.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from partita.runtime import flight
from partita.runtime.diagnosis import Diagnosis
from partita.runtime.flight import Position

STARTING_SECONDS = 120.0
LOOK_SECONDS = 0.25
REPORT = "fault.json"
SPOKEN = "stalled"  # made by the rank that speaks


@frozen(eq=False)
class Lookout:
    """The watch over `ranks` ranks that record in a directory. `report` is where details go, as JSON."""

    diagnosis: Diagnosis
    ranks: int
    timeout: float
    report: Path

    def stalled(self, directory: Path, conditions: Mapping[int, str], some: bool = False) -> str | None:
        """Why the run stands still, in words; None while it moves on. `some`: not all recorders can be seen."""
        positions = self.positions(directory)
        if not positions or (len(positions) < self.ranks and not some):
            return None  # a rank that does not even start ends, or its peers give up connecting to it
        moving = [each for each in positions if each.activity != flight.ENDED]
        if not moving:
            return None
        started = all(each.activity != flight.STARTING for each in moving)
        patience = self.timeout if started else max(self.timeout, STARTING_SECONDS)
        if min(each.seconds for each in moving) <= patience:
            return None
        return f"nothing has moved for {patience:g} s\n  {self._described(positions, conditions, 'stall')}"

    def died(self, directory: Path, conditions: Mapping[int, str]) -> str:
        """What the ranks were doing when some died; empty where they had not started."""
        positions = self.positions(directory)
        return self._described(positions, conditions, "death") if positions else ""

    def positions(self, directory: Path) -> list[Position]:
        """Where the ranks are that have a recorder."""
        found = (flight.read(directory, rank) for rank in range(self.ranks))
        return [position for position in found if position is not None]

    def _described(self, positions: list[Position], conditions: Mapping[int, str], cause: str) -> str:
        states = self.diagnosis.states(positions, conditions)
        try:
            self.diagnosis.write(self.report, cause, states)
            details = [f"details: {self.report}"]
        except OSError:
            details = []  # the message matters more
        return "\n  ".join([*self.diagnosis.lines(states), *details])

    def keep(self, directory: Path, status: int) -> None:
        """Watch from a thread of this process, and end it with `status` when the run stands still."""

        def watch() -> None:
            while True:
                time.sleep(LOOK_SECONDS)
                text = self.stalled(directory, {}, some=True)
                if text is None:
                    continue
                if _first(directory / SPOKEN):
                    print(f"partita: {text}", file=sys.stderr, flush=True)
                # The process may hang in a library that no exception reaches.
                os._exit(status)

        threading.Thread(target=watch, name="lookout", daemon=True).start()


def _first(path: Path) -> bool:
    """Whether nobody has made this file before."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return False
    return True


def prepare(directory: Path, rank: int) -> Path:
    """The place of a rank's recorder in a directory that outlives runs: what an earlier run left there is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in (flight.path_of(directory, rank), *([directory / SPOKEN] if rank == 0 else [])):
        path.unlink(missing_ok=True)
    return flight.path_of(directory, rank)
