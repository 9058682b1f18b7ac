"""Files named in a `.par` file, which are looked for under its directory and nowhere else; and those that a user names
on the command line, which may be anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from partita.dsl.config.builtins import Flag, Setting, Text
from partita.dsl.diagnostic import refuse, shown
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span

# Of sources of documents and text.
TOKENIZER, END = Setting("tokenizer", Text(), None), Setting("end", Text(), None)
PACK = Setting("pack", Flag(), False)

MAX_NAMES = 12  # shown

# Lists the files that a call reads: by the name by which they are compared with others, and where they are.
Files: TypeAlias = Callable[[Call, Path], list[tuple[str, Path]]]


def resolve_files(pattern: str | Path, root: Path, span: Span | None) -> list[tuple[str, Path]]:
    """The files that a pattern or an address matches, with their names: the path under the root, or the address. A
    `Path` is what the user has named, a file or a pattern: relative to the current directory, and wherever it leads.

    Raises Refused (E0601 to E0603, and E0617 and E0618 for addresses).
    """
    if isinstance(pattern, Path):
        return [(str(path), path) for path in _anywhere(pattern)]
    if "://" in pattern:
        from partita.runtime.data.remote import fetched

        return fetched(pattern, span)
    return [(path.relative_to(root).as_posix(), path) for path in matching(pattern, root, span)]


def matching(pattern: str, root: Path, span: Span | None) -> tuple[Path, ...]:
    """The files under `root` that match a pattern (`*`, `?`, `[…]`, `**`), sorted by path; at least one.

    The pattern is relative and may not lead out of the root. Links in the directory are followed: its owner made them,
    not the file that names them. Raises Refused (E0601 to E0603).
    """
    parts = PurePosixPath(pattern)
    if "\0" in pattern or not parts.parts:
        raise refuse("E0601", f"{pattern!r} is not the name of a file", span)
    if parts.is_absolute() or ".." in parts.parts:
        raise refuse(
            "E0602",
            f"`{pattern}` leads out of the directory of the file",
            span,
            help=f"move or link the data into {root}, and name it from there",
        )
    try:
        paths = sorted(path for path in root.glob(pattern) if path.is_file())
    except (OSError, ValueError) as error:
        raise refuse("E0603", f"cannot look for `{pattern}`: {error}", span) from error
    if not paths:
        raise refuse(
            "E0601",
            f"no file matches `{pattern}`",
            span,
            notes=[f"looked in {root.resolve()}"],
            help="paths are relative to the directory of the .par file",
        )
    return tuple(paths)


def _anywhere(pattern: Path) -> tuple[Path, ...]:
    """The files that a path or pattern on the command line matches, sorted; at least one. Raises Refused (E0601)."""
    paths = (
        [pattern] if pattern.is_file() else sorted(filter(Path.is_file, map(Path, glob(str(pattern), recursive=True))))
    )
    if not paths:
        help = "a relative path is one of the current directory"
        raise refuse("E0601", f"there is no file `{pattern}`", notes=[f"looked in {Path.cwd()}"], help=help)
    return tuple(paths)


def matched(argument: str) -> Files:
    """Returns a function that lists the files that a pattern argument matches, as (path under the root, path)."""

    def files(call: Call, root: Path) -> list[tuple[str, Path]]:
        return resolve_files(call.arguments[argument], root, call.span)

    return files


def with_tokenizer(files: Files) -> Files:
    """The same files, and the one of the `tokenizer`."""

    def found(call: Call, root: Path) -> list[tuple[str, Path]]:
        tokenizer = call.arguments.get("tokenizer")
        own = [] if tokenizer is None else [(tokenizer, tokenizer_file(tokenizer, root, call.span))]
        return [*files(call, root), *own]

    return found


def tokenizer_file(name: str | Path, root: Path, span: Span | None) -> Path:
    """The file of a tokenizer, or of one in a folder or on the hub. Raises Refused, as `resolve_files`, and E0627."""
    from partita.runtime.hub import TOKENIZER as TOKENIZER_FILES
    from partita.runtime.hub import is_id, model_folder

    if isinstance(name, str) and "://" in name:
        return single(name, root, span)
    place, file = name if isinstance(name, Path) else root / name, TOKENIZER_FILES[0]
    if place.is_dir():
        return single(place / file if isinstance(name, Path) else f"{name}/{file}", root, span)
    if is_id(str(name)) and not place.exists():
        return model_folder(str(name), TOKENIZER_FILES, span) / file
    return single(name, root, span)


def single(name: str | Path, root: Path, span: Span | None) -> Path:
    """The one file that a name, pattern or address matches. Raises Refused, as `resolve_files` does."""
    files = resolve_files(name, root, span)
    if len(files) > 1:
        raise refuse(
            "E0601",
            f"`{name}` matches {len(files)} files, but exactly one is needed",
            span,
            notes=[shown(each) for each, _ in files[:5]],
            help="name one of them",
        )
    return files[0][1]


def listed(names: Sequence[str]) -> str:
    """The first of some names, for messages: `a`, `b`, …; or that there are none."""
    more = ", …" if len(names) > MAX_NAMES else ""
    return ", ".join(f"`{shown(each)}`" for each in names[:MAX_NAMES]) + more if names else "none"


def read(path: Path, span: Span | None) -> bytes:
    """The content of a file. Raises Refused (E0603)."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise refuse("E0603", f"cannot read {path}: {error.strerror}", span) from error


@contextmanager
def readable(name: str, span: Span | None) -> Iterator[None]:
    """Refuse (E0603) a data file that cannot be read, at the call that names it."""
    try:
        yield
    except OSError as error:
        raise refuse("E0603", f"cannot read `{name}`: {error.strerror or error}", span) from error
