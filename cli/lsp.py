"""`partita lsp`: the language server, for editors, on standard input and output."""

from __future__ import annotations

import argparse
import os
import sys

from partita.cli.command import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The only option is `--stdio`, which editors pass to every server."""
    parser.set_defaults(needs="editor")
    parser.add_argument("--stdio", action="store_true", help="what it does anyway: talk over standard input and output")


@command("lsp", add_arguments, "language-server", "server")
def run(arguments: argparse.Namespace) -> int:
    """Serve until the editor ends it. Returns 0; 1 if that is without a shutdown, as the protocol has it."""
    from partita.cli.editor.features import server

    serving = server()
    with open(os.dup(sys.stdout.fileno()), "wb") as output:  # the server closes what it writes to
        serving.start_io(stdout=output)
    return 1 if serving.killed else 0
