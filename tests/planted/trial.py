"""One trial: a mistake planted in a copy of the sources, and what comes of the command that must fail.

Python keeps what it compiles in the copy: what a mistake changes is compiled anew.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import cache_from_source
from pathlib import Path
from time import perf_counter

from attrs import frozen

from tests.copies import Copy
from tests.definitions import Sources
from tests.planted.planted import VERIFY, Planted

# A mistake may make something wait for ever.
SECONDS = 300.0
# Of random examples the same ones every time; what fails is not made smaller, which would take most of the time.
PYTEST = ("-q", "-x", "--hypothesis-profile=planted", "--hypothesis-seed=0", "--tb=line")
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
    which = "" if caught.endswith("]") else "not soak"  # one case may be too long for `make test`
    return [sys.executable, "-m", "pytest", "-m", which, *PYTEST, caught]


def tried(copy: Copy, caught: str, seconds: float = SECONDS) -> Result:
    """Run a command on a copy as it is."""
    environment = {
        **{name: value for name, value in copy.environment.items() if not name.startswith("PYTEST")},
        "PYTHONDONTWRITEBYTECODE": "",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy.folder / "hypothesis"),
        "TMPDIR": str(copy.folder),
    }
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    begin = perf_counter()
    with subprocess.Popen(
        command(caught), cwd=copy.tree, env=environment, **pipes, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            outcome = _outcome(caught, process.returncode, output)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            outcome = Outcome.LATE
    return Result(outcome, perf_counter() - begin, output)


@contextmanager
def with_mistake(copy: Copy, sources: Sources, planted: Planted) -> Iterator[None]:
    """A copy of these sources with a mistake, for as long as the context lasts."""
    file, text = planted.planted(sources)
    _write(copy.tree / file, text)
    try:
        yield
    finally:
        _write(copy.tree / file, sources.texts[file])


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
