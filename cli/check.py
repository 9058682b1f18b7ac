"""`partita check`: parses, resolves and type-checks a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from partita.cli.command import command
from partita.cli.formats import add_format, formatted
from partita.cli.output import add_output, deliver, json_text
from partita.cli.source import add_source_arguments, counts_text, files_and_overrides, printable, rendered, report
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.load import load
from partita.dsl.spec import Spec, applications


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_source_arguments(parser)
    add_output(parser, "the diagnostics")
    add_format(parser)


@command("check", add_arguments, "lint", "validate")
@formatted
def run(arguments: argparse.Namespace) -> int:
    """Print the diagnostics. Returns 0 if there are no errors (warnings do not count), 1 otherwise."""
    files, overrides = files_and_overrides(arguments)
    found = [(file, *_checked(file, overrides, arguments.root)) for file in files]
    every = [diagnostic for _, _, diagnostics in found for diagnostic in diagnostics]
    if arguments.format is not None:
        report(every)
    elif arguments.json:
        deliver(json_text([diagnostic.as_json() for diagnostic in every]), arguments.output)
    else:
        deliver("".join(_shown(file, diagnostics) for file, _, diagnostics in found), arguments.output)
    return 0 if all(right for _, right, _ in found) else 1


def _shown(file: str, diagnostics: Sequence[Diagnostic]) -> str:
    every = "".join(f"{rendered(diagnostic, sys.stdout)}\n\n" for diagnostic in diagnostics)
    return f"{every}{printable(file)}: {counts_text(diagnostics) or 'ok'}\n"


def _checked(file: str, overrides: Sequence[str], root: str | None) -> tuple[bool, Sequence[Diagnostic]]:
    """Whether a file is right, and what there is to say of it."""
    spec, diagnostics = load(file, overrides, root)
    if spec is not None and derives(spec):
        # What a gradient flows through is known once blocks and repeats are expanded.
        from partita.compiler.pipeline import check_gradients

        try:
            check_gradients(spec)
        except Refused as refused:
            spec, diagnostics = None, (*diagnostics, *refused.diagnostics)
    return spec is not None, diagnostics


def derives(file: Spec) -> bool:
    """Whether the model of a file that trains has gradients in it, or several losses."""
    if file.model is None or file.train is None:
        return False
    return bool(file.model.losses) or any(each.function == "grad" for each in applications(file.model.body))
