"""`text(glob, alphabet, holdout, tokenizer, end)`: all files that match, concatenated in the order of their paths.

With `alphabet = bytes` an id is a byte. With `chars` an id is the index of a character among the sorted distinct
characters of the entire corpus, holdout included. With a `tokenizer`, files are encoded once, and the ids kept; in
pieces of at least a mebibyte that end with a line, so that a file may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.config.builtins import HOLDOUT, Keyword, Setting, Text
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.files import END, TOKENIZER, matched, read, readable, with_tokenizer
from partita.runtime.data.registry import COMMON, Source, Use, register

if TYPE_CHECKING:
    import numpy as np

    from partita.runtime.data.dataset import Dataset, Input

LARGEST = 4 << 30  # bytes; anything larger is better tokenized once than read by every rank
CODE_POINTS = 0x110000
PIECE = 1 << 20  # bytes


def open_text(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Dataset:
    """The windows of a text, as `tokens` and `targets`."""
    import numpy as np

    from partita.runtime.data.documents import open_documents
    from partita.runtime.data.formats import refuse_format
    from partita.runtime.data.windows import open_windows, share_held_out

    arguments = dict(call.arguments)
    pattern = arguments["glob"]
    if arguments.get("tokenizer") is not None:
        if arguments.get("alphabet") == "chars":
            raise refuse("E0619", "`alphabet = chars` and `tokenizer` exclude each other", call.span)

        def documents(path: Path, name: str) -> Iterator[tuple[str, bool]]:
            refuse_format(path, name, "`text` reads text", call.span)
            return _pieces(path, name, call.span)

        files = FILES(call, root)
        return open_documents(call, inputs, seed, root, use, files, documents, "text", separate=False)
    end = arguments.get("end") or ""
    files = FILES(call, root)
    size = 0
    for name, path in files:
        with readable(name, call.span):
            size += path.stat().st_size
            refuse_format(path, name, "`text` reads text", call.span)
    if size > LARGEST:
        raise refuse(
            "E0603",
            f"`{pattern}` has {size / 2**30:.1f} GiB of text, more than every rank can load",
            call.span,
            help='convert it once to a file of ids, and use `tokens("…")`',
        )
    holdout = share_held_out(call, use)
    if arguments.get("alphabet", "bytes") == "bytes":
        ids = np.frombuffer(b"".join(read(path, call.span) + end.encode() for _, path in files), np.uint8)
        return open_windows(ids, f"`{pattern}`", inputs, seed, holdout, use, call.span)
    alphabet = arguments[COMMON]["alphabet"] if COMMON in arguments else None
    ids, alphabet = numbered(_characters(call, files), alphabet, f"`{pattern}`", call.span)
    return open_windows(
        ids,
        f"`{pattern}`, with {len(alphabet)} different characters,",
        inputs,
        seed,
        holdout,
        use,
        call.span,
        lambda number: f"character {number}, {alphabet[number]!r}",
    )


def alphabet_of(call: Call, root: Path) -> str:
    """The characters of a text with `alphabet = chars`: id i is the i-th. Raises Refused."""
    if COMMON in call.arguments:
        return str(call.arguments[COMMON]["alphabet"])
    return numbered(_characters(call, FILES(call, root)))[1]


def common_alphabet(calls: Sequence[Call], root: Path) -> dict[str, str] | None:
    """The characters of all texts with `alphabet = chars` that a model is trained on; None if there are none."""
    characters = {
        each for call in calls if call.arguments.get("alphabet") == "chars" for each in alphabet_of(call, root)
    }
    return {"alphabet": "".join(sorted(characters))} if characters else None


def _characters(call: Call, files: Sequence[tuple[str, Path]]) -> str:
    """All files, each with `end` after it."""
    end = call.arguments.get("end") or ""
    return "".join(_decoded(path, call.span) + end for _, path in files)


def numbered(
    text: str, alphabet: str | None = None, what: str = "", span: Span | None = None
) -> tuple[np.ndarray, str]:
    """The ids of a text's characters, and the sorted alphabet, its own unless given: id i is the i-th character.

    Raises Refused (E0605) if the text, which is `what` in messages, has a character that is not in the alphabet.
    """
    import numpy as np

    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    present = np.zeros(CODE_POINTS, np.bool_)
    present[points] = True
    if alphabet is not None:
        known = np.zeros(CODE_POINTS, np.bool_)
        known[np.frombuffer(alphabet.encode("utf-32-le"), "<u4")] = True
        if (unknown := np.flatnonzero(present & ~known)).size:
            message = f"{what} has {chr(unknown[0])!r}, which is not in the text that the model learns"
            raise refuse("E0605", message, span, help="train on text that has it, or use `alphabet = bytes`")
        present = known
    numbers = np.cumsum(present, dtype=np.uint32) - np.uint32(1)
    return numbers[points], "".join(map(chr, np.flatnonzero(present)))


def _pieces(path: Path, name: str, span: Span | None) -> Iterator[tuple[str, bool]]:
    """A file in pieces that end with a line, and whether the file ends with them. Raises Refused and OSError."""
    start = 0
    with path.open("rb") as file:
        while True:
            piece = file.read(PIECE) + file.readline()
            last = not file.peek(1)
            try:
                yield piece.decode(), last
            except UnicodeDecodeError as error:
                raise _not_utf8(f"`{name}`", start + error.start, error.object[error.start], span) from error
            if last:
                return
            start += len(piece)


def _not_utf8(what: str, place: int, byte: int, span: Span | None) -> Refused:
    help = "convert it to UTF-8, or use `alphabet = bytes`"
    return refuse("E0603", f"{what} is not UTF-8 text: byte {place} is 0x{byte:02x}", span, help=help)


def _decoded(path: Path, span: Span | None) -> str:
    try:
        return read(path, span).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(str(path), error.start, error.object[error.start], span) from error


FILES = matched("glob")

register(
    Source(
        "text",
        (Setting("glob", Text()), Setting("alphabet", Keyword(("bytes", "chars")), "bytes"), HOLDOUT, TOKENIZER, END),
        open=open_text,
        textual=True,
        common=common_alphabet,
        files=with_tokenizer(FILES),
    )
)
