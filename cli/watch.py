"""`partita watch RUN`: a run's page, live, for a browser on this machine."""

from __future__ import annotations

import argparse
import signal
import sys

from partita.cli.command import SUMMARIES, Command, register
from partita.cli.page.opened import add_run_argument, opened
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


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Returns 0, or 2 if there is no such run, or the port is taken."""
    found = opened(arguments.run_dir)
    if found is None:
        return 2
    try:
        server = Server(found, arguments.port)
    except OSError as error:
        print(f"partita: cannot listen on port {arguments.port}: {error.strerror}", file=sys.stderr)
        return 2
    with server:
        print(f"watching {printable(found.name)} at {server.address}\nCtrl-C ends it", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            return 0
    return 0


register(
    Command(
        "watch",
        SUMMARIES["watch"],
        add_arguments,
        run,
        others=("serve", "monitor", "tail"),
    )
)
