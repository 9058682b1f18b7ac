"""Predicted and measured: what the cost model says of Megatron-LM's published runs on A100s.

    python bench/published/megatron.py [--rows N ...]

Each row is `megatron_sc21.par` with the row's sizes, compiled and predicted with the presets `a100`, `nvlink3` and
`ib200`; nothing else differs between rows. Percent of peak is as the paper has it: the FLOPs of its formula, those of
recomputation among them, in the predicted time of a step, of 312 TFLOP/s. That system waited for whatever it sent,
so communication is predicted without overlap.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation, fmean
from typing import Any

HERE = Path(__file__).parent
SEQUENCE, VOCABULARY, PEAK = 2048, 51_200, 312e12

Row = dict[str, Any]


def tables() -> list[dict[str, Any]]:
    """The published tables: name, source and rows."""
    found: list[dict[str, Any]] = json.loads((HERE / "megatron_sc21.json").read_text())["tables"]
    return found


def overrides(row: Row) -> list[str]:
    """What makes the file a row's."""
    data = row["gpus"] // (row["tensor"] * row["pipe"])
    sizes = {name: row[name] for name in ("batch", "depth", "embed", "heads")}
    sizes |= {"selene.data": data, "selene.pipe": row["pipe"], "selene.tensor": row["tensor"]}
    sizes |= {"schedule.microbatches": row["batch"] // data // row["microbatch"], "schedule.chunks": row["chunks"]}
    return [f"{name}={size}" for name, size in sizes.items()]


def flops(row: Row) -> float:
    """The FLOPs of a step by the paper's formula (its §5.1), recomputation included."""
    embed, depth = row["embed"], row["depth"]
    tokens = row["batch"] * SEQUENCE
    return float(96 * tokens * depth * embed**2 * (1 + SEQUENCE / (6 * embed) + VOCABULARY / (16 * depth * embed)))


def percent(row: Row) -> float:
    """The predicted percent of peak."""
    from partita.compiler.analysis.time import predict
    from partita.compiler.pipeline import compile_spec
    from partita.dsl.load import load

    spec, diagnostics = load(HERE / "megatron_sc21.par", overrides(row))
    assert spec is not None, [diagnostic.render() for diagnostic in diagnostics]
    step = predict(compile_spec(spec), overlap=False).step_time
    return 100 * flops(row) / (step * row["gpus"] * PEAK)


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each; equal ones share the mean of theirs."""
    return [sum(other < each for other in values) + (values.count(each) + 1) / 2 for each in values]


def error(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """The mean absolute error."""
    return fmean(abs(a - b) for a, b in zip(measured, predicted, strict=True))


def main() -> None:
    """Print each table, measured and predicted, with what a constant would score."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="only these rows of each table, from 1")
    arguments = parser.parse_args()
    for table in tables():
        rows: list[Row] = [
            row for i, row in enumerate(table["rows"], 1) if arguments.rows is None or i in arguments.rows
        ]
        shown = Table("parameters", "GPUs", "tensor", "pipe", "measured", "predicted", "off", title=table["name"])
        measured, predicted = [row["percent"] for row in rows], [percent(row) for row in rows]
        for row, was, said in zip(rows, measured, predicted, strict=True):
            cells = (row["gpus"], row["tensor"], row["pipe"])
            off = said - was
            shown.add_row(f"{row['parameters']:g} B", *map(str, cells), f"{was:g}%", f"{said:.1f}%", f"{off:+.1f}")
        Console().print(shown)
        constant = error(measured, [fmean(measured)] * len(measured))
        print(f"mean absolute error {error(measured, predicted):.2f} points, of a constant {constant:.2f}", end="")
        if len(rows) > 2:
            print(f"; rank correlation {correlation(ranks(measured), ranks(predicted)):.2f}", end="")
        print()


if __name__ == "__main__":
    main()
