"""The directory of a run's checkpoints: what its names mean, and how a save becomes a commit.

A commit gets its name by one rename, after all of its contents are on disk. So whatever has the name of a commit is
complete, and a run that dies at any moment leaves the earlier commits intact, and at most a save that nobody reads.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from pathlib import Path

from attrs import define, field

from partita.dsl.diagnostic import Diagnostic, refuse
from partita.runtime import locks
from partita.runtime.checkpoint.files import directory

COMMIT = re.compile(r"step-(\d{8,16})")
LEFTOVER = re.compile(r"step-\d{8,16}\.(partial-[0-9a-f]+|removed)")
DAMAGED = re.compile(r"step-(\d{8,16})\.damaged")


def commit_name(step: int) -> str:
    """The directory name of the commit of a step."""
    return f"step-{step:08}"


def steps_in(path: Path) -> list[int]:
    """The steps of the commits in a directory, ascending; none if there is no directory."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (COMMIT.fullmatch(name) for name in names)
    return sorted(step for match in found if match and commit_name(step := int(match[1])) == match[0])


@define(eq=False)
class Store:
    """The directory, for writing. Only rank 0 locks, cleans, commits and removes.

    `attempt` is part of the names of this run's saves, so that a surviving rank of an earlier run writes elsewhere.
    Methods raise OSError.
    """

    path: Path
    attempt: int = 0
    _lock: int | None = field(default=None, init=False)

    def lock(self) -> Diagnostic | None:
        """Create the directory and hold it until `close`. Raises Refused (E0802, E0803).

        Returns a warning (W0806) if the file system has no locks, so that nothing can be held.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with directory(self.path) as handle:
                self._lock, unlocked = locks.lock(handle)
        except locks.Held as error:
            raise locks.refused(self.path) from error
        except OSError as error:
            raise refuse("E0802", f"cannot write to {self.path}: {error.strerror}") from error
        return None if unlocked is None else locks.missing(self.path, unlocked)

    def hold(self) -> None:
        """Check that this run still holds the directory; one that was removed is created and locked again.

        Raises OSError if another run has created and locked it.
        """
        if self._lock is None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with directory(self.path) as handle:
            if locks.still_there(handle, self._lock):
                return
            try:
                renewed, _ = locks.lock(handle, patience=0.0)
            except locks.Held as error:
                raise OSError(errno.EBUSY, f"another run now writes to {self.path}") from error
        os.close(self._lock)
        self._lock = renewed

    def close(self) -> None:
        """Release the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clean(self) -> None:
        """Remove leftovers of runs that died."""
        with directory(self.path) as handle:
            for name in os.listdir(handle):
                if LEFTOVER.fullmatch(name):
                    _remove(name, handle)

    # ------------------------------------------------------------ a save

    def partial(self, step: int) -> str:
        """The directory name of a save in progress."""
        return f"{commit_name(step)}.partial-{self.attempt:x}"

    def begin(self, step: int) -> Path:
        """The directory of a save, created by whichever rank comes first."""
        path = self.path / self.partial(step)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, step: int) -> None:
        """Turn a save, whose files are on disk, into a commit."""
        self.hold()
        with directory(self.path) as handle:
            with directory(self.partial(step), handle) as inner:
                os.fsync(inner)
            os.rename(self.partial(step), commit_name(step), src_dir_fd=handle, dst_dir_fd=handle)
            os.fsync(handle)

    def abandon(self, step: int) -> None:
        """Remove a save that will not become a commit."""
        with directory(self.path) as handle:
            _remove(self.partial(step), handle)

    # ------------------------------------------------------------ commits

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` commits, and damaged ones that would be gone by now if they were intact."""
        steps = steps_in(self.path)
        for step in steps[:-keep]:
            self.remove(step)
        if len(steps) >= keep:
            self.remove_damaged(before=steps[-keep])

    def remove(self, step: int) -> None:
        """Remove a commit."""
        with directory(self.path) as handle:
            aside = f"{commit_name(step)}.removed"
            # Renamed first: what is half removed must not look like a commit.
            os.rename(commit_name(step), aside, src_dir_fd=handle, dst_dir_fd=handle)
            _remove(aside, handle)

    def set_aside(self, step: int) -> None:
        """Rename a commit that was skipped as damaged, so that the run can save this step again."""
        with directory(self.path) as handle:
            aside = f"{commit_name(step)}.damaged"
            _remove(aside, handle)
            os.rename(commit_name(step), aside, src_dir_fd=handle, dst_dir_fd=handle)

    def remove_damaged(self, before: int | None = None) -> list[str]:
        """Remove commits that were set aside, all or those of steps before `before`; returns their names."""
        with directory(self.path) as handle:
            found = [match for name in os.listdir(handle) if (match := DAMAGED.fullmatch(name))]
            names = sorted(match[0] for match in found if before is None or int(match[1]) < before)
            for name in names:
                _remove(name, handle)
        return names


def _remove(name: str, parent: int) -> None:
    """Remove an entry of an open directory, if it exists; of a link, the link itself."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)
