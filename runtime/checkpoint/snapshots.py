"""Snapshots of a run's state in memory, every few steps: a lost rank costs seconds of work, and needs no commit.

Each rank fills a slot (`slots`) of its host, which outlives the rank: its memory belongs to the supervisor, or under
torchrun to a memory server (`supervision.memory`). If there are several hosts, a second slot, on the next host, is
filled with the same bytes, as in Gemini (Wang et al., SOSP 2023), so that the memory of one machine may be lost as
well. The rank at the same place of the next host receives them, in a thread and over a process group of their own,
while both train.

Slots come in pairs, which are filled in turn. Before a snapshot all ranks agree that the previous one is complete, or
skip this one: so one of two steps is always complete, and nobody waits for a slow neighbour. After a restart the ranks
exchange lists of the shards that their hosts have, choose the newest step with all shards, and send each other the
missing ones. A snapshot that was saved on another mesh is read as from a commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from threading import Thread
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from partita.dsl.grouping import grouped
from partita.runtime.bad_steps import History
from partita.runtime.checkpoint.loading import entries_of, files_of, read_parts
from partita.runtime.checkpoint.manifest import Manifest, parse
from partita.runtime.checkpoint.shards import Shard
from partita.runtime.checkpoint.slots import Label, Shards, Slot, manifest_text
from partita.runtime.regions import Region
from partita.runtime.supervision.memory import Memory
from partita.runtime.supervision.store import Store
from partita.runtime.transports.failures import ConnectionLost, post
from partita.runtime.transports.transport import PeerConnections

KEY = "partita/copies"
BLOCK = 1 << 26  # bytes sent at a time


@frozen
class StepSnapshot:
    """The copies of one step in memory: the manifest, and by rank the hosts' slots that have its shard."""

    label: Label
    places: Mapping[int, Sequence[tuple[str, int]]]

    @property
    def whole(self) -> bool:
        """Whether there are all shards."""
        return not self.lost

    @property
    def lost(self) -> list[int]:
        """The ranks without any copy of their shards."""
        return [rank for rank in range(self.label.ranks) if rank not in self.places]


def partners(hosts: Sequence[str]) -> list[int | None]:
    """By rank, the rank to which each sends its copies: that at the same place of the next host that has as many. Each
    rank receives from one at most. `hosts` are by rank; None if no other host has so many ranks.
    """
    members = grouped(range(len(hosts)), hosts.__getitem__)
    order = list(members)
    destinations: list[int | None] = []
    for rank, host in enumerate(hosts):
        place, at = members[host].index(rank), order.index(host)
        others = (members[each] for each in (*order[at + 1 :], *order[:at]))
        destinations.append(next((each[place] for each in others if len(each) > place), None))
    return destinations


def newest(labels: Mapping[str, Mapping[int, Label]]) -> tuple[StepSnapshot | None, StepSnapshot | None]:
    """The newest step of which memory has all shards, else None; then also the newest of which it has some. `labels`
    are by host and slot.
    """
    snapshots: dict[tuple[int, int, int], StepSnapshot] = {}
    for host, slots in labels.items():
        for number, label in slots.items():
            each = snapshots.setdefault(label.generation, StepSnapshot(label, {}))
            places = {**each.places, label.rank: (*each.places.get(label.rank, ()), (host, number))}
            snapshots[label.generation] = StepSnapshot(each.label, places)
    order = sorted(snapshots)
    whole = next((snapshots[each] for each in reversed(order) if snapshots[each].whole), None)
    return whole, snapshots[order[-1]] if order and whole is None else None


@frozen
class Transfer:
    """A shard that one rank sends another, from a slot of its host."""

    source: int
    destination: int
    shard: int
    slot: int


def transfers(snapshot: StepSnapshot, hosts: Sequence[str], needed: Mapping[int, Sequence[int]]) -> list[Transfer]:
    """Who sends what, in an order that is the same on all ranks: `needed` are by rank the shards that it reads."""
    planned = []
    for rank, shards in sorted(needed.items()):
        for shard in shards:
            places = dict(snapshot.places[shard])
            if hosts[rank] in places:
                continue
            host = next(each for each in hosts if each in places)
            senders = [each for each, name in enumerate(hosts) if name == host]
            planned.append(Transfer(senders[shard % len(senders)], rank, shard, places[host]))
    return planned


@frozen(eq=False)
class SnapshotResources:
    """The resources of snapshots: the memory of this rank's host, the store of the rendezvous, and a function that
    connects to the ranks of other hosts, to be called on all ranks at once.
    """

    memory: Memory
    store: Store
    links: Callable[[], PeerConnections]


