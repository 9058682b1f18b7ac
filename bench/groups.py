"""Groups that train apart, and updates with the gradients of the step before, beside synchronous training.

    python bench/groups.py [--steps 200] [--set KEY=VALUE ...] -- [SYNC ...]

Trains the model of `specs/tiny.par` on four processes over Gloo (`bench/models/groups.par`), each SYNC once: `none`, or
the value of `train.sync`. The ranks of a run have a network of their own, whose loopback interface counts the bytes
that they send each other, rendezvous and evaluations included; it is read until they end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import sleep

ROOT = Path(__file__).parent.parent
FILE = ROOT / "bench" / "models" / "groups.par"
SYNCS = (
    "none",
    "local(groups = 4, every = 20)",
    "local(groups = 4, every = 20, outer = nesterov(lr = 0.7, momentum = 0.9))",
    "delayed(1)",
    "paired()",
)
SECONDS = 0.1  # between two looks at the counter


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("syncs", nargs="*", default=SYNCS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the file")
    arguments = parser.parse_args()
    print("| sync | eval loss | sent, all ranks | a step, median |\n|---|---|---|---|")
    for sync in arguments.syncs:
        print(row(sync, arguments.steps, arguments.set), flush=True)


def row(sync: str, steps: int, more: Sequence[str]) -> str:
    """One run, as a row of the table."""
    with TemporaryDirectory() as directory:
        overrides = [f"train.sync={sync}", f"train.steps={steps}", f"train.eval=every({steps}, batches = 10)", *more]
        train = [str(Path(sys.executable).with_name("partita")), "run", str(FILE), "--root", str(ROOT), *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = subprocess.Popen([*train, "--run-dir", directory], stdout=sys.stderr, env=environment)
        sent = 0
        while running.poll() is None:
            sent = max(sent, *map(sent_near, children(running.pid)), 0)
            sleep(SECONDS)
        assert running.returncode == 0, f"it ended with {running.returncode}"
        told = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    loss = next(each["eval_loss"] for each in reversed(told) if "eval_loss" in each)
    seconds = [each["step_seconds"] for each in told if "step_seconds" in each]
    shown = f"{median(seconds) * 1e3:.0f} ms" if seconds else ""
    return f"| `{sync}` | {loss:.4f} | {sent / 1e6:,.1f} MB | {shown} |"


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def sent_near(process: int) -> int:
    """The bytes that were sent over the loopback interface of a process in a network of its own; 0 if it has ended."""
    try:
        if os.readlink(f"/proc/{process}/ns/net") == os.readlink("/proc/self/ns/net"):
            return 0
        lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


if __name__ == "__main__":
    main()
