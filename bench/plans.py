"""How good a plan for two ranks of this machine is: every plan that `partita plan` ranks, run and timed.

    python bench/plans.py [FILE] [key=value ...] [--top K] [--steps N] [--repeats R]

The machine is profiled first. The plans then take turns, so that what else the machine does falls on all; of each, the
median step of its median run counts. What is said at the end is how much slower than the fastest of all the proposed
one is.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from statistics import median

from measure import profiled, trained

SPECS = Path(__file__).parents[1] / "specs"
# Steps in which a run warms up.
WARM = 3


def main() -> None:
    """Profile, plan, run all, and print."""
    from partita.compiler.planner.search import Search, described
    from partita.compiler.planner.space import space_of
    from partita.compiler.planner.writing import written_plan
    from partita.dsl.load import load

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("file", nargs="?", type=Path, default=SPECS / "tiny.par")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / arguments.file.name
        shutil.copy(arguments.file, source)
        profiled("2", folder / "machine.json")
        given, diagnostics = load(source, arguments.overrides)
        assert given is not None, [diagnostic.render() for diagnostic in diagnostics]
        assert given.mesh is not None
        record = 'profile("machine.json")'
        overrides = [*arguments.overrides, *(f"{given.mesh.name}.{each}={record}" for each in ("device", "link"))]
        given, diagnostics = load(source, overrides)
        assert given is not None, [diagnostic.render() for diagnostic in diagnostics]
        space = space_of(given)
        found = Search(space, arguments.top, 60).run()
        seconds: list[list[float]] = [[] for _ in found.plans]
        for _ in range(arguments.repeats):
            for i, plan in enumerate(found.plans):
                path = folder / f"plan{i}.par"
                path.write_text(written_plan(plan, str(source), overrides, output=str(path)))
                speeds = trained([str(path)], arguments.steps, OMP_NUM_THREADS="1")
                seconds[i].append(plan.prediction.counted / median(speeds[WARM:]))
    usual = [median(each) for each in seconds]
    for plan, each, all_ in zip(found.plans, usual, seconds, strict=True):
        predicted = plan.prediction.step_time * 1e3
        spread = f"{min(all_) * 1e3:.1f} to {max(all_) * 1e3:.1f}"
        print(
            f"{predicted:8.1f} ms predicted, {each * 1e3:8.1f} ms measured ({spread})", described(space, plan.candidate)
        )
    print(f"the proposed one takes {usual[0] / min(usual) - 1:+.1%} of the fastest")


if __name__ == "__main__":
    main()
