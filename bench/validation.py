"""Updates that wait for the norm of their step beside updates that do not, in processes that are a pipeline.

    python bench/validation.py [--rounds 3] [--steps 20] [--ranks 2] [--microbatches 4] [--sleep SECONDS] [SCHEDULE ...]

All train `bench/models/linear.par`, clipped at a norm that is never reached, over Gloo. The time of a step is the mean
over a run, without its first steps. With `--sleep`, every action also sleeps until it has taken that long, as if it ran
on a device of its own: then there may be more ranks than cores.
"""

from __future__ import annotations

import argparse
from functools import partial
from time import perf_counter, sleep
from typing import Any

from measure import agree, alternately, joined, measured, report, show

WARM_UP = 4
VALIDATED = {"before": "before", "after": "after(calm = 1)"}


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("schedules", nargs="*", default=["zb_h2", "zb_v"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--linears", type=int, default=48, help="on each rank")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=128, help="of a microbatch")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="SECONDS", help="each action takes that long")
    parser.add_argument("--as", dest="validated", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.validated:
        run(arguments)
        return
    for schedule in arguments.schedules:
        losses: dict[str, list[float]] = {}

        def figure(name: str, schedule: str = schedule, losses: dict[str, list[float]] = losses) -> float:
            sizes = ("rounds", "steps", "ranks", "microbatches", "linears", "width", "rows", "sleep")
            options = [text for size in sizes for text in (f"--{size}", str(getattr(arguments, size)))]
            found = measured([__file__, schedule, "--as", name, *options], arguments.ranks, 1)
            losses[name] = found["losses"]
            return found["seconds"] * 1e3

        figures = alternately({name: partial(figure, name) for name in VALIDATED}, arguments.rounds)
        agree(losses, absolute=1e-300)
        shape = f"{schedule} on {arguments.ranks} ranks, {arguments.microbatches} microbatches"
        show(f"a step, {shape}", "ms", figures, "before")


def run(arguments: argparse.Namespace) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from peers.workload import workload

    from partita.compiler.instructions import Compute
    from partita.runtime.heap import keep_pages
    from partita.runtime.rank import Rank
    from partita.runtime.training import train
    from partita.runtime.transports.process import ProcessTransport

    overrides = (
        f"layers={arguments.ranks * arguments.linears}",
        f"pair.pipe={arguments.ranks}",
        f"embed={arguments.width}",
        f"batch={arguments.microbatches * arguments.rows}",
        f"fast.microbatches={arguments.microbatches}",
        f"schedule={arguments.schedules[0]}",
        "train.optimizer.lr=1e-3",
        "train.clip=1e9",
        f"train.steps={arguments.steps}",
        f"train.validate={VALIDATED[arguments.validated]}",
    )

    def slowly(own: Any) -> Any:
        """An action that takes that long."""

        def run() -> Any:
            end = perf_counter() + arguments.sleep
            waits = own()
            if waits is not None:
                yield from waits
            sleep(max(0.0, end - perf_counter()))

        return run

    class Seen:
        """An observer that notes the losses."""

        def __init__(self) -> None:
            self.losses: list[float] = []

        def step(self, result: Any) -> None:
            """A step is done."""
            self.losses.append(result.loss)

    class Timed:
        """The data set; it notes when each step begins."""

        def __init__(self, dataset: Any) -> None:
            self.dataset, self.begun = dataset, list[float]()

        def batch(self, step: int) -> Any:
            """The batch of a step."""
            self.begun.append(perf_counter())
            return self.dataset.batch(step)

    work = workload("linear.par", overrides)
    joined()
    keep_pages()
    device = torch.device("cpu")
    transport = ProcessTransport(device)
    rank = Rank(work.plan, dist.get_rank(), transport, device)
    if arguments.sleep:
        executor = rank.training
        computes = [isinstance(each, Compute) for each in executor.record.instructions for _ in range(2)]
        pairs = zip(executor._instructions, computes, range(len(computes)), strict=True)
        executor._instructions = tuple(slowly(own) if own_ and i % 2 == 0 else own for own, own_, i in pairs)
    seen, timed = Seen(), Timed(work.dataset)
    for _ in train(rank, timed, seen):
        pass
    transport.close()
    seconds = (timed.begun[-1] - timed.begun[WARM_UP]) / (len(timed.begun) - 1 - WARM_UP)
    report({"losses": seen.losses, "seconds": seconds})


if __name__ == "__main__":
    main()
