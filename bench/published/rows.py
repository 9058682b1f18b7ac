"""Published runs: what each was measured to do, and the file that is the same run in this project's language.

One JSON file a family: runs of one system by one group. `{"family", "spec", "assumed", "tables": [{"name", "source",
"rows": [{"name", "set", …}]}]}`. A family, a table and a row may each have `set`: overrides of the `spec`, a file
beside it, of which the row's come last; a table may have a `spec` of its own. They may also say

- `percent`, the utilization as published, and `counts`, what it counts: `model` (MFU: the model's FLOPs) or `hardware`
  (HFU: those of recomputation as well);
- how long a step took, in one of three ways: `seconds`, `tokens` a second of each GPU, or `teraflops` a second of each
  GPU; a row with none of them is one of which only `percent` is published;
- `whole_attention`: its TFLOP/s or percent count products of queries with all keys, though attention is causal, as
  PaLM's formula does (arXiv 2204.02311, appendix B);
- `ran`, how that system ran where our programs run otherwise, so that the prediction is of one that does the same:
  names of `published.scores.DIFFERENCES` or, of torch's FSDP, of `SHARDED`; or `eager`, which is not compiled; and
  `flash-1`, which has attention's kernel of before July 2023, or `cudnn`, which has cuDNN's, as ours have;
- `planned`: overrides of the configuration that plans are compared with, where our program with the row's does not fit;
- `fitted`: constants of the cost model were chosen with these rows in view.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from partita.dsl.spec import Spec

HERE = Path(__file__).parent


@frozen
class Row:
    """A published run. `percent` is a utilization that counts FLOPs of recomputation if `hardware`."""

    family: str
    table: str
    name: str
    spec: Path
    set: Mapping[str, Any]
    percent: float
    hardware: bool
    ran: frozenset[str]
    fitted: bool
    whole_attention: bool
    step: Mapping[str, float] = field(repr=False)
    planned: Mapping[str, Any] = field(factory=dict, repr=False)

    @property
    def overrides(self) -> list[str]:
        """What makes the file this run's."""
        return [f"{name}={value}" for name, value in self.set.items()]

    def load(self) -> Spec:
        """The file of this run."""
        from partita.dsl.load import load

        spec, diagnostics = load(self.spec, self.overrides)
        assert spec is not None, [diagnostic.render() for diagnostic in diagnostics]
        return spec


def families() -> tuple[str, ...]:
    """The files of rows, by name."""
    return tuple(sorted(path.stem for path in HERE.glob("*.json")))


def rows(family: str) -> Iterator[Row]:
    """The rows of a family."""
    found: dict[str, Any] = json.loads((HERE / f"{family}.json").read_text())
    for table in found["tables"]:
        for row in table["rows"]:
            said = {**found, **table, **row}
            assert said["counts"] in ("model", "hardware"), said
            yield Row(
                family,
                table["name"],
                row["name"],
                HERE / said["spec"],
                {**found.get("set", {}), **table.get("set", {}), **row["set"]},
                row["percent"],
                said["counts"] == "hardware",
                frozenset(said.get("ran", ())),
                said.get("fitted", False),
                said.get("whole_attention", False),
                {key: float(row[key]) for key in ("seconds", "tokens", "teraflops") if key in row},
                said.get("planned", {}),
            )
