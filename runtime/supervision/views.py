"""Each machine's view of its ranks, exchanged before one rank reports who holds the run up.

A rank's recorder can only be read on its own machine; from elsewhere, a rank that waits for a stopped one looks like
the cause. So a rank that sees no progress asks, through the store of the rendezvous, and each machine answers with the
positions of its ranks and which of them are stopped. A machine that does not answer in time is silent.

That a rank has died is told unasked: NCCL's ranks elsewhere would wait for it until they stall.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
from attrs import define, field, frozen

from partita.runtime.supervision.diagnosis import SILENT
from partita.runtime.supervision.store import Store
from partita.runtime.tracing import flight
from partita.runtime.tracing.flight import Position

ASKED, SPOKEN, DIED = "views/asked", "views/spoken", "views/died"
ASK_SECONDS = 2.0  # between two checks for a request
ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.1


@frozen
class LocalView:
    """The positions of ranks, and their conditions by rank."""

    positions: list[Position]
    conditions: dict[int, str]


@define(eq=False)
class ProgressExchange:
    """One rank's part in the exchange. `machines` are ids by rank; `connect` opens a store nobody else waits on."""

    rank: int
    machines: Sequence[int]
    connect: Callable[[], Store]
    _store: Store | None = field(default=None, init=False)
    _answered: int = field(default=0, init=False)
    _next: float = field(default=0.0, init=False)
    told: str | None = field(default=None, init=False)

    def answer(self, local_view: Callable[[], LocalView]) -> None:
        """Answer pending requests; `told` is then what another machine has said of ranks that have died."""
        if len(set(self.machines)) == 1 or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + ASK_SECONDS
        with suppress(RuntimeError):  # the store is gone, and with it anyone who could ask
            store = self._connected()
            if store.check([ASKED]):
                self._answer(store, store.add(ASKED, 0), local_view())
            if store.check([DIED]):
                self.told = store.get(DIED).decode()

    def tell(self, died: str) -> None:
        """Tell all machines that ranks have died, and what is known of it."""
        with suppress(RuntimeError):
            self._connected().set(DIED, died)

    def collect(self, own: LocalView) -> LocalView:
        """The views of all machines; ranks of a machine that does not answer are silent."""
        mine = self.machines[self.rank]
        answers = {mine: own}
        with suppress(RuntimeError):
            store = self._connected()
            number = store.add(ASKED, 1)
            others = set(self.machines) - {mine}
            end = time.monotonic() + ANSWER_SECONDS
            while others - answers.keys() and time.monotonic() < end:
                self._answer(store, store.add(ASKED, 0), own)
                for machine in others - answers.keys():
                    if store.check([_key(number, machine)]):
                        answers[machine] = _read(store.get(_key(number, machine)))
                time.sleep(POLL_SECONDS)
        positions = [each for view in answers.values() for each in view.positions]
        conditions = {rank: text for view in answers.values() for rank, text in view.conditions.items()}
        for rank, machine in enumerate(self.machines):
            if machine not in answers:
                positions.append(Position(rank, 0, flight.BETWEEN, 0, 0, 0, float("inf"), ()))
                conditions[rank] = SILENT
        return LocalView(sorted(positions, key=lambda each: each.rank), conditions)

    def speaks(self) -> bool:
        """Whether this rank is the first to report; True if the store cannot be reached."""
        try:
            return self._connected().add(SPOKEN, 1) == 1
        except RuntimeError:
            return True

    def _connected(self) -> Store:
        if self._store is None:
            self._store = self.connect()
        return self._store

    def _answer(self, store: Store, request_count: int, view: LocalView) -> None:
        """Answer all requests up to a number."""
        for number in range(self._answered + 1, request_count + 1):
            store.set(_key(number, self.machines[self.rank]), _written(view))
        self._answered = max(self._answered, request_count)


def _key(number: int, machine: int) -> str:
    return f"views/{number}/{machine}"


def _written(view: LocalView) -> str:
    """Without the details that only a machine's own ranks need."""
    positions = [attrs.asdict(attrs.evolve(each, ages=(), undone="")) for each in view.positions]
    return json.dumps({"positions": positions, "conditions": {str(k): text for k, text in view.conditions.items()}})


def _read(text: bytes) -> LocalView:
    data: Mapping[str, Any] = json.loads(text)
    conditions = {int(rank): condition for rank, condition in data["conditions"].items()}
    return LocalView([Position(**{**each, "ages": ()}) for each in data["positions"]], conditions)
