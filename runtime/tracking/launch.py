"""Starts the process that follows a run for its trackers, and ends it after the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from partita.runtime.metrics import File, file_of
from partita.runtime.supervision.processes import piped

# How long trackers may take after the run: to upload what is left.
FINISH_SECONDS = 60
SILENT_SECONDS = 3  # of it


@contextmanager
def tracked(directory: Path, names: Sequence[str]) -> Iterator[None]:
    """Follow the run in this directory, of which nothing is written yet, while the context is open."""
    if not names:
        yield
        return
    # Without the current directory among its modules: some trackers keep folders of their own names there.
    command = [sys.executable, "-P", "-m", "partita.runtime.tracking", str(directory), text_of(file_of(directory))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARTITA_")}
    # In a session of its own: Ctrl-C is for the run, after which there is still something to hand over.
    try:
        process = subprocess.Popen(
            [*command, *names], stdin=subprocess.PIPE, stdout=2, env=environment, start_new_session=True
        )
    except OSError as error:
        print(f"partita: cannot start the process of the trackers: {error.strerror}", file=sys.stderr)
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            piped(process.stdin).close()
        try:
            status = _ended(process)
        except BaseException as error:
            status = -signal.SIGALRM
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        finally:
            if process.returncode != 0:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what trackers have started
                process.wait()
        if status == -signal.SIGALRM:
            print(f"partita: trackers did not finish within {FINISH_SECONDS} s, and were ended", file=sys.stderr)
        elif status != 0:
            print("partita: the process of the trackers has failed", file=sys.stderr)


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit status of the process, which may have something left to do. Raises TimeoutExpired."""
    try:
        return process.wait(SILENT_SECONDS)
    except subprocess.TimeoutExpired:
        print("partita: waiting for trackers to take what is left; Ctrl-C ends them", file=sys.stderr)
        return process.wait(FINISH_SECONDS + 1)


def text_of(file: File | None) -> str:
    """Which file it is, as an argument of the process."""
    return "-" if file is None else f"{file[0]}:{file[1]}"
