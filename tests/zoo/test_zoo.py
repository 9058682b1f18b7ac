"""Every file of the zoo checks without a warning, is verified in several layouts, and trains as it stands.

Their axes are named alike, so that the layouts here can split them all: a new file comes into these tests by being
there. What it needs besides stands in the tables below.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import partita
from partita.cli.main import main
from partita.dsl import spec
from partita.dsl.load import load, load_text
from partita.runtime.verification.verify import Outcome, verify
from tests.files import SPECS
from tests.marks import soak
from tests.zoo import pairs
from tests.zoo.clicks import PATH, clicks
from tests.zoo.layouts import INDIVISIBLE

ZOO = SPECS / "zoo"
FILES = sorted(ZOO.glob("*.par"))
NAMES = [path.stem for path in FILES]

# Axes that tensor parallelism splits, in the order of preference for a tensor that has several.
TENSOR = ("groups", "heads", "ffn", "experts", "channels", "inner", "vocab", "tables", "mid1", "mid2", "mid3", "mid4")
# Axes whose positions may stand in zigzag order, likewise.
ORDERED = ("seq", "height", "nodes", "channels", "features", "ffn")
# Steps of training until the loss has fallen, if more than usual.
USUAL_STEPS = 24
STEPS = {"resnet": 48, "moco": 60}  # by SGD with a rate of 0.1, whose losses go up and down
FIRST = {"moco": 8}  # steps until its queue has what it is to tell apart


def rules(layout: str, given: spec.Spec, block: int) -> str:
    """The rules of a layout, as far as a model has what they name, in parts that have whole blocks."""
    axes, repeats = set(given.axes), sorted(outermost(given))
    tensor = ", ".join(name for name in TENSOR if name in axes and given.axes[name].size % (2 * block) == 0)
    every = {
        "data": "shard batch -> data",
        "tensor": f"shard {tensor} -> tensor" if tensor else "",
        "sequence": "shard seq -> tensor" if "seq" in axes else "",
        "zigzag": next((f"shard {name} -> tensor by zigzag" for name in ORDERED if _has_parts(given, name)), ""),
        "pipe": f"stage {', '.join(repeats)} -> pipe" if repeats else "",
        "zero1": "shard state -> data",
        "zero3": "shard param -> data",
    }
    return "\n  ".join(every[part] for part in LAYOUTS[layout] if every[part])


# Which rules each layout has.
LAYOUTS = {
    "data": ("data",),
    "zero": ("data", "zero3"),
    "tensor": ("tensor", "sequence"),
    "pipe": ("pipe",),
    "zigzag": ("data", "zigzag", "pipe"),
    "all": ("data", "tensor", "sequence", "pipe", "zero1"),
}


def _has_parts(given: spec.Spec, name: str) -> bool:
    """Whether two ranks can have two parts each of an axis."""
    return name in given.axes and given.axes[name].size % 4 == 0


def outermost(given: spec.Spec) -> Iterator[str]:
    """The repeats that a pipeline can be cut between."""
    assert given.model is not None
    bodies = [given.model.body]
    while bodies:
        body = bodies.pop()
        for step in body.steps:
            if isinstance(step, spec.Repeat):
                yield step.name
            elif isinstance(step, spec.CallBlock):
                bodies.append(step.body)


def laid_out(path: Path, layout: str) -> spec.Spec:
    """A file in one of the layouts, on a mesh of two ranks along each axis that it uses."""
    given, _ = load(path)
    assert given is not None
    block = 64 if "four_bits" in path.read_text() else 1  # of numbers that have one scale
    text = rules(layout, given, block)
    mesh = ", ".join(f"{axis} = 2" for axis in ("data", "pipe", "tensor") if f"-> {axis}" in text)
    if not mesh:
        pytest.skip("it has nothing that this layout splits")
    count = 1 if path.stem in INDIVISIBLE else 2
    more = f"\nmesh _zoo({mesh})\nlayout _zoo on _zoo {{\n  {text}\n}}\n"
    more += f"schedule _zoo = one_f_one_b(microbatches = {count})\n"
    overrides = ("layout=_zoo", "schedule=_zoo")
    found, diagnostics = load_text(path.read_text() + more, path.name, overrides, path)
    assert found is not None, "\n\n".join(each.render() for each in diagnostics)
    return found


@pytest.mark.few(16)
@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_checks_without_a_warning(path: Path):
    assert [each.render() for each in partita.check(path)] == []


@pytest.mark.parametrize("path", [*FILES, *sorted((ZOO / "blocks").glob("*.par"))], ids=lambda path: path.stem)
def test_is_formatted(path: Path):
    assert main(["fmt", "--check", str(path)]) == 0


CASES = [(path, layout) for path in FILES for layout in LAYOUTS]
# Attention, a scan, experts and tables; of the others `make test` holds the parts, and that they check.
ALWAYS = [("gpt2", "all"), ("gla", "all"), ("mixtral", "all"), ("dlrm", "all")]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("path", "layout"),
    [each for case in CASES for each in ([case] if (case[0].stem, case[1]) in ALWAYS else soak(case))],
    ids=[f"{path.stem}-{layout}" for path, layout in CASES],
)
def test_is_verified(path: Path, layout: str):
    found = verify(laid_out(path, layout))
    assert found.outcome == Outcome.VERIFIED, [each.render() for each in (*found.diagnostics, *found.warnings)]


# But for the file whose reward rises, and not its loss (tests/runtime/inference/test_rollouts.py).
LEARNED = [path for path in FILES if path.stem != "grpo"]


@pytest.mark.parametrize("path", soak(*LEARNED), ids=[path.stem for path in LEARNED])
def test_learns(path: Path):
    """As it stands, with the rate of learning of its first steps."""
    steps = STEPS.get(path.stem, USUAL_STEPS)
    trained = partita.train(path, {"train.steps": steps, "train.eval": None, "train.checkpoint": None})
    losses = [record["loss"] for record in trained][FIRST.get(path.stem, 0) :]
    assert sum(losses[-4:]) < sum(losses[:4]), losses


def test_clicks_are_those_that_are_drawn():
    there = np.load(PATH)
    drawn = clicks()
    assert there.files == list(drawn)
    for name, array in drawn.items():
        assert there[name].dtype == array.dtype
        assert (there[name] == array).all()


def test_a_table_of_dlrm_has_a_state_for_each_row_of_each_table():
    state = partita.compile(ZOO / "dlrm.par")
    table = next(record for record in state.program.parameters if record.name == "dlrm.table")
    assert [str(each.type) for each in table.states] == ["f32[tables=6, rows=40]"]


def test_pairs_are_those_that_are_drawn():
    assert [json.loads(line) for line in pairs.PATH.read_text().splitlines()] == pairs.pairs()
