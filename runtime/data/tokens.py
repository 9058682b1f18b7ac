"""`tokens(path, dtype, holdout)`: a file of little-endian ids and nothing else, memory-mapped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.builtins import HOLDOUT, Keyword, Setting, Text
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.spec import Call
from partita.runtime.data.files import matched, single
from partita.runtime.data.registry import Source, register

if TYPE_CHECKING:
    from partita.runtime.data.dataset import Input
    from partita.runtime.data.windows import Windows

DTYPES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "i64": "<i8"}


def token_doubts(call: Call, root: Path) -> list[Diagnostic]:
    """Warnings (W0603) about a file of ids that can be opened but looks wrong."""
    import numpy as np

    from partita.runtime.data.formats import alternate

    name, written = call.arguments["path"], call.arguments.get("dtype", "u16")
    if not alternate(np.memmap(single(name, root, call.span), np.dtype(DTYPES[written]), mode="r")):
        return []
    return [
        Diagnostic(
            "W0603",
            f"ids at even and odd positions of `{name}` are of very different sizes, as if each two were one id",
            call.span,
            help=f"is {written} the `dtype` that it was written with?",
        )
    ]


def open_tokens(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, evaluates: bool) -> Windows:
    """The windows of a file of ids, as `tokens` and `targets`."""
    import numpy as np

    from partita.runtime.data.formats import refuse_format, refuse_halves
    from partita.runtime.data.windows import open_windows

    arguments = dict(call.arguments)
    name = arguments["path"]
    path = single(name, root, call.span)
    written = arguments.get("dtype", "u16")
    dtype = np.dtype(DTYPES[written])
    try:
        refuse_format(path, name, "`tokens` reads ids and nothing else", call.span)
        size = path.stat().st_size
    except OSError as error:
        raise refuse("E0603", f"cannot read `{name}`: {error.strerror}", call.span) from error
    if size == 0 or size % dtype.itemsize:
        raise refuse(
            "E0603",
            f"`{name}` has {size} bytes, which is not a whole number of {written} ids",
            call.span,
            notes=[f"one id takes {dtype.itemsize} bytes"],
            help="is `dtype` what the file was written with?" if size else "the file is empty",
        )
    try:
        ids = np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise refuse("E0603", f"cannot read `{name}`: {error.strerror}", call.span) from error
    refuse_halves(ids, name, written, call.span)
    holdout = float(arguments.get("holdout", 0.0))
    return open_windows(ids, f"`{name}`", inputs, seed, holdout, evaluates, call.span)


register(
    Source(
        "tokens",
        (Setting("path", Text()), Setting("dtype", Keyword(tuple(DTYPES)), "u16"), HOLDOUT),
        open=open_tokens,
        files=matched("path"),
        doubts=token_doubts,
    )
)
