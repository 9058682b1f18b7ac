"""The pages of the documentation as tests see them: fenced blocks, the files they make, the sessions they show.

How a block is marked says what it is:

    ```par                  a whole file, which must check
    ```par NAME.par         a whole file, under a name that the console blocks of the page can use
    ```par NAME.par broken  the same, but one that does not check
    ```par frame KIND       a file with `…` where the examples of a kind stand
    ```par KIND             an example that must check within the frame of its kind, on the same page
    ```par fragment         no whole file, and in no frame
    ```console              commands after `$ `, each with its output; `$ echo $?` shows a status other than 0

The console blocks of a page run in order, in one empty folder with the page's named files. In an expected output `…`
stands for anything, spaces for any number of spaces, and numbers for numbers near them; durations and speeds may be any.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from math import isclose
from pathlib import Path

from attrs import evolve, field, frozen

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NEAR = 0.02  # relative difference that a number in an output may have

_FENCE = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = r"[0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_TOKEN = re.compile(rf"(?P<any>…)|(?P<speed>{_NUMBER} ?(?:µs|ms|s|m|h|tokens/s)\b)|(?P<number>{_NUMBER})|(?P<space>\s+)")


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
    """A command of a console block, the output and the status shown for it; `place` is where the output stands."""

    text: str
    output: str
    status: int
    place: tuple[int, int] = field(eq=False)


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
            (kind,) = fence.words
            assert kind in frames, f"{fence}: no frame for `{kind}` before"
            yield fence, frames[kind].replace("…", fence.text)


def named_files(page: Path) -> dict[str, str]:
    """The files of a page that have a name."""
    return {fence.words[0]: fence.text for fence in fences(page) if fence.words and fence.words[0].endswith(".par")}


def commands(page: Path) -> list[Command]:
    """The commands that a page shows, in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Command] = []
    for fence in _FENCE.finditer(text):
        if fence[1] != "console":
            continue
        starts = [match.start() + fence.start(3) for match in re.finditer(r"(?m)^\$ ", fence[3])]
        for start, end in zip(starts, [*starts[1:], fence.end(3)], strict=True):
            line, _, output = text[start:end].partition("\n")
            if line == "$ echo $?":
                found[-1] = evolve(found[-1], status=int(output))
            else:
                place = (end - len(output), end)
                found.append(Command(line.removeprefix("$ "), output, 0, place))
    return found


def same(expected: str, actual: str) -> bool:
    """Whether an output is the one that a page shows."""
    expected, actual = expected.strip(), actual.strip()
    pattern, numbers, end = "", [], 0
    for token in _TOKEN.finditer(expected):
        pattern += re.escape(expected[end : token.start()])
        end = token.end()
        if token.lastgroup == "any":
            pattern += ".*?"
        elif token.lastgroup == "space":
            pattern += r"\s+"
        elif token.lastgroup == "speed":
            pattern += rf"{_NUMBER} ?(?:µs|ms|s|m|h|tokens/s)\b"
        else:
            pattern += f"({_NUMBER})"
            numbers.append(_value(token[0]))
    found = re.fullmatch(pattern + re.escape(expected[end:]), actual, re.DOTALL)
    return found is not None and all(
        isclose(number, _value(text), rel_tol=NEAR) for number, text in zip(numbers, found.groups(), strict=True)
    )


def _value(text: str) -> float:
    return float(text.replace(",", "").rstrip("_"))


def run(command: str, folder: Path) -> tuple[int, str]:
    """Run a command in a folder; its status, and what it writes to standard output and error.

    Commands of Partita that start no processes run in this one, which is faster.
    """
    words = command.split()
    if words[0] == "partita" and (words[1] != "run" or "virtual" in words):
        return _run_here(command, folder)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def _run_here(command: str, folder: Path) -> tuple[int, str]:
    import shlex

    from partita.cli.main import main

    here, output = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                status = main(shlex.split(command)[1:])
            except SystemExit as left:
                status = left.code
    finally:
        os.chdir(here)
    return int(status or 0), output.getvalue()
