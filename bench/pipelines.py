"""A training step of a GPT on two ranks: ours beside `torch.distributed.pipelining`, and one process with torch alone.

    python bench/pipelines.py [--case gpt|latency] [--rounds 9] [--steps 12] [--compile] [SYSTEM ...]

Systems are `partita:SCHEDULE`, `torch:SCHEDULE` and `plain`; each runs in two processes of one thread (`plain`: one),
from the same weights, on the same batches, with the same optimizer. A step is all of it: the batch, forward and
backward, the update, and the loss on every rank.

Each is started by its own launcher. Ours binds ranks to cores and torchrun does not; `bound:SCHEDULE` is torch's
schedule in processes that are bound as ours are.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from statistics import median
from time import perf_counter

from measure import agree, alternately, joined, measured, report, show

CASES = {
    "gpt": (),
    "latency": ("batch=32", "seq=64", "embed=64", "fast.microbatches=32"),
}
OURS = {
    "gpipe": ("schedule=gpipe",),
    "1f1b": ("fast.chunks=1",),
    "interleaved": (),
    "interleaved4": ("fast.chunks=4",),
    "bfs": ("schedule=looped_bfs",),
    "zb_v": ("schedule=zb_v",),
    "auto": ("schedule=auto",),
}
SYSTEMS = ("partita:interleaved", "torch:interleaved", "bound:interleaved", "partita:1f1b", "torch:1f1b", "plain")
WARM_UP = 3


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("systems", nargs="*", default=SYSTEMS)
    parser.add_argument("--case", choices=CASES, default="gpt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--as", dest="system", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        run(arguments.system, arguments.case, arguments.steps, arguments.compile)
        return
    losses: dict[str, list[float]] = {}

    def figure(system: str) -> float:
        command = [__file__, "--as", system, "--case", arguments.case, "--steps", str(arguments.steps)]
        command += ["--compile"] * arguments.compile
        found = measured(command, 1 if system == "plain" else 2, 1, torchrun=system.startswith("torch:"))
        losses[system] = found["losses"]
        return median(found["seconds"][WARM_UP:]) * 1e3

    figures = alternately({each: partial(figure, each) for each in arguments.systems}, arguments.rounds)
    agree(losses, absolute=1e-4)
    show(f"a step, {arguments.case}", "ms", figures, arguments.systems[0])


def run(system: str, case: str, steps: int, compiled: bool) -> None:
    """One rank of a system."""
    family, _, schedule = system.partition(":")
    overrides = [*CASES[case], *(OURS[schedule] if family == "partita" else ()), f"train.steps={steps}"]
    if compiled:
        overrides.append("train.compile=true")
    timed = ours(overrides) if family == "partita" else peers(family, schedule, overrides, steps, compiled)
    seconds, losses = [], []
    for duration, loss in timed:
        seconds.append(duration)
        losses.append(loss)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    report({"seconds": seconds, "losses": losses})


def ours(overrides: list[str]) -> list[tuple[float, float]]:
    """Seconds and loss of every step of `partita run`'s own loop."""
    from peers.ours import rank_of
    from peers.workload import workload

    from partita.runtime.training import train

    work = workload("gpt.par", overrides)
    joined()
    rank = rank_of(work.plan)
    seen = _Seen(work.tokens)
    for _ in train(rank, work.dataset, seen):
        pass
    rank.transport.close()
    return seen.steps


class _Seen:
    """An observer of our loop."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.steps: list[tuple[float, float]] = []

    def step(self, result) -> None:
        self.steps.append((self.tokens / result.rate, result.loss))

    def evaluation(self, *_: object) -> None:
        """There is none."""

    def resumed(self, *_: object) -> None:
        """Nothing is."""


def peers(
    family: str, schedule: str, overrides: list[str], steps: int, compiled: bool
) -> Iterator[tuple[float, float]]:
    """Seconds and loss of every step of a peer."""
    from peers.pipelining import Pipeline
    from peers.plain import Plain
    from peers.workload import workload

    work = workload("gpt.par", overrides)
    if family == "plain":
        system = Plain(work, compiled)
    else:
        joined()
        system = Pipeline(work, schedule, compiled)
    batches = work.batches()
    for _ in range(steps):
        start = perf_counter()
        loss = system.step(*next(batches))
        yield perf_counter() - start, loss


if __name__ == "__main__":
    main()
