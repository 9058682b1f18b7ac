"""What a step waits for where collectives beside products are in pieces, and where they are whole (`overlap`).

    python bench/pieces.py [--rounds 3] [--steps 6] [--batch 8] [--megabytes 125] [--pieces 2 4 8]
    python bench/pieces.py --predicted [cluster.tensor=8 …]

Two ranks with tensor and sequence parallelism train `bench/models/tensor.par` at the ends of a narrow link
(`narrow.py`), alternately with each number of pieces. `exposed` is the time that a step waits for the link. With
`--predicted`, what the cost model says of `bench/models/gpt_175b.par` on its A100s.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median

from measure import agree, alternately, measured, show
from narrow import run

WARM_UP = 2
LARGE = Path(__file__).parent / "models" / "gpt_175b.par"


def main() -> None:
    """Measure, or predict, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=125, help="of the link, a second")
    parser.add_argument("--pieces", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--predicted", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--as", dest="rank", metavar="LAYOUT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.predicted is not None:
        predicted(arguments.pieces, arguments.predicted)
        return
    if arguments.rank:
        settings = [f"train.steps={arguments.steps}", f"batch={arguments.batch}"]
        run("tensor.par", [*settings, f"layout={arguments.rank}"], arguments.megabytes * 1e6)
        return
    losses: dict[str, list[float]] = {}
    names = ["whole", *(f"pieces{count}" for count in arguments.pieces)]
    steps: dict[str, list[float]] = {name: [] for name in names}
    computed: dict[str, list[float]] = {name: [] for name in names}

    def figure(name: str) -> float:
        command = [__file__, "--as", name, "--steps", str(arguments.steps), "--batch", str(arguments.batch)]
        found = measured([*command, "--megabytes", str(arguments.megabytes)], 2, 1)
        losses[name] = found["losses"]
        steps[name].append(median(found["seconds"][WARM_UP:]) * 1e3)
        computed[name].append(median(found["computed"][WARM_UP:]) * 1e3)
        return median(found["waited"][WARM_UP:]) * 1e3

    figures = alternately({name: partial(figure, name) for name in names}, arguments.rounds)
    agree(losses, relative=1e-4)
    show("exposed communication of a step", "ms", figures, "whole")
    show("a step", "ms", steps, "whole")
    show("CPU time of the first rank in a step", "ms", computed, "whole")


def predicted(counts: list[int], overrides: list[str]) -> None:
    """Print what the cost model says, by the number of pieces."""
    from rich.console import Console
    from rich.table import Table

    from partita.compiler.analysis.memory import peak_memory
    from partita.compiler.analysis.time import predict
    from partita.compiler.pipeline import compile_spec
    from partita.dsl.load import load_text

    text, split = LARGE.read_text(), "shard seq -> tensor "
    assert split in text
    table = Table("pieces", "step", "MFU", "exposed", "peak memory", title=LARGE.name, title_justify="left")
    for count in (1, *counts):
        given, diagnostics = load_text(
            text.replace(split, f"overlap tensor in {count}  {split}"), LARGE.name, overrides
        )
        assert given is not None, [each.render() for each in diagnostics]
        state = compile_spec(given)
        found = predict(state)
        peak = max(peak_memory(state, rank) for rank in state.plan.ranks)
        shown = f"{found.step_time:.2f} s", f"{found.mfu:.1%}", f"{found.exposed_communication:.1%}"
        table.add_row(str(count), *shown, f"{peak / 2**30:.1f} GiB")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
