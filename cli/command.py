"""What a command is, and all of them by name. One is a module of this folder, which registers it when it is imported.

Exit status: 0 done, 1 the file or a claim in it is wrong, 2 usage, 3 a run failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from attrs import frozen

from partita.dsl.registry import Registry


@frozen
class Command:
    """A command: its name, what it does in a line, its options, and its function, which returns its exit status.

    `others` is what people who come from elsewhere call it.
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
