"""Copies in memory: what a slot holds, who sends what to whom, and what is left when hosts are lost."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Condition, Thread
from typing import TypeVar

import pytest
import torch
from attrs import define, evolve, field
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from partita.runtime.bad_steps import History
from partita.runtime.checkpoint.checkpoints import Checkpoints, load_targets, shard_of
from partita.runtime.checkpoint.identity import manifest_of
from partita.runtime.checkpoint.settings import settings_of
from partita.runtime.checkpoint.slots import HEAD, Label, Slot
from partita.runtime.checkpoint.snapshots import (
    Pair,
    SnapshotResources,
    Snapshots,
    StepSnapshot,
    newest,
    partners,
    transfers,
)
from partita.runtime.data.binding import open_data
from partita.runtime.rank import CompiledRun
from partita.runtime.supervision.memory import Memory, created
from partita.runtime.training import StepResult, VirtualRun
from partita.runtime.transports.transport import PeerConnections
from tests.runtime.checkpoint.runs import ONE_RANK, Outcome, plan_of, same, tensors

T = TypeVar("T")
LAYOUTS = {
    8: "train.layout=zero3",
    4: "train.layout=zero1 cluster.tensor=1",
    2: "train.layout=plain cluster.tensor=1 cluster.data=1",
}
PLANS: dict[int, CompiledRun] = {}
FULL = Pair([Slot(os.open("/dev/full", os.O_RDWR))] * 2, 0)
HISTORY = History(1, 0, (0.1, 1 / 3), (2.0,))
TIMEOUT = 20.0  # seconds
MANIFEST = b"the manifest of a run"


def plan(ranks: int) -> CompiledRun:
    """A plan of that many ranks."""
    if ranks not in PLANS:
        PLANS[ranks] = plan_of(*LAYOUTS[ranks].split())
    return PLANS[ranks]


# ---------------------------------------------------------------- slots


class Killed(BaseException):
    """The end of a process."""


blocks = st.lists(st.binary(max_size=9000), max_size=4)
label = st.builds(Label, *(st.integers(0, 1 << 48),) * 2, st.integers(0, 9), st.integers(1, 10), st.just(HISTORY))


@given(st.lists(st.tuples(label, st.binary(max_size=5000), blocks), min_size=1, max_size=3))
def test_a_slot_holds_what_was_written_last(written: list[tuple[Label, bytes, list[bytes]]]) -> None:
    with created(1) as (file, *_):
        slot = Slot(file)
        assert slot.label() is None
        for each, manifest, data in written:
            slot.write(each, manifest, data)
        assert slot.label() == each
        assert slot.texts() == (each.text, manifest)
        start, size = slot.data()
        assert slot.read(start, size) == b"".join(data)


@given(label, label, blocks, st.integers(0, 4))
def test_a_slot_whose_writer_is_killed_is_empty(before: Label, after: Label, data: list[bytes], last: int) -> None:
    def until_killed() -> Iterator[bytes]:
        yield from data[:last]
        raise Killed

    with created(1) as (file, *_):
        slot = Slot(file)
        slot.write(before, MANIFEST, data)
        with pytest.raises(Killed):
            slot.write(after, MANIFEST, until_killed())
        assert slot.label() is None


@given(label, blocks, st.data())
def test_a_slot_that_is_not_as_written_is_empty(label: Label, written: list[bytes], data: st.DataObject) -> None:
    with created(1) as (file, *_):
        slot = Slot(file)
        slot.write(label, MANIFEST, written)
        place = data.draw(st.integers(0, HEAD.size + len(label.text) + len(MANIFEST) - 1))
        (byte,) = os.pread(file, 1, place)
        os.pwrite(file, bytes([byte ^ data.draw(st.integers(1, 255))]), place)
        assert slot.label() is None


# ---------------------------------------------------------------- who has what


hosts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12).map(lambda names: [f"host {each}" for each in names])


@given(hosts)
def test_a_partner_is_on_another_host_and_has_one_to_receive_from(hosts: list[str]) -> None:
    found = partners(hosts)
    sent = [each for each in found if each is not None]
    assert len(sent) == len(set(sent))
    assert all(hosts[rank] != hosts[each] for rank, each in enumerate(found) if each is not None)
    sizes = {host: hosts.count(host) for host in hosts}
    for rank, each in enumerate(found):
        place = hosts[:rank].count(hosts[rank])
        assert (each is None) == all(size <= place for host, size in sizes.items() if host != hosts[rank])


@given(hosts, st.data())
def test_shards_come_from_hosts_that_have_them_and_only_where_they_are_not(hosts: list[str], data: st.DataObject):
    there = list(dict.fromkeys(hosts))
    count = data.draw(st.integers(1, 6))
    places = {
        shard: [(host, number) for number, host in enumerate(data.draw(st.sets(st.sampled_from(there), min_size=1)))]
        for shard in range(count)
    }
    wanted = {rank: sorted(data.draw(st.sets(st.integers(0, count - 1)))) for rank in range(len(hosts))}
    planned = transfers(StepSnapshot(Label(0, 1, 0, count), places), hosts, wanted)
    for each in planned:
        assert (hosts[each.source], each.slot) in places[each.shard]
    needed = {
        (rank, shard) for rank, shards in wanted.items() for shard in shards if hosts[rank] not in dict(places[shard])
    }
    assert sorted((each.destination, each.shard) for each in planned) == sorted(needed)


few = st.integers(1, 2)
labels = few.flatmap(lambda ranks: st.builds(Label, few, few, st.integers(0, ranks - 1), st.just(ranks)))


@given(st.dictionaries(st.sampled_from("ab"), st.dictionaries(st.integers(0, 5), labels, max_size=4)))
def test_the_newest_step_is_one_of_which_there_are_all_shards(held: dict[str, dict[int, Label]]) -> None:
    whole, incomplete = newest(held)
    there = [each for slots in held.values() for each in slots.values()]
    ranks = {each.generation: {other.rank for other in there if other.generation == each.generation} for each in there}
    complete = {generation for generation, found in ranks.items() if found == set(range(generation[-1]))}
    assert (whole is None) == (not complete)
    if whole is not None:
        assert whole.label.generation == max(complete)
        assert incomplete is None
    elif there:
        assert incomplete is not None
        assert incomplete.label.step == max(each.step for each in there)
        assert incomplete.lost


@given(few, few, few)
def test_shards_of_two_attempts_are_no_step(step: int, one: int, other: int) -> None:
    """The ranks of a later one may have computed them in another order."""
    held = {"a": {0: Label(one, step, 0, 2), 1: Label(other, step, 1, 2)}}
    whole, _ = newest(held)
    assert (whole is not None) == (one == other)


# ---------------------------------------------------------------- ranks that copy, and are lost


@define
class Said:
    """A store, in this process."""

    values: dict[str, bytes] = field(factory=dict)
    changed: Condition = field(factory=Condition)

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, TIMEOUT)
            return self.values[key]


Wires = dict[tuple[int, int], "Queue[torch.Tensor]"]


def links_of(rank: int, wires: Wires) -> PeerConnections:
    """A rank's links: what is sent is there at once."""

    def send(tensor: torch.Tensor, peer: int) -> Callable[[], None]:
        wires[rank, peer].put(tensor.clone())
        return lambda: None

    def receive(tensor: torch.Tensor, peer: int) -> Callable[[], None]:
        def wait() -> None:
            tensor.copy_(wires[peer, rank].get(timeout=TIMEOUT))

        return wait

    return PeerConnections(send, receive)


