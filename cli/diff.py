"""`partita diff BEFORE AFTER`: what changes in the program from one file, revision or layout to another."""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from os.path import dirname, exists
from typing import TYPE_CHECKING

from partita.cli.argument_types import known, number
from partita.cli.command import UsageError, command
from partita.cli.output import add_output, deliver_either
from partita.cli.source import printable
from partita.cli.table import Column, Table, print_table, print_text
from partita.dsl.config.builtins import MEASURES
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.syntax.units import shortened

if TYPE_CHECKING:
    from rich.console import Console

    from partita.compiler.report.difference import Difference, Numbers

LONGEST = 48  # characters of a value in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("before", metavar="BEFORE", help="a .par file, or one of a revision of git, HEAD~1:FILE")
    what = "the other; without it, the same file, as it is now"
    parser.add_argument("after", metavar="AFTER", nargs="?", help=what)
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of both")
    for side in ("before", "after"):
        what = f"an override of {side.upper()} alone"
        parser.add_argument(
            f"--{side}", dest=f"{side}_overrides", action="append", default=[], metavar="KEY=VALUE", help=what
        )
    what = "exit with 1 if a measure is worse by more than so many percent, as step_time=2"
    parser.add_argument("--limit", metavar="MEASURE=PERCENT", action="append", default=[], type=_limit, help=what)
    add_output(parser, "the differences")


def _limit(text: str) -> tuple[str, float]:
    name, _, share = text.rpartition("=")
    measures = [each for each, measure in MEASURES.items() if not measure.takes or each == "bytes"]
    try:
        known(name.partition("(")[0], measures)
        return name, number(share.removesuffix("%")) / 100
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; it is a measure and percent: step_time=2") from error


@command("diff", add_arguments)
def run(arguments: argparse.Namespace) -> int:
    """Compile both, and print what is different. Returns 1 beyond a limit. Raises UsageError and Refused."""
    from partita.compiler.report.difference import differences, measures

    after, overrides = arguments.after, list(arguments.overrides)
    if after is not None and "=" in after and not exists(after):
        after, overrides = None, [after, *overrides]
    before = arguments.before
    if after is None:
        after = before.partition(":")[2] if _is_revision(before) else before
    one = _compiled(before, [*overrides, *arguments.before_overrides])
    other = _compiled(after, [*overrides, *arguments.after_overrides])
    found = list(differences(one, other))
    exceeded, measured = [], {**measures(other), **measures(one)}
    for name, share in arguments.limit:
        if name not in measured:
            raise UsageError(f"--limit {name}: there is no such measure: {', '.join(measured)}")
        exceeded += [
            (each, share) for each in found if each.kind == "measure" and each.what == name and each.worse > share
        ]
    result = {"differences": [each.as_json() for each in found], "exceeded": [each.what for each, _ in exceeded]}
    deliver_either(arguments, result, lambda console: _show(found, exceeded, console))
    return 1 if exceeded else 0


def _show(found: Sequence[Difference], exceeded: Sequence[tuple[Difference, float]], console: Console) -> None:
    if not found:
        print_text(console, "no differences")
    for kind in dict.fromkeys(each.kind for each in found):
        own = [each for each in found if each.kind == kind]
        columns = [Column(kind), Column("before"), Column("after"), Column("", right=True), Column("where", spare=1)]
        rows = [
            tuple(
                printable(text)
                for text in (
                    shortened(each.what, LONGEST),
                    shortened(each.shown(each.before), LONGEST),
                    shortened(each.shown(each.after), LONGEST),
                    _percent(each.growth),
                    each.place or "",
                )
            )
            for each in own
        ]
        print_table(console, Table(columns, rows, console.width))
        console.print()
    for each, share in exceeded:
        grows = "where there was none" if each.growth is None else f"by {100 * abs(each.worse):.3g}%"
        print_text(console, f"{each.what} is worse {grows}, of at most {100 * share:g}%")


def _percent(growth: float | None) -> str:
    if growth is None:
        return ""
    return f"{100 * growth:+,.0f}%" if abs(growth) >= 1 else f"{100 * growth:+.3g}%"


def _compiled(name: str, overrides: Sequence[str]) -> Numbers:
    """The program of a file. Raises UsageError and Refused."""
    from partita.compiler.pipeline import compile_run
    from partita.compiler.report.difference import Numbers
    from partita.compiler.report.summary import summarize

    with _file(name) as path:
        spec, diagnostics = load(path, overrides)
        if spec is None:
            raise Refused(diagnostics)
        state, _ = compile_run(spec)
    return Numbers(state, summarize(state))


def _is_revision(name: str) -> bool:
    return ":" in name and not exists(name)


@contextmanager
def _file(name: str) -> Iterator[str]:
    """The path of a file; of one of a revision, in a folder with all that was beside it. Raises UsageError."""
    if not _is_revision(name):
        yield name
        return
    revision, _, path = name.partition(":")
    command = ["git", "archive", "--format=tar", revision, "--", dirname(path) or "."]
    try:
        made = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise UsageError("revisions need git") from None
    if made.returncode:
        reason = made.stderr.decode(errors="replace").strip().partition("\n")[0].removeprefix("fatal: ")
        raise UsageError(f"git has no {printable(name)}: {printable(reason)}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(made.stdout)) as files:
        files.extractall(folder, filter="data")
        with chdir(folder):
            yield path
