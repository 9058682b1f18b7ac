"""Slots: files in memory, of which each holds what one rank saves of one step, as a file of a checkpoint does on disk.

A slot begins with a head, a label, the manifest of the run and, from the next page on, the bytes of the tensors. The
head is cleared first and written last, so a rank that is killed while it fills a slot leaves an empty one. Slots are
written through descriptors and never mapped while a rank trains: no stray write of a dying process gets there.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from struct import Struct, error
from typing import Any
from zlib import crc32

import torch
from attrs import asdict, evolve, field, frozen

from partita.runtime.bad_steps import History
from partita.runtime.checkpoint.checksummed import with_checksum
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.loading import entries_of
from partita.runtime.checkpoint.manifest import File, Manifest
from partita.runtime.kernels.dtypes import DTYPES

PAGE = 4096
MAGIC = b"partita\1"
HEAD = Struct("<8sIIQQ")  # the magic number, a CRC-32 of the rest and the texts; the sizes of label, manifest and data
NO_FILE = File(8, "0" * 64)  # in a manifest of memory, whose shards are no files


@frozen
class Label:
    """Whose shard of which step a slot holds. An `attempt` at the run writes each of its steps once."""

    attempt: int
    step: int
    rank: int
    ranks: int
    history: History = field(factory=History)

    @property
    def generation(self) -> tuple[int, int, int]:
        """What the shards of one step have in common."""
        return self.step, self.attempt, self.ranks

    @classmethod
    def read(cls, text: bytes) -> Label:
        """The label of its text."""
        fields = json.loads(text)
        history = fields.pop("history")
        return cls(**fields, history=History(**{**history, **{k: tuple(history[k]) for k in ("losses", "norms")}}))

    @property
    def text(self) -> bytes:
        """The label as text."""
        return json.dumps(asdict(self)).encode()


@frozen
class Slot:
    """A file in memory, by its descriptor. Methods raise OSError, as if there is no memory left."""

    file: int

    def write(self, label: Label, manifest: bytes, blocks: Iterable[bytes | memoryview]) -> None:
        """Fill the slot. It is empty until the last block is in it."""
        self.clear()
        text = label.text
        start = place = _pages(HEAD.size + len(text) + len(manifest))
        for block in blocks:
            left = memoryview(block)
            while left:
                count = os.pwrite(self.file, left, place)
                place, left = place + count, left[count:]
        os.ftruncate(self.file, place)  # of a longer one before
        os.pwrite(self.file, text + manifest, HEAD.size)
        sizes = len(text), len(manifest), place - start
        os.pwrite(self.file, HEAD.pack(MAGIC, _checksum(sizes, text + manifest), *sizes), 0)

    def clear(self) -> None:
        """Make the slot an empty one."""
        os.pwrite(self.file, bytes(HEAD.size), 0)

    def label(self) -> Label | None:
        """What the slot holds; None if nothing."""
        contents = self._texts()
        return None if contents is None else Label.read(contents[0])

    def data(self) -> tuple[int, int]:
        """Where the tensors' bytes begin in the file, and how many they are. Raises Corrupt if the slot is empty."""
        _, _, start, size = self._held()
        return start, size

    def read(self, place: int, count: int) -> bytearray:
        """So many bytes of the file, from a place on. Raises Corrupt if there are fewer."""
        block = bytearray(count)
        if os.preadv(self.file, [block], place) != count:
            raise Corrupt("a slot of memory ends too early")
        return block

    def texts(self) -> tuple[bytes, bytes]:
        """The texts of the label and of the manifest. Raises Corrupt if the slot is empty."""
        return self._held()[:2]

    def _held(self) -> tuple[bytes, bytes, int, int]:
        contents = self._texts()
        if contents is None:
            raise Corrupt("a slot of memory is empty")
        return contents

    def _texts(self) -> tuple[bytes, bytes, int, int] | None:
        """The label, the manifest, and where the data begin and how many bytes they are; None if the slot is empty."""
        try:
            magic, checksum, *sizes = HEAD.unpack(os.pread(self.file, HEAD.size, 0))
        except error:
            return None
        if magic != MAGIC:
            return None
        label, manifest, data = sizes
        start = _pages(HEAD.size + label + manifest)
        if os.fstat(self.file).st_size < start + data:
            return None
        text = os.pread(self.file, label + manifest, HEAD.size)
        if checksum != _checksum(sizes, text):
            return None
        return text[:label], text[label:], start, data


def _checksum(sizes: Sequence[int], text: bytes) -> int:
    return crc32(text, crc32(repr(tuple(sizes)).encode()))


def _pages(size: int) -> int:
    return size + -size % PAGE


def manifest_text(manifest: Manifest) -> bytes:
    """The manifest of a run, as all slots have it: of no step."""
    files = (NO_FILE,) * manifest.mesh.ranks
    return with_checksum(evolve(manifest, step=0, history=History(), files=files).as_json())


class Shards:
    """The tensors of one rank's shard in memory; answers as a file that the safetensors package has opened."""

    def __init__(self, manifest: Manifest, rank: int, data: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        start = 0
        for each in entries_of(manifest, rank):
            dtype = DTYPES[each.dtype]
            if each.elements:
                flat = torch.frombuffer(data, dtype=dtype, count=each.elements, offset=start)
            else:
                flat = torch.empty(0, dtype=dtype)
            self._tensors[each.name] = flat.view(each.shape)
            start += each.bytes
        if start > len(data):
            raise Corrupt(f"a copy of rank {rank} has {len(data):,} bytes instead of {start:,}")

    @classmethod
    def of(cls, slot: Slot, manifest: Manifest, rank: int) -> Shards:
        """Those of a slot; pages are read as they are asked for. Raises Corrupt and OSError."""
        start, size = slot.data()
        if not size:
            return cls(manifest, rank, b"")
        return cls(manifest, rank, mmap.mmap(slot.file, size, mmap.MAP_PRIVATE, offset=start))

    def get_slice(self, name: str) -> torch.Tensor:
        """A tensor, of which regions can be read."""
        return self._tensors[name]

    get_tensor = get_slice
