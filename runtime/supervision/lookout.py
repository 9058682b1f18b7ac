"""Watching ranks by their flight recorders: notices that a run stands still, and says who holds it up.

A run stands still when no rank has taken a mark for the stall timeout: while one waits, another must work. No phase is
left out. Before all ranks have begun their first step they compile, connect and load, for which they have
`STARTING_SECONDS` at least, and after the last step they leave, for which they have `ENDING_SECONDS`: on a machine
with much else to do either takes its time. One that is stopped has no more than the stall timeout.

The supervisor watches the ranks that it has started. Under another launcher every rank watches all whose recorders it
can see, asks the other machines what they see (`views`), and the first one to notice speaks for all.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import field, frozen

from partita.runtime.run_directory import RunDirectory
from partita.runtime.supervision.diagnosis import DEAD, STOPPED, Diagnosis
from partita.runtime.supervision.processes import is_gone, is_stopped
from partita.runtime.supervision.views import Seen, Views
from partita.runtime.tracing import flight
from partita.runtime.tracing.flight import Position

STARTING_SECONDS = 120.0
ENDING_SECONDS = 60.0
STARTS = (flight.STARTING, flight.READY, flight.CONNECTING, flight.LOADING)
LOOK_SECONDS = 0.25
REPORT = "fault.json"
FOLDER = "flight"  # in the run's directory: where ranks record that watch themselves


@frozen(eq=False)
class Lookout:
    """The watch over `ranks` ranks. Details of what it finds go to the run's directory, as JSON."""

    diagnosis: Diagnosis
    ranks: int
    timeout: float
    run: RunDirectory

    def stalled(self, directory: Path, since: float, processes: Mapping[int, int]) -> str | None:
        """Why the run stands still, in words; None while it moves on.

        `since` is when the ranks were told to begin (as by time.monotonic), `processes` are theirs: one that has no
        recorder yet is still being started.
        """
        waited = time.monotonic() - since
        positions = {each.rank: each for each in self.positions(directory)}
        for rank, process in processes.items():
            if rank not in positions:
                positions[rank] = Position(rank, process, flight.STARTING, 0, 0, 0, waited, ())
        return self.judged(_seen(positions.values()), waited)

    def judged(self, seen: Seen, waited: float) -> str | None:
        """Why ranks that are seen like this stand still, which have been told to begin `waited` seconds ago."""
        seconds = min([waited, *(each.seconds for each in seen.positions)])
        if not seen.positions or seconds <= min(self.timeout, ENDING_SECONDS):
            return None
        patience = self.timeout
        if all(each.activity == flight.ENDED for each in seen.positions):
            patience = min(patience, ENDING_SECONDS) if seen.conditions else ENDING_SECONDS
        elif not seen.conditions and any(each.activity in STARTS for each in seen.positions):
            patience = max(patience, STARTING_SECONDS)
        if seconds <= patience:
            return None
        return f"no progress for {patience:g} s\n  {self._described(seen.positions, seen.conditions, 'stall')}"

    def begun(self, directory: Path) -> bool:
        """Whether all ranks have come to their first step, and none is at the end."""
        positions = self.positions(directory)
        return len(positions) == self.ranks and not any(each.activity in (*STARTS, flight.ENDED) for each in positions)

    def died(self, directory: Path, ranks: Iterable[int], said: Mapping[int, str] | None = None) -> str:
        """What the ranks were doing when some died; empty where they had not started. `said` is what they said last."""
        positions = self.positions(directory)
        return self._described(positions, dict.fromkeys(ranks, DEAD), "death", said) if positions else ""

    def positions(self, directory: Path) -> list[Position]:
        """Where the ranks are that have a recorder."""
        found = (flight.read(directory, rank) for rank in range(self.ranks))
        return [position for position in found if position is not None]

    def connecting(self, directory: Path) -> bool:
        """Whether no rank has come to its first step."""
        return not any(each.activity not in STARTS for each in self.positions(directory))

    def _described(
        self,
        positions: Sequence[Position],
        conditions: Mapping[int, str],
        cause: str,
        said: Mapping[int, str] | None = None,
    ) -> str:
        states = self.diagnosis.states(positions, conditions)
        try:
            self.run.put(REPORT, self.diagnosis.as_text(cause, states, said or {}))
            details = [f"details: {self.run.path / REPORT}"]
        except OSError:
            details = []  # the message matters more
        return "\n  ".join([*self.diagnosis.lines(states), *details])


@frozen(eq=False)
class Watcher:
    """A thread of a rank that watches the others, where no supervisor does: ends its process when the run stands still.

    `views` are the other machines', `status` what the process ends with.
    """

    lookout: Lookout
    directory: Path
    views: Views
    status: int
    since: float = field(factory=time.monotonic)

    def start(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self._watch, name="lookout", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self.views.answer(self._seen)
            if self.lookout.judged(self._seen(), self._waited) is None:
                continue
            text = self.lookout.judged(self.views.collect(self._seen()), self._waited)
            if text is None:
                continue  # on another machine something moves
            if self.views.speaks():
                print(f"partita: {text}", file=sys.stderr, flush=True)
            # The process may hang in a library that no exception reaches.
            os._exit(self.status)

    def _seen(self) -> Seen:
        return _seen(self.lookout.positions(self.directory))

    @property
    def _waited(self) -> float:
        return time.monotonic() - self.since


def _seen(positions: Iterable[Position]) -> Seen:
    """Those of this machine's ranks that have not come to their end, and which of them are stopped."""
    left = [each for each in positions if not (each.activity == flight.ENDED and is_gone(each.process))]
    return Seen(left, {each.rank: STOPPED for each in left if is_stopped(each.process)})


def prepare(run: RunDirectory, rank: int) -> flight.Flight:
    """A rank's recorder in the run's directory: what an earlier run left there is removed. Raises OSError."""
    with run.folder(FOLDER) as handle:
        name = flight.path_of(Path(), rank).name
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=handle)
        return flight.Flight(name, handle)
