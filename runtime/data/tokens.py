"""`tokens(path, dtype, holdout)`: files of ids, memory-mapped, one after the other in the order of their paths.

A file is little-endian ids and nothing else, as `dtype` says, or, if its name ends in `.npy`, a one-dimensional numpy
array of integers, which has a dtype of its own. Windows may span two files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.config.builtins import HOLDOUT, Keyword, Setting, Text
from partita.dsl.diagnostic import Diagnostic, refuse, shown
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.files import matched, readable
from partita.runtime.data.registry import Source, Use, register

if TYPE_CHECKING:
    import numpy as np

    from partita.runtime.data.dataset import Input
    from partita.runtime.data.windows import Windows

DTYPES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "i64": "<i8"}
USUAL = "u16"  # of files that do not say it themselves
READS = "`tokens` reads ids and nothing else"


def token_warnings(call: Call, root: Path) -> list[Diagnostic]:
    """Warnings (W0603) about files of ids that can be opened but look wrong."""
    from partita.runtime.data.formats import alternate

    warnings = []
    for name, path in FILES(call, root):
        if path.suffix != ".npy" and alternate(mapped(path, name, call)):
            written = call.arguments.get("dtype") or USUAL
            warnings.append(
                Diagnostic(
                    "W0603",
                    f"ids at even and odd positions of `{name}` are of very different sizes, "
                    "as if each two were one id",
                    call.span,
                    help=f"is {written} the `dtype` that it was written with?",
                )
            )
    return warnings


def open_tokens(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Windows:
    """The windows of files of ids, as `tokens` and `targets`."""
    from partita.runtime.data.ids import joined
    from partita.runtime.data.windows import open_windows, share_held_out

    ids = joined([mapped(path, name, call) for name, path in FILES(call, root)])
    holdout = share_held_out(call, use)
    return open_windows(ids, f"`{call.arguments['path']}`", inputs, seed, holdout, use, call.span)


FILES = matched("path")


def mapped(path: Path, name: str, call: Call) -> np.ndarray:
    """The ids of a file, mapped. Raises Refused (E0603, E0607)."""
    from partita.runtime.data.formats import NPY, refuse_format

    dtype, span = call.arguments.get("dtype"), call.span
    with readable(name, span):
        if path.suffix == ".npy":
            refuse_format(path, name, READS, span, but=(NPY,))
            return _array(path, name, dtype, span)
        refuse_format(path, name, READS, span)
        return _bare(path, name, dtype or USUAL, span)


def _bare(path: Path, name: str, written: str, span: Span | None) -> np.ndarray:
    """A file of ids and nothing else. Raises OSError and Refused."""
    import numpy as np

    from partita.runtime.data.formats import refuse_halves

    dtype = np.dtype(DTYPES[written])
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise refuse(
            "E0603",
            f"`{name}` has {size} bytes, which is not a whole number of {written} ids",
            span,
            notes=[f"one id takes {dtype.itemsize} bytes"],
            help="is `dtype` what the file was written with?" if size else "the file is empty",
        )
    ids = np.memmap(path, dtype, mode="r")
    refuse_halves(ids, name, written, span)
    return ids


def _array(path: Path, name: str, written: str | None, span: Span | None) -> np.ndarray:
    """A numpy array. Raises OSError and Refused."""
    import numpy as np

    help = "write it with `numpy.save(path, ids)`, `ids` being one array of integers"
    if path.stat().st_size == 0:
        raise refuse("E0603", f"`{name}` is empty", span, help=help)
    try:
        with path.open("rb") as file:
            magic = file.read(6)
        if magic != b"\x93NUMPY":
            raise ValueError("it does not begin as a numpy array does")
        ids: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OverflowError) as error:
        reason = shown(str(error).split("\n")[0])
        raise refuse("E0603", f"cannot read `{name}`: {reason}", span, help=help) from error
    if ids.dtype.kind not in "iu":
        raise refuse("E0607", f"`{name}` holds {ids.dtype}, and ids are integers", span, help=help)
    if ids.ndim != 1:
        shape = list(ids.shape)
        raise refuse(
            "E0607",
            f"`{name}` has shape {shape}, and ids are one after the other",
            span,
            help="`numpy.save(path, array.ravel())`, if its rows follow each other",
        )
    if len(ids) == 0:
        raise refuse("E0603", f"`{name}` has no ids", span)
    if written is not None and np.dtype(DTYPES[written]) != ids.dtype:
        raise refuse(
            "E0607",
            f"`{name}` holds {ids.dtype}, and `dtype` is {written}",
            span,
            help="leave out `dtype`: an array has its own",
        )
    return ids


register(
    Source(
        "tokens",
        (Setting("path", Text()), Setting("dtype", Keyword(tuple(DTYPES)), None), HOLDOUT),
        open=open_tokens,
        endings=(".bin", ".npy"),
        files=FILES,
        warnings=token_warnings,
    )
)
