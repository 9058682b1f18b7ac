"""The commands by name. A command is a module of this directory that registers a `Command` when it is imported.

Exit status: 0 success, 1 the file or a claim in it is wrong, 2 usage, 3 a run failed, 4 not decided (`verify`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from attrs import frozen

from partita.dsl.registry import Registry


@frozen
class Command:
    """A command: its name, a summary of one line, its options, and its function, which returns the exit status.

    `others` are names by which users of other tools may call it.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    others: tuple[str, ...] = ()


COMMANDS: Registry[Command] = Registry(
    "command",
    "partita.cli",
    (
        "init",
        "check",
        "fmt",
        "compile",
        "explain",
        "schedule",
        "verify",
        "plan",
        "run",
        "profile",
        "checkpoint",
    ),
)
register = COMMANDS.register
