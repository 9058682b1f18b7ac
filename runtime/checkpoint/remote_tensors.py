"""A file of tensors in the safetensors format at an address, of which only what is asked for is read.

It answers as a file that the safetensors package has opened.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from attrs import frozen

from partita.runtime.addresses import Address, pieces, size_of
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.folders import reading
from partita.runtime.kernels.dtypes import DTYPES as OURS
from partita.runtime.regions import Region, whole_region

# By the format's names, which are ours in capitals.
DTYPES = {name.upper(): dtype for name, dtype in {**OURS, "f16": torch.float16, "i16": torch.int16}.items()}
LENGTH = 8  # bytes that say how long the header is
MAX_HEADER = 100_000_000  # bytes, as the safetensors package has it
FIRST = 1 << 16  # bytes that are read at first: all of the header, mostly


@frozen
class RemoteSlice:
    """A tensor of a file, of which regions can be read."""

    address: Address
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file

    def get_dtype(self) -> str:
        """The format's name of the dtype."""
        return self.dtype

    def get_shape(self) -> list[int]:
        """The shape."""
        return list(self.shape)

    def __getitem__(self, region: Region) -> torch.Tensor:
        """A region. Only its rows along the first axis are read, and of the other axes all. Raises Corrupt, Refused."""
        first, others = region[0], region[1:]
        rows, row = first.stop - first.start, prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        start = self.start + first.start * row
        data = _read(self.address, start, start + rows * row)
        read = torch.frombuffer(data, dtype=DTYPES[self.dtype]) if data else torch.empty(0, dtype=DTYPES[self.dtype])
        return read.view(rows, *self.shape[1:])[(slice(None), *others)]

    def whole(self) -> torch.Tensor:
        """All of it. Raises Corrupt, Refused."""
        if not self.shape:
            return RemoteSlice(self.address, self.dtype, (1,), self.start)[slice(0, 1),].view(())
        return self[whole_region(self.shape)]


@frozen
class RemoteTensors:
    """The tensors of a file, by name."""

    tensors: dict[str, RemoteSlice]

    @classmethod
    def of(cls, address: Address) -> RemoteTensors:
        """Read the header of a file. Raises Corrupt, also if there is none; Refused (E0819) if it cannot be read."""
        with reading(address):
            size = size_of(address)
        start = _read(address, 0, min(size, FIRST))
        length = int.from_bytes(start[:LENGTH], "little")
        if size < LENGTH or length > min(MAX_HEADER, size - LENGTH):
            raise _wrong(address, "it has no header")
        start += _read(address, len(start), max(len(start), LENGTH + length))
        try:
            header = json.loads(start[LENGTH : LENGTH + length])
            if not isinstance(header, dict):
                raise ValueError("its header is no object")
            header.pop("__metadata__", None)
            return cls({name: _slice(address, each, LENGTH + length, size) for name, each in header.items()})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _wrong(address, f"its header is wrong: {error}") from error

    def keys(self) -> Sequence[str]:
        """The names."""
        return list(self.tensors)

    def get_slice(self, name: str) -> RemoteSlice:
        """A tensor, still unread."""
        return self.tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor. Raises Corrupt, Refused."""
        return self.tensors[name].whole()


def _slice(address: Address, written: Any, base: int, size: int) -> RemoteSlice:
    """A tensor as a header describes it. Raises ValueError, TypeError, KeyError."""
    dtype, shape, (start, end) = written["dtype"], written["shape"], written["data_offsets"]
    if dtype not in DTYPES or not all(type(each) is int and each >= 0 for each in (*shape, start, end)):
        raise ValueError(f"a tensor of {dtype!r}, {shape!r}, at {start!r}")
    if end - start != prod(shape) * DTYPES[dtype].itemsize or base + end > size:
        raise ValueError(f"{end - start:,} bytes for a tensor of {dtype}{shape}, in a file of {size:,}")
    return RemoteSlice(address, dtype, tuple(shape), base + start)


def _read(address: Address, start: int, stop: int) -> bytearray:
    with reading(address):
        return bytearray().join(pieces(address, start, stop))


def _wrong(address: Address, why: str) -> Corrupt:
    return Corrupt(f"{address.name} is not a file of tensors: {why}")
