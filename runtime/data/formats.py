"""Detects files of formats that a source does not read, by how they begin, and refuses them by name.

A source of ids or bytes accepts anything: it would silently train on the header of an archive. Files that begin like a
known format are inspected further, so that ids that happen to begin the same way are not refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from zipfile import ZipFile, is_zipfile

import numpy as np
from attrs import frozen

from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span

HEAD = 1 << 16  # bytes that are inspected
LOOKED_AT = 1 << 20  # ids that are inspected
MIN_IDS = 64  # with fewer ids, every other one may be 0 by coincidence
MIN_COMPARED = 1024  # ids of which even and odd positions are compared
UNLIKE = 0.5  # total variation distance of their sizes above which they count as different


@frozen
class Format:
    """A file format: its name, whether a file of `size` bytes that begins with `head` has it, and what to do then."""

    name: str
    is_it: Callable[[Path, bytes, int], bool]
    help: str


def _begins(magic: bytes) -> Callable[[Path, bytes, int], bool]:
    """For magic numbers that are long enough not to occur by accident."""
    return lambda path, head, size: head.startswith(magic)


def _is_npy(path: Path, head: bytes, size: int) -> bool:
    return head[:6] == b"\x93NUMPY" and head[6:7] in (b"\x01", b"\x02", b"\x03")


def _is_zip(path: Path, head: bytes, size: int) -> bool:
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06") and is_zipfile(path)


def _is_npz(path: Path, head: bytes, size: int) -> bool:
    if not _is_zip(path, head, size):
        return False
    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # whatever zipfile raises for a damaged archive, it is still a zip
        return False
    return all(name.endswith(".npy") for name in names)


def _is_gzip(path: Path, head: bytes, size: int) -> bool:
    if head[:3] != b"\x1f\x8b\x08" or head[3:4] > b"\x1f":
        return False
    try:
        zlib.decompressobj(wbits=31).decompress(head)
    except zlib.error:
        return False
    return True


def _is_bzip2(path: Path, head: bytes, size: int) -> bool:
    return head[:3] == b"BZh" and head[4:10] == b"1AY&SY"


def _is_zstandard(path: Path, head: bytes, size: int) -> bool:
    # In the frame header, the reserved bit is 0 (RFC 8878, 3.1.1.1).
    return head[:4] == b"\x28\xb5\x2f\xfd" and size > 8 and not head[4] & 0x08


def _is_parquet(path: Path, head: bytes, size: int) -> bool:
    if head[:4] != b"PAR1" or size < 12:
        return False
    with path.open("rb") as file:
        file.seek(-4, 2)
        return file.read() == b"PAR1"


def _is_safetensors(path: Path, head: bytes, size: int) -> bool:
    length = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or not 2 <= length <= size - 8:
        return False
    if 8 + length > len(head):
        return head[8:10] == b'{"' and head[8:].isascii()
    try:
        return isinstance(json.loads(head[8 : 8 + length]), dict)
    except ValueError:
        return False


NPY = Format(
    "a numpy array (.npy)", _is_npy, "name it `….npy`, for `tokens`; `arrays` reads archives of them: `numpy.savez`"
)
GZIP = Format("compressed with gzip", _is_gzip, "unpack it: `gunzip --keep`")
BZIP2 = Format("compressed with bzip2", _is_bzip2, "unpack it: `bunzip2 --keep`")
XZ = Format("compressed with xz", _begins(b"\xfd7zXZ\x00"), "unpack it: `unxz --keep`")
NPZ = Format("a numpy archive (.npz)", _is_npz, '`arrays("…")` reads it, an array for each input of the model')
SAFETENSORS = Format(
    "a safetensors file", _is_safetensors, "weights come in with `partita checkpoint import`, not as data"
)
FORMATS = (
    NPY,
    NPZ,
    Format("a zip archive", _is_zip, "unpack it, and name what is in it"),
    GZIP,
    BZIP2,
    XZ,
    Format("compressed with Zstandard", _is_zstandard, "unpack it: `unzstd`"),
    Format("a Parquet table", _is_parquet, '`parquet("…", column = "…")` reads text from it'),
    Format("an Arrow table", _begins(b"ARROW1\0\0"), "write it as Parquet, for `parquet`"),
    Format("an HDF5 file", _begins(b"\x89HDF\r\n\x1a\n"), "write its arrays with `numpy.savez`, for `arrays`"),
    SAFETENSORS,
)


def format_of(path: Path) -> Format | None:
    """The known format of a file. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    size = path.stat().st_size
    return next((format for format in FORMATS if format.is_it(path, head, size)), None)


def refuse_format(path: Path, name: str, reads: str, span: Span | None, but: Collection[Format] = ()) -> None:
    """Refuse (E0603) a file of a known format, except those in `but`; `reads` says what its source reads.

    Raises OSError.
    """
    detected = format_of(path)
    if detected is not None and detected not in but:
        raise refuse("E0603", f"`{name}` is {detected.name}, and {reads}", span, help=detected.help)


def refuse_halves(ids: np.ndarray, name: str, dtype: str, span: Span | None) -> None:
    """Refuse (E0603) ids of which every other one is 0: each was written with at least twice as many bytes."""
    sample = ids[: min(LOOKED_AT, len(ids) - len(ids) % 2)]
    if len(sample) < MIN_IDS or sample[1::2].any() or not sample[::2].any():
        return
    fours = len(sample) % 4 == 0 and not sample[2::4].any()
    wider = {"u8": ("u16", "u32"), "u16": ("u32", "i64"), "u32": ("i64", "i64"), "i32": ("i64", "i64")}
    if dtype in wider:
        raise refuse(
            "E0603",
            f"every other id of `{name}` is 0, as if it had been written with more bytes an id than {dtype} has",
            span,
            help=f"`dtype = {wider[dtype][fours]}`, if that is what it was written with",
        )


def alternate(ids: np.ndarray) -> bool:
    """Whether ids at even and odd positions, or in the first and last of every four, differ greatly in size, as the
    parts of wider ids do.

    Sizes are compared as powers of two: these are few, so that samples of one distribution look alike.
    """
    sample = ids[: min(LOOKED_AT, len(ids) - len(ids) % 4)]
    if len(sample) < MIN_COMPARED:
        return False
    sizes = np.frexp(np.maximum(sample, 0).astype(np.float64))[1]

    def shares(first: int, step: int) -> np.ndarray:
        return np.bincount(sizes[first::step], minlength=65) * step / len(sizes)

    pairs = (shares(0, 2), shares(1, 2)), (shares(0, 4), shares(3, 4))
    return any(float(np.abs(one - other).sum()) / 2 > UNLIKE for one, other in pairs)
