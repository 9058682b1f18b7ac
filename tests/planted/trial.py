"""Mistakes planted in a copy of the sources, one at a time, and whether what must fail does.

The copy has the folders of the house, and beside them a package `partita` that is made of links to these, as an
installation maps them. Processes find that package first, whatever is installed. Python keeps what it compiles in the
copy: what a mistake changes is compiled anew.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import cache_from_source
from pathlib import Path
from time import perf_counter

from attrs import define, frozen

from tests.planted.planted import VERIFY, Planted

ROOT = Path(__file__).parents[2]
# What the tests and `verify` read.
COPIED = (
    *("api", "bench", "cli", "compiler", "docs", "dsl", "grammars", "runtime", "specs", "testing", "tests"),
    *("Makefile", "README.md", "constraints.txt", "pyproject.toml"),
)
# A mistake may make something wait for ever.
SECONDS = 300.0
# Of random examples the same ones every time; what fails is not made smaller, which would take most of the time.
PYTEST = ("-q", "-x", "-m", "not soak", "--hypothesis-profile=planted", "--hypothesis-seed=0", "--tb=line")
CRASH = "Traceback (most recent call last)"


class Outcome(StrEnum):
    """What came of a command."""

    PASSED = "passed"
    FAILED = "failed"  # by what it is there to tell
    UNDECIDED = "not decided"  # by `verify`, which could not tell
    CRASHED = "crashed"  # before it could
    LATE = "out of time"


@frozen
class Result:
    """The outcome of a command, how long it took, and the end of what it printed."""

    outcome: Outcome
    seconds: float
    output: str


def command(caught: str) -> list[str]:
    """The command line behind `caught`."""
    if caught.startswith(VERIFY):
        return [sys.executable, "-m", "partita", "verify", *shlex.split(caught.removeprefix(VERIFY))]
    return [sys.executable, "-m", "pytest", *PYTEST, caught]


@define(eq=False)
class Copy:
    """A copy of the sources in a folder of its own."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Copy:
        """Copy the sources."""
        tree, package = folder / "tree", folder / "package" / "partita"
        ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=ignored)
            else:
                tree.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, tree / name)
        package.mkdir(parents=True)
        for part in (tree / "api").iterdir():
            (package / part.name).symlink_to(part)
        for part in tree.iterdir():
            if part.is_dir() and part.name not in ("api", "bench", "docs", "tests"):
                (package / part.name).symlink_to(part)
        return cls(folder)

    def run(self, caught: str, seconds: float = SECONDS) -> Result:
        """Run a command on the copy as it is."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            "PYTHONPATH": str(self.folder / "package"),
            "PYTHONDONTWRITEBYTECODE": "",
            "OMP_NUM_THREADS": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder / "hypothesis"),
            "TMPDIR": str(self.folder),
        }
        begin = perf_counter()
        process = subprocess.Popen(
            command(caught),
            cwd=self.folder / "tree",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Result(Outcome.LATE, perf_counter() - begin, output)
        return Result(_outcome(caught, process.returncode, output), perf_counter() - begin, output)

    @contextmanager
    def with_mistake(self, planted: Planted) -> Iterator[None]:
        """The copy with a mistake, for as long as the context lasts."""
        path = self.folder / "tree" / planted.file
        right = path.read_text(encoding="utf-8")
        self._write(path, planted.planted(right))
        try:
            yield
        finally:
            self._write(path, right)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python tells by seconds and sizes whether what it has compiled is still good.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _outcome(caught: str, status: int, output: str) -> Outcome:
    if status == 0:
        return Outcome.PASSED
    if status == 1 and (not caught.startswith(VERIFY) or CRASH not in output):
        return Outcome.FAILED
    if status == 4 and caught.startswith(VERIFY):
        return Outcome.UNDECIDED
    return Outcome.CRASHED
