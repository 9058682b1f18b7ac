"""`stdlib(holdout)`: the Python sources of the running interpreter, real text that is on every machine.

The single-file modules at the top of the standard library, sorted by name and concatenated as bytes: 4 to 5 MB.
Packages are left out: many of them are tables (encodings, pydoc topics) and tests.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.config.builtins import HOLDOUT
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call
from partita.runtime.data.files import read
from partita.runtime.data.registry import Source, Use, register

if TYPE_CHECKING:
    from partita.runtime.data.dataset import Input
    from partita.runtime.data.windows import Windows

LARGEST = 16 << 20  # bytes; the rest is left out


def sources(folder: Path) -> list[Path]:
    """The `.py` files in a directory, by name, except the interpreter's build configuration."""
    paths = [path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata")]
    return sorted(paths, key=lambda path: path.name)


def stdlib_files(call: Call, root: Path) -> list[tuple[str, Path]]:
    """The files that `open_stdlib` reads."""
    return [(path.name, path) for path in sources(Path(sysconfig.get_path("stdlib")))]


def open_stdlib(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Windows:
    """The windows of the standard library's sources, as `tokens` and `targets`."""
    import numpy as np

    from partita.runtime.data.windows import open_windows, share_held_out

    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sources(folder):
        if size >= LARGEST:
            break
        parts.append(read(path, call.span))
        size += len(parts[-1])
    if not parts:
        raise refuse(
            "E0601",
            "this interpreter has no standard library sources",
            call.span,
            notes=[f"looked in {folder}"],
            help='use another text: `data = text("corpus/*.txt")`',
        )
    ids = np.frombuffer(b"".join(parts)[:LARGEST], np.uint8)
    holdout = share_held_out(call, use)
    return open_windows(ids, "the standard library", inputs, seed, holdout, use, call.span)


register(Source("stdlib", (HOLDOUT,), example="stdlib()", open=open_stdlib, files=stdlib_files, textual=True))
