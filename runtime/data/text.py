"""`text(glob, alphabet = bytes | chars, holdout)`: all files that match, concatenated in the order of their paths.

With `bytes` an id is a byte. With `chars` an id is the index of a character among the sorted distinct characters of the
entire corpus, holdout included.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.builtins import HOLDOUT, Keyword, Setting, Text
from partita.dsl.diagnostic import refuse
from partita.dsl.source import Span
from partita.dsl.spec import Call
from partita.runtime.data.files import matched, matching, read
from partita.runtime.data.registry import Source, register

if TYPE_CHECKING:
    import numpy as np

    from partita.runtime.data.dataset import Input
    from partita.runtime.data.windows import Windows

LARGEST = 4 << 30  # bytes; anything larger is better tokenized once than read by every rank
CODE_POINTS = 0x110000


def open_text(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, evaluates: bool) -> Windows:
    """The windows of a text, as `tokens` and `targets`."""
    import numpy as np

    from partita.runtime.data.formats import refuse_format
    from partita.runtime.data.windows import open_windows

    arguments = dict(call.arguments)
    pattern = arguments["glob"]
    paths = matching(pattern, root, call.span)
    size = 0
    for path in paths:
        try:
            size += path.stat().st_size
            refuse_format(path, path.relative_to(root).as_posix(), "`text` reads text", call.span)
        except OSError as error:
            raise refuse("E0603", f"cannot read {path}: {error.strerror}", call.span) from error
    if size > LARGEST:
        raise refuse(
            "E0603",
            f"`{pattern}` has {size / 2**30:.1f} GiB of text, more than every rank can load",
            call.span,
            help='convert it once to a file of ids, and use `tokens("…")`',
        )
    holdout = float(arguments.get("holdout", 0.0))
    if arguments.get("alphabet", "bytes") == "bytes":
        ids = np.frombuffer(b"".join(read(path, call.span) for path in paths), np.uint8)
        return open_windows(ids, f"`{pattern}`", inputs, seed, holdout, evaluates, call.span)
    ids, alphabet = numbered("".join(_decoded(path, call.span) for path in paths))
    return open_windows(
        ids,
        f"`{pattern}`, with {len(alphabet)} different characters,",
        inputs,
        seed,
        holdout,
        evaluates,
        call.span,
        lambda number: f"character {number}, {alphabet[number]!r}",
    )


def numbered(text: str) -> tuple[np.ndarray, str]:
    """The ids of a text's characters, and its sorted alphabet: id i is its i-th character."""
    import numpy as np

    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    present = np.zeros(CODE_POINTS, np.bool_)
    present[points] = True
    numbers = np.cumsum(present, dtype=np.uint32) - np.uint32(1)
    return numbers[points], "".join(map(chr, np.flatnonzero(present)))


def _decoded(path: Path, span: Span | None) -> str:
    try:
        return read(path, span).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(
            "E0603",
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}",
            span,
            help="convert it to UTF-8, or use `alphabet = bytes`",
        ) from error


register(
    Source(
        "text",
        (Setting("glob", Text()), Setting("alphabet", Keyword(("bytes", "chars")), "bytes"), HOLDOUT),
        open=open_text,
        files=matched("glob"),
    )
)
