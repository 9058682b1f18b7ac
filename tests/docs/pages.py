"""The pages of the documentation as tests see them: fenced blocks, the files they make, the sessions they show.

How a block is marked says what it is:

    ```par                  a whole file, which must check
    ```par NAME.par         a whole file, under a name that the console blocks of the page can use
    ```par NAME.par broken  the same, but one that does not check
    ```par frame KIND       a file with `…` where the examples of a kind stand
    ```par KIND             an example that must check within the frame of its kind, on the same page
    ```par KIND NAME.par    the same, as a file under a name
    ```par fragment         no whole file, and in no frame
    ```python NAME.py       a Python file that files or commands of the page name
    ```diff NAME.diff       a change of a file, that commands of the page name
    ```console              commands after `$ `, each with its output; `$ echo $?` shows a status other than 0
    ```pycon                statements after `>>> `, each with its output

A picture of a page, `![what it shows](images/NAME.svg)`, is what a command of the page has written into NAME.svg.

The sessions of a page run in order, in one empty folder with the page's named files. In an expected output `…` stands
for anything and spaces for any number of spaces. All else must be printed as it stands, but for what differs from
machine to machine: seconds that something has taken, after the word `in`; and where a command computes with tensors,
durations and speeds, and numbers with a decimal point, which may be near those shown.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import isclose
from pathlib import Path
from xml.etree import ElementTree

from attrs import evolve, field, frozen

from tests.files import ROOT
from tests.installed import Installed

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
# The relative difference that a number in an output of training may have: machines add in different orders. Losses on
# the interpreter's own text depend on its version: pages are written by this one.
NEAR, NEAR_ON_OTHER_TEXT = 0.03, 0.25
WRITTEN_BY = (3, 11)
# Commands of Partita that compute with tensors, or measure.
RUNNING = ("run", "evaluate", "predict", "sample", "profile", "doctor")

# What else of a page is a file, if it has a name.
BESIDE = ("python", "diff")

# Which ranks are slow, and how many cores there are for them, is the machine's business.
_SLOW = re.compile(r"^(rank \d+: )?warning\[W0604\].*\n(?:(?(1)\1)\n)?|^warning\[W0606\](?:.+\n)+\n?", re.MULTILINE)
_FENCE = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = r"[0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
# A duration has two parts from a minute on: `1m 05s`. `compiled in` is followed by those of all passes.
_DURATION = rf"{_NUMBER} ?(?:µs|ms|s|m|h|d)\b(?: [0-9]{{2}}[smh]\b)?"
_SPEED = rf"(?:{_DURATION}|{_NUMBER} (?:tokens|rows)/s\b)"
_TOOK = rf"\bin\s+{_DURATION}(?::(?:\s+\w+\s+{_DURATION},?)+)?"
_AMOUNT = rf"(?:{_DURATION}|{_NUMBER}(?: ?[KMGT]?i?B\b)?)"
_EXACT = re.compile(rf"(?P<any>…)|(?P<measured>{_TOOK})|(?P<number>{_AMOUNT})|(?P<space>\s+)")
_NEARLY = re.compile(rf"(?P<any>…)|(?P<measured>{_SPEED})|(?P<number>{_NUMBER})|(?P<space>\s+)")


@frozen
class Fence:
    """A fenced block: its language, the words after it, and the line of the page on which its text begins."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@frozen
class Command:
    """A command of a session, the output and the status shown for it; `place` is where the output stands."""

    text: str
    output: str
    status: int
    place: tuple[int, int] = field(eq=False)
    python: bool = False

    @property
    def running(self) -> bool:
        """Whether it computes with tensors, or shows what has been computed."""
        words = self.text.split()
        return self.python or words[0] != "partita" or words[1] in RUNNING

    def shows(self, output: str) -> bool:
        """Whether an output is the one that the page shows."""
        return self.changes(output) == []

    def changes(self, output: str) -> list[tuple[int, int, str]] | None:
        """The numbers of an output that the page shows otherwise: the place of each in what is shown, and the number.
        None if more than numbers differs.
        """
        return changed_numbers(self.output, steady(output), self.running)


def steady(output: str) -> str:
    """An output without what depends on the load of the machine."""
    return _SLOW.sub("", output)


def fences(page: Path) -> list[Fence]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Fence(page, text.count("\n", 0, found.start(3)) + 1, found[1], tuple(found[2].split()), found[3])
        for found in _FENCE.finditer(text)
    ]


def files(page: Path) -> Iterator[tuple[Fence, str]]:
    """The `par` blocks of a page that make a whole file, with its text."""
    frames: dict[str, str] = {}
    for fence in fences(page):
        if fence.language != "par" or fence.words == ("fragment",) or fence.words[1:] == ("broken",):
            continue
        if fence.words[:1] == ("frame",):
            frames[fence.words[1]] = fence.text
            assert fence.text.count("…") == 1, f"{fence}: a frame has one `…`"
        elif not fence.words or fence.words[0].endswith(".par"):
            yield fence, fence.text
        else:
            kind = fence.words[0]
            assert kind in frames, f"{fence}: no frame for `{kind}` before"
            yield fence, frames[kind].replace("…", fence.text)


def named_files(page: Path) -> dict[str, str]:
    """The files of a page that have a name."""
    broken = [(fence, fence.text) for fence in fences(page) if fence.words[1:] == ("broken",)]
    named = [(name, text) for fence, text in (*files(page), *broken) for name in fence.words[:2]]
    named += [(fence.words[0], fence.text) for fence in fences(page) if fence.language in BESIDE and fence.words]
    return {name: text for name, text in named if name.endswith((".par", ".py", ".diff"))}


