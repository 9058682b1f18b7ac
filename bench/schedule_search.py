"""How good `auto` is, and how long it takes.

    python bench/schedule_search.py

Three tables. The rows that Qi et al. published (arXiv 2401.10241v1, tables 5 and 9; `tests/golden/zero_bubble.json`):
the bubble of their search, ours, and the lower bound, in the memory of P and of 2P microbatches. Small pipelines, with
several ratios of F, B and W: how many orders meet the bound, and the mean of cost over bound. And larger pipelines,
with equal and with unequal stages: cost over lower bound, and what kind of order it is.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from time import perf_counter

from partita.compiler.schedules.communication import default_messages
from partita.compiler.schedules.conditions import Conditions, Memory
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.schedules.simulator import Costs, equal_costs

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "zero_bubble.json"


def searched(ranks: int, chunks: int, microbatches: int, costs: Costs, memory: Memory | None) -> tuple[Schedule, float]:
    """The schedule, and the seconds it took."""
    conditions = Conditions(costs, default_messages(ranks * chunks), (lambda _: memory) if memory else None)
    start = perf_counter()
    schedule = make("auto", ranks, chunks, microbatches, conditions=conditions)
    return schedule, perf_counter() - start


def published() -> None:
    """The rows of the paper."""
    print(f"{'P':>3} {'M':>4}  {'memory':>6}  {'published':>9} {'auto':>8} {'bound':>8} {'seconds':>8}")
    for row in json.loads(GOLDEN.read_text())["rows"]:
        ranks, microbatches = row["stages"], row["microbatches"]
        times = [row[key] for key in ("T_F", "T_B", "T_W")]
        work = microbatches * sum(times)
        for name, factor in (("zb_1p", 1), ("zb_2p", 2)):
            memory = Memory((float(factor * ranks),) * ranks, (1.0,) * ranks, (row["M_W"],) * ranks)
            schedule, seconds = searched(ranks, 1, microbatches, equal_costs(*times, row["T_comm"]), memory)
            search = schedule.search
            assert search is not None
            ours, bound = (1 - work / each for each in (search.cost, search.least))
            figures = f"{row['bubble'][name]:9.4f} {ours:8.4f} {bound:8.4f} {seconds:8.2f}"
            print(f"{ranks:3} {microbatches:4}  {factor * ranks:6}  {figures}")


def small() -> None:
    """Small pipelines with memory for some multiples of P microbatches, of which 0.4 stays until W."""
    print(f"{'P':>3} {'V':>2} {'M':>4}  {'at bound':>8} {'cost/bound':>10} {'seconds':>8}")
    ratios = ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (3.0, 2.0, 2.0), (1.0, 1.0, 0.3))
    for chunks, (ranks, microbatches) in product((1, 2), ((3, 5), (4, 8), (4, 13), (8, 16), (8, 24))):
        stages, shares, taken = ranks * chunks, [], 0.0
        for times, factor in product(ratios, (0.5, 1.0, 1.5, 2.0)):
            memory = Memory((factor * ranks,) * ranks, (1.0 / chunks,) * stages, (0.4 / chunks,) * stages)
            costs = equal_costs(*(each / chunks for each in times), 0.1)
            schedule, seconds = searched(ranks, chunks, microbatches, costs, memory)
            assert schedule.search is not None
            shares.append(schedule.search.cost / schedule.search.least)
            taken += seconds
        met = sum(share < 1 + 1e-9 for share in shares)
        figures = f"{met:4} / {len(shares)} {fmean(shares):10.4f} {taken / len(shares):8.2f}"
        print(f"{ranks:3} {chunks:2} {microbatches:4}  {figures}")


def uneven(stages: int) -> Costs:
    """Stages of different lengths; the first is shorter and the last longer."""
    random = Random(1)
    lengths = [1 + 0.3 * random.random() for _ in range(stages)]
    lengths[0] *= 0.8
    lengths[-1] *= 1.5
    kinds = {"F": 1.0, "B": 1.05, "W": 0.8, "BW": 1.85}
    return Costs(lambda stage, kind: lengths[stage] * kinds[kind], lambda message: 0.05)


def larger() -> None:
    """Large pipelines, with memory for some multiples of P microbatches, or any number."""
    print(f"{'P':>3} {'V':>2} {'M':>4}  {'stages':>7} {'memory':>6}  {'cost/bound':>10} {'seconds':>8}  found")
    for ranks, chunks, microbatches in ((32, 1, 256), (16, 1, 128), (16, 2, 64), (16, 4, 64)):
        stages = ranks * chunks
        for what, costs in (("equal", equal_costs(1.0, 1.05, 0.8, 0.05)), ("unequal", uneven(stages))):
            for factor in (0.5, 1.0, 1.5, 2.0, None):
                memory = None
                if factor is not None:
                    kept = (1.0 / chunks,) * stages, (0.4 / chunks,) * stages
                    memory = Memory((factor * ranks,) * ranks, *kept)
                schedule, seconds = searched(ranks, chunks, microbatches, costs, memory)
                search = schedule.search
                assert search is not None
                size = f"{ranks:3} {chunks:2} {microbatches:4}  {what:>7} {f'{factor} P' if factor else '':>6}"
                print(f"{size}  {search.cost / search.least:10.4f} {seconds:8.2f}  {search.family}", flush=True)


if __name__ == "__main__":
    published()
    print()
    small()
    print()
    larger()
