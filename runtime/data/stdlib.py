"""`stdlib(holdout)`: the Python sources of the running interpreter, real text that is there on every machine.

All `.py` files of the standard library in the order of their paths, one after the other, as bytes: about 12
MB. Tests and installed packages are left out, so that the text depends on the interpreter's version alone.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np

from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call
from partita.runtime.data.dataset import Input
from partita.runtime.data.files import read
from partita.runtime.data.windows import Windows, open_windows

LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
LARGEST = 16 << 20  # bytes; the rest is left out


def sources(folder: Path) -> list[Path]:
    """The `.py` files under a folder by the order of their relative paths, without tests and packages."""
    found: list[Path] = []
    for here, folders, files in os.walk(folder):
        # `config-3.11-x86_64-linux-gnu` and `_sysconfigdata…` say how and where the interpreter was built.
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        found += [Path(here, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def open_stdlib(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, evaluates: bool) -> Windows:
    """The windows of the standard library's sources; yields `tokens` and `targets`."""
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
            "this interpreter has no sources of its standard library",
            call.span,
            notes=[f"looked in {folder}"],
            help='use another text: `data = text("corpus/*.txt")`',
        )
    ids = np.frombuffer(b"".join(parts)[:LARGEST], np.uint8)
    holdout = float(call.arguments.get("holdout", 0.0))
    return open_windows(ids, "the standard library", inputs, seed, holdout, evaluates, call.span)
