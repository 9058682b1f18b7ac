"""Directories of runs, as runs and strangers leave them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partita.runtime.run_directory import Origin, Record, RunDirectory

# With a collective, a metric, and what would be a script if it were not escaped.
SCRIPT = "<script>window.taken = 1</script><img src=x onerror='window.taken = 2'>"
TEXT = f"""axis batch = 8, embed = 6

model m(x: [batch, embed]) {{
  param w: [embed] ~ normal(1.0)  # {SCRIPT} </code></pre>"
  loss mean(x * w)
  metric size = mean(abs(w))
}}

mesh four(data = 2, pipe = 1)

layout split on four {{
  shard batch -> data
}}

train {{
  layout = split
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 8
  eval = every(4)
}}
"""

# Two stages of two chunks each, and two parameters, u and w, that are equal but for their names.
PIPE = """axis batch = 65536, embed = 1024

model m(x: [batch, embed]) {
  param u, v, w: [embed] ~ normal(1.0)
  let h = x
  repeat 4 as layer {
    let h = h + h * v
  }
  loss mean(h * u + h * w)
}

mesh four(data = 2, pipe = 2)

layout split on four {
  shard batch -> data
  stage layer -> pipe
}

schedule fast = interleaved_1f1b(microbatches = 4, chunks = 2)

train {
  layout = split
  schedule = fast
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 8
}
"""


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "loss": 4.0 / number, "learning_rate": 0.1, "tokens_per_second": 1000.0 + number} | more


RECORDS = [
    step(1, peak_memory=300 << 20, peak_memory_by_rank=[300 << 20, 290 << 20], unix_time=1.7e9),
    step(2, step_seconds=0.25, size=0.5),
    step(3, loss=None, bad=f"the loss of step 3 is nan {SCRIPT}", rows=["item 3"], rewound_to=0),
    step(4, **{SCRIPT: 1.0}),
    {"step": 4, "eval_loss": 1.25, "eval_size": 0.5, "eval_" + SCRIPT: 2.0},
    {"step": 4, "slow_ranks": [{"rank": 1, "action": f"F of stage 0 {SCRIPT}", "cost": 0.25}]},
]

FAULT = {"cause": SCRIPT, "ranks": [{"rank": 0, "step": 3, "doing": SCRIPT}]}


def written(
    folder: Path,
    name: str = "run",
    file: str = "m.par",
    records: Sequence[dict[str, Any]] = RECORDS,
    text: str = TEXT,
    fault: dict[str, Any] | None = FAULT,
    **command: Any,
) -> Path:
    """A run's directory, as a stranger may have written it; `command` is what its `Origin` has beside its file."""
    path = folder / name
    source = str(folder / file)
    with RunDirectory.open(path) as directory:
        directory.keep(Record("0" * 16, {source: text}, None, Origin(source, ("train.steps=6",), **command)))
        directory.put("metrics.jsonl", "".join(json.dumps(each) + "\n" for each in records).encode())
        if fault is not None:
            directory.put("fault.json", json.dumps(fault).encode())
    return path


def append(path: Path, *records: dict[str, Any]) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in records)
