"""Compiles the file of a command. Separate from `source` because checking a file needs no compiler."""

from __future__ import annotations

import argparse

from partita.cli.source import load_or_report, report
from partita.compiler.pipeline import compile_run, compile_spec
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Refused


def compile_or_report(arguments: argparse.Namespace, run: bool = False) -> Compilation | None:
    """The file compiled for training, of which a `run` may need memory for its evaluation, too; None, with diagnostics
    on stderr, if it or its layout is wrong.
    """
    spec = load_or_report(arguments)
    if spec is None:
        return None
    try:
        return compile_run(spec)[0] if run else compile_spec(spec)
    except Refused as refused:
        report(refused.diagnostics)
        return None
