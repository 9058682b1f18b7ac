"""Steps of a DLRM whose tables have more rows or fewer, on four ranks.

    python bench/tables.py [--rounds 3] [--steps 30] [--rows 1_000_000 10_000_000] [KEY=VALUE ...]

`bench/models/tables.par`: 20 tables, whose rows are split over the ranks, as is the batch. With 10 million rows each,
tables and states are 20 GB, and the four ranks need 21.5 GB with Python and libraries: by themselves, on a machine of
24 GiB, `--rounds 1 --steps 40 --rows 10_000_000`. Nothing is saved; initial values are made 32 MiB at a time. A step
should take as long with any number of rows: it reads and writes those alone that it looks up. Runs with each number of
rows take turns. A step is all of it, without drawing the batch; beside its time stands the CPU time that it took on the
first rank, which other programs on the machine disturb less. The last table is what each rank held at most, of memory
of its own, and what the compiler has said that it would at most, both without what Python and libraries hold before a
rank is made; and beside both, from a run of a few steps of its own, the peak of live tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from resource import RUSAGE_SELF, getrusage
from statistics import median
from time import perf_counter, thread_time

from measure import alternately, joined, measured, report, show
from memory import Live

RANKS, WARM_UP = 4, 5
COUNTED = 4  # steps of the run whose tensors are counted


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--live", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of:
        run(arguments.of, arguments.overrides, arguments.steps, Live() if arguments.live else None)
        return
    cpu: dict[str, list[float]] = {f"{rows:,} rows": [] for rows in arguments.rows}
    held: dict[str, list[float]] = {}

    def figure(rows: int) -> float:
        command = [__file__, *arguments.overrides, "--of", str(rows), "--steps", str(arguments.steps)]
        found = measured(command, RANKS, 1)
        name = f"{rows:,} rows"
        cpu[name].append(1e3 * median(found["cpu"][WARM_UP:]))
        held[f"{name}, held"] = [found["held"] / 2**20]
        held[f"{name}, bound"] = [found["bound"] / 2**20]
        print(f"{name}: loss {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}", flush=True)
        return median(found["seconds"][WARM_UP:]) * 1e3

    figures = alternately({f"{rows:,} rows": partial(figure, rows) for rows in arguments.rows}, arguments.rounds)
    for rows in arguments.rows:
        command = [__file__, *arguments.overrides, "--of", str(rows), "--steps", str(COUNTED), "--live"]
        held[f"{rows:,} rows, live tensors"] = [measured(command, RANKS, 1)["live"] / 2**20]
    first = next(iter(cpu))
    show("a step", "ms", figures, first)
    show("CPU time of a step on the first rank", "ms", cpu, first)
    show("memory of a rank", "MiB", held, next(iter(held)))


def run(rows: int, overrides: Sequence[str], steps: int, live: Live | None) -> None:
    """One rank with tables of so many rows; `live` counts its tensors, which takes time."""
    import torch.distributed as dist
    from peers.ours import rank_of
    from peers.workload import MODELS

    from partita.compiler.analysis.memory import memory_report
    from partita.dsl.load import load
    from partita.runtime.data.binding import open_data
    from partita.runtime.evaluation import results
    from partita.runtime.rank import prepare

    spec, diagnostics = load(MODELS / "tables.par", (f"rows={rows}", *overrides))
    assert spec is not None, [each.render() for each in diagnostics]
    plan = prepare(spec)
    joined()
    before = getrusage(RUSAGE_SELF).ru_maxrss * 1024
    seconds, cpu, losses = [], [], []
    with live or nullcontext():
        rank = rank_of(plan)
        dataset = open_data(plan.program, plan.train, MODELS)
        # One after the other if they are counted: the bound has room for that of the step alone.
        given = (rank.tensors(dataset.batch(number + 1)) for number in range(steps))
        for number, batch in enumerate(given if live else list(given)):
            dist.barrier()
            start, begun = perf_counter(), thread_time()
            for _ in rank.step(number + 1, batch, (0.1, 0.05)):
                pass
            seconds.append(perf_counter() - start)
            cpu.append(thread_time() - begun)
            losses.append(results(rank.training)[0])
            del batch
    held = getrusage(RUSAGE_SELF).ru_maxrss * 1024 - before
    bound = memory_report(plan.training, plan.program.ranks[0]).total
    counted = {} if live is None else {"live": live.peak}
    report({"seconds": seconds, "cpu": cpu, "losses": losses, "held": held, "bound": bound, **counted})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