@define(eq=False)
class Snapshots:
    """A run's copies, as one rank sees them. All ranks make the same calls in the same order.

    `moved` is called repeatedly while shards are read. `attempt` is the same on all ranks.
    """

    rank: int
    ranks: int
    manifest: Manifest
    shard: Shard
    kept: SnapshotResources
    moved: Callable[[], None]
    attempt: int = 0
    hosts: list[str] = field(factory=list, init=False)
    incomplete: StepSnapshot | None = field(
        default=None, init=False
    )  # the newest step, if there are all shards of none
    _own: Pair = field(init=False)
    _received: Pair | None = field(default=None, init=False)
    _links: PeerConnections | None = field(default=None, init=False)
    _thread: Thread | None = field(default=None, init=False)
    _error: Exception | None = field(default=None, init=False)
    _text: bytes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._text = manifest_text(self.manifest)

    # ------------------------------------------------------------ after a restart

    def find_newest(self) -> StepSnapshot | None:
        """Find out which hosts there are, and the newest step of which they have all shards. Raises ConnectionLost."""
        place, count = self.kept.memory.place, self.kept.memory.count
        slots = self.kept.memory.slots
        labels = {number: Slot(slots[number]).label() for number in range(place, len(slots), count)}
        own = {number: label for number, label in labels.items() if label is not None}
        texts = {number: label.text.decode() for number, label in own.items()}
        gathered = self._told("held", {"host": self.kept.memory.host, "held": texts})
        self.hosts = [each["host"] for each in gathered]
        host_labels: dict[str, dict[int, Label]] = {}
        for each in gathered:
            labels_of = {int(number): Label.read(text.encode()) for number, text in each["held"].items()}
            host_labels.setdefault(each["host"], {}).update(labels_of)
        whole, self.incomplete = newest(host_labels)
        for number, label in own.items():
            if whole is None or label.step > whole.label.step:  # these steps will be done again
                Slot(slots[number]).clear()
        generation = whole.label.generation if whole is not None else None
        self._own = Pair.of([Slot(each) for each in self.kept.memory.own], generation)
        if self.several:
            self._received = Pair.of([Slot(each) for each in self.kept.memory.received], generation)
            self._links = self.kept.links()
        return whole

    @property
    def several(self) -> bool:
        """Whether there are several hosts."""
        return len(set(self.hosts)) > 1

    def manifest_of(self, snapshot: StepSnapshot) -> Manifest:
        """The manifest of a step that memory has. Raises ConnectionLost and Corrupt."""
        speaks = min(rank for rank, host in enumerate(self.hosts) if host in dict(snapshot.places[0]))
        if self.rank == speaks:
            _, text = self._slot(snapshot, 0).texts()
            post("telling what memory has", self.kept.store.set, f"{KEY}/manifest", text.decode())
        text = post("asking what memory has", self.kept.store.get, f"{KEY}/manifest")
        return evolve(parse(text, "a copy in memory"), step=snapshot.label.step, history=snapshot.label.history)

    def load(self, snapshot: StepSnapshot, saved: Manifest, reads: Sequence[tuple[str, Region, torch.Tensor]]) -> None:
        """Read regions of tensors. Raises ConnectionLost, Corrupt and OSError."""
        needed = files_of(saved, [(name, region) for name, region, _ in reads])
        shards: dict[int, Shards] = {}
        if self._links is not None:
            for rank, data in self._fetched(self._links, snapshot, saved, needed):
                shards[rank] = Shards(saved, rank, data)
        for rank in needed:
            if rank not in shards:
                shards[rank] = Shards.of(self._slot(snapshot, rank), saved, rank)
        tensors = {each.name: each for each in saved.tensors}
        for name, region, into in reads:
            read_parts(tensors[name], saved.mesh, region, into, shards.__getitem__, self.moved)

    def _fetched(
        self, links: PeerConnections, snapshot: StepSnapshot, saved: Manifest, needed: Sequence[int]
    ) -> Iterator[tuple[int, memoryview]]:
        """Send the shards that others need from this host, and yield those that this rank needs from others."""
        gathered = self._told("needed", list(needed))
        for each in transfers(snapshot, self.hosts, dict(enumerate(gathered))):
            size = sum(entry.bytes for entry in entries_of(saved, each.shard))
            if self.rank == each.source:
                start, _ = Slot(self.kept.memory.slots[each.slot]).data()
                for place, count in _blocks(size):
                    block = Slot(self.kept.memory.slots[each.slot]).read(start + place, count)
                    links.send(torch.frombuffer(block, dtype=torch.uint8), each.destination)()
                    self.moved()
            elif self.rank == each.destination:
                data = torch.empty(size, dtype=torch.uint8)
                for place, count in _blocks(size):
                    links.receive(data[place : place + count], each.source)()
                    self.moved()
                yield each.shard, data.numpy().data

    def _slot(self, snapshot: StepSnapshot, rank: int) -> Slot:
        return Slot(self.kept.memory.slots[dict(snapshot.places[rank])[self.kept.memory.host]])

    # ------------------------------------------------------------ while the run trains

    @property
    def votes(self) -> tuple[bool, bool]:
        """Whether the copy before is still being made, and whether it has failed: to be added up over all ranks."""
        busy = self._thread is not None and self._thread.is_alive()
        return busy, not busy and self._error is not None

    def take(self, step: int, history: History, failed: bool) -> Exception | None:
        """Copy the state of a step; no rank is busy. `failed`: the copy before has, on some rank. Returns why it has on
        this one.
        """
        error, self._error = self._error, None
        if self._thread is not None and not failed:
            self._own.turn()
            if self._received is not None:
                self._received.turn()
        self.shard.take()
        self._thread = Thread(target=self._run, args=(step, history), name="partita-copies", daemon=True)
        self._thread.start()
        return error

    def wait(self) -> None:
        """Wait for the copy that is being made: the rank that receives it may wait for it, too."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, step: int, history: History) -> None:
        label = Label(self.attempt, step, self.rank, self.ranks, history)
        try:
            self._own.next.write(label, self._text, [self.shard.copy.numpy().data])
        except OSError as error:
            self._error = error
        try:
            if self._links is not None:
                self._exchange(label, self._links)
        except (OSError, ConnectionLost) as error:
            self._error = error

    def _exchange(self, label: Label, links: PeerConnections) -> None:
        """Send this rank's shard to its partner, and receive that of the rank whose partner it is."""
        partner = partners(self.hosts)
        destination = partner[self.rank]
        source = partner.index(self.rank) if self.rank in partner else None
        own = self.shard.copy
        outgoing = [own[place : place + count] for place, count in _blocks(len(own))] if destination is not None else []

        def arriving() -> Iterator[memoryview]:
            size = 0 if source is None else sum(each.bytes for each in entries_of(self.manifest, source))
            for block, expected in zip_longest(outgoing, _blocks(size)):
                sent = links.send(block, destination) if block is not None and destination is not None else None
                if expected is not None and source is not None:
                    data = torch.empty(expected[1], dtype=torch.uint8)
                    links.receive(data, source)()
                    yield data.numpy().data
                if sent is not None:
                    sent()

        blocks = arriving()
        try:
            if source is not None and self._received is not None:
                self._received.next.write(evolve(label, rank=source), self._text, blocks)
        finally:
            for _ in blocks:  # whatever is not written: the other end sends it all the same
                pass

    # ------------------------------------------------------------ through the store

    def _told(self, what: str, own: Any) -> list[Any]:
        """The statements of all ranks, in order; the first rank collects them, so that each makes one request."""
        return list(post(f"telling the other ranks what is {what}", self._said, what, own))

    def _said(self, what: str, own: Any) -> list[Any]:
        self.kept.store.set(f"{KEY}/{what}/{self.rank}", json.dumps(own))
        if self.rank == 0:
            every = [json.loads(self.kept.store.get(f"{KEY}/{what}/{rank}")) for rank in range(self.ranks)]
            self.kept.store.set(f"{KEY}/{what}", json.dumps(every))
        return list(json.loads(self.kept.store.get(f"{KEY}/{what}")))


@define(eq=False)
class Pair:
    """Two slots that are filled in turn."""

    slots: Sequence[Slot]
    place: int

    @classmethod
    def of(cls, slots: Sequence[Slot], generation: tuple[int, int, int] | None) -> Pair:
        """A pair whose slot with a shard of the step that is `generation` is filled last."""
        labels = [slot.label() for slot in slots]
        return cls(slots, int(labels[0] is not None and labels[0].generation == generation))

    @property
    def next(self) -> Slot:
        """The slot to be filled."""
        return self.slots[self.place]

    def turn(self) -> None:
        """The slot is full, and so are those of all ranks."""
        self.place = 1 - self.place


def _blocks(size: int) -> list[tuple[int, int]]:
    """Where blocks of so many bytes begin, and how long they are."""
    return [(place, min(BLOCK, size - place)) for place in range(0, size, BLOCK)]
