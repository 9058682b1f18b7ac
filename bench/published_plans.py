"""What `partita plan` proposes in place of published configurations, and why the model prefers it.

    python bench/published_plans.py [FAMILY ...] [--rows N ...] [--one] [--within SECONDS]

Each row is planned as a file that has the published configuration. Beside the plan stands that configuration as the
same model predicts it, communication overlapped in both, with what a row says of how it fits (`planned`). What is said
of each family at the end is the published time of a step over the planned one, both as predicted, and the seconds of
CPU that a plan took.
"""

from __future__ import annotations

import argparse
from statistics import geometric_mean
from time import process_time

from attrs import evolve
from published.rows import Row, families, rows


def main() -> None:
    """Print both for each row, and each family in a line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(families())} (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="only these rows of each family, from 1")
    parser.add_argument("--one", action="store_true", help="only the first row of each family")
    parser.add_argument("--within", type=float, default=15, metavar="SECONDS", help="for each (default: 15)")
    arguments = parser.parse_args()
    wanted = [1] if arguments.one else arguments.rows
    lines = []
    for family in arguments.families or families():
        chosen = [row for i, row in enumerate(rows(family), 1) if wanted is None or i in wanted]
        found = [planned(row, arguments.within) for row in chosen]
        if found:
            ratios, seconds = zip(*found, strict=True)
            text = f"{family}: {len(found)} rows, published/planned {min(ratios):.3f} to {max(ratios):.3f}"
            lines.append(f"{text}, mean {geometric_mean(ratios):.3f}; at most {max(seconds):.1f} s of CPU")
    print(*lines, sep="\n")


def planned(row: Row, within: float) -> tuple[float, float]:
    """Plan a row and print it: the published time over the planned one, and the seconds of CPU."""
    from partita.compiler.planner.reasons import reason
    from partita.compiler.planner.search import Search, described
    from partita.compiler.planner.space import space_of

    row = evolve(row, set={**row.set, **row.planned})
    given = row.load()
    start = process_time()
    space = space_of(given)
    found = Search(space, within=within).run()
    seconds = process_time() - start
    best, theirs = found.plans[0], found.own
    assert theirs is not None, found.wrong
    print(f"{row.family}, {row.name} on {space.devices:,} GPUs; planned in {seconds:.1f} s")
    for name, plan in (("published", theirs), ("planned", best)):
        step, memory = plan.prediction.step_time, plan.peak / 2**30
        print(f"  {name:9}  {step:6.2f} s  MFU {plan.prediction.mfu:.1%}  {memory:5.1f} GiB", end="  ")
        print(described(space, plan.candidate))
    faster = theirs.prediction.step_time / best.prediction.step_time
    fits = "" if found.own_fits else "; it does not fit"
    print(f"  the published one takes {faster - 1:+.1%}: {reason(theirs, best)}{fits}", flush=True)
    return faster, seconds


if __name__ == "__main__":
    main()
