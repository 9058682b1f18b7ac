"""The directory of a run's checkpoints: what its names mean, and how a save becomes a commit.

A commit appears under its name by one rename, when everything in it is on disk. So whatever has the name of a commit is
one, and a run that dies at any moment leaves the commits that were there before, and perhaps a save that nobody reads.
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
    """The name of the commit of a step."""
    return f"step-{step:08}"


def steps_in(path: Path) -> list[int]:
    """The steps of the commits in a directory, ascending; none where there is no directory."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (COMMIT.fullmatch(name) for name in names)
    return sorted(step for match in found if match and commit_name(step := int(match[1])) == match[0])


@define(eq=False)
class Store:
    """The directory, for those who write to it. Only rank 0 locks, cleans, commits and removes.

    `attempt` names this run's saves, so that a rank of an earlier run that is still alive somewhere writes elsewhere.
    Methods raise OSError.
    """

    path: Path
    attempt: int = 0
    _lock: int | None = field(default=None, init=False)

    def lock(self) -> Diagnostic | None:
        """Make the directory and hold it until `close`. Raises Refused (E0802, E0803).

        A warning (W0806) where nothing can be held, because the file system has no locks.
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
        """See that the directory is still this run's: one that was removed is made and held anew.

        Raises OSError where another run has made it, and holds it.
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
        """Let go of the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clean(self) -> None:
        """Remove what runs that died have left."""
        with directory(self.path) as handle:
            for name in os.listdir(handle):
                if LEFTOVER.fullmatch(name):
                    _remove(name, handle)

    # ------------------------------------------------------------ a save

    def partial(self, step: int) -> str:
        """The name of a save under way."""
        return f"{commit_name(step)}.partial-{self.attempt:x}"

    def begin(self, step: int) -> Path:
        """The directory of a save, made by whichever rank comes first."""
        path = self.path / self.partial(step)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, step: int) -> None:
        """Make a save, whose files are on disk, a commit."""
        self.hold()
        with directory(self.path) as handle:
            with directory(self.partial(step), handle) as inner:
                os.fsync(inner)
            os.rename(self.partial(step), commit_name(step), src_dir_fd=handle, dst_dir_fd=handle)
            os.fsync(handle)

    def abandon(self, step: int) -> None:
        """Remove a save that is to become no commit."""
        with directory(self.path) as handle:
            _remove(self.partial(step), handle)

    # ------------------------------------------------------------ commits

    def prune(self, keep: int) -> None:
        """Remove all commits but the newest, and the damaged ones that would have gone by now if they were whole."""
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
        """Give a commit that was passed over another name, so that the run can save this step again."""
        with directory(self.path) as handle:
            aside = f"{commit_name(step)}.damaged"
            _remove(aside, handle)
            os.rename(commit_name(step), aside, src_dir_fd=handle, dst_dir_fd=handle)

    def remove_damaged(self, before: int | None = None) -> list[str]:
        """Remove commits that were set aside, all or those of steps before one; returns their names."""
        with directory(self.path) as handle:
            found = [match for name in os.listdir(handle) if (match := DAMAGED.fullmatch(name))]
            names = sorted(match[0] for match in found if before is None or int(match[1]) < before)
            for name in names:
                _remove(name, handle)
        return names


def _remove(name: str, parent: int) -> None:
    """Remove what has a name in an open directory, if anything has; of a link, the link."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)
