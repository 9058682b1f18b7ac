"""A rank's checkpoints: where its run goes on, when it saves, and what it says of both.

All ranks ask in the same order. What they must agree on they tell each other as numbers, by sums over all ranks: which
commit rank 0 proposes, how many ranks have found it damaged, which errors have kept ranks from writing.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve, field, frozen

from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.runtime.bad_steps import History
from partita.runtime.checkpoint.commits import read_manifest, refuse_links
from partita.runtime.checkpoint.files import Damaged
from partita.runtime.checkpoint.identity import changed_data, changes, manifest_of
from partita.runtime.checkpoint.loading import Commit, entries_of
from partita.runtime.checkpoint.manifest import Manifest
from partita.runtime.checkpoint.parts import state_name
from partita.runtime.checkpoint.saving import Save
from partita.runtime.checkpoint.settings import Settings, refuse_others
from partita.runtime.checkpoint.shards import Shard
from partita.runtime.checkpoint.store import Store, commit_name, steps_in
from partita.runtime.data.identity import DataFile
from partita.runtime.regions import region_of
from partita.runtime.tracing.flight import AGREEING, LOADING, SAVING

if TYPE_CHECKING:
    from partita.runtime.training import Rank

MOST_ERRNO = max(errno.errorcode) + 1
NOTABLE_SECONDS = 1.0
# What rank 0 proposes: a step, or one of these.
NOTHING, REFUSED = -1, -2

Report = Callable[[Diagnostic], None]


@frozen
class Resumed:
    """The step after which a run goes on, and a line that says so."""

    step: int
    note: str


@define(eq=False)
class Checkpoints:
    """The checkpoints of a run, as one rank sees them. Generators yield while they wait for other ranks.

    `report` is told what a person should know; `data` are the files that the run is trained on. `unsaved` says that the
    last save has failed.
    """

    rank: Rank
    settings: Settings
    report: Report
    data: Sequence[DataFile] = ()
    unsaved: bool = field(default=False, init=False)
    _manifest: Manifest = field(init=False)
    _store: Store = field(init=False)
    _shard: Shard = field(init=False)
    _save: Save | None = field(default=None, init=False)
    _has_waited: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        plan, memory = self.rank.plan, self.rank.memory
        self._manifest = manifest_of(plan.spec, plan.program, self.data)
        self._store = Store(self.settings.path)
        tensors = {
            **memory.masters,
            **{state_name(state, name): tensor for (state, name), tensor in memory.states.items()},
        }
        entries = entries_of(self._manifest, self.rank.rank)
        self._shard = Shard(entries, tuple(tensors[each.name] for each in entries))

    # ------------------------------------------------------------ saving

    def due(self, step: int) -> bool:
        """Whether a step is followed by a save: every so many, and the last."""
        return step % self.settings.interval == 0 or step == self.rank.plan.train.steps

    def save(self, step: int) -> Iterator[None]:
        """Copy what there is and begin to write it; waits for the save before it, if that is still under way."""
        start = time.monotonic()
        yield from self._settle()
        waited = time.monotonic() - start
        if waited > NOTABLE_SECONDS and not self._has_waited:
            self._has_waited = True  # said once
            self._say("W0803", f"training waited {waited:.1f} s for the checkpoint before that of step {step}")
        self._shard.take()
        manifest = evolve(self._manifest, step=step, history=self.rank.judge.history)
        self._save = Save(self._store, manifest, self.rank.rank, self._shard, self.settings.keep)

    def finish(self) -> Iterator[None]:
        """Wait for the save under way."""
        yield from self._settle()

    def close(self) -> None:
        """Let go of the directory."""
        self._store.close()

    def _settle(self) -> Iterator[None]:
        """The end of the save under way, on which all ranks agree."""
        save, self._save = self._save, None
        if save is None:
            return
        with self.rank.flight.within(SAVING):
            error = save.written(self.rank.flight.mark)
        # How many ranks have met each error, and the sum of their numbers: of one rank, its number.
        votes = torch.zeros(2, MOST_ERRNO, dtype=torch.float64)
        if error is not None:
            number = error.errno if error.errno and error.errno < MOST_ERRNO else errno.EIO
            votes[:, number] = torch.tensor([1.0, self.rank.rank], dtype=torch.float64)
        votes = yield from self._summed(votes)
        counts = {number: int(count) for number, count in enumerate(votes[0].tolist()) if count}
        with self.rank.flight.within(SAVING):
            save.conclude(all_written=not counts)
        self.unsaved = bool(counts) or (self.rank.rank == 0 and not save.committed)
        step = save.manifest.step
        if counts:
            causes = [
                f"{f'rank {int(votes[1, number])}' if count == 1 else f'{count} ranks'}: {os.strerror(number)}"
                for number, count in counts.items()
            ]
            self._say("W0802", f"step {step} was not saved: {', '.join(causes)}", *self._remaining())
        elif save.trouble is not None and not save.committed:
            self._say("W0802", f"step {step} was not saved: {save.trouble}", *self._remaining())
        elif save.trouble is not None:
            self._say("W0802", f"step {step} was saved, but {save.trouble}")

    def _remaining(self) -> list[str]:
        steps = steps_in(self.settings.path)
        return [f"training goes on; the last checkpoint is that of step {steps[-1]}" if steps else "training goes on"]

    # ------------------------------------------------------------ resuming

    def resume(self) -> Generator[None, None, Resumed | None]:
        """Load the newest commit that is whole; None where there is no commit.

        Raises Refused, on all ranks or none: the directory cannot be written to (E0802) or another run does (E0803),
        the commit is of another model (E0804), of a later format (E0805) or of other data (E0811), or there are commits
        and none is whole (E0806).
        """
        with self.rank.flight.within(LOADING):
            return (yield from self._resume())

    def _resume(self) -> Generator[None, None, Resumed | None]:
        first = self.rank.rank == 0
        refused: Refused | None = None
        candidates = list[int]()
        if first:
            try:
                self._store.lock()
                self._store.clean()
                candidates = steps_in(self.settings.path)
            except Refused as error:
                refused = error
            except OSError as error:
                refused = refuse("E0802", f"cannot write to {self.settings.path}: {error.strerror}")
        self._store.attempt = yield from self._told(secrets.randbits(48))
        found = yield from self._newest(candidates, refused)
        if found is None:
            return None
        saved, passed_over = found
        self.rank.judge.history = saved.history
        return self._resumed(saved, passed_over)

    def rewind(self) -> Generator[None, None, tuple[int, History | None]]:
        """Load the newest commit that is whole, in the middle of a run; its step, and what was known of the steps up to
        it. Step 0 and None where there is no commit: the state is then left as it is. Raises Refused, as `resume`.
        """
        yield from self._settle()
        with self.rank.flight.within(LOADING):
            candidates = steps_in(self.settings.path) if self.rank.rank == 0 else []
            found = yield from self._newest(candidates, None)
        return (0, None) if found is None else (found[0].step, found[0].history)

    def _newest(
        self, candidates: list[int], refused: Refused | None
    ) -> Generator[None, None, tuple[Manifest, list[int]] | None]:
        """Load the newest whole one of the commits that rank 0 knows of; its manifest, and the steps of those that are
        damaged. None where there are none."""
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
                raise refused or refuse("E0806", f"another rank cannot use the checkpoints in {self.settings.path}")
            # What is damaged is not even opened: files are mapped, and one that ends early would end the process.
            if not (yield from self._any(saved is None)):
                assert saved is not None
                loaded = self._loaded(saved)
                if not (yield from self._any(not loaded)):
                    return saved, passed_over
            passed_over.append(step)

    def _checked(self, step: int) -> Manifest | None:
        """Check this rank's share of a commit: each file is read whole by one rank.

        Returns the manifest, or None where something is damaged, and says what. Raises Refused.
        """
        path, rank = self.settings.path, self.rank.rank
        try:
            saved = read_manifest(path, step)
            refuse_links(path, step)
        except Damaged as damage:
            if rank == 0:  # all have found it
                self._say_damaged(step, damage)
            return None
        refuse_others(self.settings, saved, self._manifest)
        with Commit(path, saved, self.rank.flight.mark) as commit:
            problems = list(commit.problems(range(rank, len(saved.files), self.rank.plan.ranks)))
        for problem in problems:
            self._say_damaged(step, problem)
        return None if problems else saved

    def _loaded(self, saved: Manifest) -> bool:
        """Load this rank's parts; whether that worked."""
        try:
            with Commit(self.settings.path, saved, self.rank.flight.mark) as commit:
                self._fill(commit)
        except Damaged as damage:
            self._say_damaged(saved.step, damage)
            return False
        return True

    def _fill(self, commit: Commit) -> None:
        """Read this rank's parts of all its tensors."""
        program, memory = self.rank.plan.program, self.rank.memory
        sizes, coordinates = program.mesh.sizes, program.mesh.coordinates(self.rank.rank)
        for record in program.parameters:
            if record.name not in memory.masters:
                continue
            region = region_of(record.type, record.layout, sizes, coordinates)
            commit.read(record.name, region, memory.masters[record.name])
            region = region_of(record.type, record.state_layout, sizes, coordinates)
            for state in record.states:
                commit.read(state_name(state, record.name), region, memory.states[state, record.name])

    def _resumed(self, saved: Manifest, passed_over: Sequence[int]) -> Resumed:
        if self.rank.rank == 0:
            for step in passed_over:
                try:
                    self._store.set_aside(step)
                except OSError as error:
                    self._say("W0801", f"{commit_name(step)} could not be renamed: {error.strerror}")
            changed = [*changes(saved, self._manifest), *changed_data(saved, self._manifest)]
            if changed:
                message = f"the run goes on after step {saved.step:,} under other settings"
                self.report(Diagnostic("W0804", message, notes=tuple(changed)))
        words = "" if saved.mesh_text == self._manifest.mesh_text else f", saved on {saved.mesh_text}"
        return Resumed(saved.step, f"resumed from {self.settings.path / commit_name(saved.step)}{words}")

    def _none_whole(self, count: int) -> Refused:
        what = "the only checkpoint" if count == 1 else f"each of the {count} checkpoints"
        return refuse(
            "E0806",
            f"{what} in {self.settings.path} is damaged",
            help="move the directory away to begin anew",
        )

    # ------------------------------------------------------------ telling

    def _told(self, number: int) -> Generator[None, None, int]:
        """The number that rank 0 gives, on every rank."""
        own = float(number if self.rank.rank == 0 else 0)
        return int((yield from self._summed(torch.tensor([own], dtype=torch.float64))).item())

    def _any(self, flag: bool) -> Generator[None, None, bool]:
        """Whether it is so on any rank."""
        return bool((yield from self._summed(torch.tensor([float(flag)], dtype=torch.float64))).item())

    def _summed(self, numbers: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """The sum over all ranks of a few numbers."""
        tensor = numbers.to(self.rank.device)
        with self.rank.flight.within(AGREEING):
            handle = self.rank.transport.sum_over_ranks(tensor)
            while not handle.done():
                yield
        return tensor.cpu()

    def _say(self, code: str, message: str, *notes: str) -> None:
        """A warning of rank 0, which knows what all others do."""
        if self.rank.rank == 0:
            self.report(Diagnostic(code, message, notes=notes))

    def _say_damaged(self, step: int, problem: object) -> None:
        place = self.settings.path / commit_name(step)
        self.report(Diagnostic("W0801", f"{place} is damaged and passed over: {problem}"))
