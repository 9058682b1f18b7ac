"""A rank's checkpoints: where its run resumes, when it saves, and what it reports about both.

All ranks make the same calls in the same order. They agree by summing numbers over all ranks: which commit rank 0
proposes, how many ranks found it damaged, which errors kept ranks from writing.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve, field, frozen

from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.grouping import grouped
from partita.runtime.addresses import PathOrUrl, StorageError
from partita.runtime.bad_steps import History
from partita.runtime.checkpoint.address_store import CheckpointStore, steps_in, store_at
from partita.runtime.checkpoint.commits import quick_problem, read_manifest, refuse_links
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.folders import unwritable
from partita.runtime.checkpoint.identity import changed_data, changes, manifest_of
from partita.runtime.checkpoint.loading import Commit, entries_of
from partita.runtime.checkpoint.manifest import Manifest
from partita.runtime.checkpoint.parts import copies_of_parameters
from partita.runtime.checkpoint.saving import NO_ROOM, Save
from partita.runtime.checkpoint.settings import Settings, refuse_others
from partita.runtime.checkpoint.shards import Entry, Shard
from partita.runtime.checkpoint.snapshots import SnapshotResources, Snapshots, StepSnapshot
from partita.runtime.checkpoint.store import commit_name
from partita.runtime.data_files import DataFile
from partita.runtime.global_tensors import piece_view
from partita.runtime.naming import ranks_text
from partita.runtime.regions import Region, pieces_of, whole_region
from partita.runtime.tracing.flight import AGREEING, LOADING, SAVING
from partita.runtime.transports.transport import awaited

if TYPE_CHECKING:
    from partita.runtime.rank import Rank

NOTABLE_SECONDS = 1.0
# What rank 0 proposes: a step, or one of these.
NOTHING, REFUSED = -1, -2

Report = Callable[[Diagnostic], None]


@frozen
class Resumed:
    """The step after which a run resumes, and a line that says so."""

    step: int
    note: str


@define(eq=False)
class Checkpoints:
    """The checkpoints of a run, as one rank sees them. Generators yield while they wait for other ranks.

    `report` receives diagnostics for the user; `data` are the files that the run is trained on. `kept` is what makes
    copies in memory possible, if anything does; `copying` makes them. `unsaved`: the last save failed, and this rank is
    one of those on which it failed. `committed` is the last step that was saved, on rank 0, which alone knows.
    """

    rank: Rank
    settings: Settings
    report: Report
    data: Sequence[DataFile] = ()
    kept: SnapshotResources | None = None
    unsaved: bool = field(default=False, init=False)
    committed: int | None = field(default=None, init=False)
    _keep: int = field(init=False)  # lower than configured if there is not enough space
    _manifest: Manifest = field(init=False)
    _store: CheckpointStore = field(init=False)
    _shard: Shard = field(init=False)
    _save: Save | None = field(default=None, init=False)
    _has_waited: bool = field(default=False, init=False)
    copying: Snapshots | None = field(default=None, init=False)
    _has_skipped: bool = field(default=False, init=False)  # a copy, because the one before was not complete

    def __attrs_post_init__(self) -> None:
        plan = self.rank.plan
        self._manifest = manifest_of(plan.spec, plan.program, self.data)
        self._keep = self.settings.keep
        self._store = store_at(self.settings.path)
        self._shard = shard_of(self._manifest, self.rank, self.rank.memory.files)
        if self.settings.copies is not None and self.kept is not None:
            shard = shard_of(self._manifest, self.rank)
            self.copying = Snapshots(
                self.rank.rank, plan.ranks, self._manifest, shard, self.kept, self.rank.flight.mark
            )

    # ------------------------------------------------------------ saving

    def due(self, step: int) -> bool:
        """Whether a step is followed by a save: every `interval` steps, and the last."""
        return step % self.settings.interval == 0 or step == self.rank.plan.train.steps

    def save(self, step: int) -> Iterator[None]:
        """Take a snapshot and start writing it; waits for the previous save if that is still in progress."""
        start = time.monotonic()
        yield from self._settle()
        waited = time.monotonic() - start
        if waited > NOTABLE_SECONDS and not self._has_waited:
            self._has_waited = True  # reported once
            self._say("W0803", f"training waited {waited:.1f} s for the checkpoint before that of step {step}")
        self._shard.take()
        self._save = self._begun(step)

    def _begun(self, step: int) -> Save:
        """Start a save of the latest snapshot."""
        manifest = evolve(self._manifest, step=step, history=self.rank.bad_step_policy.history)
        return Save(self._store, manifest, self.rank.rank, self._shard, self._keep)

    def finish(self) -> Iterator[None]:
        """Wait for the save in progress."""
        yield from self._settle()
        if self.copying is not None:
            self.copying.wait()

    def abort(self) -> None:
        """End the save in progress without the other ranks, in a process that outlives the run."""
        save, self._save = self._save, None
        if save is not None:
            save.abort()

    def close(self) -> None:
        """Release the directory."""
        self._store.close()

    def _settle(self) -> Iterator[None]:
        """Wait for the save in progress; all ranks agree on the result."""
        save, self._save = self._save, None
        while save is not None:
            save = yield from self._settled(save)

    def _settled(self, save: Save) -> Generator[None, None, Save | None]:
        """Wait for a save. If it ran out of space and some was freed, it is started again and returned."""
        with self.rank.flight.within(SAVING):
            error = save.written(self.rank.flight.mark)
        # By rank: the errno of its error, or 0.
        votes = torch.zeros(self.rank.plan.ranks, dtype=torch.float64)
        if error is not None:
            votes[self.rank.rank] = error.errno or errno.EIO
        votes = yield from self._summed(votes)
        failed = {rank: int(number) for rank, number in enumerate(votes.tolist()) if number}
        with self.rank.flight.within(SAVING):
            save.conclude(not failed, self.rank.flight.mark)
            full = save.full or bool(failed and set(failed.values()) <= set(NO_ROOM))
            freed = self.rank.rank == 0 and full and self._makes_room(save.manifest.step)
        if (yield from self._told(int(freed))):
            return self._begun(save.manifest.step)
        self.unsaved = error is not None or (self.rank.rank == 0 and not save.committed and not failed)
        step = save.manifest.step
        if save.committed:
            self.committed = step
        if failed:
            own = {self.rank.rank: str(error.strerror)} if isinstance(error, StorageError) else {}
            self._say("W0802", f"step {step} was not saved: {_causes(failed, own)}", *self._remaining())
        elif save.trouble is not None and not save.committed:
            self._say("W0802", f"step {step} was not saved: {save.trouble}", *self._remaining())
        elif save.trouble is not None:
            self._say("W0802", f"step {step} was saved, but {save.trouble}")
        return None

    def _makes_room(self, step: int) -> bool:
        """Free space for the save of a step, and report it: remove damaged commits, or else the oldest one.

        The newest intact commit and those after it stay. False if nothing could be removed.
        """
        path = self.settings.path
        try:
            removed = self._store.remove_damaged()
            if not removed:
                steps = self._store.steps()
                whole = next((each for each in reversed(steps) if _seems_whole(path, each)), steps[0] if steps else 0)
                if not steps or steps[0] >= whole:
                    return False
                self._store.remove(steps[0])
                removed = [commit_name(steps[0])]
                self._keep = min(self._keep, len(steps) - 1)
        except OSError as error:
            self._say("W0802", f"nothing could be removed to free space for step {step}: {error.strerror}")
            return False
        note = f"; from now on {self._keep} are kept" if self._keep < self.settings.keep else ""
        self._say("W0805", f"removed {', '.join(removed)} to free space for the checkpoint of step {step}{note}")
        return True

    def _remaining(self) -> list[str]:
        try:
            steps = self._store.steps()
        except OSError:
            steps = []
        return [
            f"training continues; the last checkpoint is that of step {steps[-1]}" if steps else "training continues"
        ]

    # ------------------------------------------------------------ copies in memory

    def copies(self, step: int) -> bool:
        """Whether a step is followed by a copy in memory: every so many steps, but for the last."""
        copies, last = self.settings.copies, self.rank.plan.train.steps
        return self.copying is not None and copies is not None and step % copies == 0 and step < last

    def copy(self, step: int) -> Iterator[None]:
        """Copy the state to memory that outlives this rank, in the background; or skip that if the copy before is not
        complete on all ranks: a slow neighbour slows nobody.
        """
        copying = self.copying
        if copying is None:
            return
        votes = torch.tensor(copying.votes, dtype=torch.float64)
        busy, failed = (yield from self._summed(votes)).tolist()
        if busy:
            if not self._has_skipped:
                self._has_skipped = True  # reported once
                self._say("W0808", f"the copy of step {step} is skipped: the one before it is not complete")
            return
        error = copying.take(step, self.rank.bad_step_policy.history, bool(failed))
        if error is not None:
            self.report(Diagnostic("W0808", f"rank {self.rank.rank} has no copy in memory: {error}"))

    def _in_memory(self, newest: int) -> Generator[None, None, Resumed | None]:
        """Load the newest step that memory has, unless there is a commit of a later one; None if there is none."""
        if self.settings.copies is None:
            return None
        copying = self.copying
        if (yield from self._any(copying is None)) or copying is None:
            self.copying = None
            self._say("W0808", "no copies are made in memory: nothing keeps it when these ranks end")
            return None
        copying.attempt = self._store.attempt
        snapshot = copying.find_newest()
        self._say_incomplete(copying.incomplete, newest)
        if snapshot is None or snapshot.label.step < newest or newest == REFUSED:
            return None
        saved = None
        try:
            saved = copying.manifest_of(snapshot)
            copying.load(snapshot, saved, list(load_targets(self.rank)))
        except (Corrupt, OSError) as error:
            self.report(Diagnostic("W0808", f"the copies of step {snapshot.label.step} cannot be read: {error}"))
            saved = None
        if (yield from self._any(saved is None)) or saved is None:
            return None
        self.rank.bad_step_policy.history = saved.history
        if copying.several:  # what was lost is soon in two places again
            yield from self.copy(saved.step)
        return self._resumed(saved, (), "copies in memory")

    def _say_incomplete(self, snapshot: StepSnapshot | None, newest: int) -> None:
        if snapshot is not None and snapshot.label.step > newest:
            lost = snapshot.lost
            self._say(
                "W0808",
                f"the copies of step {snapshot.label.step} are incomplete: "
                f"{'that' if len(lost) == 1 else 'those'} of {ranks_text(lost)} "
                f"{'is' if len(lost) == 1 else 'are'} lost",
            )

    # ------------------------------------------------------------ resuming

    def resume(self) -> Generator[None, None, Resumed | None]:
        """Load the newest intact commit; None if there are no commits.

        Raises Refused, on all ranks or none: the directory cannot be written to (E0802) or is in use by another run
        (E0803), the commit is of another model (E0804), a later format (E0805) or other data (E0815), or all commits
        are damaged (E0806).
        """
        with self.rank.flight.within(LOADING):
            return (yield from self._resume())

    def _resume(self) -> Generator[None, None, Resumed | None]:
        first = self.rank.rank == 0
        refused: Refused | None = None
        candidates = list[int]()
        if first:
            try:
                unlocked = self._store.lock()
                if unlocked is not None:
                    self.report(unlocked)
                self._store.clean()
                candidates = steps_in(self.settings.path)
            except Refused as error:
                refused = error
            except OSError as error:
                refused = unwritable(self.settings.path, error)
        self._store.attempt = yield from self._told(secrets.randbits(48))
        newest = yield from self._told(REFUSED if refused else candidates[-1] if candidates else NOTHING)
        resumed = yield from self._in_memory(newest)
        if resumed is not None:
            return resumed
        loaded = yield from self._newest(candidates, refused)
        if loaded is None:
            return None
        saved, passed_over = loaded
        self.rank.bad_step_policy.history = saved.history
        return self._resumed(saved, passed_over, str(self.settings.path / commit_name(saved.step)))

    def rewind(self) -> Generator[None, None, tuple[int, History | None]]:
        """Load the newest intact commit in the middle of a run; returns its step and the history up to it.

        If there is no commit, returns step 0 and None and changes nothing. Raises Refused, as `resume`.
        """
        yield from self._settle()
        candidates, refused = list[int](), None
        with self.rank.flight.within(LOADING):
            try:
                candidates = steps_in(self.settings.path) if self.rank.rank == 0 else []
            except Refused as error:
                refused = error
            loaded = yield from self._newest(candidates, refused)
        return (0, None) if loaded is None else (loaded[0].step, loaded[0].history)

    def _newest(
        self, candidates: list[int], refused: Refused | None
    ) -> Generator[None, None, tuple[Manifest, list[int]] | None]:
        """Load the newest intact commit of those that rank 0 knows of; returns its manifest and the steps of the
        damaged ones that were skipped, or None if there are no commits.
        """
        first = self.rank.rank == 0
        passed_over = list[int]()
        while True:
            if first and passed_over and not candidates:
                refused = self._none_whole(len(passed_over))
            step = yield from self._told(REFUSED if refused else candidates.pop() if candidates else NOTHING)
            if step == NOTHING:
                return None
            saved = None
            if step != REFUSED:
                try:
                    saved = self._checked(step)
                except Refused as error:
                    refused = error
            if (yield from self._any(refused is not None)):
                raise refused or self._refused_elsewhere()
            # Damaged commits are not even opened: files are memory-mapped, and a truncated one would crash the process.
            if not (yield from self._any(saved is None)):
                assert saved is not None
                loaded = False
                try:
                    loaded = self._loaded(saved)
                except Refused as error:
                    refused = error
                if (yield from self._any(refused is not None)):
                    raise refused or self._refused_elsewhere()
                if not (yield from self._any(not loaded)):
                    return saved, passed_over
            passed_over.append(step)

    def _checked(self, step: int) -> Manifest | None:
        """Check this rank's share of a commit: each file is read completely, by one rank.

        Returns the manifest, or None after reporting what is damaged. Raises Refused.
        """
        path, rank = self.settings.path, self.rank.rank
        try:
            saved = read_manifest(path, step)
            refuse_links(path, step)
        except Corrupt as damage:
            if rank == 0:  # all ranks find it
                self._say_damaged(step, damage)
            return None
        refuse_others(self.settings, saved, self._manifest)
        with Commit(path, saved, self.rank.flight.mark) as commit:
            problems = list(commit.problems(range(rank, len(saved.files), self.rank.plan.ranks)))
        for problem in problems:
            self._say_damaged(step, problem)
        return None if problems else saved

    def _loaded(self, saved: Manifest) -> bool:
        """Load this rank's parts; returns whether that succeeded. Raises Refused (E0819)."""
        try:
            with Commit(self.settings.path, saved, self.rank.flight.mark) as commit:
                load(self.rank, commit)
        except Corrupt as damage:
            self._say_damaged(saved.step, damage)
            return False
        return True

    def _resumed(self, saved: Manifest, passed_over: Sequence[int], place: str) -> Resumed:
        if self.rank.rank == 0:
            for step in passed_over:
                try:
                    self._store.quarantine(step)
                except OSError as error:
                    self._say("W0801", f"{commit_name(step)} could not be renamed: {error.strerror}")
            changed = [*changes(saved, self._manifest), *changed_data(saved, self._manifest)]
            if changed:
                message = f"the run resumes after step {saved.step:,} with different settings"
                self.report(Diagnostic("W0804", message, notes=tuple(changed)))
            steps = self.rank.plan.train.steps
            if saved.step >= steps:
                message = f"the run is already finished: its last checkpoint is of step {saved.step:,} of {steps:,}"
                help = f"to go on: `train.steps={saved.step + steps}`; to begin anew: {self.settings.anew}"
                self.report(Diagnostic("W0810", message, help=help))
        words = "" if saved.mesh_text == self._manifest.mesh_text else f", saved on {saved.mesh_text}"
        return Resumed(saved.step, f"resumed from {place}{words}")

    def _refused_elsewhere(self) -> Refused:
        return refuse("E0806", f"another rank cannot use the checkpoints in {self.settings.path}")

    def _none_whole(self, count: int) -> Refused:
        what = "the only checkpoint" if count == 1 else f"each of the {count} checkpoints"
        return refuse(
            "E0806",
            f"{what} in {self.settings.path} is damaged",
            help="move the directory away to start over",
        )

    # ------------------------------------------------------------ agreement and reports

    def _told(self, number: int) -> Generator[None, None, int]:
        """Broadcast the number of rank 0."""
        own = float(number if self.rank.rank == 0 else 0)
        return int((yield from self._summed(torch.tensor([own], dtype=torch.float64))).item())

    def _any(self, flag: bool) -> Generator[None, None, bool]:
        """Whether `flag` is set on any rank."""
        return bool((yield from self._summed(torch.tensor([float(flag)], dtype=torch.float64))).item())

    def _summed(self, numbers: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """Sum a few numbers over all ranks."""
        with self.rank.flight.within(AGREEING):
            (parts,) = yield from awaited(self.rank.transport.gather_over_ranks(numbers.to(self.rank.device)))
        return parts.sum(0).cpu()

    def _say(self, code: str, message: str, *notes: str) -> None:
        """Report a warning on rank 0, which knows what all others do."""
        if self.rank.rank == 0:
            self.report(Diagnostic(code, message, notes=notes))

    def _say_damaged(self, step: int, problem: object) -> None:
        place = self.settings.path / commit_name(step)
        self.report(Diagnostic("W0801", f"{place} is damaged and was skipped: {problem}"))


def shard_of(manifest: Manifest, rank: Rank, files: Mapping[str, Path] = MappingProxyType({})) -> Shard:
    """What a rank saves: of its parts, without the zeros that pad them. Of what is mapped from `files`, it takes no
    copies in memory.
    """
    parts = {record.name: (record.layout.padded, tensor) for record, tensor in rank.kept()}
    entries = entries_of(manifest, rank.rank)
    files = {name: path for name, path in files.items() if not parts[name][0]}
    return Shard(entries, tuple(_unpadded(*parts[each.name], each) for each in entries), files)


def _unpadded(padded: Collection[object], part: torch.Tensor, entry: Entry) -> torch.Tensor:
    """What is saved of a rank's part of a tensor."""
    if padded:
        return part[whole_region(entry.shape)]
    return part.view(-1)[: entry.elements].view(entry.shape)


def load(rank: Rank, commit: Commit) -> None:
    """Read a rank's parts of all its tensors. Where parameters were saved alone, states are zero or copies of these, as
    before the first step. Raises Corrupt and Refused.
    """
    saved = {each.name for each in commit.manifest.tensors}
    copies = copies_of_parameters(rank.plan.program)
    for name, region, into in load_targets(rank):
        if name in saved or name in copies:
            commit.read(name if name in saved else copies[name], region, into)
        else:
            assert commit.manifest.is_untrained, name
            into.zero_()


def load_targets(rank: Rank) -> Iterator[tuple[str, Region, torch.Tensor]]:
    """Yields what a rank reads, its parts of all its tensors: name, region, and the memory for it."""
    mesh = rank.plan.program.mesh
    for record, tensor in rank.kept():
        for piece in pieces_of(record.type, record.layout, mesh.sizes, mesh.coordinates(rank.rank)):
            yield record.name, piece.region, piece_view(tensor, record.layout, piece)


def _causes(failed: Mapping[int, int], own: Mapping[int, str]) -> str:
    """`rank 1: No space left on device`: which ranks had which error; those that are known in words of their own."""
    ranks_of = grouped(failed, lambda rank: own.get(rank, os.strerror(failed[rank])))
    return ", ".join(f"{ranks_text(ranks)}: {cause}" for cause, ranks in ranks_of.items())


def _seems_whole(path: PathOrUrl, step: int) -> bool:
    """Whether a commit looks intact without reading its tensors."""
    try:
        return quick_problem(path, read_manifest(path, step)) is None
    except (Corrupt, Refused):
        return False
