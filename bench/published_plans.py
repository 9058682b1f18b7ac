"""What `partita plan` proposes in place of Megatron-LM's published configurations, and why the model prefers it.

    python bench/published_plans.py [--rows N ...] [--within SECONDS]

Each row of Table 1 is planned with its model, number of GPUs and global batch alone. Beside it stands the published
configuration as the same model predicts it, communication overlapped in both.
"""

from __future__ import annotations

import argparse
from time import process_time

from published.rows import rows


def main() -> None:
    """Print both for each row."""
    from partita.compiler.planner.reasons import reason
    from partita.compiler.planner.search import Search, described, predicted
    from partita.compiler.planner.space import space_of

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="only these rows, from 1")
    parser.add_argument("--within", type=float, default=15, metavar="SECONDS", help="for each (default: 15)")
    arguments = parser.parse_args()
    table = [row for row in rows("megatron_sc21") if row.table == "Table 1"]
    for i, row in enumerate(table, 1):
        if arguments.rows is not None and i not in arguments.rows:
            continue
        given = row.load()
        start = process_time()
        space = space_of(given)
        found = Search(space, within=arguments.within).run()
        seconds = process_time() - start
        best = found.plans[0]
        own = space.own()
        assert own is not None
        theirs = predicted(given, own)
        sizes = f"{row.set['gpus']:,} GPUs, {row.set['sequences']:,} sequences"
        print(f"{row.name} on {sizes}; planned in {seconds:.1f} s")
        for name, plan in (("published", theirs), ("planned", best)):
            step, memory = plan.prediction.step_time, plan.peak / 2**30
            print(f"  {name:9}  {step:6.2f} s  MFU {plan.prediction.mfu:.1%}  {memory:5.1f} GiB", end="  ")
            print(described(space, plan.candidate))
        faster = theirs.prediction.step_time / best.prediction.step_time - 1
        print(f"  the published one takes {faster:+.1%}: {reason(theirs, best)}", flush=True)


if __name__ == "__main__":
    main()
