"""Files of tensors in the safetensors format: written in one pass, hashed on the way, read slice by slice.

The format is a length, a JSON header and the tensors' bytes. The safetensors package only reads: files are written
here, through a descriptor (so that no link is followed), from existing memory, in blocks during which other threads
run, and without a second pass for the hash.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from safetensors import SafetensorError, safe_open

from partita.dsl.types import BYTES
from partita.runtime.addresses import Address, PathOrUrl
from partita.runtime.checkpoint.files import BLOCK, Corrupt
from partita.runtime.checkpoint.folders import Folder
from partita.runtime.checkpoint.manifest import File
from partita.runtime.checkpoint.remote_tensors import RemoteTensors
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.mapped import copy_file
from partita.runtime.regions import Region

# The sizes of dtypes, whose names in the format are ours in capitals. Files for other programs may have f16 as well.
WIDTHS = {**BYTES, "f16": 2}
ALIGNMENT = 8  # of the first tensor in the file


@frozen
class Entry:
    """A tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return self.elements * WIDTHS[self.dtype]


def header(entries: Sequence[Entry]) -> bytes:
    """The bytes before the tensors', which follow without gaps in the order of the entries."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        described[entry.name] = {"dtype": entry.dtype.upper(), "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def whole_file(entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a file of contiguous CPU tensors, each of which is taken when it is its turn."""
    yield header(entries)
    yield from map(bytes_of, tensors)


def write_file(name: str, folder: Folder, blocks: Iterable[bytes | memoryview]) -> File:
    """Write a new file in a folder; returns its size and hash."""
    digest, size = hashlib.sha256(), 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal size
        for block in blocks:
            digest.update(block)
            size += len(block)
            yield block

    folder.write(name, hashed())
    return File(size, digest.hexdigest())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


@define(eq=False)
class Shard:
    """The tensors that a rank saves, and a snapshot of them in host memory, which is allocated at the first save. Of a
    tensor that is mapped into memory (`files`, by name), the snapshot is a copy of its file, beside it.

    `take` takes a snapshot; `blocks` are the bytes of the file with the latest one.
    """

    entries: tuple[Entry, ...]
    tensors: tuple[torch.Tensor, ...]
    files: Mapping[str, Path] = field(factory=dict)
    _copy: torch.Tensor | None = None
    _taken: torch.cuda.Event | None = field(default=None, init=False)

    def take(self) -> None:
        """Copy all tensors. On a GPU the copies are only enqueued, before anything that is launched later."""
        cuda = any(tensor.is_cuda for tensor in self.tensors)
        if self._copy is None:
            size = sum(each.bytes for each, file in self._places() if file is None)
            self._copy = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        start = 0
        for (entry, file), tensor in zip(self._places(), self.tensors, strict=True):
            if file is not None:
                copy_file(file, _snapshot(file))
                continue
            part = self._copy[start : start + entry.bytes]
            part.view(DTYPES[entry.dtype]).view(entry.shape).copy_(tensor, non_blocking=True)
            start += entry.bytes
        if cuda:
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._taken.record()

    @property
    def copy(self) -> torch.Tensor:
        """The bytes of all tensors in the latest snapshot, in the order of the entries; waits until it is complete."""
        if self._taken is not None:
            self._taken.synchronize()
        assert self._copy is not None
        return self._copy

    def blocks(self) -> Iterator[bytes | memoryview]:
        """Yields the bytes of the file."""
        data = self.copy.numpy().data
        yield header(self.entries)
        offset = 0
        for entry, file in self._places():
            end = offset + (entry.bytes if file is None else 0)
            for start in range(offset, end, BLOCK):
                yield data[start : min(start + BLOCK, end)]
            offset = end
            if file is not None:
                yield from _blocks(_snapshot(file), entry.bytes)

    def _places(self) -> Iterator[tuple[Entry, Path | None]]:
        """Each entry, with its file if it is mapped into memory."""
        return ((entry, self.files.get(entry.name)) for entry in self.entries)


def _snapshot(file: Path) -> Path:
    return file.with_name(f"{file.name}.copy")


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file."""
    with file.open("rb") as opened:
        for start in range(0, size, BLOCK):
            yield opened.read(min(BLOCK, size - start))


# ---------------------------------------------------------------- reading


@contextmanager
def opened(path: PathOrUrl) -> Iterator[Any]:
    """Open a file of tensors: with the safetensors package, or at an address. Raises Corrupt if it is not one."""
    if isinstance(path, Address):
        yield RemoteTensors.of(path)
        return
    if path.exists() and not path.is_file():
        raise Corrupt(f"{path.name} is not a regular file")  # opening a FIFO would block forever
    try:
        file = safe_open(os.fspath(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{path.name} is not a file of tensors: {error}") from error
    with file:
        yield file


def check_entries(file: Any, name: str, entries: Sequence[Entry]) -> None:
    """Raise Corrupt unless a file has exactly these entries."""
    present = set(file.keys())
    expected = {each.name for each in entries}
    if present != expected:
        which = sorted(expected - present) or sorted(present - expected)
        raise Corrupt(f"{name} {'lacks' if expected - present else 'has a surplus'} {which[0]}")
    for each in entries:
        part = file.get_slice(each.name)
        if part.get_dtype() != each.dtype.upper() or tuple(part.get_shape()) != each.shape:
            described = f"{part.get_dtype()}{part.get_shape()}"
            raise Corrupt(f"{name} has {each.name} as {described}, not {each.dtype.upper()}{list(each.shape)}")


def read_region(file: Any, name: str, region: Region) -> torch.Tensor:
    """A region of a tensor of an open file. Raises Corrupt."""
    try:
        tensor: torch.Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
    except SafetensorError as error:
        raise Corrupt(f"{name} cannot be read: {error}") from error
    return tensor
