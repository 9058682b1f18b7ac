"""`partita watch RUN`: a run's page, live, for a browser on this machine."""

from __future__ import annotations

import argparse
import signal
from contextlib import suppress

from partita.cli.command import UsageError, command
from partita.cli.page.run import add_run_argument, opened
from partita.cli.page.server import Server
from partita.cli.source import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run_argument(parser)
    parser.add_argument("--port", type=_port, default=0, metavar="N", help="default: one that is free")


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError("from 1 to 65535")
    return port


@command("watch", add_arguments, "serve", "monitor", "tail")
def run(arguments: argparse.Namespace) -> None:
    """Serve until Ctrl-C. Raises UsageError if there is no such run, or the port is taken."""
    training_run = opened(arguments.run_dir)
    try:
        server = Server(training_run, arguments.port)
    except OSError as error:
        raise UsageError(f"cannot listen on port {arguments.port}: {error.strerror}") from error
    with server:
        print(f"watching {printable(training_run.name)} at {server.address}\nCtrl-C ends it", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)
