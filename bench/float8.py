"""What eight bits cost in loss: `specs/tiny.par` trained in bf16 and in fp8, on the same batches from the same values.

    python bench/float8.py [--steps 200] [--seeds 0] [PRECISION ...]

Shown are the losses of evaluations on held-out data, the last of which is compared, and the mean loss of the last fifty
steps. With several seeds, the difference between precisions can be held against that between seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

SPEC = Path(__file__).parents[1] / "specs" / "tiny.par"
LAST = 50


def main() -> None:
    """Train with each precision and seed, and print the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("precisions", nargs="*", default=["bf16", "fp8"], metavar="PRECISION")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0])
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        last = {}
        for precision in arguments.precisions:
            evaluations, training = losses(precision, seed, arguments.steps)
            last[precision] = evaluations[-1]
            shown = ", ".join(f"{loss:.4f}" for loss in evaluations)
            print(
                f"seed {seed}  {precision:4}  evaluations {shown}; last steps {fmean(training[-LAST:]):.4f}", flush=True
            )
        first, *others = last
        for other in others:
            print(f"seed {seed}  {other} - {first}: {last[other] - last[first]:+.4f}", flush=True)


def losses(precision: str, seed: int, steps: int) -> tuple[list[float], list[float]]:
    """Of evaluations, and of training steps."""
    with TemporaryDirectory() as directory:
        overrides = [f"train.precision={precision}", f"train.seed={seed}", f"train.steps={steps}"]
        command = [sys.executable, "-m", "partita", "run", str(SPEC), *overrides, "--run-dir", directory]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    evaluations = [each["eval_loss"] for each in records if "eval_loss" in each]
    return evaluations, [each["loss"] for each in records if "loss" in each]


if __name__ == "__main__":
    main()
