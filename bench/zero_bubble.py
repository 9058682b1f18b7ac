"""A zero-bubble step of two ranks with 48 linear layers each: ours beside torch's, and beside a plain loop's share.

    python bench/zero_bubble.py [--rounds 9] [--steps 12] [--linears 48] [--width 128] [--rows 128] [SYSTEM ...]

Systems are `partita:SCHEDULE`, `torch:SCHEDULE` and `plain`. All train `bench/models/linear.par` from the same weights
on the same batches. Where a schedule has two chunks (zb_v, auto, torch's zero_bubble and zbv), a rank's 48 layers are
two stages of 24. `plain` is one process, microbatch by microbatch, with autograd: half its time is what two ranks would
take if nothing were lost, and the figure shown for it. A step is forward, backward, the update, and the loss on every
rank; the batches are drawn before.

Each is started by its own launcher: ours binds ranks to cores, torchrun does not; `bound:SCHEDULE` is torch's schedule
in processes that are bound as ours are. Of torch's schedules, zb1p is ZB1P (`ScheduleInterleavedZeroBubble`) with one
stage a rank, zero_bubble with two.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import islice
from statistics import median
from time import perf_counter

from measure import agree, alternately, joined, measured, report, show

RANKS, MICROBATCHES = 2, 12
OURS = {"1f1b": "one_f_one_b", "zb_h1": "zb_h1", "zb_h2": "zb_h2", "zb_v": "zb_v", "auto": "auto"}
SYSTEMS = (
    "plain",
    "partita:zb_h1",
    "partita:zb_h2",
    "partita:zb_v",
    "partita:auto",
    "torch:zb1p",
    "torch:zero_bubble",
    "torch:1f1b",
)
WARM_UP = 3


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("systems", nargs="*", default=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--linears", type=int, default=48, help="on each rank")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=128, help="of a microbatch")
    parser.add_argument("--as", dest="system", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("steps", "linears", "width", "rows")}
    if arguments.system:
        run(arguments.system, **sizes)
        return
    losses: dict[str, list[float]] = {}

    def figure(system: str) -> float:
        options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        ranks = 1 if system == "plain" else RANKS
        command = [__file__, "--as", system, *options]
        found = measured(command, ranks, 1, torchrun=system.startswith("torch:"))
        losses[system] = found["losses"]
        return median(found["seconds"][WARM_UP:]) * 1e3 * ranks / RANKS

    figures = alternately({each: partial(figure, each) for each in arguments.systems}, arguments.rounds)
    agree(losses, relative=1e-4)
    shape = f"{arguments.linears} linears a rank, {arguments.width} wide, {MICROBATCHES} × {arguments.rows} rows"
    for reference in ("plain", "torch:zb1p"):
        if reference in figures:
            show(f"a step, {shape}", "ms", figures, reference)


def overrides(linears: int, width: int, rows: int, schedule: str) -> tuple[str, ...]:
    """Those that make `linear.par` this benchmark's."""
    sizes = (f"layers={RANKS * linears}", f"embed={width}", f"batch={MICROBATCHES * rows}")
    # Nothing stands between the layers: at greater rates so many of them diverge.
    return (*sizes, f"fast.microbatches={MICROBATCHES}", f"schedule={schedule}", "train.optimizer.lr=1e-3")


def run(system: str, steps: int, linears: int, width: int, rows: int) -> None:
    """One rank of a system."""
    import torch.distributed as dist
    from peers.ours import Ours
    from peers.pipelining import Pipeline
    from peers.plain import Plain
    from peers.workload import workload

    family, _, schedule = system.partition(":")
    work = workload("linear.par", overrides(linears, width, rows, OURS.get(schedule, "one_f_one_b")))
    if family == "plain":
        rank = Plain(work, False, work.microbatches)
    else:
        joined()
        rank = Ours(work) if family == "partita" else Pipeline(work, schedule, False)
    seconds, losses = [], []
    for batch in list(islice(work.batches(), steps)):
        start = perf_counter()
        losses.append(rank.step(*batch))
        seconds.append(perf_counter() - start)
    report({"seconds": seconds, "losses": losses})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
