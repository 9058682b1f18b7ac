"""Reads source files and records their texts, so that a restarted run does not read them again."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from attrs import define, field

from partita.dsl import limits
from partita.dsl.advice.report import nearest
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Source, Span


@define(eq=False)
class Reader:
    """Reads files from disk or, if `kept` texts by path are given, only from those; `edited` texts come before both.

    `texts` records what was read, by real path.
    """

    kept: Mapping[str, str] | None = None
    edited: Mapping[str, str] = field(factory=dict)
    texts: dict[str, str] = field(factory=dict, init=False)

    def source(self, path: str, name: str, span: Span | None = None) -> Source:
        """The text of a file under the name that the user knows. Raises Refused (E0001 to E0004)."""
        real = os.path.realpath(path) if "\0" not in path else path
        if real in self.edited:
            source = source_of(self.edited[real], name, span)
        elif self.kept is None:
            source = read_source(path, name, span)
        elif real in self.kept:
            source = source_of(self.kept[real], name, span)
        else:
            raise refuse("E0001", f"there was no file `{name}` when this run began", span)
        self.texts[real] = source.text
        return source


def inside(root: str, target: str, written: str, span: Span) -> str:
    """The real path of a file, `written` in another one. Raises Refused (E0010) if it is outside the root directory."""
    real = real_path_inside(root, target)
    if real is None:
        help = "move it there, or pass a directory that contains both as --root"
        notes = [f"the root directory is `{root}`"]
        raise refuse("E0010", f"`{written}` is outside the root directory", span, notes=notes, help=help)
    return real


def real_path_inside(root: str, target: str) -> str | None:
    """The real path of a file; None if that is outside the root directory."""
    real = os.path.realpath(target)
    return real if os.path.commonpath([real, root]) == root else None


def read_source(path: str, name: str, span: Span | None = None) -> Source:
    """The text of a file on disk under the name that the user knows. Raises Refused (E0001 to E0004)."""
    try:
        status = os.stat(path)
        wrong = (
            f"`{name}` is a directory, not a file"
            if stat.S_ISDIR(status.st_mode)
            else f"`{name}` is not a regular file"
            if not stat.S_ISREG(status.st_mode)
            else None
        )
        data = b""
        if wrong is None and status.st_size <= limits.FILE_BYTES:
            with open(path, "rb") as file:
                data = file.read(limits.FILE_BYTES + 1)
    except FileNotFoundError:
        raise refuse("E0001", f"there is no file `{name}`", span, help=_neighbour(path)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refuse("E0001", f"cannot read `{name}`: {reason}", span) from None
    if wrong is not None:
        help = (
            f"a .par file comes first; `--run-dir {name}` names the run whose model is used" if span is None else None
        )
        raise refuse("E0001", wrong, span, help=help)
    if status.st_size > limits.FILE_BYTES or len(data) > limits.FILE_BYTES:
        message = f"`{name}` has {max(status.st_size, len(data)):,} bytes"
        raise refuse("E0004", message, span, help=f"at most {limits.FILE_BYTES:,}")
    return decode(data, name, span)


def decode(data: bytes, name: str, span: Span | None = None) -> Source:
    """The text of a file's bytes, which must be UTF-8. Raises Refused (E0002 to E0004)."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise refuse("E0002", f"`{name}` is not UTF-8 text: byte {error.start} on line {line}", span) from None
    return source_of(text, name, span)


def source_of(text: str, name: str, span: Span | None = None) -> Source:
    """A source of a text, with line ends normalized. Raises Refused (E0003, E0004)."""
    if len(text) > limits.FILE_BYTES:
        raise refuse("E0004", f"`{name}` has more than {limits.FILE_BYTES:,} characters", span)
    source = Source(name, text.replace("\r\n", "\n").replace("\r", "\n"))
    if "\0" in text:
        start = source.text.index("\0")
        raise refuse("E0003", f"`{name}` contains a NUL character", Span(source, start, start + 1))
    return source


def _neighbour(path: str) -> str | None:
    folder, name = os.path.split(path)
    try:
        names = [entry.removesuffix(".par") for entry in os.listdir(folder or ".") if entry.endswith(".par")]
    except (OSError, ValueError):
        return None
    near = nearest(name.removesuffix(".par"), names[:1000])
    return f"did you mean `{near}.par`?" if near else None
