"""How long compiling takes, and how little that depends on the number of devices.

    python bench/compile_time.py [--repeat N]

Each file is compiled in a process of its own, N times (default 3); the table shows the fastest time of every pass, of
translation validation, the sum, and the most memory that a process has held. The invariants of schedules and programs
are part of `assemble`. Compare with one line under the other: only the mesh differs between the first two.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter

MODELS = Path(__file__).parent / "models"
CASES = (
    ("175 B, 1,024 devices", "gpt_175b.par", ()),
    ("175 B, 16,384 devices", "gpt_175b.par", ("cluster.data=128", "batch=24_576")),
    ("1 T, 3,072 devices", "gpt_1t.par", ()),
)


def measure(file: str, overrides: tuple[str, ...]) -> dict[str, float]:
    """Seconds by pass, and `memory` in bytes, of this process."""
    from partita.compiler.pipeline import compile_spec
    from partita.compiler.verify.equivalence import validate
    from partita.dsl.load import load

    start = perf_counter()
    spec, diagnostics = load(MODELS / file, overrides)
    assert spec is not None, [diagnostic.render() for diagnostic in diagnostics]
    times = {"check": perf_counter() - start}
    compilation = compile_spec(spec)
    times.update(compilation.times)
    start = perf_counter()
    validation = validate(compilation, invariants=False)
    times["validate"] = perf_counter() - start
    assert not validation.problems, validation.problems[0].render()
    times["sum"] = sum(times.values())
    times["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return times


def main() -> None:
    """Measure every case in processes of their own, and print the table."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=3, help="processes for each file (default 3)")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        _, file, overrides = CASES[arguments.case]
        print(json.dumps(measure(file, overrides)))
        return
    columns: dict[str, dict[str, float]] = {}
    for i, (name, _, _) in enumerate(CASES):
        command = [sys.executable, __file__, "--case", str(i)]
        runs = [
            json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            for _ in range(arguments.repeat)
        ]
        columns[name] = {key: min(run[key] for run in runs) for key in runs[0]}
        columns[name]["slowest sum"] = max(run["sum"] for run in runs)
    table = Table("seconds", *columns)
    for key in next(iter(columns.values())):
        values = [column[key] for column in columns.values()]
        table.add_row(key, *(f"{v / 2**20:.0f} MiB" if key == "memory" else f"{v:.2f}" for v in values))
    Console().print(table)


if __name__ == "__main__":
    main()