def at_once(act: Callable[[int], T], ranks: int) -> list[T]:
    """Do something on all ranks, each in a thread of its own."""
    found: dict[int, T] = {}

    def note(rank: int) -> None:
        found[rank] = act(rank)

    threads = [Thread(target=note, args=(rank,), daemon=True) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(TIMEOUT)
    assert len(found) == ranks, "a rank has failed, or waits"
    return [found[rank] for rank in range(ranks)]


def attempt(run: VirtualRun, hosts: Sequence[str], memory: dict[str, tuple[int, ...]], number: int) -> list[Snapshots]:
    """The copies of all ranks of an attempt, which have not met yet."""
    wires: Wires = defaultdict(Queue)
    store = Said()
    manifest = manifest_of(run.plan.spec, run.plan.program, ())

    def of(rank: int) -> Snapshots:
        there = [each for each, host in enumerate(hosts) if host == hosts[rank]]
        own = Memory(hosts[rank], there.index(rank), len(there), memory[hosts[rank]])
        kept = SnapshotResources(own, store, lambda: links_of(rank, wires))  # type: ignore[arg-type]
        copies = Snapshots(rank, len(hosts), manifest, shard_of(manifest, run.ranks[rank]), kept, lambda: None)
        copies.attempt = number
        return copies

    for pair in ((a, b) for a in range(len(hosts)) for b in range(len(hosts))):
        wires[pair]
    return [of(rank) for rank in range(len(hosts))]


def taken(copies: Sequence[Snapshots], step: int, failed: bool = False) -> None:
    """Copy a step on all ranks, and wait until all have. `failed`: the copy before has, somewhere."""
    at_once(lambda rank: copies[rank].take(step, HISTORY, failed), len(copies))
    at_once(lambda rank: copies[rank].wait(), len(copies))
    assert not any(each.votes[0] for each in copies)


def fails(copies: Sequence[Snapshots], ranks: Collection[int]) -> None:
    """Let some ranks have no memory for their own copies from now on."""
    for rank in ranks:
        copies[rank]._own = FULL


def loaded(run: VirtualRun, copies: Sequence[Snapshots]) -> StepSnapshot | None:
    """Read the newest step on all ranks."""

    def load(rank: int) -> StepSnapshot | None:
        found = copies[rank].find_newest()
        if found is not None:
            saved = copies[rank].manifest_of(found)
            assert (saved.step, saved.history) == (found.label.step, HISTORY)
            copies[rank].load(found, saved, list(load_targets(run.ranks[rank])))
        return found

    first, *others = at_once(load, len(copies))
    assert all(each == first for each in others)
    return first


@contextmanager
def on_hosts(names: Sequence[str], most: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """The memory of hosts."""
    if not names:
        yield {}
        return
    with created(most) as slots, on_hosts(names[1:], most) as others:
        yield {names[0]: slots, **others}


def scrambled(run: VirtualRun, seed: int) -> None:
    """Other values than a run begins with: the same on all ranks that hold a part."""
    for rank in run.ranks:
        for (state, name), tensor in rank.memory.states.items():
            tensor.copy_(rank.memory.masters[name].view(tensor.shape) * (len(state) + seed))


ranks = st.sampled_from([8, 4, 2])


@settings(max_examples=8, deadline=None, phases=[Phase.generate])  # an example is slow to shrink
@given(ranks, ranks, st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.data())
def test_what_is_left_is_read_on_any_mesh(
    before: int, after: int, before_hosts: int, after_hosts: int, whole: int, data: st.DataObject
) -> None:
    """Any one host may be lost, if there are several; and the last copy may not have been complete."""
    names = [f"host {number}" for number in range(4)]
    first = [names[rank * before_hosts // before] for rank in range(before)]
    lost = data.draw(st.sampled_from(names[:before_hosts])) if before_hosts > 1 else ""
    left = [name for name in names if name != lost][: max(after_hosts, 1 if lost else before_hosts)]
    if before_hosts == 1:
        left = names[:after_hosts]
    second = [left[rank * len(left) // after] for rank in range(after)]
    old, new = VirtualRun(plan(before)), VirtualRun(plan(after), seed=1)
    with on_hosts(names, 8) as memory, on_hosts([lost] if lost else [], 8) as fresh:
        copies = attempt(old, first, memory, 7)
        assert at_once(lambda rank: copies[rank].find_newest(), before) == [None] * before
        for number in range(6 - whole, 6):
            scrambled(old, number)
            taken(copies, number)
        expected, step = tensors(old), 5
        # The next copies are not made everywhere: some ranks have no memory for them.
        without = data.draw(st.sets(st.integers(0, before - 1), max_size=before // 2))
        fails(copies, without)
        for number, failed in ((7, False), (9, bool(without))):
            scrambled(old, number)
            taken(copies, number, failed)
            assert {rank for rank in range(before) if copies[rank].votes[1]} == without
        if all(first[rank] == lost for rank in without):  # their partners have it
            expected, step = tensors(old), 9
        memory = {**memory, **fresh}
        for each in new.ranks:
            for tensor in (*each.memory.masters.values(), *each.memory.states.values()):
                tensor.fill_(-1.0)
        copies = attempt(new, second, memory, 8)
        found = loaded(new, copies)
        assert found is not None
        assert found.label.step == step
        same(tensors(new), expected)
        # What was read is still there if the first copy of this attempt is not made everywhere.
        fails(copies, {0})
        scrambled(new, 11)
        taken(copies, 11)
        again = loaded(new, attempt(new, second, memory, 9))
        assert again is not None
        if again.label.step == step:
            same(tensors(new), expected)
        else:
            assert again.label.step == 11
            assert len(set(second)) > 1  # its partner has it


# ---------------------------------------------------------------- what a run resumes from


class Stopped(Exception):
    """The end of a run, in the middle."""


@define
class Watched(Outcome):
    """A run that is stopped once it has done a step; each copy is complete before the next step."""

    stop: int | None = None
    checkpoints: Checkpoints | None = None

    def step(self, result: StepResult) -> None:
        super().step(result)
        assert self.checkpoints is not None
        if self.checkpoints.copying is not None:
            self.checkpoints.copying.wait()
        if result.step == self.stop:
            raise Stopped


def one_rank(directory: Path, memory: Memory | None, copies: str, stop: int | None = None) -> Watched:
    """Run on one rank, from whatever is there on; a commit every third of seven steps."""
    judged = "train.on_bad_step=skip(spike = 100)"  # by a history of all steps
    plan = plan_of(*ONE_RANK, "train.steps=7", judged, f"train.checkpoint=every(3{copies})")
    found = Watched(VirtualRun(plan), stop=stop)
    where = settings_of(plan.spec, directory, directory)
    assert where is not None
    kept = SnapshotResources(memory, Said(), lambda: links_of(0, {})) if memory is not None else None  # type: ignore[arg-type]
    found.checkpoints = Checkpoints(found.run.ranks[0], where, found.said.append, kept=kept)
    try:
        found.run.train(open_data(plan.program, plan.train, directory), [found], [found.checkpoints])
    except Stopped:
        found.checkpoints.abort()
    finally:
        found.checkpoints.close()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A run that is not stopped."""
    return one_rank(tmp_path_factory.mktemp("whole"), None, "")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("stop", "copies", "lost", "from_step", "codes"),
    [
        (6, ", copies = 1", False, 5, []),  # step 6 is neither copied nor saved yet
        (6, ", copies = 4", False, 4, []),
        (7, ", copies = 5", False, 6, []),  # there is a later commit
        (6, ", copies = 1", True, 3, ["W0808"]),
        (6, "", False, 3, []),
    ],
)
def test_a_run_resumes_from_the_newest_that_is_whole(
    whole: Watched, tmp_path: Path, stop: int, copies: str, lost: bool, from_step: int, codes: list[str]
) -> None:
    with created(1) as slots:
        memory = Memory("here", 0, 1, slots)
        one_rank(tmp_path / "run", memory, copies, stop)
        if lost:  # as if there had been another rank
            for slot in map(Slot, memory.own):
                label, manifest = slot.texts()
                slot.write(evolve(Label.read(label), ranks=2), manifest, [])
        saved = sorted((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
        if not lost and from_step in (4, 5):
            for each in saved:
                each.write_text("{}")  # whoever reads it says so
        again = one_rank(tmp_path / "run", memory, copies)
    assert again.found is not None
    assert again.found.step == from_step
    assert ("copies in memory" in again.found.note) == (from_step in (4, 5))
    assert again.codes == codes
    assert again.steps == {step: values for step, values in whole.steps.items() if step > from_step}
    same(tensors(again.run), tensors(whole.run))
    assert again.run.ranks[0].bad_step_policy.history == whole.run.ranks[0].bad_step_policy.history
    assert len(whole.run.ranks[0].bad_step_policy.history.losses) == 7


def test_where_nothing_keeps_memory_no_copies_are_made(tmp_path: Path) -> None:
    found = one_rank(tmp_path, None, ", copies = 1")
    assert found.codes == ["W0808"]
    assert sorted(found.steps) == [1, 2, 3, 4, 5, 6, 7]
