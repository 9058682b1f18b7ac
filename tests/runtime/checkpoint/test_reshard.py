"""A checkpoint knows nothing of the layout that reads it: tensors are the same bits, training goes on the same."""

from __future__ import annotations

from math import lcm, prod
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from partita.dsl.load import load
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.loading import Commit, entries_of
from partita.runtime.rank import CompiledRun, prepare
from tests import programs
from tests.files import SPECS
from tests.marks import every, soak
from tests.runtime.checkpoint.runs import (
    ONE_RANK,
    TEXT,
    plan_of,
    same,
    saved_every,
    tensors,
    trained,
    without_checkpoints,
)


@st.composite
def meshes(draw: st.DrawFn, ranks: int):
    """Sizes of some mesh axes beside the pipeline's, for up to sixteen ranks."""
    mesh: dict[str, int] = {}
    for name in draw(st.permutations(["data", "tensor", "context"])):
        mesh[name] = draw(st.integers(1, min(3, 16 // (ranks * prod(mesh.values())))))
    return {name: size for name, size in mesh.items() if size > 1}


@st.composite
def pipelines(draw: st.DrawFn):
    """A random schedule on up to three ranks: as it is written, its ranks, stages and microbatches."""
    ranks, chunks, microbatches = (draw(st.integers(1, 3)) for _ in range(3))
    name = draw(st.sampled_from(["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs"]))
    if name in ("gpipe", "one_f_one_b"):
        return f"{name}(microbatches = {microbatches})", ranks, ranks, microbatches
    return f"{name}(microbatches = {microbatches}, chunks = {chunks})", ranks, ranks * chunks, microbatches


@st.composite
def relaid(draw: st.DrawFn):
    """A file with two meshes, layouts and schedules for one random model."""
    schedules = [draw(pipelines()) for _ in range(2)]
    model = draw(programs.models(max(stages for _, _, stages, _ in schedules)))
    text, parts = "", dict[str, int]()
    for i, (written, ranks, _, _) in enumerate(schedules):
        mesh = draw(meshes(ranks))
        rules = draw(programs.layouts(mesh, model)) if mesh else []
        for axis, count in programs.divisors(mesh, rules).items():
            parts[axis] = lcm(parts.get(axis, 1), count)
        declared = draw(st.permutations(list({**mesh, "pipe": ranks}.items())))
        text += f"mesh {'ab'[i]}({', '.join(f'{name} = {size}' for name, size in declared)})\n"
        text += "\n  ".join([f"layout {('cut', 'other')[i]} on {'ab'[i]} {{", *rules, "stage layer -> pipe"])
        text += f"\n}}\nschedule {'st'[i]} = {written}\n"
    sizes = programs.sizes_for(parts, lcm(*(microbatches for *_, microbatches in schedules)))
    return programs.axes(sizes) + model + text + draw(programs.endings())


def check(text: str, directory: Path) -> None:
    first, second = (saved_every(plan_of(*each, text=text), 2) for each in ((), ("layout=other", "schedule=t")))
    saved = trained(first, directory)
    loaded = trained(second, directory)
    assert loaded.found is not None
    assert loaded.found.step == 2
    assert loaded.steps == {}
    assert (saved.codes, loaded.codes) == ([], ["W0810"])
    same(tensors(loaded.run), tensors(saved.run))
    held_once(first, directory)


def held_once(plan: CompiledRun, directory: Path) -> None:
    """Replicas are saved once: together the files hold each element of each tensor once."""
    manifest = read_manifest(directory / "checkpoints", 2)
    elements = sum(prod(entry.shape) for rank in range(plan.ranks) for entry in entries_of(manifest, rank))
    assert elements == sum(tensor.type.elements for tensor in manifest.tensors)


@given(text=relaid())
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
def test_saved_in_one_layout_and_loaded_in_another(text: str, tmp_path_factory: pytest.TempPathFactory):
    note(text)
    check(text, tmp_path_factory.mktemp("relaid"))


@pytest.mark.soak
@given(text=relaid())
@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
def test_saved_in_one_layout_and_loaded_in_another_at_length(text: str, tmp_path_factory: pytest.TempPathFactory):
    note(text)
    check(text, tmp_path_factory.mktemp("relaid"))


@pytest.mark.parametrize("rule", ["embed -> tensor, data", *soak("ffn -> data, tensor", "param -> tensor, data")])
def test_an_axis_over_two_mesh_axes(rule: str, tmp_path: Path):
    text = TEXT + f"layout both on cluster {{ shard {rule}  stage layer -> pipe }}"
    saved = trained(plan_of("layout=both", "train.steps=2", text=text), tmp_path)
    assert any(len(layout.states) == 2 for layout in (r.layout for r in saved.run.plan.program.parameters))
    for overrides in (("layout=both",), ("layout=zero3",), ONE_RANK):
        loaded = trained(plan_of("train.steps=2", *overrides, text=text), tmp_path)
        same(tensors(loaded.run), tensors(saved.run))


@pytest.mark.soak
@pytest.mark.parametrize("rule", ["vocab -> pipe", "vocab -> pipe, tensor"])
def test_parts_of_a_vocabulary_are_split_further(rule: str, tmp_path: Path):
    """The pipeline's mesh axis is the outermost of a parameter in parts, whatever its place in the mesh."""
    text = TEXT.replace("vocab = 6", "vocab = 8")
    rules = f"shard batch -> data  shard {rule}  shard ffn -> tensor  shard state -> data  stage layer -> pipe"
    text += f"layout parts on cluster {{ {rules} }}"
    saved = trained(plan_of("layout=parts", "train.steps=2", text=text), tmp_path)
    for overrides in (("layout=parts",), ("layout=zero3",), ONE_RANK):
        loaded = trained(plan_of("train.steps=2", *overrides, text=text), tmp_path)
        same(tensors(loaded.run), tensors(saved.run))


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_any_region_of_any_tensor_can_be_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.getbasetemp() / "regions"
    if not directory.exists():
        directory.mkdir()
        trained(plan_of("train.steps=2"), directory)
    manifest = read_manifest(directory / "checkpoints", 2)
    tensor = data.draw(st.sampled_from(manifest.tensors))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in tensor.type.shape]
    region = tuple(slice(start, stop) for start, stop in bounds)
    with Commit(directory / "checkpoints", manifest) as commit:
        assert commit.read(tensor.name, region).equal(commit.read(tensor.name)[region])


def test_files_are_of_about_one_size(tmp_path: Path):
    """Ranks that hold the same take turns in saving it."""
    trained(plan_of("layout=plain", "train.steps=2", "embed=64", "key=32"), tmp_path)
    sizes = [file.size for file in read_manifest(tmp_path / "checkpoints", 2).files]
    assert max(sizes) < 1.5 * min(sizes)


# ---------------------------------------------------------------- llama.par

SMALL = ("batch=32", "seq=8", "embed=32", "key=8", "ffn=64", "vocab=64")
MESHES = {
    1: ({},),
    2: ({"data": 2}, {"pipe": 2}, {"tensor": 2}),
    4: ({"data": 2, "pipe": 2}, {"pipe": 2, "tensor": 2}, {"data": 4}, {"data": 2, "tensor": 2}),
    8: ({"data": 2, "pipe": 2, "tensor": 2}, {"data": 8}, {"data": 2, "tensor": 4}),
}
CASES = [
    (layout, {**{"data": 1, "pipe": 1, "tensor": 1}, **mesh})
    for layout in ("everything", "zero1")
    for ranks in MESHES
    for mesh in MESHES[ranks]
]


def llama(layout: str, mesh: dict[str, int], sizes: tuple[str, ...], *overrides: str) -> CompiledRun:
    counts = {1: "[6]", 2: "[3, 3]"}[mesh["pipe"]]
    text = (SPECS / "llama.par").read_text().replace("pipe [3, 3]", f"pipe {counts}")
    axes = [f"cluster.{axis}={size}" for axis, size in mesh.items()]
    return plan_of(*axes, f"layout={layout}", *sizes, *overrides, text=text)


@pytest.fixture(scope="module")
def saved_llama(tmp_path_factory: pytest.TempPathFactory):
    """A checkpoint of step 3 under 2 × 2 × 2, and what the undisturbed run does in steps 4 to 6."""
    directory = tmp_path_factory.mktemp("llama")
    plan = llama("everything", {"data": 2, "pipe": 2, "tensor": 2}, SMALL, "train.steps=6")
    short = evolve(plan, spec=evolve(plan.spec, train=evolve(plan.train, steps=3)))
    return directory, trained(saved_every(short, 3), directory), trained(plan, directory)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "mesh"),
    every(18, CASES),
    ids=lambda each: str(each).replace(" ", ""),
)
def test_llama_resumes_on_any_mesh_in_any_layout(layout: str, mesh: dict[str, int], saved_llama, tmp_path: Path):
    directory, saved, undisturbed = saved_llama
    (tmp_path / "checkpoints").mkdir()
    (directory / "checkpoints" / "step-00000003").rename(tmp_path / "checkpoints" / "step-00000003")
    try:
        plan = llama(layout, mesh, SMALL, "train.steps=3")
        same(tensors(trained(saved_every(plan, 10), tmp_path).run), tensors(saved.run))
        resumed = trained(saved_every(llama(layout, mesh, SMALL, "train.steps=6"), 10, keep=2), tmp_path)
    finally:
        (tmp_path / "checkpoints" / "step-00000003").rename(directory / "checkpoints" / "step-00000003")
    assert resumed.found is not None
    assert list(resumed.steps) == [4, 5, 6]
    for step in (4, 5, 6):
        assert resumed.steps[step] == pytest.approx(undisturbed.steps[step], rel=1e-5, abs=1e-5)


def test_all_layouts_of_llama_are_tried():
    spec, _ = load(SPECS / "llama.par")
    assert spec is not None
    declared = {line.split()[1] for line in spec.source.text.splitlines() if line.startswith("layout ")}
    assert {layout for layout, _ in CASES} == declared


@pytest.mark.soak
def test_a_whole_file_runs_without_its_checkpoints():
    """`checkpoint` is a matter of the run alone: the compiler does not see it."""
    spec, _ = load(SPECS / "llama.par", ["train.checkpoint=every(2)"])
    assert spec is not None
    plan = prepare(spec)
    assert plan.training.warnings == ()
    assert without_checkpoints(plan).program is plan.program
