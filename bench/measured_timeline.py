"""How near the simulator comes to what ranks do: 20 steps on 2 real ranks, and the simulation from their costs.

    python bench/measured_timeline.py [--steps N] [schedule ...]

For each schedule (default: the classical ones) a GPT of 8 layers, 256 wide, is trained by `partita run --trace`.
The table shows the median of the measured steps, the step that the simulator makes of the mean costs of actions and
transfers (docs/commands/run.md says how they are found), the difference, and the share of the step that the ranks
compute, which says how much of the timeline is waiting.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

FILE = Path(__file__).parent / "models" / "gpt.par"
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs")


def measured(schedule: str, steps: int) -> tuple[str, ...]:
    """A row of the table."""
    from partita.dsl.load import load
    from partita.runtime.rank import prepare
    from partita.runtime.tracing.measurement import measure
    from partita.runtime.tracing.stopwatch import Marks, path_of

    overrides = [f"schedule={schedule}", f"train.steps={steps + 1}"]
    spec, diagnostics = load(FILE, overrides)
    assert spec is not None, [diagnostic.render() for diagnostic in diagnostics]
    program = prepare(spec).program
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "partita", "run", str(FILE), *overrides]
        subprocess.run([*command, "--run-dir", folder, "--trace", folder], stdout=subprocess.PIPE, check=True)
        found = measure(program, [Marks.read(path_of(Path(folder), rank)) for rank in range(program.mesh.ranks)])
    busy = max(found.typical.timeline.busy) / found.typical.timeline.makespan
    return (
        schedule,
        f"{found.seconds * 1e3:.1f}",
        f"{found.simulated.makespan * 1e3:.1f}",
        f"{found.difference:+.1%}",
        f"{busy:.0%}",
    )


def main() -> None:
    """Measure every schedule in turn, and print the table."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--steps", type=int, default=20, help="measured steps (default 20, at most 20)")
    arguments = parser.parse_args()
    table = Table("schedule")
    for heading in ("measured, ms", "simulated, ms", "difference", "busiest rank computes"):
        table.add_column(heading, justify="right")
    for schedule in arguments.schedules:
        table.add_row(*measured(schedule, arguments.steps))
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    main()
