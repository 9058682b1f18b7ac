"""A part of the examination as a process of its own, with a limit of time: it may crash or hang, and ends alone."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from attrs import frozen

from partita.runtime.supervision.isolation import SUPERVISOR
from partita.runtime.supervision.launcher import death

POLL_SECONDS = 0.02
LONGEST = 1 << 20  # bytes that are read of what a part writes


@frozen
class Ended:
    """How a process ended: its exit status, None if it was killed because its time was over; and what it wrote."""

    status: int | None
    output: str
    errors: str
    seconds: float

    @property
    def problem(self) -> str | None:
        """What is wrong, in words; None if it ended with 0."""
        if self.status == 0:
            return None
        if self.status is None:
            return f"had not ended after {self.seconds:.0f} s, and was killed"
        last = next((line.strip() for line in reversed(self.errors.splitlines()) if line.strip()), "")
        return death(self.status) + (f": {last}" if last else "")


def run_part(
    command: Sequence[str],
    seconds: float,
    over: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run a command up to `seconds`, or until it is `over`, then kill it with all that it started. If this process ends
    first, so does the part (`isolation`). Raises OSError if it cannot be started.
    """
    own = {**os.environ, SUPERVISOR: str(os.getpid())}
    start = time.monotonic()
    # Files rather than pipes: what a part has started may hold those open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, env=own, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < start + seconds and not over():
                time.sleep(POLL_SECONDS)
            status = process.poll()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(LONGEST).decode(errors="replace"))
    return Ended(status, texts[0], texts[1], time.monotonic() - start)
