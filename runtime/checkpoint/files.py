"""Files of a directory that a stranger may have made: regular ones only, no links, no more than is expected.

Everything is opened relative to an open directory and without following a link, so that no name can lead elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from partita.dsl.diagnostic import shown

BLOCK = 1 << 22  # bytes read, hashed or written at a time, during which other threads run


class Damaged(ValueError):
    """A commit is not what was saved; the message names the file and what is wrong with it, on one line."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


@contextmanager
def directory(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """A directory, open: a path that the user has given, or a name in an open directory, which may be no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    handle = os.open(path, flags if parent is None else flags | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def regular_file(name: str, parent: int) -> Iterator[tuple[int, int]]:
    """A regular file of an open directory, open for reading, and its size. Raises Damaged."""
    try:
        kind = stat.S_IFMT(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        if kind != stat.S_IFREG:
            raise Damaged(f"{name} is {KINDS.get(kind, 'not a regular file')}")
        # Should it be exchanged for something else just now: no link is followed, and no pipe waited for.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing") from error
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
    try:
        yield handle, os.fstat(handle).st_size
    finally:
        os.close(handle)


KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory"}


def links(parent: int) -> list[str]:
    """The names in an open directory that are links."""
    with os.scandir(parent) as entries:
        return sorted(entry.name for entry in entries if entry.is_symlink())


def read(name: str, parent: int, most: int) -> bytes:
    """The content of a small file. Raises Damaged, also where it has more than `most` bytes."""
    with regular_file(name, parent) as (handle, size):
        if size > most:
            raise Damaged(f"{name} has {size:,} bytes; at most {most:,} are read")
        return b"".join(bytes(block) for block in _blocks(name, handle, size))


def sha256(name: str, parent: int, size: int, moved: Callable[[], None]) -> str:
    """The SHA-256 of a file that has `size` bytes. Raises Damaged, also where it has another size.

    `moved` is called now and then.
    """
    digest = hashlib.sha256()
    with regular_file(name, parent) as (handle, found):
        if found != size:
            raise Damaged(f"{name} has {found:,} bytes instead of {size:,}")
        for block in _blocks(name, handle, size):
            digest.update(block)
            moved()
    return digest.hexdigest()


def _blocks(name: str, handle: int, size: int) -> Iterator[memoryview]:
    """The content, in a buffer that is used again for each block."""
    buffer = memoryview(bytearray(min(BLOCK, size)))
    while size:
        try:
            count = os.readv(handle, [buffer[: min(BLOCK, size)]])
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from error
        if count == 0:
            raise Damaged(f"{name} ends too early")
        size -= count
        yield buffer[:count]


def create(name: str, parent: int, more: int = 0) -> int:
    """A new file, open for writing, with `more` flags; whatever had this name is gone."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | more, 0o666, dir_fd=parent)


def write(handle: int, data: bytes | memoryview) -> None:
    """All of the data."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left[:BLOCK]) :]


def put(name: str, parent: int, data: bytes) -> None:
    """A small file that is there whole or not at all, and on disk when this returns."""
    aside = f"{name}.new"
    handle = create(aside, parent)
    try:
        write(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)
    os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
    os.fsync(parent)
