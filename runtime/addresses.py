"""Files at addresses such as `s3://bucket/runs/gpt`: opened by fsspec, with the credentials that its packages find
(environment, configuration files, the machine's role).

Every call ends: clients give up after some tries. Whatever their packages raise becomes an OSError, with the cause on
one line: FileNotFoundError if nothing is there, otherwise StorageError.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from attrs import frozen

from partita.dsl.diagnostic import Refused, refuse, shown
from partita.dsl.syntax.source import Span
from partita.runtime.data.packages import package

# The schemes of addresses, and the packages that read them beside fsspec; and those that can be written to.
SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
WRITABLE = ("s3", "gs")
# How long a client of S3 waits for a connection and for an answer, before it tries again a few times.
S3_PATIENCE: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
NOT_THERE = (404, 410)  # as HTTP says it
MAX_REASON = 300  # characters
PIECE = 1 << 24  # bytes that are read at once


class StorageError(OSError):
    """A server does not answer, refuses, or answers with what nobody asked for."""


@frozen
class Address:
    """The address of a file or a folder, without a `/` at its end. Like a path: `/` gives what is in it."""

    text: str

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text

    @property
    def scheme(self) -> str:
        """`s3` of `s3://bucket/a`."""
        return self.text.partition("://")[0]

    @property
    def name(self) -> str:
        """Its last part."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """The folder that it is in."""
        return Address(self.text.rpartition("/")[0])


# A file or folder: of this machine, or at an address.
PathOrUrl: TypeAlias = Path | Address


def is_address(text: str) -> bool:
    """Whether a text is an address, and not a path."""
    return "://" in text


def place_of(text: str, folder: Path | None = None) -> PathOrUrl:
    """The place that a text on the command line names; a relative path is in `folder`, by default the current one."""
    return Address(text.rstrip("/")) if is_address(text) else (folder or Path()) / text


def resolved(place: PathOrUrl) -> str:
    """A text by which a place is the same wherever it is read from."""
    return str(place.resolve() if isinstance(place, Path) else place)


def check_writable(address: Address, span: Span | None = None) -> None:
    """Refuse (E0602) an address that cannot be written to."""
    if address.scheme not in WRITABLE:
        known = ", ".join(f"`{each}://`" for each in WRITABLE)
        raise refuse("E0602", f"nothing can be written to `{shown(str(address))}`", span, help=f"addresses: {known}")


def system_of(address: str, span: Span | None = None) -> tuple[Any, str]:
    """The file system of an address, of fsspec, and the path there. Raises Refused (E0602, E0617)."""
    scheme = address.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"`{each}://`" for each in SCHEMES)
        raise refuse("E0602", f"`{shown(scheme)}://` is not among the addresses that can be read", span, help=known)
    package("fsspec", "remote", f"`{scheme}://`", span)
    package(SCHEMES[scheme], "remote", f"`{scheme}://`", span)
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        configured = package("fsspec.config", "remote", "`s3://`", span).conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {**S3_PATIENCE, **configured}
    with storage_errors_translated():
        location: tuple[Any, str] = package("fsspec.core", "remote", f"`{scheme}://`", span).url_to_fs(
            address, **options
        )
    return location


@contextmanager
def storage_errors_translated() -> Iterator[None]:
    """Raise FileNotFoundError or StorageError for whatever a file system raises."""
    try:
        yield
    except FileNotFoundError as error:
        cause = error.__cause__
        # Over HTTP, whatever fails is called a file that is not found; the cause knows better.
        if type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", None) not in NOT_THERE:
            raise StorageError(_number(error), reason(cause or error)) from error
        raise
    except (StorageError, Refused):
        raise
    except Exception as error:  # each package raises its own
        raise StorageError(_number(error), reason(error)) from error


def reason(error: BaseException) -> str:
    """The cause of an error, on one line."""
    text = shown(next(iter(str(error).strip().split("\n")), "")) or type(error).__name__
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"


def _number(error: BaseException) -> int:
    """The number of the system's error that comes nearest: all that ranks tell each other of it."""
    causes = list(_causes(error))
    if any(isinstance(each, PermissionError) or "Credentials" in type(each).__name__ for each in causes):
        return errno.EACCES
    if any(isinstance(each, TimeoutError) or "Timeout" in type(each).__name__ for each in causes):
        return errno.ETIMEDOUT
    if any(isinstance(each, ConnectionError) or "Connect" in type(each).__name__ for each in causes):
        return errno.ECONNREFUSED
    return errno.EIO


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# ---------------------------------------------------------------- single files


def size_of(address: Address) -> int:
    """The size of a file in bytes. Raises OSError."""
    system, path = system_of(str(address))
    with storage_errors_translated():
        size = system.info(path).get("size")
    if size is None:
        raise StorageError(errno.EIO, "the server does not tell its size")
    return int(size)


def read_range(address: Address, start: int, stop: int) -> bytes:
    """Some bytes of a file. Raises OSError, also if there are fewer."""
    if start == stop:
        return b""
    system, path = system_of(str(address))
    with storage_errors_translated():
        data: bytes = system.cat_file(path, start=start, end=stop)
    if len(data) > stop - start:
        raise StorageError(errno.EIO, "the server does not serve parts of files (range requests)")
    if len(data) < stop - start:
        raise StorageError(errno.EIO, f"{len(data):,} bytes came instead of {stop - start:,}")
    return data


def pieces(address: Address, start: int, stop: int) -> Iterator[bytes]:
    """Some bytes of a file, piece by piece. Raises OSError."""
    for first in range(start, stop, PIECE):
        yield read_range(address, first, min(stop, first + PIECE))


def names_in(address: Address) -> list[str]:
    """The names of the files and folders in a folder; none if there is no such folder. Raises OSError."""
    system, path = system_of(str(address))
    try:
        with storage_errors_translated():
            paths = system.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return sorted({name.rstrip("/").rpartition("/")[2] for name in paths} - {""})


def exists(address: Address) -> bool:
    """Whether there is a file at an address. Raises OSError."""
    system, path = system_of(str(address))
    try:
        with storage_errors_translated():
            return bool(system.info(path).get("type") != "directory")
    except FileNotFoundError:
        return False


def put(address: Address, data: bytes) -> None:
    """Write a small file at once: whoever reads it reads all of it, or what was there before. Raises OSError."""
    system, path = system_of(str(address))
    with storage_errors_translated():
        system.pipe_file(path, data)


def write(address: Address, blocks: Iterable[bytes | memoryview]) -> None:
    """Write a file, which is there when all of it is: a small one at once, others in parts that are then put together.

    Raises OSError, and what `blocks` raises.
    """
    left, first, size = iter(blocks), list[bytes | memoryview](), 0
    for block in left:
        first.append(bytes(block))
        size += len(block)
        if size >= PIECE:
            break
    else:
        put(address, b"".join(first))
        return
    system, path = system_of(str(address))
    with storage_errors_translated():
        file = system.open(path, "wb", autocommit=False)
    try:
        for block in chain(first, left):
            with storage_errors_translated():
                file.write(block)
        with storage_errors_translated():
            file.close()
            file.commit()
    except BaseException:
        with suppress(OSError), storage_errors_translated():
            file.discard()
        file.closed = True  # or it would be sent when it is collected
        raise


def remove(address: Address) -> None:
    """Remove a file, if it is there. Raises OSError."""
    system, path = system_of(str(address))
    try:
        with storage_errors_translated():
            system.rm_file(path)
    except FileNotFoundError:
        return
