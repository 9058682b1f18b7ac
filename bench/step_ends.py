"""What a step waits for at its ends: two ranks with ZeRO-1, joined by a link of 1 Gbit/s.

    python bench/step_ends.py [--rounds 3] [--steps 8] [--precision f32] [--batch 32] [--beside PYTHON]

Each rank is a process that trains `bench/models/zero.par` at one end of a narrow link (`narrow.py`). `exposed` is the
time that a step waits for the link; not that for the other rank, or for a core, which depends on what else the machine
does. The first steps do not count.

`--beside` names the Python of another checkout, which is measured in turn.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from statistics import median

from measure import agree, alternately, measured, show
from narrow import run

WARM_UP = 2


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--batch", type=int, default=32, help="the more rows, the more hides")
    parser.add_argument("--beside", metavar="PYTHON")
    parser.add_argument("--as", dest="rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settings = [f"train.steps={arguments.steps}", f"train.precision={arguments.precision}"]
    settings.append(f"batch={arguments.batch}")
    if arguments.rank:
        run("zero.par", settings)
        return
    pythons = {"this": sys.executable, **({"beside": arguments.beside} if arguments.beside else {})}
    losses: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {name: [] for name in pythons}

    def figure(name: str) -> float:
        command = [__file__, "--as", "--steps", str(arguments.steps), "--precision", arguments.precision]
        command += ["--batch", str(arguments.batch)]
        found = measured(command, 2, 1, python=pythons[name])
        losses[name] = found["losses"]
        steps[name].append(median(found["seconds"][WARM_UP:]) * 1e3)
        return median(found["waited"][WARM_UP:]) * 1e3

    figures = alternately({name: partial(figure, name) for name in pythons}, arguments.rounds)
    agree(losses, absolute=1e-5)
    show("exposed communication of a step", "ms", figures, "beside" if arguments.beside else "this")
    show("a step", "ms", steps, "beside" if arguments.beside else "this")


if __name__ == "__main__":
    main()
