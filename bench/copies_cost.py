"""What copies in memory cost the training loop: with a neighbour that keeps up, and with a slow one.

    python bench/copies_cost.py [--blocks N] [--steps N] [--seconds N] [NEIGHBOUR ...]

Two ranks on two hosts (two agents of torchrun, one rank each) train a stack of 17 million parameters, ZeRO-3. Blocks of
steps alternate, in the same processes: with a copy every ten steps, and without. Shown is the median of the ratios of
neighbouring blocks' times, and where it lies with a probability of 95% whatever their distribution; first as it is
(`quick`), then with a neighbour that is `slow`: the second rank takes `--seconds` before it receives each block of a
copy, which the first cannot send until then, so that a copy takes longer than ten steps and some are skipped. Times are
those of the second half of each block of steps: the first is for what is left of copies begun before. The ratio of
blocks of which none copies shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch

EVERY = 10
NEIGHBOURS = {"quick": "a neighbour that keeps up", "slow": "a slow one"}
TEXT = """
axis batch = 64, embed = 512, ffn = 2048

block mlp(x: [batch, embed]) {{
  param up: [embed, ffn] ~ normal(0.02)
  param down: [ffn, embed] ~ normal(0.02)
  return x + dot(gelu(dot(rms_norm(x, over = embed), up, over = embed)), down, over = ffn)
}}

model m(x: [batch, embed], y: [batch, embed]) {{
  let h = x
  repeat 8 as layer {{ let h = mlp(h) }}
  loss mse(h, y)
}}

mesh cluster(data = 2)

layout zero3 on cluster {{
  shard batch -> data
  shard param -> data
}}

train {{
  data = random()
  optimizer = adamw(lr = 1e-3)
  steps = {steps}
  checkpoint = every(1_000_000, copies = {every})
}}
"""


def rank(block: int, seconds: float, arguments: list[str]) -> int:
    """Run a rank, which copies in every other block of steps alone, and may be slow to receive."""
    from partita.cli.main import main
    from partita.runtime.checkpoint.checkpoints import Checkpoints
    from partita.runtime.transports.process import ProcessTransport
    from partita.runtime.transports.transport import PeerConnections

    due, links = Checkpoints.copies, ProcessTransport.links

    def copies(self: Checkpoints, step: int) -> bool:
        return due(self, step) and (step - 1) // block % 2 == 1

    def slow(self: ProcessTransport) -> PeerConnections:
        found = links(self)

        def receive(tensor: torch.Tensor, peer: int) -> Callable[[], None]:
            time.sleep(seconds)
            return found.receive(tensor, peer)

        return PeerConnections(found.send, receive if self.rank else found.receive)

    Checkpoints.copies = copies  # type: ignore[method-assign]
    if seconds:
        ProcessTransport.links = slow  # type: ignore[method-assign]
    return main(arguments)


def trained(blocks: int, block: int, seconds: float) -> tuple[list[float], str]:
    """The seconds of the second half of each block of a run, and what its ranks said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "m.par").write_text(TEXT.format(steps=blocks * block, every=EVERY))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        agents = []
        for node in range(2):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            command += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port]
            command += [__file__, "--rank", str(block), str(seconds), "run", "m.par", "--run-dir", "run"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            agents.append(
                subprocess.Popen(
                    command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        said = [each.communicate()[0] for each in agents]
        assert all(each.returncode == 0 for each in agents), said
        records: list[dict[str, Any]] = [
            json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        times = [each["unix_time"] for each in records if "loss" in each]
    half = block // 2
    return [times[first + block - 1] - times[first + half - 1] for first in range(0, len(times), block)], "".join(said)


def shown(what: str, seconds: list[float]) -> None:
    """Print the median ratio of blocks with copies and the mean of those around them, and of blocks without."""
    pairs = range(1, len(seconds) - 1, 2)
    ratios = [2 * seconds[i] / (seconds[i - 1] + seconds[i + 1]) for i in pairs]
    noise = [seconds[i + 1] / seconds[i - 1] for i in pairs]
    print(f"{what}: {middle(ratios)} times as long ({len(ratios)} blocks; without copies {middle(noise)})", flush=True)


def middle(values: Sequence[float]) -> str:
    """The median, and what it is within with a probability of 95%: how many of n values lie below it is binomial."""
    ordered, apart = sorted(values), 0.98 * sqrt(len(values))
    first, last = int(len(ordered) / 2 - apart), int(len(ordered) / 2 + apart)
    within = f"{ordered[max(first, 0)]:.3f} to {ordered[min(last, len(ordered) - 1)]:.3f}"
    return f"{statistics.median(ordered):.3f} ({within})"


def main() -> int:
    """Measure."""
    if "--rank" in sys.argv:
        block, seconds, *arguments = sys.argv[sys.argv.index("--rank") + 1 :]
        return rank(int(block), float(seconds), arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("neighbours", nargs="*", default=list(NEIGHBOURS), metavar="NEIGHBOUR", help="quick or slow")
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.5)
    given = parser.parse_args()
    if unknown := set(given.neighbours) - NEIGHBOURS.keys():
        parser.error(f"no such neighbour: {', '.join(sorted(unknown))}; there are {', '.join(NEIGHBOURS)}")
    for each in given.neighbours:
        what, seconds = NEIGHBOURS[each], given.seconds if each == "slow" else 0.0
        found, said = trained(given.blocks, given.steps, seconds)
        shown(what, found)
        step = 2 * statistics.median(found) / given.steps
        print(f"  a step takes {step:.3f} s; {said.count('is skipped')} copies were skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
