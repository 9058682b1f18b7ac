"""The command as a user runs it, in a process of its own, and what a run has written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from partita.cli.main import main


def partita(
    *arguments: str, cwd: Path | None = None, launcher: tuple[str, ...] = (sys.executable,), timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `partita` to its end."""
    command = [*launcher, "-m", "partita", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def here(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has torch already."""
    out, errors = StringIO(), StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(errors):
        status = main(arguments)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), errors.getvalue())


def records(directory: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` of a run's directory says."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# What of a record is of the machine and the moment.
OF_THE_MACHINE = {
    *("tokens_per_second", "rows_per_second", "step_seconds", "unix_time", "peak_memory", "peak_memory_by_rank", "mfu"),
}


def computed(directory: Path) -> list[dict[str, Any]]:
    """What a run computed, to the last bit: its records, but for how fast it was, and its ranks."""
    return [
        {k: v for k, v in record.items() if k not in OF_THE_MACHINE}
        for record in records(directory)
        if "slow_ranks" not in record
    ]
