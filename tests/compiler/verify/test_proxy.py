"""The shrunken copy of a file runs the same operations, in the same layouts, by the same kinds of instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, note

from partita.compiler.passes.place import pipeline_of
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.compiler.verify.proxy import MAX_RANKS, MAX_STAGES, proxy_of
from partita.compiler.verify.proxy_sizes import LEAST, PRODUCT, Search, axes_of
from partita.dsl import spec
from partita.dsl.load import load, load_text
from tests.files import SPECS
from tests.marks import examples
from tests.programs import Program, sharded_programs

LARGE = (SPECS / "gpt.par", "batch=1536", "embed=12_288", "heads=96", "key=128", "seq=2048")


def loaded(path: Path, *overrides: str) -> spec.Spec:
    found, diagnostics = load(path, overrides)
    assert found is not None, "\n\n".join(d.render() for d in diagnostics)
    return found


def structure(state: Compilation) -> set[tuple]:
    """Each operation with its phase and the layouts of its results, however many tensors travel together."""
    return {
        (type(node.op).__name__, node.phase, value.layout)
        for stage in state.partitioned.stages
        for node in stage.nodes
        for value in node.outputs
    }


def instructions(state: Compilation) -> set[str]:
    return {type(each).__name__ for rank in state.program.ranks for each in rank.instructions}


CASES = [
    (SPECS / "mlp.par",),
    (SPECS / "mlp.par", "pair.data=8"),
    (SPECS / "tiny.par",),
    (SPECS / "tiny.par", "laptop.pipe=4", "schedule=one_f_one_b"),
    (SPECS / "tiny.par", "schedule=looped_bfs"),
    (SPECS / "llama.par",),
    (SPECS / "llama.par", "layout=zero1"),
    (SPECS / "gpt.par",),
    (SPECS / "gpt.par", "cluster.tensor=4", "cluster.pipe=2", "schedule=gpipe"),
    (*LARGE, "cluster.data=8", "cluster.tensor=16", "fast.microbatches=192"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join([case[0].name, *case[1:3]]))
def test_structure_is_kept(case: tuple):
    whole = loaded(*case)
    small = proxy_of(whole)
    assert small.mesh.ranks <= MAX_RANKS
    before, after = compile_spec(whole), compile_spec(small)
    assert structure(before) == structure(after)
    assert instructions(before) == instructions(after)
    assert max(
        value.type.elements for stage in after.partitioned.stages for n in stage.nodes for value in n.outputs
    ) < (200_000)


def test_axes_differ_in_size():
    """So that two that are mixed up do not fit."""
    for case in CASES:
        small = proxy_of(loaded(*case))
        sizes = [axis.size for axis in small.axes.values()]
        assert len(set(sizes)) == len(sizes), small.axes


def test_mesh_axes_differ_in_size():
    small = proxy_of(loaded(SPECS / "gpt.par", "cluster.data=4", "cluster.tensor=4"))
    assert small.mesh.axes == (("data", 3), ("pipe", 3), ("tensor", 2))


WINDOWS = """axis batch = 12, length = 10, spots = 8, tap = 3, channels = 4
model m(x: [batch, length, channels]) {
  param w: [tap, channels] ~ normal(0.5)
  let y = dot(patches(x, length -> spots, size = tap), w, over = [tap, channels])
  loss mean(y * y)
}
mesh ranks(data = 4, context = 3)
layout cut on ranks { shard batch -> data  shard tap -> context }
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


def test_a_window_that_divides_by_no_smaller_mesh_keeps_the_files():
    whole, diagnostics = load_text(WINDOWS, "windows.par")
    assert whole is not None, "\n\n".join(d.render() for d in diagnostics)
    small = proxy_of(whole)
    assert small.mesh.axes == (("data", 4), ("context", 3))
    assert (small.axes["tap"].size, small.axes["batch"].size % 4) == (3, 0)


@pytest.mark.soak
def test_parameters_that_a_quarter_of_memory_cannot_hold_are_gathered_as_before():
    whole = loaded(SPECS / "llama.par")
    tight = {**whole.meshes}
    figures = {"flops": 1e12, "memory": 1 << 20, "bandwidth": 1e9}
    tight["cluster"] = evolve(whole.mesh, device=spec.Call("device", figures))
    whole = evolve(whole, meshes=tight)
    assert structure(compile_spec(whole)) == structure(compile_spec(proxy_of(whole, hoist=False)))
    assert structure(compile_spec(whole)) != structure(compile_spec(proxy_of(whole)))


