"""What an action costs beside its arithmetic: ours and torch's pipelining, in microseconds, on two ranks of one thread.

    python bench/overhead.py [--rounds 9] [--pairs 40] [SCHEDULE ...]

An action is a stage's forward or backward pass on a microbatch (a separate W belongs to its B). A stage of
`bench/models/linear.par` is here one linear layer of 8 × 8 on two rows. A step of 96 microbatches less one of 32,
divided by the actions that it has more, is the cost of one: what happens once a step drops out. The figures are means
of both ranks.

The cost is CPU time of the main thread. It holds all that a system does for an action: both runtimes, autograd on a
CPU and the posting of transfers run in that thread. It does not hold what a rank waits for: Gloo's waits sleep, and its
own thread moves what arrives; our transport looks for a while before it sleeps, and says how long it has. So it hardly
depends on how early the other rank is; going to sleep and waking up do count, for the transport below too. Wall time
stands beside it; ranks with next to nothing to compute spend it waiting for each other.

What is not a system's own is measured in the same processes, alternately with the steps, and taken out:
- transport: from torch's, `isend`, `irecv` and `wait` for the same messages in the order of our instructions, in the
  process group of all ranks. That torch batches messages is its own choice. Ours sends through memory, which is a part
  of it; nothing is taken out.
- arithmetic: the three products of a layer with nothing around them. The loss stays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

from measure import alternately, joined, measured, report
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from partita.runtime.transports.transport import Transport

# Ours, torch's name in `peers.pipelining`, chunks.
SCHEDULES = {
    "1f1b": ("one_f_one_b", "1f1b", 1),
    "interleaved": ("interleaved_1f1b", "interleaved", 2),
    "zb1p": ("zb_h1", "zb1p", 1),
    "zbv": ("zb_v", "zbv", 2),
}
USUAL = ("1f1b", "interleaved")
FAMILIES = ("partita", "torch")
RANKS, FEW, MANY = 2, 32, 96
ROWS, WIDTH = 2, 8
WARM_UP = 5
PARTS = ("total", "transport", "arithmetic")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("schedules", nargs="*", default=USUAL, metavar="SCHEDULE", help=", ".join(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pairs", type=int, default=40, help="of steps, in each round")
    parser.add_argument("--as", dest="system", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        run(*arguments.system.split(":"), arguments.pairs)
        return
    systems = [f"{family}:{schedule}" for schedule in arguments.schedules for family in FAMILIES]
    found: dict[str, list[dict[str, float]]] = {system: [] for system in systems}

    def figure(system: str) -> float:
        found[system].append(measured([__file__, "--as", system, "--pairs", str(arguments.pairs)], RANKS, 1))
        return _own(found[system][-1])

    figures = alternately({each: partial(figure, each) for each in systems}, arguments.rounds)
    columns = ("", *PARTS, "own", "range", "wall", "its transport", "own ÷ torch's, by round")
    table = Table(*columns, title="an action (µs of the main thread's CPU time; wall time)", title_justify="left")
    for system, own in figures.items():
        theirs = figures[f"torch:{system.partition(':')[2]}"]
        ratios = sorted(a / b for a, b in zip(own, theirs, strict=True))
        table.add_row(
            system,
            *(f"{median(each[part] for each in found[system]):.1f}" for part in PARTS),
            f"{median(own):.1f}",
            f"{min(own):.1f} to {max(own):.1f}",
            *(f"{median(each[part] for each in found[system]):.1f}" for part in ("wall total", "wall transport")),
            f"{median(ratios):.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        )
    Console(width=130).print(table)


def _own(found: dict[str, float]) -> float:
    """What is left of the total: the system's own."""
    return found["total"] - found["transport"] - found["arithmetic"]


def run(family: str, schedule: str, pairs: int) -> None:
    """One rank of a system."""
    import torch
    import torch.distributed as dist
    from peers.bare import Layer, Messages
    from peers.ours import Ours
    from peers.pipelining import Pipeline
    from peers.workload import workload

    joined()
    ours, theirs, chunks = SCHEDULES[schedule]
    settings = (f"embed={WIDTH}", f"layers={RANKS * chunks}", f"schedule={ours}")
    works = [workload("linear.par", (*settings, f"fast.microbatches={m}", f"batch={ROWS * m}")) for m in (FEW, MANY)]
    systems = [Ours(work) if family == "partita" else Pipeline(work, theirs, False) for work in works]
    steps = [partial(system.step, *next(work.batches())) for system, work in zip(systems, works, strict=True)]
    messages = [Messages(work.plan.program).run if family == "torch" else _nothing for work in works]
    arithmetic = partial(Layer(ROWS, WIDTH).run, chunks * (MANY - FEW))
    transports = [system.rank.transport for system in systems if isinstance(system, Ours)]
    costs = [[_cost(each, transports) for each in (*steps, *messages, arithmetic)] for _ in range(WARM_UP + pairs)]
    found = []
    for clock in (0, 1):
        usual = [_usual([each[clock] for each in run]) for run in zip(*costs[WARM_UP:], strict=True)]
        found.append((usual[1] - usual[0], usual[3] - usual[2], usual[4]))
    actions = 2 * chunks * (MANY - FEW)
    means = torch.tensor(found, dtype=torch.float64) / (RANKS * actions) * 1e6
    dist.all_reduce(means)
    names = (*PARTS, *(f"wall {part}" for part in PARTS))
    report(dict(zip(names, means.flatten().tolist(), strict=True)))
    dist.destroy_process_group()


def _nothing() -> None:
    """What is not taken out."""


def _cost(run: Callable[[], object], transports: Sequence[Transport]) -> tuple[float, float]:
    """Seconds of this thread's CPU time, without those in which it waited, and of wall time."""
    busy_wait, wall, own = sum(each.busy_wait for each in transports), perf_counter(), thread_time()
    run()
    own, wall = thread_time() - own, perf_counter() - wall
    return own + busy_wait - sum(each.busy_wait for each in transports), wall


def _usual(seconds: Sequence[float]) -> float:
    """The lower quartile: what else the machine does only adds."""
    return quantiles(seconds, n=4)[0]


if __name__ == "__main__":
    main()
