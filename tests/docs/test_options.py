"""The options that the pages name are those of the commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita.cli.command import COMMANDS, SUMMARIES
from tests.docs.pages import PAGES, ROOT, fences

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The long options of a command, and of its subcommands."""
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from (each for each in action.option_strings if each.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from options(each)


def known(command: str) -> set[str]:
    parser = argparse.ArgumentParser()
    COMMANDS[command].add_arguments(parser)
    return set(options(parser)) - {"--help"}


# Spellings that stay for who knows them: pages name the other one.
FORMER = {"--from": "--run-dir", "--ranks": "--stages"}
# Options whose short form the usage shows.
SHORT = {"--output": "-o"}
# Of the commands of others.
OTHERS = re.compile(
    r"\b(hf|pytorch|torchrun|srun|sbatch|kubectl|docker|buildah|debootstrap|mlflow|tensorboard|mkdocs|pytest|SBATCH|ulimit)\b|--(master-port|build-arg)"
)


@pytest.mark.parametrize("command", SUMMARIES)
def test_the_usage_names_every_option(command: str) -> None:
    page = ROOT / "docs" / "commands" / f"{command}.md"
    usage = next(fence.text for fence in fences(page) if fence.language == "text")
    shown = set(OPTION.findall(usage))
    wanted = {each for each in known(command) if command == "init" or FORMER.get(each) not in known(command)}
    for long, short in SHORT.items():
        if long in wanted and re.search(rf"(?<!\w){short}\b", usage):
            shown.add(long)
    assert shown == wanted, page.name


@pytest.mark.few(37)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_option_in_the_text_is_one_of_its_command(page: Path) -> None:
    """Of the command before it in the line; without one, on the page of a command, of that; else of any."""
    every = set().union(*map(known, SUMMARIES)) | {"--help", "--version"}
    own = "run" if page.name == "running.md" else page.stem if page.parent.name == "commands" else None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if OTHERS.search(line):
            continue
        named = [each for each in re.finditer(r"(?:partita |\[`)(?!partita)(\w+)", line) if each[1] in SUMMARIES]
        for found in OPTION.finditer(line):
            command = next((each[1] for each in reversed(named) if each.start() < found.start()), own)
            assert found[0] in (known(command) if command else every), f"{page.name}:{number}: {line}"