def commands(page: Path) -> list[Command]:
    """The commands that a page shows, in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Command] = []
    for fence in _FENCE.finditer(text):
        if fence[1] == "pycon":
            found.extend(_statements(fence[3], fence.start(3)))
        if fence[1] != "console":
            continue
        starts = [match.start() + fence.start(3) for match in re.finditer(r"(?m)^\$ ", fence[3])]
        for start, end in zip(starts, [*starts[1:], fence.end(3)], strict=True):
            line, _, output = text[start:end].partition("\n")
            if line == "$ echo $?":
                found[-1] = evolve(found[-1], status=int(output))
            else:
                found.append(Command(line.removeprefix("$ "), output, 0, (end - len(output), end)))
    return found


def _statements(text: str, start: int) -> Iterator[Command]:
    """The statements of a Python session that begins at `start` of its page."""
    lines = text.splitlines(keepends=True)
    starts = [start + sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    for example in doctest.DocTestParser().get_examples(text):
        after = example.lineno + example.source.count("\n")
        place = (starts[after], starts[after + example.want.count("\n")])
        yield Command(example.source, example.want, 0, place, python=True)


def pictures(page: Path) -> list[Path]:
    """The pictures that a page shows."""
    return [
        page.parent / link for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+\.svg)\)", page.read_text(encoding="utf-8"))
    ]


def same_picture(expected: Path, actual: Path) -> bool:
    """Whether two SVGs show the same: the same texts, and the same shapes at places that differ by less than one."""
    shown = []
    for path in (expected, actual):
        elements = list(ElementTree.parse(path).getroot().iter())
        texts = [each.text for each in elements if each.tag.endswith("}text")]
        drawn = [each.get("d", "") for each in elements] + [each.get("style", "") for each in elements]
        shown.append((texts, "\n".join(drawn)))
    (texts, shapes), (texts_, shapes_) = shown
    numbers, numbers_ = ([float(each) for each in re.findall(_NUMBER, text)] for text in (shapes, shapes_))
    return (
        texts == texts_
        and re.sub(_NUMBER, "", shapes) == re.sub(_NUMBER, "", shapes_)
        and all(abs(a - b) < 1 for a, b in zip(numbers, numbers_, strict=True))
    )


def changed_numbers(expected: str, actual: str, running: bool) -> list[tuple[int, int, str]] | None:
    """The places in an expected output of numbers that the actual one has otherwise, with these and their units: no
    places if those of a command that is `running` are all near. None if more than numbers differs.
    """
    pattern, places, end = "", list[tuple[int, int]](), 0
    for token in (_NEARLY if running else _EXACT).finditer(expected):
        pattern += re.escape(expected[end : token.start()])
        end = token.end()
        if token.lastgroup == "any":
            pattern += ".*?"
        elif token.lastgroup == "space":
            pattern += r"\s+" if token.start() > 0 and end < len(expected) else r"\s*"
        elif token.lastgroup == "measured":
            pattern += _SPEED if running else _TOOK
        else:
            pattern += f"({_NUMBER})" if running else f"({_AMOUNT})"
            places.append(token.span())
    found = re.fullmatch(r"\s*" + pattern + re.escape(expected[end:]) + r"\s*", actual, re.DOTALL)
    if found is None:
        return None
    pairs = [(expected[slice(*at)], number) for at, number in zip(places, found.groups(), strict=True)]
    if all(_same_number(*pair, running) for pair in pairs):
        return []
    return [(*at, new) for at, (old, new) in zip(places, pairs, strict=True) if old != new]


def _same_number(expected: str, actual: str, running: bool) -> bool:
    """Whether a number is the expected one, or of a command that is `running` near it."""
    if not running or not {".", "e"} & {*expected, *actual}:
        return expected == actual
    near = NEAR if sys.version_info[:2] == WRITTEN_BY else NEAR_ON_OTHER_TEXT
    return isclose(_value(expected), _value(actual), rel_tol=near)


def _value(text: str) -> float:
    return float(text.replace(",", "").rstrip("_"))


class Session:
    """Runs the commands of a page, in a folder with the page's files; those of an installation, if one is given."""

    def __init__(self, page: Path, folder: Path, installed: Installed | None = None) -> None:
        self.folder, self.installed = folder, installed
        self.names: dict[str, object] = {"__name__": "__main__"}
        for name, text in named_files(page).items():
            (folder / name).write_text(text, encoding="utf-8")

    def run(self, command: Command) -> tuple[int, str]:
        """The status of a command, and what it writes to standard output and error.

        Commands of Partita that start no processes run in this one, which is faster.
        """
        if command.python:
            code = compile(command.text, "<session>", "single")
            return self._captured(lambda: exec(code, self.names))
        words = shlex.split(command.text)
        if self.installed is None and words[0] == "partita" and (words[1] != "run" or "virtual" in words):
            from partita.cli.main import main

            return self._captured(lambda: main(words[1:]))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        mine = {"PATH": path, "OMP_NUM_THREADS": "1"}
        environment = self.installed.environment if self.installed is not None else os.environ | mine
        # Unbuffered: as on a terminal, messages come after what was printed before them.
        environment = {**environment, "PYTHONUNBUFFERED": "1"}
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout

    def _captured(self, call: Callable[[], int | None]) -> tuple[int, str]:
        output = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                status = call()
            except SystemExit as left:
                status = left.code if isinstance(left.code, int) else 1
        return status or 0, output.getvalue()
