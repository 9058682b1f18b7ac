"""The identity of a run's data: files by name, size and content, so that changes are noticed.

Ranks on different machines compare it before the first step, and a checkpoint stores it for the run that resumes from
it. Small files are hashed in full; of large ones, evenly spaced blocks that include the first and the last. This takes
a moment at any size and detects files that were replaced, truncated or extended, but not a change of a few bytes
between two blocks. Modification times differ between copies, and only appear in messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from attrs import field, frozen

from partita.dsl.diagnostic import Refused
from partita.dsl.syntax.source import Span
from partita.runtime.data.files import readable

WHOLE = 1 << 26  # bytes up to which a file is hashed in full
BLOCK, BLOCKS = 1 << 16, 256
MAX_FILES = 1_000  # listed one by one; more are combined into one hash
MAX_SHOWN = 6


class ReadFailed(Refused):
    """Data cannot be read. Only the ranks know whose rows they are."""


@frozen
class DataFile:
    """A data file: its name as the run's file gives it, its size in bytes and its content hash.

    `modified` is its modification time in seconds since 1970, `path` its place on this machine.
    """

    name: str
    size: int
    sha256: str
    modified: int = field(default=0, eq=False)
    path: Path | None = field(default=None, eq=False)


def identified(files: Sequence[tuple[str, Path]], span: Span | None) -> tuple[DataFile, ...]:
    """The identity of files given by name and path. Raises Refused (E0603) for one that cannot be read."""
    data_files = []
    for name, path in files:
        with readable(name, span):
            status = path.stat()
            data_files.append(DataFile(name, status.st_size, hashed(path, status.st_size), int(status.st_mtime), path))
    if len(data_files) <= MAX_FILES:
        return tuple(data_files)
    together = hashlib.sha256("".join(f"{each.name}\0{each.size} {each.sha256}\0" for each in data_files).encode())
    size, modified = sum(each.size for each in data_files), max(each.modified for each in data_files)
    return (DataFile(f"{len(data_files):,} files from {data_files[0].name} on", size, together.hexdigest(), modified),)


def hashed(path: Path, size: int) -> str:
    """The SHA-256 of the first `size` bytes of a file, or of blocks of them if they are many."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start, length in _blocks(size):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """The start and length of each block to hash."""
    if size > WHOLE:
        for index in range(BLOCKS):
            yield (size - BLOCK) * index // (BLOCKS - 1), BLOCK
    else:
        for start in range(0, size, 1 << 20):
            yield start, min(1 << 20, size - start)


# ---------------------------------------------------------------- what differs


def changed(before: Sequence[DataFile], now: Sequence[DataFile]) -> list[str]:
    """How the files of a run differ from those before, in words."""

    def grown(was: DataFile, file: DataFile) -> str:
        if file.path is not None and file.size > was.size and hashed(file.path, was.size) == was.sha256:
            return f"`{file.name}` has grown from {was.size:,} to {file.size:,} bytes; the old content is unchanged"
        when = f", written {_date(file.modified)}" if file.modified else ""
        if file.size == was.size:
            return f"`{file.name}` has different content of the same size{when}"
        return f"`{file.name}` had {was.size:,} bytes, and has {file.size:,}{when}"

    return _differences(before, now, "`{}` is missing", "`{}` is new", grown)


def unlike(one: Sequence[DataFile], one_rank: int, other: Sequence[DataFile], other_rank: int) -> list[str]:
    """How the files of one rank differ from those of another, in words."""

    def differs(here: DataFile, there: DataFile) -> str:
        if here.size == there.size:
            dates = f"{_date(here.modified)} on rank {one_rank}, {_date(there.modified)} on rank {other_rank}"
            return f"`{here.name}` has different content of the same size, written {dates}"
        return f"`{here.name}` has {here.size:,} bytes on rank {one_rank}, {there.size:,} on rank {other_rank}"

    return _differences(
        one, other, f"`{{}}` is only on rank {one_rank}", f"`{{}}` is only on rank {other_rank}", differs
    )


def _differences(
    before: Sequence[DataFile],
    now: Sequence[DataFile],
    missing: str,
    new: str,
    differs: Callable[[DataFile, DataFile], str],
) -> list[str]:
    old, present = ({each.name: each for each in files} for files in (before, now))
    notes = [
        missing.format(name)
        if name not in present
        else new.format(name)
        if name not in old
        else differs(old[name], present[name])
        for name in {**old, **present}
        if old.get(name) != present.get(name)
    ]
    more = len(notes) - MAX_SHOWN
    return [*notes[:MAX_SHOWN], *([f"and {more} more file{'s' * (more > 1)}"] if more > 0 else [])]


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
