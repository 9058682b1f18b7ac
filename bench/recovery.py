"""How long a run stands still when one of its ranks dies: from the kill to the first step after the resume.

    python bench/recovery.py [--kills N] [--seed N] [FILE] [key=value ...]

`partita run FILE --restarts N` (default specs/tiny.par, two ranks) saves every five steps. Once it has saved something
new, and a random while later, a random rank is killed by SIGKILL; so again and again. The time is split at what the run
says: `noticed`, until the supervisor has ended the other ranks and starts all again; `resumed`, until the new ranks are
up, connected and have read the checkpoint; `first step`, until they have done one.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from partita.runtime.tracing.flight import read

TINY = Path(__file__).parents[1] / "specs" / "tiny.par"
FOR_EVER, INTERVAL = 1_000_000, 5
MAX_SECONDS = 2.0  # from a commit to the kill
PHASES = {
    "noticed": re.compile(r"partita: restarting all ranks"),
    "resumed": re.compile(r"step \d+/\d+  resumed"),
    "first step": re.compile(r"step \d+/\d+  loss"),
}


def ranks_of(supervisor: int) -> list[int]:
    """The processes of a run's ranks: the children of the supervisor whose flight recorders say that they train."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path("/proc", name, "status").read_text()
            mapped = re.search(r"(/\S+)/flight-(\d+)", Path("/proc", name, "maps").read_text())
        except OSError:
            continue
        if f"PPid:\t{supervisor}\n" in status and mapped is not None:
            position = read(Path(mapped[1]), int(mapped[2]))
            if position is not None and position.step > 0:
                found.append(int(name))
    return sorted(found)


def await_commit(directory: Path, others: set[str]) -> set[str]:
    """Wait for a commit that was not there before; returns all that are there."""
    while not (found := {each.name for each in directory.glob("step-*") if each.suffix == ""}) - others:
        time.sleep(0.05)
    return found


def recoveries(arguments: argparse.Namespace, folder: Path) -> Iterator[list[float]]:
    """Kill a rank again and again; the seconds of each phase."""
    random = Random(arguments.seed)
    settings = [f"train.steps={FOR_EVER}", f"train.checkpoint=every({INTERVAL})", *arguments.overrides]
    command = [sys.executable, "-m", "partita", "run", str(arguments.file), *settings]
    command += ["--run-dir", str(folder), "--restarts", str(arguments.kills)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        commits: set[str] = set()
        try:
            for _ in range(arguments.kills):
                commits = await_commit(folder / "checkpoints", commits)
                time.sleep(MAX_SECONDS * random.random())
                os.kill(random.choice(ranks_of(process.pid)), signal.SIGKILL)
                before, seconds = time.monotonic(), []
                for pattern in PHASES.values():
                    if not any(pattern.match(line) for line in process.stdout):
                        sys.exit(f"the run ended with {process.wait()}")
                    before, begun = time.monotonic(), before
                    seconds.append(before - begun)
                yield seconds
        finally:
            process.send_signal(signal.SIGINT)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("file", nargs="?", type=Path, default=TINY)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--kills", type=int, default=10, help="how many (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    found = []
    with TemporaryDirectory() as folder:
        for number, seconds in enumerate(recoveries(arguments, Path(folder)), 1):
            found.append([sum(seconds), *seconds])
            print(f"kill {number}/{arguments.kills}  {sum(seconds):.2f} s", file=sys.stderr, flush=True)
    table = Table("seconds", "median", "quartiles", "range", title=f"{arguments.kills} kills", title_justify="left")
    for name, values in zip(("all", *PHASES), zip(*found, strict=True), strict=True):
        low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
        table.add_row(
            name, f"{median(values):.2f}", f"{low:.2f} to {high:.2f}", f"{min(values):.2f} to {max(values):.2f}"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
