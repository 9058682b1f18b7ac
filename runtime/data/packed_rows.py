"""Which documents share a row: best fit in order of falling length (best-fit decreasing; for language models: Ding et
al., Fewer Truncations Improve Language Modeling, 2024).

The rows of many documents are kept as ids are: one process of a machine packs them, and all ranks map them. A file is
the numbers of rows and pieces, and then the arrays of `Rows`, little-endian, one after the other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import frozen

from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span
from partita.runtime.data import cache
from partita.runtime.data.cache import Documents

VERSION = 1  # of how documents are packed, and of the file
MIN_DOCUMENTS = 100_000  # documents: fewer are packed in less time than a file takes
HEADER = struct.Struct("<QQ")
DTYPES = {"first": "<i8", "starts": "<i8", "numbers": "<i8", "lengths": "<i4", "goes_on": "|b1"}


@frozen(eq=False)
class Rows:
    """Packed rows: row i has the pieces `first[i] : first[i + 1]`, each with its start among the ids, its length,
    whether the document goes on behind it, and the document's number.
    """

    first: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    goes_on: np.ndarray
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1


def rows_alone(corpus: Documents, numbers: np.ndarray, length: int) -> Rows:
    """The rows of documents of these numbers, one in each, of which each has as much as fits."""
    lengths = np.minimum(corpus.sizes[numbers], length)
    some = lengths > 0  # an empty document has no piece
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(some)])
    goes_on = np.zeros(int(some.sum()), np.bool_)
    return Rows(first, corpus.starts[numbers][some], lengths[some].astype(np.int32), goes_on, numbers[some])


def check_lengths(
    corpus: Documents,
    length: int,
    called: Callable[[int], str],
    help: str,
    span: Span | None,
    shown: Callable[[int], str] | None = None,
) -> None:
    """Refuse (E0607) documents of which the longest, by its number `called` and perhaps `shown` so, is longer than a
    row.
    """
    sizes = corpus.sizes
    if len(sizes) and sizes.max() > length:
        longest = int(sizes.argmax())
        message = f"{called(longest)} has {sizes[longest]:,} ids, and a row has {length:,}"
        notes = [f"{int((sizes > length).sum()):,} of {len(sizes):,} are longer than a row"]
        notes += [] if shown is None else [shown(longest)]
        raise refuse("E0607", message, span, notes=notes, help=f"a longer sequence; or `cut = true`, by which {help}")


def packed_once(
    starts: np.ndarray, ends: np.ndarray, length: int, number: int, span: Span | None, alone: bool = False
) -> Rows:
    """What `packed` returns. Raises Refused (E0618) if it cannot be kept."""
    if len(starts) < MIN_DOCUMENTS or alone:
        return packed(starts, ends, length, number, alone)
    digest = hashlib.sha256(f"{VERSION} {length} {number} {len(starts)} ".encode())
    for each in (starts, ends):
        digest.update(np.ascontiguousarray(each, "<i8").data)

    def write(name: str) -> None:
        rows = packed(starts, ends, length, number)
        with open(name, "wb") as file:
            file.write(HEADER.pack(len(rows.first), len(rows.starts)))
            for field, dtype in DTYPES.items():
                file.write(np.ascontiguousarray(getattr(rows, field), dtype).data)

    path = cache.file(f"{digest.hexdigest()[:40]}.rows", write, span)
    return _mapped(path) or packed(starts, ends, length, number)


def _mapped(path: Path) -> Rows | None:
    """The rows of a file; None if it has been cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    firsts, pieces = HEADER.unpack(header)
    arrays, offset = {}, HEADER.size
    for field, dtype in DTYPES.items():
        count = firsts if field == "first" else pieces
        if offset + count * np.dtype(dtype).itemsize > size:
            return None
        arrays[field] = np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)
        offset += count * np.dtype(dtype).itemsize
    return Rows(**arrays)


def packed(starts: np.ndarray, ends: np.ndarray, length: int, number: int = 0, alone: bool = False) -> Rows:
    """The rows for documents by their starts and ends among the ids; the first has this number. With `alone`, each
    has a row of its own, or several if it is longer.
    """
    pieces = -(-(ends - starts) // length)  # of each document
    owner = np.repeat(np.arange(len(starts)), pieces)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = starts[owner] + index * length
    lengths = np.minimum(ends[owner] - first, length)
    row = np.arange(len(lengths)) if alone else _best_fit(lengths, length)
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=0)
    return Rows(
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)]),
        first[order],
        lengths[order].astype(np.int32),
        (first + lengths < ends[owner])[order],
        owner[order] + number,
    )


def _best_fit(lengths: np.ndarray, length: int) -> np.ndarray:
    """The row of each piece: the fullest that has room for it, or a new one; the longest pieces choose first."""
    row = np.empty(len(lengths), np.int64)
    with_space: list[list[int]] = [[] for _ in range(length + 1)]  # the rows that have so much space
    spaces = 0  # bit s: some row has space s
    count = 0
    order = np.argsort(-lengths, kind="stable")
    for piece, size in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            own = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            own, space = count, length
            count += 1
        row[piece] = own
        if space > size:
            with_space[space - size].append(own)
            spaces |= 1 << (space - size)
    return row
