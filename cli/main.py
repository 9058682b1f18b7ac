"""The command line: one subcommand per module of this folder, imported only when it is called for.

A command module has `SUMMARY`, `add_arguments(parser)` and `run(arguments) -> int`. Exit status: 0 done, 1 the file
or a claim in it is wrong, 2 usage, 3 a run failed.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from partita import __version__
from partita.cli import streams
from partita.cli.extras import explained, missing
from partita.cli.source import printable
from partita.dsl.report import nearest

# Name -> the SUMMARY of the module of that name in this folder, which is the command. It stands here too, so that
# the overview imports none of them.
COMMANDS = {
    "init": "write a starter file: a small model that trains on this machine as is",
    "check": "check a file: errors with location, cause and fix",
    "fmt": "format files, keeping comments",
    "compile": "compile a file: stages, collectives, memory, predicted step, claims; or print an intermediate form",
    "explain": "list every collective with bytes, time and source line; or the layout of one tensor, and why",
    "schedule": "show the timeline of one step: bubble, makespan, peak live activations per rank",
    "verify": "verify a file: translation validation, invariants, memory, and a proxy run against one device",
    "plan": "search meshes, layouts and schedules for N devices: a ranked table, or the best as a file",
    "run": "train: standalone on this machine, or as one rank under torchrun or Slurm",
    "profile": "measure this machine's device and links, as a profile for the cost model",
    "checkpoint": "list, show and verify checkpoints; export and import full tensors",
}
# What others call them.
OTHERS = {
    **dict.fromkeys(("train", "start", "launch", "torchrun"), "run"),
    **dict.fromkeys(("new", "create"), "init"),
    **dict.fromkeys(("lint", "validate"), "check"),
    **dict.fromkeys(("search", "autotune", "tune"), "plan"),
    **dict.fromkeys(("checkpoints", "ckpt"), "checkpoint"),
    "benchmark": "profile",
    "build": "compile",
    "format": "fmt",
    "help": "--help",
    "prove": "verify",
    "version": "--version",
}
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    streams.prepare()
    _settle()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            status = _run(given)
        finally:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        streams.abandon(sys.stdout)  # its reader has left
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        streams.abandon(sys.stdout)
        print(f"partita: cannot write: {error.strerror}", file=sys.stderr)
        return 2


def _settle() -> None:
    """As a supervisor's rank: enter the run's network, and end with the supervisor. Before any library has threads."""
    if "PARTITA_SUPERVISOR" in os.environ:
        from partita.runtime.supervision.isolation import settle

        settle(os.environ)


def _run(given: Sequence[str]) -> int:
    parser, called, command = _parser(given)
    parsed = _parsed(parser, called, given)
    if command is None:
        parser.print_help()
        return 2
    what = f"`partita {command}`"
    problem = missing(getattr(parsed, "needs", None), what)
    if problem is None:
        try:
            return int(import_module(f"partita.cli.{command}").run(parsed))
        except ImportError as error:
            problem = explained(error, what)
            if problem is None:
                raise
    print(f"partita: {problem}", file=sys.stderr)
    return 2


def _parsed(
    parser: argparse.ArgumentParser, called: argparse.ArgumentParser, given: Sequence[str]
) -> argparse.Namespace:
    """The arguments; argparse itself takes no overrides after an option that follows the first ones."""
    parsed, rest = parser.parse_known_args(given)
    words = hasattr(parsed, "takes_name")
    strays = [word for word in rest if word.startswith("-") or not ("=" in word or words)]
    if strays or (rest and not hasattr(parsed, "overrides")):
        option = next((word for word in strays if re.fullmatch(r"--[a-z][\w.-]*(=.*)?", word)), None)
        help = ""
        if option is not None and hasattr(parsed, "overrides"):
            key, _, value = option[2:].partition("=")
            help = f"; settings take no dashes: {key.replace('-', '_')}={value or '…'}"
        called.error(f"unrecognized arguments: {' '.join(strays or rest)}{help}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _parser(given: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, str | None]:
    """The parser, with the options of the one command that is called, that command's own, and its name."""
    parser = argparse.ArgumentParser(
        prog="partita", description="Declarative distributed training.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    name = next((word for word in given if not word.startswith("-")), None)
    called = parser
    for each, summary in COMMANDS.items():
        subparser = commands.add_parser(each, help=summary, description=summary, allow_abbrev=False)
        if each == name:
            import_module(f"partita.cli.{each}").add_arguments(subparser)
            called = subparser
    if name is not None and name not in COMMANDS and not {"-h", "--help", "--version"} & set(given):
        parser.error(_unknown(name))
    return parser, called, name


def _unknown(name: str) -> str:
    """That there is no such command, and which may be meant."""
    # Imported here: whoever names a command needs neither.

    shown = printable(name)
    near = OTHERS.get(name) or nearest(name, COMMANDS)
    help = f"did you mean `partita {near}`?" if near else f"there are {', '.join(COMMANDS)}"
    if name.endswith(".par"):
        help = f"a file follows a command: `partita run {shown}`"
    return f"there is no command `{shown}`; {help}"


class _Version(argparse.Action):
    """`--version`, looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"partita {__version__}")
        parser.exit(0)
