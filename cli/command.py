"""The commands by name. A command is a module of this directory whose function is registered by `command`.

Exit status: 0 success, 1 the file or a claim in it is wrong, 2 usage, 3 a run failed, 4 not decided (`verify`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import frozen

from partita.cli.source import report
from partita.dsl.diagnostic import Refused
from partita.dsl.registry import Registry

Run = Callable[[argparse.Namespace], "int | None"]


class UsageError(Exception):
    """Why a command cannot do what is asked, in a line; and the exit `status` of that."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@frozen
class Command:
    """A command: its name, a summary of one line, its options, and its function, which returns the exit status, or None
    for 0; it raises UsageError and Refused.

    `others` are names by which users of other tools may call it.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Run
    others: tuple[str, ...] = ()


# What `partita --help` says of each command, without importing it.
SUMMARIES = {
    "init": "write a starter file, or that of a model of transformers",
    "import": "write the file of a PyTorch module, or of a model of transformers, and prove them equal",
    "check": "check a file: errors with location, cause and fix",
    "fmt": "format files, keeping comments",
    "compile": "compile a file: stages, collectives, memory, predicted step, claims; or print an intermediate form",
    "diff": "what changes from one file, revision or layout to another: collectives, bytes, memory, step, claims",
    "explain": "list every collective with bytes, time and source line; or the layout of one tensor, and why",
    "schedule": "show the timeline of one step: bubble, makespan, peak live activations per rank",
    "verify": "verify a file: translation validation, invariants, memory, and a proxy run against one device",
    "plan": "search meshes, layouts and schedules for N devices: a ranked table, or the best as a file",
    "data": "show rows of a file's data as its model will see them, with what it learns",
    "run": "train: standalone on this machine, or as one rank under torchrun or Slurm",
    "evaluate": "loss and metrics of a trained model on a whole data set",
    "predict": "outputs of a trained model for all rows of some data, as a .npz",
    "sample": "write text with a trained language model",
    "report": "write a run as one page for a browser: metrics, timeline, memory, collectives, and the file",
    "watch": "serve a run's page live, on this machine",
    "lsp": "the language server, for editors: diagnostics, types and layouts, names, formatting",
    "completion": "the script with which bash, zsh or fish complete commands, options, files and names in them",
    "doctor": "what this machine has, what is wrong with it, and a self test with one rank per device",
    "profile": "measure this machine's device and links, as a profile for the cost model",
    "checkpoint": "list, show and verify checkpoints; import and export trained models",
}

COMMANDS: Registry[Command] = Registry("command", "partita.cli", tuple(SUMMARIES))


def command(
    name: str, add_arguments: Callable[[argparse.ArgumentParser], None], *others: str, summary: str | None = None
) -> Callable[[Run], Run]:
    """Registers the decorated function as a command, by default with its summary of `SUMMARIES`."""

    def registered(run: Run) -> Run:
        COMMANDS.register(Command(name, summary or SUMMARIES[name], add_arguments, run, others))
        return run

    return registered


def status_of(act: Callable[[], int | None]) -> int:
    """The exit status of a command, whose errors are printed."""
    try:
        return act() or 0
    except UsageError as error:
        print(f"partita: {error}", file=sys.stderr)
        return error.status
    except Refused as refused:
        report(refused.diagnostics)
        return 1


@contextmanager
def writing(place: object) -> Iterator[None]:
    """Turns errors of the system into a UsageError that says what cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {place}: {error.strerror}") from error
