"""What took long to make or to fetch, kept for the next run: in `$PARTITA_CACHE`, or `partita` in the user's cache.

An entry of ids is one file: the ids; the end of each document, as i64; and a footer that says how many there are. It is
written under a temporary name, and renamed when it is complete, so that whoever finds it finds all of it, whenever the
writer was killed. One process makes an entry while others that want it wait (a lock of the kernel, which ends with its
holder); where the file system has no locks, each makes it, and the last rename wins. Entries are mapped: all ranks of a
machine share what is in memory of them, and they may be larger than memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
from attrs import frozen

from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span
from partita.runtime.data.ids import Ids

FOOTER = struct.Struct("<QQq8s8s")  # ids, documents, the largest id, dtype, magic
MAGIC = b"partita1"
GATHERED = 1 << 21  # ids that are written at once

Found = TypeVar("Found")
# Ids, and whether the document that they belong to ends with them.
Part: TypeAlias = tuple[np.ndarray, bool]


@frozen(eq=False)
class Documents:
    """Ids of documents, one after the other: document i is `ids[ends[i-1] : ends[i]]`. `largest` is the largest id, -1
    without any.
    """

    ids: Ids
    ends: np.ndarray
    largest: int

    @cached_property
    def starts(self) -> np.ndarray:
        """The start of each document."""
        return starts_of(self.ends)

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many ids each has."""
        sizes: np.ndarray = self.ends - self.starts
        return sizes


def starts_of(ends: np.ndarray) -> np.ndarray:
    """Where what follows one another starts, by where each ends."""
    starts: np.ndarray = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    return starts


def directory() -> Path:
    """Where entries are. Raises Refused (E0618) if there is no place for them."""
    configured = os.environ.get("PARTITA_CACHE")
    if configured:
        return Path(configured)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "partita"
    except RuntimeError as error:
        help = "name a directory in the environment: PARTITA_CACHE=/scratch/partita"
        raise refuse("E0618", "there is no home directory to keep data in", help=help) from error


def entry(key: str, make: Callable[[], Iterable[Part]], dtype: np.dtype, span: Span | None) -> Documents:
    """The entry of a key, hexadecimal digits; `make` gives its parts in order, if it is not there yet.

    Raises Refused (E0618) if it cannot be kept, and what `make` raises.
    """
    return _kept(directory() / f"{key}.ids", _opened, lambda path: _write(path, make(), dtype), span)


def file(name: str, fetch: Callable[[str], object], span: Span | None) -> Path:
    """The path of a file of this name, which begins with hexadecimal digits; `fetch` writes it, to the path that it is
    given, if it is not there yet.

    Raises Refused (E0618) if it cannot be kept, and what `fetch` raises.
    """
    return _kept(directory() / name, lambda path: path if path.exists() else None, lambda path: fetch(str(path)), span)


def kept(content: str, suffix: str, span: Span | None) -> Path:
    """The path of a file with this content, which names it. Raises Refused (E0618) if it cannot be kept."""
    key = hashlib.sha256(content.encode()).hexdigest()[:40]
    return file(f"{key}.{suffix}", lambda path: Path(path).write_text(content, encoding="utf-8"), span)


@contextmanager
def writable(path: Path, span: Span | None) -> Iterator[None]:
    """Refuse (E0618) a file of the cache that cannot be written; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise refuse(
            "E0618",
            f"cannot keep data in {path.parent}: {error.strerror or error}",
            span,
            help="free some space, or name another directory in the environment: PARTITA_CACHE=/scratch/partita",
        ) from error


def _kept(
    path: Path, opened: Callable[[Path], Found | None], write: Callable[[Path], object], span: Span | None
) -> Found:
    """What `opened` finds at a path, if need be after `write` has made it. Raises Refused (E0618)."""
    lock = path.with_name(f"{path.name}.lock")
    with writable(path, span):
        cached = opened(path)
        if cached is not None:
            return cached
        with _locked(lock) as alone:
            cached = opened(path)  # another process may have made it meanwhile
            if cached is None:
                if alone:
                    for left in path.parent.glob(f"{path.name}.*.part"):  # of one that was killed
                        left.unlink(missing_ok=True)
                _complete(path, write)
                cached = opened(path)
            if alone:
                lock.unlink(missing_ok=True)
    if cached is None:
        raise refuse("E0618", f"{path} was damaged as soon as it was written", span)
    return cached


def _complete(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name, and rename it when it is on the disk; if that fails, nothing is left behind."""
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    try:
        os.close(handle)
        write(Path(name))
        with open(name, "rb") as written:
            os.fsync(written.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of an entry; yields whether there are locks."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _write(path: Path, parts: Iterable[Part], dtype: np.dtype) -> None:
    """Write an entry. Raises OSError, and what `parts` raises."""
    with path.open("wb") as file:
        ends: list[int] = []
        count, largest, written = 0, -1, 0
        gathered: list[np.ndarray] = []

        def write() -> int:
            together = np.concatenate([*gathered, np.empty(0, dtype)]).astype(dtype, copy=False)
            file.write(together.data)
            gathered.clear()
            return int(together.max()) if len(together) else -1

        for ids, last in parts:
            count += len(ids)
            if last:
                ends.append(count)
            gathered.append(ids)
            if count - written >= GATHERED:
                largest, written = max(largest, write()), count
        largest = max(largest, write())
        file.write(bytes(-count * dtype.itemsize % 8))
        file.write(np.array(ends, "<i8").tobytes())
        file.write(FOOTER.pack(count, len(ends), largest, dtype.str.encode(), MAGIC))


def _opened(path: Path) -> Documents | None:
    """A complete entry, mapped; None if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < FOOTER.size:
                return None
            file.seek(size - FOOTER.size)
            count, documents, largest, written, magic = FOOTER.unpack(file.read(FOOTER.size))
    except FileNotFoundError:
        return None
    name = written.rstrip(b"\0").decode("ascii", "replace")
    if magic != MAGIC or name not in ("|u1", "<u2", "<u4"):
        return None
    dtype = np.dtype(name)
    start = count * dtype.itemsize
    start += -start % 8
    if size != start + 8 * documents + FOOTER.size:
        return None  # cut off
    return Documents(_map(path, dtype, 0, count), _map(path, np.dtype("<i8"), start, documents), largest)


def _map(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,))
