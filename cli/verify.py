"""`partita verify FILE`: that the program of a file is right, whatever its mesh, without its GPUs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from partita.cli.source import add_source_arguments, load_or_report, printable, report

if TYPE_CHECKING:
    from rich.console import Console

    from partita.runtime.verification import Execution, Verification

SUMMARY = "prove a file: certificate, laws, memory, and a shrunken copy run against one device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_source_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the figures, and what is wrong, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Verify and print. 0; 1 with diagnostics."""
    spec = load_or_report(arguments)
    if spec is None:
        return 1
    from partita.dsl.diagnostic import Refused
    from partita.runtime.verification import verify

    try:
        found = verify(spec)
    except Refused as refused:
        report(refused.diagnostics)
        return 1
    report(found.warnings)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        from rich.console import Console

        colour = sys.stdout.isatty()
        _show(arguments.file, found, Console(width=None if colour else 110, highlight=False))
    return 0 if found.passed else 1


def _show(file: str, found: Verification, console: Console) -> None:
    """The report: one row for each thing that was shown, then the verdict."""
    from rich.table import Table

    from partita.cli.figures import bytes_text

    report(found.diagnostics)
    most = max(found.peak_memory)
    ranks = "1 rank" if found.ranks == 1 else f"{found.ranks:,} ranks"
    table = Table("", "", "", box=None, show_header=False, pad_edge=False)
    table.add_row("laws", "[green]hold[/]", f"{found.actions:,} actions, {found.messages:,} messages; no deadlock")
    table.add_row("memory", "[green]bounded[/]", f"at most {bytes_text(most)} on each of {ranks}")
    certified = all(each.passed for each in found.certificates)
    nodes, moves = (sum(getattr(each, what) for each in found.certificates) for what in ("nodes", "moves"))
    what = f"{nodes:,} operations and {moves:,} changes of layout, each by its rule"
    table.add_row("certificate", _verdict(certified, "holds"), what)
    table.add_row("execution", _verdict(found.execution.passed, "equal"), _execution(found.execution))
    console.print(table)
    verdict = "verified" if found.passed else "[red]wrong[/]"
    console.print(f"{printable(file)}: {verdict} in {found.seconds:.1f} s")


def _verdict(passed: bool, word: str) -> str:
    return f"[green]{word}[/]" if passed else "[red]fails[/]"


def _execution(found: Execution) -> str:
    """What was run, on which sizes, and how near it came."""
    mesh = " × ".join(f"{name} {size}" for name, size in found.mesh) or "one rank"
    sizes = ", ".join(f"{name} {size}" for name, size in found.sizes.items())
    stages = f"{found.stages} stage{'s' * (found.stages > 1)}"
    microbatches = f"{found.microbatches} microbatch{'es' * (found.microbatches > 1)}"
    text = f"on {mesh}; {stages}, {microbatches}; {sizes}\n"
    if found.worst is None:
        return text + f"none of {found.compared} tensors could be compared"
    return text + f"{found.compared} tensors compared, largest error {found.largest:.1e} ({found.worst})"
