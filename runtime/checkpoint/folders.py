"""The folder of a commit, or of a save: of this machine, or at an address. Does not need torch.

Of this machine only regular files are read, of bounded size, and links are never followed (`files`); what is written is
synced. At an address, a file is there when all of it is, and nobody has links.

Reading raises Corrupt, and Refused (E0819) if a server cannot be asked; writing raises OSError, of which the server's
are `addresses.StorageError`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

from attrs import frozen

from partita.dsl.diagnostic import Refused, refuse
from partita.runtime import addresses
from partita.runtime.addresses import Address, PathOrUrl
from partita.runtime.checkpoint import files
from partita.runtime.checkpoint.files import Corrupt


@frozen
class LocalFolder:
    """An open directory of this machine, by its descriptor."""

    handle: int

    def read(self, name: str, max_bytes: int) -> bytes:
        """The content of a small file, of at most `max_bytes` bytes."""
        return files.read(name, self.handle, max_bytes)

    def size(self, name: str) -> int:
        """The size of a file."""
        with files.regular_file(name, self.handle) as (_, size):
            return size

    def sha256(self, name: str, size: int, moved: Callable[[], None]) -> str:
        """The SHA-256 of a file of this size; `moved` is called after each block."""
        digest = hashlib.sha256()
        with files.regular_file(name, self.handle) as (handle, actual_size):
            if actual_size != size:
                raise Corrupt(f"{name} has {actual_size:,} bytes instead of {size:,}")
            for block in files.blocks(name, handle, size):
                digest.update(block)
                moved()
        return digest.hexdigest()

    def links(self) -> list[str]:
        """The names in it that are links."""
        with os.scandir(self.handle) as entries:
            return sorted(entry.name for entry in entries if entry.is_symlink())

    def has(self, name: str) -> bool:
        """Whether there is a file of this name. Raises OSError."""
        try:
            os.stat(name, dir_fd=self.handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def write(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        """Write a new file; one that was there is replaced."""
        handle = files.create(name, self.handle)
        try:
            for block in blocks:
                files.write(handle, block)
            os.fsync(handle)
        finally:
            os.close(handle)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, atomically."""
        files.put(name, self.handle, data)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.handle)


@frozen
class RemoteFolder:
    """A folder at an address, which is there as soon as something is in it."""

    address: Address

    def read(self, name: str, max_bytes: int) -> bytes:
        """The content of a small file."""
        size = self.size(name)
        if size > max_bytes:
            raise Corrupt(f"{name} has {size:,} bytes; at most {max_bytes:,} are read")
        with reading(self.address / name):
            return addresses.read_range(self.address / name, 0, size)

    def size(self, name: str) -> int:
        """Its size."""
        with reading(self.address / name):
            return addresses.size_of(self.address / name)

    def sha256(self, name: str, size: int, moved: Callable[[], None]) -> str:
        """Its SHA-256."""
        actual_size = self.size(name)
        if actual_size != size:
            raise Corrupt(f"{name} has {actual_size:,} bytes instead of {size:,}")
        digest = hashlib.sha256()
        with reading(self.address / name):
            for piece in addresses.pieces(self.address / name, 0, size):
                digest.update(piece)
                moved()
        return digest.hexdigest()

    def links(self) -> list[str]:
        """None."""
        return []

    def has(self, name: str) -> bool:
        """Whether it is there."""
        return addresses.exists(self.address / name)

    def write(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        """Write it; it is there when all of it is."""
        addresses.write(self.address / name, blocks)

    def put(self, name: str, data: bytes) -> None:
        """Write it atomically."""
        addresses.put(self.address / name, data)

    def remove(self, name: str) -> None:
        """Remove it."""
        addresses.remove(self.address / name)


Folder: TypeAlias = LocalFolder | RemoteFolder


@contextmanager
def reading(address: Address) -> Iterator[None]:
    """Read a file at an address: raises Corrupt if it is missing, and Refused (E0819) if a server cannot be asked."""
    try:
        yield
    except FileNotFoundError as error:
        raise Corrupt(f"{address.name} is missing") from error
    except OSError as error:
        raise unreadable(address, error) from error


def unreadable(place: PathOrUrl, error: OSError) -> Refused:
    """The error (E0819) if a server cannot be asked for a file, whatever it has."""
    help = "if the address is right: see that the server runs, and that your credentials may read there"
    return refuse("E0819", f"cannot read {place}: {error.strerror}", help=help)


def unwritable(place: PathOrUrl, error: OSError) -> Refused:
    """The error (E0802) if nothing can be written to a place."""
    help = "see that the server runs, that the bucket exists, and that your credentials may write there"
    cause = help if isinstance(place, Address) else None
    return refuse("E0802", f"cannot write to {place}: {error.strerror or error}", help=cause)


@contextmanager
def opened_folder(place: PathOrUrl, name: str) -> Iterator[Folder]:
    """Open a folder by its name in a directory. Raises OSError, NotADirectoryError for a link."""
    if isinstance(place, Address):
        yield RemoteFolder(place / name)
        return
    with files.directory(place) as outer, files.directory(name, outer) as handle:
        yield LocalFolder(handle)
