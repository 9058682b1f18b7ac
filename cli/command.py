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


# What `partita --help` says of each command, without importing it.
SUMMARIES = {
    "init": "write a starter file, or the model of a config.json of Hugging Face",
    "check": "check a file: errors with location, cause and fix",
    "fmt": "format files, keeping comments",
    "compile": "compile a file: stages, collectives, memory, predicted step, claims; or print an intermediate form",
    "explain": "list every collective with bytes, time and source line; or the layout of one tensor, and why",
    "schedule": "show the timeline of one step: bubble, makespan, peak live activations per rank",
    "verify": "verify a file: translation validation, invariants, memory, and a proxy run against one device",
    "plan": "search meshes, layouts and schedules for N devices: a ranked table, or the best as a file",
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
register = COMMANDS.register
