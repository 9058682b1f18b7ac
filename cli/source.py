"""The file argument of most commands: `FILE [key=value ...] [--root DIR]`, and its diagnostics."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from typing import TextIO

from partita.cli.colors import colored, is_colored
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.load import load
from partita.dsl.spec import Spec


def add_source_arguments(parser: argparse.ArgumentParser, optional: str | None = None) -> None:
    """FILE, which is `optional` if that says what it is; overrides; and the directory that imports may not leave."""
    if optional is None:
        parser.add_argument("file", metavar="FILE", help="a .par file")
    else:
        parser.add_argument("file", metavar="FILE", nargs="?", help=optional)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="batch=128 cluster.pipe=4 train.steps=10 layout=zero3 schedule=gpipe",
    )
    parser.add_argument("--root", metavar="DIR", help="imports must stay within it (default: FILE's directory)")


def add_python_argument(parser: argparse.ArgumentParser) -> None:
    """Whether Python files that FILE names may be run."""
    parser.add_argument(
        "--allow-python", action="store_true", help="run the Python code that FILE names for its own operations"
    )


def load_or_report(arguments: argparse.Namespace, fitting: bool = True) -> Spec | None:
    """The checked file, with diagnostics on stderr; None if there are errors (see `load`)."""
    spec, diagnostics = load(arguments.file, arguments.overrides, arguments.root, fitting=fitting)
    report(diagnostics)
    return spec


def report(diagnostics: Iterable[Diagnostic]) -> None:
    """Print diagnostics to stderr, a blank line after each."""
    for diagnostic in diagnostics:
        print(rendered(diagnostic, sys.stderr), end="\n\n", file=sys.stderr)


def rendered(diagnostic: Diagnostic, stream: TextIO) -> str:
    """The text of a diagnostic for a stream: in colours if that has them, and without control characters of a file."""
    show = colored if is_colored(stream) else lambda kind, text: text
    return "\n".join("".join(show(kind, printable(text)) for kind, text in line) for line in diagnostic.lines())


def say(diagnostic: Diagnostic) -> None:
    """Print one."""
    report([diagnostic])


def summary(name: str, diagnostics: Iterable[Diagnostic]) -> str:
    """`gpt.par: 2 errors, 1 warning`, or `gpt.par: ok`."""
    found = [diagnostic.severity for diagnostic in diagnostics]
    counts = [(found.count(severity), severity) for severity in ("error", "warning")]
    parts = [f"{count} {severity}{'s' if count > 1 else ''}" for count, severity in counts if count]
    return f"{printable(name)}: {', '.join(parts) or 'ok'}"


def printable(text: str) -> str:
    """The text without the control characters with which a file could manipulate the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", text)
