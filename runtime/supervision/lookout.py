"""Watching ranks by their flight recorders: notices that a run stands still, and says who holds it up.

A run stands still when no rank has taken a mark for the stall timeout: while one waits, another must work. Before all
ranks have begun their first step they compile, connect and load, for which they have `STARTING_SECONDS` at least,
unless one of them is stopped.

The supervisor watches the ranks that it has started. Under another launcher every rank watches all whose recorders it
can see, and the first one to notice speaks for all.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import frozen

from partita.runtime.supervision.diagnosis import DEAD, STOPPED, Diagnosis
from partita.runtime.tracing import flight
from partita.runtime.tracing.flight import Position

STARTING_SECONDS = 120.0
STARTS = (flight.STARTING, flight.LOADING)
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

    def stalled(self, directory: Path, some: bool = False) -> str | None:
        """Why the run stands still, in words; None while it moves on. `some`: not all recorders can be seen."""
        positions = self.positions(directory)
        if not positions or (len(positions) < self.ranks and not some):
            return None  # a rank that does not even start ends, or its peers give up connecting to it
        moving = [each for each in positions if each.activity != flight.ENDED]
        seconds = min((each.seconds for each in moving), default=0.0)
        if seconds <= self.timeout:
            return None
        conditions = {each.rank: STOPPED for each in moving if is_stopped(each.process)}
        started = all(each.activity not in STARTS for each in moving)
        patience = self.timeout if started or conditions else max(self.timeout, STARTING_SECONDS)
        if seconds <= patience:
            return None
        return f"nothing has moved for {patience:g} s\n  {self._described(positions, conditions, 'stall')}"

    def begun(self, directory: Path) -> bool:
        """Whether all ranks have come to their first step, and none is at the end."""
        positions = self.positions(directory)
        return len(positions) == self.ranks and not any(each.activity in (*STARTS, flight.ENDED) for each in positions)

    def died(self, directory: Path, ranks: Iterable[int]) -> str:
        """What the ranks were doing when some died; empty where they had not started."""
        positions = self.positions(directory)
        return self._described(positions, dict.fromkeys(ranks, DEAD), "death") if positions else ""

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
                text = self.stalled(directory, some=True)
                if text is None:
                    continue
                if _first(directory / SPOKEN):
                    print(f"partita: {text}", file=sys.stderr, flush=True)
                # The process may hang in a library that no exception reaches.
                os._exit(status)

        threading.Thread(target=watch, name="lookout", daemon=True).start()


def is_stopped(process: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a terminal; False where the system does not say."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


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
