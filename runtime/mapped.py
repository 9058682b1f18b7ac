"""Tensors in files that are mapped into memory (`offload NAME by mmap`).

A file is scratch space of one rank in one run: it begins as a hole of its size, of which pages come to be as they are
written, and what outlives the run is a checkpoint. A copy of a file keeps its holes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from errno import ENXIO
from math import prod
from pathlib import Path

import torch

BLOCK = 1 << 26  # bytes that are copied at a time


def mapped_tensor(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in a new file, which replaces any that is there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    size = max(1, prod(shape)) * dtype.itemsize
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(file, size)
        mapping = mmap.mmap(file, size)
    finally:
        os.close(file)
    return torch.frombuffer(mapping, dtype=dtype)[: prod(shape)].view(tuple(shape))


def copy_file(source: Path, target: Path) -> None:
    """Copy a file with its holes; replaces a target that is there. Raises OSError."""
    target.unlink(missing_ok=True)
    with source.open("rb") as read, target.open("xb") as written:
        size = os.fstat(read.fileno()).st_size
        os.ftruncate(written.fileno(), size)
        start = 0
        while (extent := _data(read.fileno(), start)) is not None:
            start, end = extent
            os.lseek(written.fileno(), start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(written.fileno(), read.fileno(), start, min(BLOCK, end - start))


def _data(file: int, start: int) -> tuple[int, int] | None:
    """The next part of a file from `start` on that is no hole; None if there is none."""
    try:
        begin = os.lseek(file, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == ENXIO:
            return None
        raise
    return begin, os.lseek(file, begin, os.SEEK_HOLE)
