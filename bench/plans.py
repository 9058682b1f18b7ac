"""How good a plan for two ranks of this machine is: every plan that `partita plan` ranks, run and timed.

    python bench/plans.py FILE [key=value ...] [--top K] [--steps N] [--repeats R]

The plans take turns, so that what else the machine does falls on all; of each, the median step of its fastest run
counts. What is said at the end is how much slower than the fastest of all the proposed one is.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from measure import trained

# Steps in which a run warms up.
WARM = 3


def main() -> None:
    """Plan, run all, and print."""
    from partita.compiler.planning.search import Search, described
    from partita.compiler.planning.space import space_of
    from partita.compiler.planning.writing import written_plan
    from partita.dsl.load import load

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("file")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    given, diagnostics = load(arguments.file, arguments.overrides)
    assert given is not None, [diagnostic.render() for diagnostic in diagnostics]
    space = space_of(given)
    found = Search(space, arguments.top, 60).run()
    best = [float("inf")] * len(found.plans)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / Path(arguments.file).name
        source.write_text(Path(arguments.file).read_text())
        for _ in range(arguments.repeats):
            for i, plan in enumerate(found.plans):
                path = Path(folder) / f"plan{i}.par"
                path.write_text(written_plan(plan, str(source), arguments.overrides, output=str(path)))
                speeds = trained([str(path)], arguments.steps, OMP_NUM_THREADS="1")
                best[i] = min(best[i], plan.prediction.tokens / median(speeds[WARM:]))
    for plan, seconds in zip(found.plans, best, strict=True):
        print(f"{plan.prediction.step_time * 1e3:8.1f} ms predicted, {seconds * 1e3:8.1f} ms measured", end="  ")
        print(described(space, plan.candidate))
    print(f"the proposed one takes {best[0] / min(best) - 1:+.1%} of the fastest")


if __name__ == "__main__":
    main()
