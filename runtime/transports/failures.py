"""What a process is told when another one has gone: operations of torch.distributed, and the errors they end with."""

from __future__ import annotations

from typing import Any


class ConnectionLost(RuntimeError):
    """Another rank has gone; the message names the operation and the rank at its other end, or the mesh axis."""


class Stranger(RuntimeError):
    """Who is at the other end of a connection is no rank of this run."""

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
    """The first sentence of a backend's message, without the place in its source that stands before it."""
    first = str(error).strip().split("\n")[0]
    if first.startswith("["):
        first = first.partition("] ")[2]
    return first.split(". ")[0]
