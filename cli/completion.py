"""`partita completion SHELL`: the script with which a shell completes commands, options, files and names in them."""

from __future__ import annotations

import argparse

from partita.cli.command import SUMMARIES, Command, register

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(needs="completion")
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(arguments: argparse.Namespace) -> int:
    """Print the script. Returns 0."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["partita"], True, arguments.shell))
    return 0


register(Command("completion", SUMMARIES["completion"], add_arguments, run, others=("completions",)))
