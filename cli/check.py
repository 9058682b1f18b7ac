"""`partita check`: parses, resolves and type-checks a file."""

from __future__ import annotations

import argparse
import json
import sys

from partita.cli.command import command
from partita.cli.source import add_source_arguments, counts_text, printable, rendered
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.spec import Spec, applications


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_source_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the diagnostics as a JSON list")


@command("check", add_arguments, "lint", "validate")
def run(arguments: argparse.Namespace) -> int:
    """Print the diagnostics. Returns 0 if there are no errors (warnings do not count), 1 otherwise."""
    spec, diagnostics = load(arguments.file, arguments.overrides, arguments.root)
    if spec is not None and derives(spec):
        # What a gradient flows through is known once blocks and repeats are expanded.
        from partita.compiler.pipeline import check_gradients

        try:
            check_gradients(spec)
        except Refused as refused:
            spec, diagnostics = None, (*diagnostics, *refused.diagnostics)
    if arguments.json:
        print(json.dumps([diagnostic.as_json() for diagnostic in diagnostics], indent=2))
    else:
        for diagnostic in diagnostics:
            print(rendered(diagnostic, sys.stdout), end="\n\n")
        print(f"{printable(arguments.file)}: {counts_text(diagnostics) or 'ok'}")
    return 0 if spec is not None else 1


def derives(file: Spec) -> bool:
    """Whether the model of a file that trains has gradients in it, or several losses."""
    if file.model is None or file.train is None:
        return False
    return bool(file.model.losses) or any(each.function == "grad" for each in applications(file.model.body))
