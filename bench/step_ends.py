"""What a step waits for at its ends: two ranks with ZeRO-1, joined by a link of 1 Gbit/s.

    python bench/step_ends.py [--rounds 3] [--steps 8] [--precision f32] [--batch 32] [--beside PYTHON]

Each rank is a process that trains `bench/models/zero.par` over Gloo. The link is narrow in this way: a collective is
done only once what the rank has sent so far would have passed a link of that bandwidth, in order, with the latency of
each message; the process is free until it waits. What Gloo really does meanwhile, through memory, costs it CPU time as
ever. `exposed` is the time that a step waits for the link; not that for the other rank, or for a core, which depends on
what else the machine does. The first steps do not count.

`--beside` names the Python of another checkout, which is measured in turn.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

from measure import agree, alternately, joined, measured, report, show

BANDWIDTH, LATENCY = 125e6, 1e-4
WARM_UP = 2


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--batch", type=int, default=32, help="the more rows, the more hides")
    parser.add_argument("--beside", metavar="PYTHON")
    parser.add_argument("--as", dest="rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settings = [f"train.steps={arguments.steps}", f"train.precision={arguments.precision}"]
    settings.append(f"batch={arguments.batch}")
    if arguments.rank:
        run(settings)
        return
    pythons = {"this": sys.executable, **({"beside": arguments.beside} if arguments.beside else {})}
    losses: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {name: [] for name in pythons}

    def figure(name: str) -> float:
        command = [__file__, "--as", "--steps", str(arguments.steps), "--precision", arguments.precision]
        command += ["--batch", str(arguments.batch)]
        found = measured(command, 2, 1, python=pythons[name])
        losses[name] = found["losses"]
        steps[name].append(median(found["seconds"][WARM_UP:]) * 1e3)
        return median(found["waited"][WARM_UP:]) * 1e3

    figures = alternately({name: partial(figure, name) for name in pythons}, arguments.rounds)
    agree(losses, absolute=1e-5)
    show("exposed communication of a step", "ms", figures, "beside" if arguments.beside else "this")
    show("a step", "ms", steps, "beside" if arguments.beside else "this")


def run(settings: list[str]) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from peers.workload import workload

    from partita.runtime.heap import keep_pages
    from partita.runtime.rank import Rank
    from partita.runtime.training import train
    from partita.runtime.transports.process import ProcessTransport

    class Delayed:
        """A collective that is done when the link has carried it."""

        def __init__(self, handle: Any, due: float, link: Narrow) -> None:
            self.handle, self.due, self.link = handle, due, link

        def done(self) -> bool:
            """Wait for it, and add up for how long the link still carries it."""
            left = max(0.0, self.due - perf_counter())
            self.link.waited += left
            sleep(left)
            return self.handle.done()

        def result(self) -> tuple[torch.Tensor, ...]:
            """What it results in."""
            return self.handle.result()

    class Narrow(ProcessTransport):
        """Two ranks at the ends of a narrow link."""

        free = waited = 0.0

        def collective(self, kind: str, axis: str, tensors: Any, arguments: Any) -> Any:
            """Post a collective, which passes the link after those before it."""
            held = sum(each.nbytes for each in tensors)
            sent = {"all-gather": held, "reduce-scatter": held / 2, "all-to-all": held / 2, "all-reduce": held}[kind]
            self.free = max(perf_counter(), self.free) + LATENCY + sent / BANDWIDTH
            return Delayed(super().collective(kind, axis, tensors, arguments), self.free, self)

    class Seen:
        """An observer that notes the losses, and how long each step has taken and waited."""

        def __init__(self) -> None:
            self.losses, self.seconds, self.waited = [], [], []
            self.begun, self.before = perf_counter(), 0.0

        def step(self, result: Any) -> None:
            """A step is done."""
            now, waited = perf_counter(), transport.waited
            self.losses.append(result.loss)
            self.seconds.append(now - self.begun)
            self.waited.append(waited - self.before)
            self.begun, self.before = now, waited

    work = workload("zero.par", settings)
    joined()
    keep_pages()
    device = torch.device("cpu")
    transport = Narrow(device)
    rank = Rank(work.plan, dist.get_rank(), transport, device)
    seen = Seen()
    for _ in train(rank, work.dataset, seen):
        pass
    transport.close()
    report({"losses": seen.losses, "seconds": seen.seconds, "waited": seen.waited})


if __name__ == "__main__":
    main()
