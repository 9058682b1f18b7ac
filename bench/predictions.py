"""Predicted step times beside measured ones, on this machine: four schedules of three models on one rank and on two;
and a GPT and a model of experts split over two ranks without a pipeline.

    python bench/predictions.py [--rounds 3] [--steps 10] [CASE ...]

In each round the machine is profiled for one rank, then all that is predicted for one rank runs; then the same for two:
what is predicted is this machine in these minutes, as its speed drifts. A measured time is the median step of a run
(`partita run`, its first steps left out). Times and ratios are medians over the rounds. The ranking of a case's
schedules is compared wherever two measured ones differ by more than 10%, in the median of their ratios by round.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from itertools import combinations, groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from measure import profiled, trained
from rich.console import Console
from rich.table import Table

from partita.compiler.analysis.time import Prediction, predict
from partita.compiler.pipeline import compile_spec
from partita.dsl.load import load

HERE = Path(__file__).parent
SPECS = HERE.parent / "specs"
SCHEDULES = {
    "gpipe": ("schedule=gpipe",),
    "1f1b": ("schedule=one_f_one_b",),
    "interleaved": ("schedule=interleaved_1f1b", "schedule.chunks=2"),
    "zb_h1": ("schedule=zb_h1",),
}
LLAMA = ("layout=zero1", "cluster.data=1", "cluster.tensor=1")
MODELS = HERE / "models"
# With a rate above nothing, a few experts of so small a mixture soon have all tokens, whose products are quicker.
SPARSE = ("model=sparse", "train.optimizer=adamw(lr = 0, betas = [0.9, 0.95], weight_decay = 0)")
# Name → file, mesh, overrides; under all schedules.
PIPELINES = {
    "tiny on 1": (SPECS / "tiny.par", "laptop", ("laptop.pipe=1",)),
    "tiny on 2": (SPECS / "tiny.par", "laptop", ()),
    "gpt on 1": (MODELS / "gpt.par", "pair", ("pair.pipe=1",)),
    "gpt on 2": (MODELS / "gpt.par", "pair", ()),
    "llama on 1": (SPECS / "llama.par", "cluster", (*LLAMA, "cluster.pipe=1")),
    "llama on 2": (SPECS / "llama.par", "cluster", (*LLAMA, "cluster.pipe=2")),
}
# The same, without a pipeline; under the schedule of the file.
SPLITS = {
    **{
        f"{layout} on 2": (MODELS / "splits.par", "two", (f"layout={layout}",))
        for layout in ("zero1", "zero3", "tensor", "sequence", "context", "exchanged", "ring")
    },
    **{
        f"{layout} on 2": (MODELS / "splits.par", "two", (*SPARSE, f"layout={layout}"))
        for layout in ("experts_copied", "experts_split")
    },
    "experts on 1": (MODELS / "splits.par", "two", (*SPARSE, "two.split=1")),
}
CASES = PIPELINES | SPLITS
WARM_UP = 3
DIFFERENT = 1.1
WANTED = 0.15
Key = tuple[str, str]


def main() -> None:
    """Profile, measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    keys = [(case, schedule) for case in arguments.cases or CASES for schedule in _schedules(case)]
    measured: dict[Key, list[float]] = {key: [] for key in keys}
    predicted: dict[Key, list[float]] = {key: [] for key in keys}
    with TemporaryDirectory() as folder:
        here = Path(folder)
        for number in range(arguments.rounds):
            for ranks, its in groupby(sorted(keys, key=_ranks), _ranks):
                profiled(ranks, here / "machine.json")
                for key in its:
                    said = _predicted(here, *key)
                    speeds = trained([str(CASES[key[0]][0]), *_overrides(*key)], arguments.steps)
                    predicted[key].append(said.step_time)
                    measured[key].append(median(said.tokens / speed for speed in speeds[WARM_UP:]))
                    ratio = predicted[key][-1] / measured[key][-1]
                    print(f"round {number + 1}/{arguments.rounds}", *key, f"{ratio:.2f}", flush=True)
    show(measured, predicted)


def show(measured: dict[Key, list[float]], predicted: dict[Key, list[float]]) -> None:
    """The table, and what is ranked wrongly."""
    table = Table("", "schedule", "measured", "predicted", "predicted ÷ measured", "range")
    ratios = {}
    for key, seconds in measured.items():
        each = sorted(p / m for p, m in zip(predicted[key], seconds, strict=True))
        ratios[key] = median(each)
        times = (f"{median(values) * 1e3:.1f} ms" for values in (seconds, predicted[key]))
        table.add_row(*key, *times, f"{ratios[key]:.2f}", f"{each[0]:.2f} to {each[-1]:.2f}")
    console = Console(width=120)
    console.print(table)
    errors = [abs(ratio - 1) for ratio in ratios.values()]
    within = sum(error <= WANTED for error in errors)
    console.print(
        f"mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}; {within} of {len(errors)} within 15%"
    )
    pairs = wrong = 0
    for a, b in combinations(measured, 2):
        # By round: both ran within a minute or two.
        longer = sorted(one / other for one, other in zip(measured[a], measured[b], strict=True))
        found, said = median(longer), median(predicted[a]) / median(predicted[b])
        if a[0] == b[0] and max(found, 1 / found) > DIFFERENT:
            pairs += 1
            right = (found < 1) == (said < 1) and said != 1
            wrong += not right
            taken = f"{found:.2f} times as long ({longer[0]:.2f} to {longer[-1]:.2f}), predicted {said:.2f}"
            console.print(f"{a[0]}: {a[1]} against {b[1]}: {taken}{'' if right else ': ranked wrongly'}")
    console.print(f"of {pairs} pairs that differ by more than 10%, {wrong} are ranked wrongly")


def _schedules(case: str) -> Sequence[str]:
    return ("its own",) if case in SPLITS else tuple(SCHEDULES)


def _ranks(key: Key) -> str:
    return key[0].split()[-1]


def _overrides(case: str, schedule: str) -> list[str]:
    return [*CASES[case][2], *SCHEDULES.get(schedule, ())]


def _predicted(folder: Path, case: str, schedule: str) -> Prediction:
    """What this machine is predicted to take."""
    path, mesh, _ = CASES[case]
    machine = 'profile("machine.json")'
    for each in path.parent.glob("*.par"):  # some import others
        shutil.copy(each, folder)
    overrides = [*_overrides(case, schedule), f"{mesh}.device={machine}", f"{mesh}.link={machine}"]
    found, diagnostics = load(folder / path.name, overrides)
    assert found is not None, [each.render() for each in diagnostics]
    return predict(compile_spec(found), exposed=False)


if __name__ == "__main__":
    main()
