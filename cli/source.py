"""The file argument of most commands: `FILE [key=value ...] [--root DIR]`, and its diagnostics."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from partita.cli.colors import colored, is_colored
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.load import load
from partita.dsl.spec import Spec
from partita.dsl.syntax.reader import Reader


def add_source_arguments(parser: argparse.ArgumentParser, optional: str | None = None) -> None:
    """FILE, which is `optional` if that says what it is; overrides; and the directory that imports may not leave."""
    nargs = None if optional is None else "?"
    parser.add_argument("file", metavar="FILE", nargs=nargs, help=optional or "a .par file")
    examples = "batch=128 cluster.pipe=4 train.steps=10 layout=zero3 schedule=gpipe"
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=examples)
    parser.add_argument("--root", metavar="DIR", help="imports must stay within it (default: FILE's directory)")


def add_python_argument(parser: argparse.ArgumentParser) -> None:
    """Whether Python files that FILE names may be run."""
    what = "run the Python code that FILE names for operations, optimizers and data of its own"
    parser.add_argument("--allow-python", action="store_true", help=what)


def files_and_overrides(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """What stands behind FILE of a command that takes several: more files, and overrides."""
    overrides = [each for each in arguments.overrides if "=" in each]
    return [arguments.file, *(each for each in arguments.overrides if "=" not in each)], overrides


def load_file(arguments: argparse.Namespace, reader: Reader | None = None, fitting: bool = True) -> Spec:
    """The checked file, with warnings on stderr (see `load`). Raises Refused."""
    spec, diagnostics = load_quietly(arguments, reader, fitting)
    report(diagnostics)
    return spec


def load_quietly(
    arguments: argparse.Namespace, reader: Reader | None = None, fitting: bool = True
) -> tuple[Spec, Sequence[Diagnostic]]:
    """The checked file, and warnings. Raises Refused."""
    spec, diagnostics = load(arguments.file, arguments.overrides, arguments.root, reader, fitting=fitting)
    if spec is None:
        raise Refused(diagnostics)
    return spec, diagnostics


_gathering: list[list[Diagnostic]] = []  # the innermost last


@contextmanager
def gathered() -> Iterator[list[Diagnostic]]:
    """Gather what is reported instead of printing it."""
    found: list[Diagnostic] = []
    _gathering.append(found)
    try:
        yield found
    finally:
        _gathering.pop()


def report(diagnostics: Iterable[Diagnostic]) -> None:
    """Print diagnostics to stderr, a blank line after each; or keep them for who gathers them."""
    if _gathering:
        _gathering[-1].extend(diagnostics)
        return
    for diagnostic in diagnostics:
        print(rendered(diagnostic, sys.stderr), end="\n\n", file=sys.stderr)


def rendered(diagnostic: Diagnostic, stream: TextIO) -> str:
    """The text of a diagnostic for a stream: in colours if that has them, and without control characters of a file."""
    show = colored if is_colored(stream) else lambda kind, text: text
    return "\n".join("".join(show(kind, printable(text)) for kind, text in line) for line in diagnostic.lines())


def say(diagnostic: Diagnostic) -> None:
    """Print one."""
    report([diagnostic])


def counts_text(diagnostics: Iterable[Diagnostic]) -> str:
    """`2 errors, 1 warning`; empty if there are none."""
    severities = [diagnostic.severity for diagnostic in diagnostics]
    counts = [(severities.count(severity), severity) for severity in ("error", "warning")]
    return ", ".join(f"{count} {severity}{'s' * (count > 1)}" for count, severity in counts if count)


def printable(text: str) -> str:
    """The text without control characters, with which a file could manipulate the terminal, bidirectional ones, which
    make it seem to be another, and lone surrogates.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", text)
