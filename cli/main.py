"""The command line: one subcommand per module of this directory (`command`), imported when it is called."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Sequence

from partita.cli import streams
from partita.cli.command import COMMANDS, SUMMARIES, UsageError, status_of
from partita.cli.extras import explained, missing
from partita.cli.parsing import Parser
from partita.cli.source import printable
from partita.dsl.advice.report import nearest
from partita.dsl.version import __version__

# Words that stand for options.
OPTIONS = {"help": "--help", "version": "--version"}
FAILED, INTERRUPTED = 3, 130
# What torch says when an allocation fails, on CPUs and GPUs.
_OUT_OF_MEMORY = re.compile(
    r"(?<=can't allocate memory: )you tried to allocate \d+ bytes|\w+ out of memory\. [^.]*[\d.]+ \w+"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    streams.prepare()
    join_supervisor()
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if "_ARGCOMPLETE" in os.environ and not missing("completion", "completion"):
        from partita.cli.completion import complete

        complete(_parser)  # for a shell, and exits
    try:
        try:
            status = _run(argv)
        finally:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        streams.abandon(sys.stdout)  # its reader has exited
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:  # that of torch is the latter
        match = _OUT_OF_MEMORY.search(str(error))
        if match is None and not isinstance(error, MemoryError):
            raise
        what = f": {match.group()}" if match else ""
        print(f"partita: out of memory{what}; `partita compile FILE` shows what each rank needs", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        streams.abandon(sys.stdout)
        print(f"partita: cannot write: {error.strerror}", file=sys.stderr)
        return 2


def join_supervisor() -> None:
    """In a rank of a supervisor: enter the run's network, and end with the supervisor. Precedes any threads."""
    if "PARTITA_SUPERVISOR" in os.environ:
        from partita.runtime.supervision.isolation import enter_isolation

        enter_isolation(os.environ)


def _run(argv: Sequence[str]) -> int:
    parser, called, command = _parser(argv)
    parsed = _parsed(parser, called, argv)
    if command is None:
        parser.print_help()
        return 2
    return status_of(lambda: _call(command, parsed))


def _call(command: str, parsed: argparse.Namespace) -> int | None:
    what = f"`partita {command}`"
    problem = missing(getattr(parsed, "needs", None), what)
    if problem is not None:
        raise UsageError(problem)
    try:
        return COMMANDS[command].run(parsed)
    except ImportError as error:
        problem = explained(error, what)
        if problem is None:
            raise
        raise UsageError(problem) from error


def _parsed(parser: Parser, called: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; argparse itself takes no overrides, and no optional file, after an option that follows others."""
    parsed, rest = parser.parse_known_args(argv)
    words = hasattr(parsed, "takes_name")
    file = next((word for word in rest if not word.startswith("-") and "=" not in word), None)
    if file is not None and getattr(parsed, "file", file) is None:
        parsed.file = file
        rest.remove(file)
    strays = [word for word in rest if word.startswith("-") or not ("=" in word or words)]
    if strays or (rest and not hasattr(parsed, "overrides")):
        unknown, inner = strays or rest, called.called(parsed)
        help = inner.advice(argv, unknown)
        inner.error(printable(f"unrecognized arguments: {' '.join(unknown)}{f'; {help}' if help else ''}"))
    parsed.given = tuple(argv)
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _parser(argv: Sequence[str]) -> tuple[Parser, Parser, str | None]:
    """The parser, which has the options only of the command that is called; that command's parser; and its name."""
    parser = Parser(prog="partita", description="Declarative distributed training.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    name = next((word for word in argv if not word.startswith("-")), None)
    called = parser
    for each in [name] if name is not None and name in COMMANDS else COMMANDS:
        summary = SUMMARIES.get(each) or COMMANDS[each].summary
        subparser = commands.add_parser(each, help=summary, description=summary)
        if each == name:
            COMMANDS[each].add_arguments(subparser)
            called = subparser
    if name is not None and name not in COMMANDS and not {"-h", "--help", "--version"} & set(argv):
        parser.error(_unknown(name))
    return parser, called, name


def _unknown(name: str) -> str:
    """The message for an unknown command, with the one that may be meant."""
    shown = printable(name)
    same = next((each.name for each in COMMANDS.values() if name in each.others), None)
    near = OPTIONS.get(name) or same or nearest(name, COMMANDS)
    help = f"did you mean `partita {near}`?" if near else f"there are {', '.join(COMMANDS)}"
    if name.endswith(".par"):
        help = f"a file follows a command: `partita run {shown}`"
    return f"there is no command `{shown}`; {help}"


class _Version(argparse.Action):
    """`--version`, which looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"partita {__version__}")
        parser.exit(0)
