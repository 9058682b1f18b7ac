"""Files of a directory that may be untrusted: only regular files of bounded size are read, and no links followed.

Everything is opened relative to an open directory, without following links, so that no name can lead elsewhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from partita.dsl.diagnostic import shown

BLOCK = 1 << 22  # bytes read, hashed or written per call, during which other threads run


class Corrupt(ValueError):
    """A commit differs from what was saved; the message, one line, names the file and what is wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


@contextmanager
def directory(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """Open a directory: a path that the user gave, or a name in an open directory, which may not be a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    handle = os.open(path, flags if parent is None else flags | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def regular_file(name: str, parent: int) -> Iterator[tuple[int, int]]:
    """Open a regular file of an open directory for reading; yields descriptor and size. Raises Corrupt."""
    try:
        kind = stat.S_IFMT(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        if kind != stat.S_IFREG:
            raise Corrupt(f"{name} is {KINDS.get(kind, 'not a regular file')}")
        # If it has been replaced since: no link is followed, and opening a FIFO does not block.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError as error:
        raise Corrupt(f"{name} is missing") from error
    except OSError as error:
        raise Corrupt(f"{name} cannot be read: {error.strerror}") from error
    try:
        yield handle, os.fstat(handle).st_size
    finally:
        os.close(handle)


KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory"}


def read(name: str, parent: int, max_bytes: int) -> bytes:
    """The content of a small file. Raises Corrupt, also if it has more than `max_bytes` bytes."""
    with regular_file(name, parent) as (handle, size):
        if size > max_bytes:
            raise Corrupt(f"{name} has {size:,} bytes; at most {max_bytes:,} are read")
        return b"".join(bytes(block) for block in blocks(name, handle, size))


def blocks(name: str, handle: int, size: int) -> Iterator[memoryview]:
    """Yields the content, in one buffer that is reused for each block."""
    buffer = memoryview(bytearray(min(BLOCK, size)))
    while size:
        try:
            count = os.readv(handle, [buffer[: min(BLOCK, size)]])
        except OSError as error:
            raise Corrupt(f"{name} cannot be read: {error.strerror}") from error
        if count == 0:
            raise Corrupt(f"{name} ends too early")
        size -= count
        yield buffer[:count]


def create(name: str, parent: int, more: int = 0) -> int:
    """Create a file and open it for writing, with `more` flags; an existing one of that name is removed."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | more, 0o666, dir_fd=parent)


def write(handle: int, data: bytes | memoryview) -> None:
    """Write all of the data."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left[:BLOCK]) :]


def put(name: str, parent: int, data: bytes) -> None:
    """Write and sync a small file atomically."""
    aside = f"{name}.new"
    handle = create(aside, parent)
    try:
        write(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)
    os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
    os.fsync(parent)
