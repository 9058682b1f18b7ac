"""Errors of torch.distributed operations when another process is gone."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

CLOSING = "partita-close"  # the thread that closes connections


class ConnectionLost(RuntimeError):
    """Another rank is gone; the message names the operation and the peer rank or mesh axis."""


class UntrustedPeer(RuntimeError):
    """The peer of a connection is not a rank of this run."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"a process that is not a rank of this run connected to the ranks ({where}); "
            "nothing was sent to it but greetings"
        )


def post(description: str, operation: Any, *arguments: Any, **options: Any) -> Any:
    """Start an operation. Raises `ConnectionLost`."""
    try:
        return operation(*arguments, **options)
    except RuntimeError as error:
        raise ConnectionLost(f"{description} failed: {cause(error)}") from error


def wait(work: Any, description: str) -> None:
    """Wait for a started operation. Raises `ConnectionLost`."""
    try:
        work.wait()
    except RuntimeError as error:
        raise ConnectionLost(f"{description} failed: {cause(error)}") from error


def cause(error: RuntimeError) -> str:
    """The first sentence of a backend's message, without the source location in front of it."""
    first = str(error).strip().split("\n")[0]
    if first.startswith("["):
        first = first.partition("] ")[2]
    return first.split(". ")[0]


def end_with(status: int) -> None:
    """End the process if its connections are still being closed: what runs at its end would wait for them, too."""
    if any(each.name == CLOSING for each in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
