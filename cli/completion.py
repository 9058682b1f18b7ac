"""`partita completion SHELL`: the script with which a shell completes commands, options, files and names in them; and
what may follow on a command line, for the shell that asks by that script: argcomplete reads the line.

Files are .par files; overrides are those of the file on the line, `layout=` one of its layouts; NAME is a parameter.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from partita.cli.command import command
from partita.cli.parsing import file_in
from partita.dsl.config.builtins import OPTIMIZERS, SCHEDULES
from partita.dsl.config.misplaced_settings import declared_in
from partita.dsl.config.overrides import full_names
from partita.dsl.names.declarations import Declarations
from partita.dsl.syntax import tree
from partita.dsl.syntax.walk import nodes

Parsers = Callable[[list[str]], tuple[argparse.ArgumentParser, argparse.ArgumentParser, str | None]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(needs="completion")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script")


@command("completion", add_arguments, "completions")
def run(arguments: argparse.Namespace) -> None:
    """Print the script."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["partita"], True, arguments.shell))


def complete(parsers: Parsers) -> None:
    """Answer the shell that asks, by the environment, and exit. `parsers` makes the parser for the words of a line."""
    import argcomplete
    from argcomplete.lexers import split_line

    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    _, _, _, words, _ = split_line(line, point)
    parser, called, _ = parsers(words[1:])
    for action in _actions(called):
        completer = _completer(action, words)
        if completer is not None:
            action.completer = completer  # type: ignore[attr-defined]  # argcomplete looks for it there
    argcomplete.autocomplete(parser, always_complete_options="long")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The actions of a parser, and of its own commands."""
    for action in parser._actions:
        yield action
        for each in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from _actions(each)


def _completer(action: argparse.Action, words: list[str]) -> Any:
    """What completes the values of an argument."""
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    if action.dest == "file":
        return FilesCompleter((".par",))
    if action.dest == "overrides":
        return lambda prefix, parser, **_: _overrides(
            prefix, declared_in(file_in(words)), parser.get_default("takes_name")
        )
    if action.metavar == "DIR":
        return DirectoriesCompleter()
    if action.dest == "program":
        return lambda **_: list(declared_in(file_in(words)).weights)
    return None


def _overrides(prefix: str, declarations: Declarations, names: bool | None) -> list[str]:
    """Keys with `=`; behind one that chooses, what can be chosen; and the names of parameters, if `names` may stand."""
    key, equals, _ = prefix.partition("=")
    if equals:
        return [f"{key}={each}" for each in _choices(key, declarations)]
    return [
        *(f"{each}=" for each in dict.fromkeys(full_names(declarations))),
        *(_parameters(declarations) if names else ()),
    ]


def _choices(key: str, declarations: Declarations) -> list[str]:
    kind = key.removeprefix("train.")
    named: dict[str, Iterable[str]] = {"schedule": SCHEDULES, "optimizer": OPTIMIZERS}
    return [*declarations.alternatives.get(kind, ()), *named.get(kind, ())]


def _parameters(declarations: Declarations) -> Iterator[str]:
    """The names of parameters, from the block or model on."""
    bodies: list[tree.Model | tree.Block] = [*declarations.models.values(), *declarations.blocks.values()]
    for body in bodies:
        for node in nodes(body):
            if isinstance(node, tree.Param | tree.Buffer):
                yield from (f"{body.name.text}.{name.text}" for name in node.names)
