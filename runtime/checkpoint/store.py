"""The directory of a run's checkpoints: what its names mean, and how a save becomes a commit.

A commit gets its name by one rename, after all of its contents are on disk. So whatever has the name of a commit is
complete, and a run that dies at any moment leaves the earlier commits intact, and at most a save that nobody reads.
At an address, where nothing can be renamed, `address_store` gives the same guarantees.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from attrs import define, field

from partita.dsl.diagnostic import Diagnostic
from partita.runtime import locks
from partita.runtime.checkpoint.files import directory, put
from partita.runtime.checkpoint.folders import Folder, LocalFolder, unwritable
from partita.runtime.checkpoint.manifest import NAME

COMMIT = re.compile(r"step-(\d{8,16})")
LEFTOVER = re.compile(r"step-\d{8,16}\.(partial-[0-9a-f]+|removed)")
DAMAGED = re.compile(r"step-(\d{8,16})\.damaged")


def commit_name(step: int) -> str:
    """The directory name of the commit of a step."""
    return f"step-{step:08}"


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps of the commits that have some of these names, ascending."""
    matches = (COMMIT.fullmatch(name) for name in names)
    return sorted(step for match in matches if match and commit_name(step := int(match[1])) == match[0])


@define(eq=False)
class Store:
    """A directory of checkpoints of this machine, for writing. Its files are those of a run alone, since its saves have
    names of their own. Only rank 0 locks, cleans, commits and removes.

    `attempt` distinguishes this run's saves, so that a surviving rank of an earlier run writes elsewhere. Methods raise
    OSError.
    """

    poll_seconds: ClassVar[float] = 0.02  # how long rank 0 waits before it looks for the markers of others again
    bounded: ClassVar[bool] = False  # whether each operation gives up by itself
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
                self._lock, warning = locks.hold(handle, self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error
        return warning

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

    @property
    def suffix(self) -> str:
        """What the names of a save's files have in front of their extension: nothing, in directories of their own."""
        return ""

    @contextmanager
    def save(self, step: int) -> Iterator[Folder]:
        """Open the directory of a save, created by whichever rank comes first."""
        (self.path / self.partial(step)).mkdir(parents=True, exist_ok=True)
        with directory(self.path) as outer, directory(self.partial(step), outer) as handle:
            yield LocalFolder(handle)

    def commit(self, step: int, manifest: bytes, markers: Sequence[str]) -> None:
        """Turn a save, whose files are on disk, into a commit with this manifest, and without the markers: by one
        rename.
        """
        with directory(self.path) as handle:
            with directory(self.partial(step), handle) as inner:
                put(NAME, inner, manifest)
                for name in markers:
                    os.unlink(name, dir_fd=inner)
                self.hold()
                os.fsync(inner)
            os.rename(self.partial(step), commit_name(step), src_dir_fd=handle, dst_dir_fd=handle)
            os.fsync(handle)

    def abandon(self, step: int) -> None:
        """Remove a save that will not become a commit."""
        with directory(self.path) as handle:
            _remove(self.partial(step), handle)

    # ------------------------------------------------------------ commits

    def steps(self) -> list[int]:
        """The steps of the commits; none if there is no directory."""
        try:
            return steps_of(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, step: int) -> None:
        """Remove a commit."""
        with directory(self.path) as handle:
            aside = f"{commit_name(step)}.removed"
            # Renamed first: what is half removed must not look like a commit.
            os.rename(commit_name(step), aside, src_dir_fd=handle, dst_dir_fd=handle)
            _remove(aside, handle)

    def quarantine(self, step: int) -> None:
        """Rename a commit that was skipped as damaged, so that the run can save this step again."""
        with directory(self.path) as handle:
            aside = f"{commit_name(step)}.damaged"
            _remove(aside, handle)
            os.rename(commit_name(step), aside, src_dir_fd=handle, dst_dir_fd=handle)

    def remove_damaged(self, before: int | None = None) -> list[str]:
        """Remove commits that were set aside, all or those of steps before `before`; returns their names."""
        with directory(self.path) as handle:
            matches = [match for name in os.listdir(handle) if (match := DAMAGED.fullmatch(name))]
            names = sorted(match[0] for match in matches if before is None or int(match[1]) < before)
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
