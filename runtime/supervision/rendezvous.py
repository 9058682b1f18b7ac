"""The rendezvous of an attempt's ranks: a store, and a protocol in it by which all ranks find each other.

A launcher that restarts ranks may keep one store over all attempts, with the keys of earlier attempts still in it:
torch's own rendezvous reads them, and waits for processes that are gone. So ranks greet each other first. Rank 0 draws
a name for the attempt; each rank announces itself with its own nonce, receives the name in answer to that nonce, and
acknowledges it; when all have, rank 0 says so, and from then on the name prefixes all keys. A greeting of an earlier
attempt is answered too, but nobody acknowledges the answer.

Ranks that are missing at the deadline are named.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from attrs import frozen

from partita.runtime.naming import ranks_text
from partita.runtime.supervision import store as stores
from partita.runtime.supervision.identity import INTERFACES, LOOPBACK_INTERFACE, Identity
from partita.runtime.supervision.store import Store
from partita.runtime.tracing.flight import machine
from partita.runtime.transports.failures import ConnectionLost, cause, post

POLL_SECONDS = (0.01, 0.5)  # between two polls: at first, and later
PREFIX = "partita"
SECRET_BYTES = 16
CONNECT_SECONDS = 1800.0


@frozen(eq=False)
class Rendezvous:
    """The ranks of an attempt, all present.

    `run` identifies the run as long as one store is kept over its attempts. `store` is theirs alone; `again` opens
    another connection to it, for a thread that must not wait for this one. `machines` are the machines' ids by rank.
    `secret` is known only to those who can read the store, the run's ranks, which recognize each other by it.
    """

    run: str
    store: Store
    again: Callable[[], Store]
    machines: tuple[int, ...]
    secret: bytes


def join_rendezvous(identity: Identity, seconds: float) -> Rendezvous:
    """Wait up to `seconds` for all ranks. Raises `ConnectionLost`, which names the missing ones."""
    kind, _, place = identity.rendezvous.partition("://")
    if kind == "file":
        return _met_in_directory(identity, place)
    host, _, port = place.rpartition(":")
    return _met_at_address(identity, host, int(port), seconds)


def connect(
    identity: Identity, backend: str, meeting: Rendezvous | None = None, seconds: float = CONNECT_SECONDS
) -> Rendezvous:
    """Make torch.distributed's process group of all ranks, after their rendezvous if it is yet to come; each may take
    `seconds`.

    On one machine Gloo and NCCL's bootstrap are bound to the loopback interface. Raises `ConnectionLost`.
    """
    import torch.distributed as dist

    if identity.local:
        for name in INTERFACES:
            os.environ.setdefault(name, LOOPBACK_INTERFACE)
    meeting = meeting or join_rendezvous(identity, seconds)
    post(
        "connecting to the other ranks",
        dist.init_process_group,
        backend,
        store=meeting.store,
        rank=identity.rank,
        world_size=identity.ranks,
        timeout=timedelta(seconds=seconds),
    )
    return meeting


def _met_in_directory(identity: Identity, path: str) -> Rendezvous:
    """For ranks of one supervisor, whose directory is private and has never been used by another attempt."""

    def opened() -> Store:
        return stores.in_file(path)

    store = opened()
    store.set_timeout(timedelta(days=1))  # stalls are the supervisor's to report
    if identity.rank == 0:
        store.set("secret", secrets.token_hex(SECRET_BYTES))
    return Rendezvous("", store, opened, (machine(),) * identity.ranks, bytes.fromhex(store.get("secret").decode()))


def _met_at_address(identity: Identity, host: str, port: int, seconds: float) -> Rendezvous:
    end = time.monotonic() + seconds
    hosts = identity.rank == 0 and not identity.hosted

    def opened(first: bool = False) -> Store:
        left = max(1.0, end - time.monotonic()) if first else 10.0
        return stores.at_address(host, port, first and hosts, left)

    try:
        store = opened(first=True)
    except RuntimeError as error:
        raise ConnectionLost(
            f"cannot reach the store at {host}:{port}, used for the rendezvous: {cause(error)}"
        ) from error
    try:
        attempt, broadcast = (_invited if identity.rank == 0 else _arrived)(store, identity, end)
    except RuntimeError as error:
        if isinstance(error, ConnectionLost):
            raise
        raise ConnectionLost(f"lost the store at {host}:{port}, used for the rendezvous: {cause(error)}") from error
    own = stores.within(f"{PREFIX}/{attempt}", store)
    own.set_timeout(timedelta(seconds=seconds))
    machines = tuple(int(each["machine"]) for each in broadcast["places"])

    def again() -> Store:
        # Kept alive by the prefix store, and used by one thread only.
        return stores.within(f"{PREFIX}/{attempt}", opened())

    return Rendezvous(broadcast["run"], own, again, machines, bytes.fromhex(attempt))


def _own_place() -> dict[str, Any]:
    return {"machine": machine(), "host": socket.gethostname(), "process": os.getpid()}


def _invited(store: Store, identity: Identity, end: float) -> tuple[str, dict[str, Any]]:
    """Rank 0's part: answer greetings until all ranks have acknowledged."""
    attempt = secrets.token_hex(SECRET_BYTES)
    missing = set(range(1, identity.ranks))
    greeted: dict[int, dict[str, Any]] = {}
    pause = _Pause(end)
    while missing:
        for rank in sorted(missing):
            if store.check([_key("hello", rank)]):
                greeting = json.loads(store.get(_key("hello", rank)))
                if greeted.get(rank) != greeting:
                    greeted[rank] = greeting
                    store.set(_key("welcome", rank, greeting["word"]), attempt)
            if rank in greeted and store.check([_key("here", attempt, rank)]):
                missing.discard(rank)
        if missing and pause.over():
            have = "has" if len(missing) == 1 else "have"
            raise ConnectionLost(f"{ranks_text(sorted(missing))} {have} not come to the rendezvous")
    if not store.check([_key("run")]):
        store.set(_key("run"), secrets.token_hex(SECRET_BYTES))
    places = [_own_place(), *(greeted[rank] for rank in range(1, identity.ranks))]
    broadcast = {"run": store.get(_key("run")).decode(), "places": places}
    store.set(_key("complete", attempt), json.dumps(broadcast))
    return attempt, broadcast


def _arrived(store: Store, identity: Identity, end: float) -> tuple[str, dict[str, Any]]:
    """Every other rank's part: greet, and acknowledge each answer until all ranks are present."""
    word = secrets.token_hex(SECRET_BYTES)
    store.set(_key("hello", identity.rank), json.dumps({**_own_place(), "word": word}))
    welcome, attempt = _key("welcome", identity.rank, word), ""
    pause = _Pause(end)
    while not attempt or not store.check([_key("complete", attempt)]):
        if store.check([welcome]):
            answer = store.get(welcome).decode()
            if answer != attempt:
                attempt = answer
                store.set(_key("here", attempt, identity.rank), "yes")
        if pause.over():
            what = "other ranks have not come to the rendezvous" if attempt else "rank 0 has not come to the rendezvous"
            raise ConnectionLost(what)
    return attempt, json.loads(store.get(_key("complete", attempt)))


class _Pause:
    """Waits between two polls, a little longer each time, until a deadline."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.seconds = POLL_SECONDS[0]

    def over(self) -> bool:
        time.sleep(self.seconds)
        self.seconds = min(1.2 * self.seconds, POLL_SECONDS[1])
        return time.monotonic() > self.end


def _key(*parts: object) -> str:
    return "/".join((f"{PREFIX}-meeting", *map(str, parts)))