@pytest.mark.soak
@given(program=sharded_programs())
@examples(5, suppress_health_check=list(HealthCheck))
def test_any_program_shrinks(program: Program):
    note(program.text)
    whole, diagnostics = load_text(program.text, "random.par")
    assert whole is not None, "\n\n".join(d.render() for d in diagnostics)
    small = proxy_of(whole)
    assert small.mesh.ranks <= max(MAX_RANKS, whole.mesh.ranks)
    chunks = int(small.schedule.call.arguments.get("chunks") or 1)
    assert pipeline_of(small.layout, small.mesh, chunks).stages <= MAX_STAGES
    compile_spec(small)
    # A second time, there is nothing left to gain but in what was divisible by more.
    compile_spec(proxy_of(small))


AXES = """axis batch = 64, heads = 8, key = 32, embed = heads * key, groups = 4, width = embed / groups
axis left = 100, right = 156, half = 128, twin = embed, unused = 7
model m(x: [batch, embed]) {
  param w: [embed] ~ ones()
  let y = merge(split(x * w, embed -> [heads, key]), [key, heads] -> embed)
  let z = merge(split(y, embed -> [groups, width]), [groups, width] -> twin)
  let parts = concat(slice(y, embed -> left, start = 0), slice(y, embed -> right, start = size(left)),
                     [left, right] -> embed)
  let end = slice(y, embed -> half, start = size(half))
  loss mean(z * z) + mean(parts) + mean(end)
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


def test_sizes_fit_the_relations_between_axes():
    whole, _ = load_text(AXES)
    small = proxy_of(whole)
    size = {name: axis.size for name, axis in small.axes.items()}
    assert size["embed"] == size["heads"] * size["key"] == size["groups"] * size["width"] == size["twin"]
    assert size["left"] + size["right"] == size["embed"]
    assert size["half"] <= size["embed"] < 64
    assert size["unused"] == 7
    compile_spec(small)
    axes = axes_of(whole.model)
    assert {relation.kind for relation in axes.relations} >= {PRODUCT, LEAST}
    # What cannot be met is said to be so, in reasonable time.
    assert Search(axes, {"embed": 3, "heads": 8, "key": 32}).run() is None


PLACED = """axis batch = 24, embed = 8
model m(x: [batch, embed]) {{
  let h = x
  repeat 12 as first {{ param w: [embed] ~ ones()  let h = tanh(h * w) }}
  repeat 9 as second {{ param w: [embed] ~ ones()  let h = tanh(h * w) }}
  loss mean(h * h)
}}
mesh line(pipe = 6)
layout cut on line {{
  {rules}
}}
schedule s = one_f_one_b(microbatches = 24)
train {{ data = random() optimizer = sgd(lr = 0.1) steps = 1 }}
"""


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ("place first -> pipe[0..1]  place second -> pipe[2..5]", [(0, 1), (1, 2)]),
        ("place first -> pipe[0..4]  place second -> pipe[5]", [(0, 2), (2, 2)]),
        ("place first -> pipe[0]  place second -> pipe[1..5]", [(0, 0), (0, 2)]),
        ("place first -> pipe[0..2]  place second -> pipe[2..5]", [(0, 1), (1, 2)]),
    ],
)
def test_ranges_of_stages_stay_ranges(rules: str, wanted: list[tuple[int, int]]):
    whole, diagnostics = load_text(PLACED.format(rules=rules))
    assert whole is not None, diagnostics
    proxy = proxy_of(whole)
    assert [(rule.first, rule.last) for rule in proxy.layout.rules] == wanted
    assert all(stage.functions for stage in compile_spec(proxy).program.stages)


@pytest.mark.parametrize(
    ("rules", "iterations"),
    [
        ("stage first, second -> pipe", 4),
        ("stage first, second -> pipe [6, 5, 2, 3, 4, 1]", 4),
        ("stage second -> pipe", 4),
        ("place first -> pipe[0..3]\n  place second -> pipe[4..5]", 6),
    ],
)
def test_every_stage_keeps_work(rules: str, iterations: int):
    whole, diagnostics = load_text(PLACED.format(rules=rules))
    assert whole is not None, diagnostics
    state = compile_spec(proxy_of(whole))
    assert state.program.schedule.ranks == 3
    assert all(stage.functions for stage in state.program.stages)
    staged = {node.scope for node in state.placed.nodes if "first" in node.scope or "second" in node.scope}
    assert len(staged) >= iterations
