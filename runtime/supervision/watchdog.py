"""Watches ranks by their flight recorders: detects a stalled run, and names the rank that holds it up.

A run has stalled when no rank has taken a mark for the stall timeout: while one waits, another must work. This holds in
every phase. Before their first step ranks compile, connect and load, for which they have at least `STARTING_SECONDS`,
and after the last step they exit, for which they have `ENDING_SECONDS`: on a busy machine both can be slow. A stopped
rank never gets more than the stall timeout.

The supervisor watches the ranks that it started. Under another launcher every rank watches all ranks whose recorders it
can read, asks the other machines for their views (`views`), and the first to detect a stall reports it for all. It also
sees which ranks of its machine have died, and tells the others: where connections do not (NCCL), ranks would wait.
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

from partita.runtime.naming import ranks_text
from partita.runtime.run_directory import FAULT, RunDirectory
from partita.runtime.supervision.diagnosis import DEAD, STOPPED, Diagnosis
from partita.runtime.supervision.processes import is_gone, is_stopped
from partita.runtime.supervision.views import LocalView, ProgressExchange
from partita.runtime.tracing import flight
from partita.runtime.tracing.flight import Position

STARTING_SECONDS = 120.0
ENDING_SECONDS = 60.0
STEPS = (flight.TRAINING, flight.EVALUATING)
STARTS = (flight.STARTING, flight.READY, flight.CONNECTING, flight.LOADING)
LOOK_SECONDS = 0.25
# What ranks whose connections tell them of a death (Gloo) take to end by themselves, with more to say.
DEATH_SECONDS = 5.0
FOLDER = "flight"  # in the run's directory: recorders of ranks that watch themselves


@frozen(eq=False)
class Watchdog:
    """Watches `ranks` ranks. Details of its findings are written to the run's directory, as JSON."""

    diagnosis: Diagnosis
    ranks: int
    timeout: float
    run: RunDirectory

    def stalled(self, directory: Path, since: float, processes: Mapping[int, int]) -> str | None:
        """Why the run has stalled, in words; None while it makes progress.

        `since` is when the ranks were told to begin (as by time.monotonic). `processes` are their process ids: a rank
        without a recorder is still starting.
        """
        waited = time.monotonic() - since
        positions = {each.rank: each for each in self.positions(directory)}
        for rank, process in processes.items():
            if rank not in positions:
                positions[rank] = Position(rank, process, flight.STARTING, 0, 0, 0, waited, ())
        return self.stall_of(_seen(positions.values()), waited)

    def stall_of(self, view: LocalView, waited: float) -> str | None:
        """Why ranks seen like this, `waited` seconds after they were told to begin, have stalled; else None."""
        seconds = min([waited, *(each.seconds for each in view.positions)])
        if not view.positions or seconds <= min(self.timeout, ENDING_SECONDS):
            return None
        patience = self.timeout
        if all(each.activity == flight.ENDED for each in view.positions):
            patience = min(patience, ENDING_SECONDS) if view.conditions else ENDING_SECONDS
        elif not view.conditions and any(each.activity in STARTS for each in view.positions):
            patience = max(patience, STARTING_SECONDS)
        if seconds <= patience:
            return None
        return f"no progress for {patience:g} s\n  {self._described(view.positions, view.conditions, 'stall')}"

    def begun(self, directory: Path) -> bool:
        """Whether all ranks have reached their first step, and none has finished."""
        positions = self.positions(directory)
        return len(positions) == self.ranks and not any(each.activity in (*STARTS, flight.ENDED) for each in positions)

    def died(self, directory: Path, ranks: Iterable[int], words: Mapping[int, str] | None = None) -> str:
        """What the ranks were doing when some died; empty if they had not started. `words` are their last words."""
        positions = self.positions(directory)
        return self._described(positions, dict.fromkeys(ranks, DEAD), "death", words) if positions else ""

    def positions(self, directory: Path) -> list[Position]:
        """The positions of the ranks that have a recorder."""
        readings = (flight.read(directory, rank) for rank in range(self.ranks))
        return [position for position in readings if position is not None]

    def connecting(self, directory: Path) -> bool:
        """Whether no rank has reached its first step."""
        return not any(each.activity not in STARTS for each in self.positions(directory))

    def _described(
        self,
        positions: Sequence[Position],
        conditions: Mapping[int, str],
        cause: str,
        words: Mapping[int, str] | None = None,
    ) -> str:
        states = self.diagnosis.states(positions, conditions)
        written = self.run.fail(cause, self.diagnosis.as_json(states, words or {}))
        details = [f"details: {self.run.path / FAULT}"] if written else []
        return "\n  ".join([*self.diagnosis.lines(states), *details])


@frozen(eq=False)
class Watcher:
    """A thread of a rank that watches the others if no supervisor does; it ends its process when the run stalls.

    `views` gives the other machines' views; `status` is the exit status.
    """

    watchdog: Watchdog
    directory: Path
    views: ProgressExchange
    status: int
    since: float = field(factory=time.monotonic)

    def start(self) -> None:
        """Start watching."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self.views.answer(self._seen)
            text = self._death() or self._stall()
            if text is None:
                continue
            if self.views.speaks():
                print(f"partita: {text}", file=sys.stderr, flush=True)
            # The process may hang in a library that no exception reaches.
            os._exit(self.status)

    def _stall(self) -> str | None:
        """Why the run has stalled; None while some rank makes progress, here or on another machine."""
        if self.watchdog.stall_of(self._seen(), self._waited) is None:
            return None
        return self.watchdog.stall_of(self.views.collect(self._seen()), self._waited)

    def _death(self) -> str | None:
        """Which ranks have died that this one waits for in its step, here or as another machine says; else None."""
        positions = {each.rank: each for each in self.watchdog.positions(self.directory)}
        own = positions.get(self.views.rank)
        if own is None or own.activity not in STEPS or own.seconds < DEATH_SECONDS:
            return None
        dead = [each.rank for each in positions.values() if each.activity != flight.ENDED and is_gone(each.process)]
        if not dead:
            return self.views.told
        text = f"{ranks_text(dead)} died\n  {self.watchdog.died(self.directory, dead)}"
        self.views.tell(text)
        return text

    def _seen(self) -> LocalView:
        return _seen(self.watchdog.positions(self.directory))

    @property
    def _waited(self) -> float:
        return time.monotonic() - self.since


def _seen(positions: Iterable[Position]) -> LocalView:
    """The ranks of this machine that have not exited at the end of the run, and which of them are stopped."""
    left = [each for each in positions if not (each.activity == flight.ENDED and is_gone(each.process))]
    return LocalView(left, {each.rank: STOPPED for each in left if is_stopped(each.process)})


def prepare(run: RunDirectory, rank: int) -> flight.Flight:
    """Make a rank's recorder in the run's directory, and remove that of an earlier run. Raises OSError."""
    with run.folder(FOLDER) as handle:
        name = flight.path_of(Path(), rank).name
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=handle)
        return flight.Flight(name, handle)
