"""`jsonl(glob, field, …)`: files with one JSON object a line, a field of which is a document; blank lines are none.

Files compressed with gzip, bzip2 or xz are read as they are.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from partita.dsl.config.builtins import HOLDOUT, Setting, Text
from partita.dsl.diagnostic import Refused, refuse, shown
from partita.dsl.syntax.source import Span
from partita.runtime.data.files import END, PACK, TOKENIZER, listed, matched, with_tokenizer
from partita.runtime.data.registry import Source, opened_by, register

LONGEST = 1 << 28  # bytes of a line
OPENERS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b\x08": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


def texts(path: Path, name: str, field: str, span: Span | None) -> Iterator[str]:
    """A field of each line of a file. Raises Refused (E0603, E0616) and OSError."""
    return (text_of(record, where, field, span) for record, where in records(path, name, span))


def records(path: Path, name: str, span: Span | None) -> Iterator[tuple[dict[str, Any], str]]:
    """The object of each line of a file, and which line it is. Raises Refused (E0603, E0616) and OSError."""
    with _opened(path, name, span) as file:
        number = 0
        while True:
            try:
                line = file.readline(LONGEST)
            except DAMAGED as error:
                raise refuse("E0603", f"cannot read `{name}` beyond line {number}: {error}", span) from error
            if not line:
                return
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.isspace() or len(line) >= LONGEST:
                where = f"line {number} of `{name}`"
                yield _record(line, where, span), where


def _opened(path: Path, name: str, span: Span | None) -> IO[bytes]:
    from partita.runtime.data.formats import BZIP2, GZIP, XZ, refuse_format

    refuse_format(path, name, "`jsonl` reads lines of JSON", span, but=(GZIP, BZIP2, XZ))
    with path.open("rb") as file:
        head = file.read(8)
    opened = next((opener for magic, opener in OPENERS.items() if head.startswith(magic)), None)
    stream: IO[bytes] = path.open("rb") if opened is None else opened(path)
    return stream


def _record(line: bytes, where: str, span: Span | None) -> dict[str, Any]:
    if len(line) >= LONGEST:
        raise refuse("E0616", f"{where} has more than {LONGEST:,} bytes", span)
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} is 0x{line[error.start]:02x}"
        raise refuse("E0616", f"{where} is not UTF-8: {byte}", span) from error
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise refuse("E0616", f"{where} is not JSON: {shown(reason)}", span, help=ONE_A_LINE) from error
    if not isinstance(record, dict):
        raise refuse("E0616", f"{where} is {kind_of(record)}, not an object", span, help=ONE_A_LINE)
    return record


def text_of(record: dict[str, Any], where: str, field: str, span: Span | None) -> str:
    """A field of an object. Raises Refused (E0616) if it is no text."""
    if field not in record:
        raise without(record, where, field, span)
    text = record[field]
    if not isinstance(text, str):
        help = '`chat("…", tokenizer = "…")` reads conversations' if isinstance(text, list) else None
        raise refuse("E0616", f"`{shown(field)}` in {where} is {kind_of(text)}, not a string", span, help=help)
    check_unicode(text, f"`{shown(field)}` in {where}", span)
    return text


def check_unicode(text: str, what: str, span: Span | None, help: str | None = None) -> None:
    """Refuse (E0616) half of a character, which JSON can spell, and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"a lone surrogate, \\u{ord(text[error.start]):04x}"
        raise refuse("E0616", f"{what} is not Unicode: it has {surrogate}", span, help=help) from error


def without(record: dict[str, Any], where: str, field: str, span: Span | None) -> Refused:
    """The error (E0616) that an object has no such field."""
    strings = [name for name, each in record.items() if isinstance(each, str)]
    help = f'`field = "{shown(strings[0])}"`' if len(strings) == 1 else "`field` names the one that has the text"
    notes = [f"its fields: {listed(list(record))}"]
    return refuse("E0616", f"{where} has no field `{shown(field)}`", span, notes=notes, help=help)


def kind_of(value: object) -> str:
    """What a value of JSON is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


ONE_A_LINE = 'each line is one object, such as {"text": "…"}'

register(
    Source(
        "jsonl",
        (Setting("glob", Text()), Setting("field", Text(), "text"), TOKENIZER, END, PACK, HOLDOUT),
        example='jsonl("corpus/*.jsonl")',
        open=opened_by("documents", "open_records", read=texts, argument="field"),
        textual=True,
        endings=(".jsonl", ".json"),
        files=with_tokenizer(matched("glob")),
    )
)
