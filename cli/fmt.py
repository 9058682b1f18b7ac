"""`partita fmt`: formats files, keeping comments."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from partita.cli.command import command
from partita.cli.source import report
from partita.dsl.diagnostic import Refused
from partita.dsl.syntax.format import format_text
from partita.dsl.syntax.reader import read_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .par file")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a file would change")
    parser.add_argument("-o", "--output", metavar="OUT", help="write the formatted FILE here (`-`: stdout)")


@command("fmt", add_arguments, "format")
def run(arguments: argparse.Namespace) -> int:
    """Format each file. Returns 0; 1 if one is wrong, cannot be written or, with --check, would change; 2 for usage."""
    if arguments.output is not None and (len(arguments.files) > 1 or arguments.check):
        print("partita fmt: -o needs exactly one FILE, and no --check", file=sys.stderr)
        return 2
    return max(_format(name, arguments) for name in arguments.files)


def _format(name: str, arguments: argparse.Namespace) -> int:
    try:
        before = read_source(name, name).text
        after = format_text(before, name)
        # Sources are read with normalized line ends; a file with other ones changes too.
        changes = after != before or b"\r" in Path(name).read_bytes()
    except Refused as refused:
        report(refused.diagnostics)
        return 1
    if arguments.check:
        if changes:
            print(f"{name}: would change")
        return int(changes)
    if arguments.output == "-":
        sys.stdout.write(after)
        return 0
    target = arguments.output or name
    if not changes and target == name:
        return 0
    try:
        _write(target, after)
    except OSError as error:
        print(f"partita fmt: cannot write {target}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{target}: formatted")
    return 0


def _write(path: str, text: str) -> None:
    """Replace a file atomically, keeping its permissions."""
    real = os.path.realpath(path)
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(real), prefix=".partita-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        mode = os.stat(real).st_mode if os.path.exists(real) else 0o666 & ~_umask()
        os.chmod(temporary, mode & 0o7777)
        os.replace(temporary, real)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
