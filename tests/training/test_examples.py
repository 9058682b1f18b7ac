"""The files that users start from: all check, and compile up to what is not supported yet."""

from __future__ import annotations

import ast
import json
import re

import pytest

from partita.compiler.pipeline import compile_spec
from partita.compiler.report.summary import summarize
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from tests.commands import here
from tests.files import ROOT, SPECS, checked

FILES = sorted(path.name for path in SPECS.glob("*.par"))


@pytest.mark.parametrize("name", FILES)
def test_checks(name: str):
    spec, diagnostics = load(SPECS / name)
    assert spec is not None, "\n\n".join(d.render() for d in diagnostics)


def without_shard(name: str) -> str:
    return re.sub(r"(?m)^\s*shard .*$", "", (SPECS / name).read_text())


@pytest.mark.soak
def test_gpt_without_its_shard_rules():
    """4 ranks × 3 chunks of one layer each, and the tied embedding on the first and last stage."""
    spec = checked(without_shard("gpt.par"), "gpt.par", ["cluster.data=1", "cluster.tensor=1"])
    state = compile_spec(spec)
    summary = summarize(state)
    assert (summary.ranks, len(summary.stages)) == (4, 12)
    assert [stage.rank for stage in summary.stages] == [0, 1, 2, 3] * 3
    assert [stage.chunk for stage in summary.stages] == [0] * 4 + [1] * 4 + [2] * 4
    assert [stage.iterations for stage in summary.stages] == [(f"layer.{i}",) for i in range(12)]
    assert [stage.tied for stage in summary.stages] == [("gpt.wte",), *[()] * 10, ("gpt.wte",)]
    assert summary.parameters == 124_391_424  # GPT-2 small with this vocabulary, without biases
    # One activation forward and one cotangent back for each of the eleven boundaries.
    assert len(summary.transfers) == 22
    assert not state.warnings


def test_a_mesh_axis_that_no_rule_uses_is_an_error():
    with pytest.raises(Refused) as refused:
        checked(without_shard("gpt.par"), "gpt.par")
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E0402"
    assert "`data` of 2, `tensor` of 2" in diagnostic.message


@pytest.mark.soak
@pytest.mark.parametrize(
    "form", ["sharded", "graph", "joint", "microbatch", "python", "partitioned", "schedule", "streams"]
)
def test_every_form_is_emitted(form: str):
    whole = here("compile", str(SPECS / "tiny.par"), "--emit", form, cwd=ROOT)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout
    if form not in ("schedule", "streams"):
        part = here("compile", str(SPECS / "tiny.par"), "--emit", form, "--stage", "1", cwd=ROOT)
        assert part.returncode == 0, part.stderr
        assert 0 < len(part.stdout) < len(whole.stdout)
    if form == "python":
        compile(whole.stdout, "emitted", "exec")
        assert "tiny.par:" in whole.stdout


@pytest.mark.soak
def test_a_stages_source_has_all_that_it_calls():
    """Also what those call, which torch compiles."""
    command = ("compile", str(SPECS / "tiny.par"), "train.compile=true", "--emit", "python")
    whole, part = (
        {node.name: node for node in ast.parse(here(*each, cwd=ROOT).stdout).body if isinstance(node, ast.FunctionDef)}
        for each in (command, (*command, "--stage", "0"))
    )
    assert 0 < len(part) < len(whole)
    assert any(node.decorator_list for node in part.values())
    for name, node in part.items():
        assert ast.dump(node) == ast.dump(whole[name])
        assert {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & whole.keys() <= part.keys()


@pytest.mark.parametrize(
    "wrong", [("--stage", "0"), ("--emit", "schedule", "--stage", "0"), ("--emit", "graph", "--json")]
)
def test_what_says_nothing_together_is_status_2(wrong: tuple[str, ...]):
    done = here("compile", str(SPECS / "tiny.par"), *wrong, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("partita: --")


def test_compile_json_has_the_stable_keys():
    done = here("compile", str(SPECS / "tiny.par"), "--json", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    keys = {"ranks", "stages", "parameters", "peak_memory", "collectives", "transfers", "seconds"}
    assert keys <= found.keys()
    assert len(found["peak_memory"]) == found["ranks"] == 2
    assert "settle" in found["seconds"]
    assert "assemble" in found["seconds"]


def test_schedule_json_has_the_stable_keys():
    done = here("schedule", str(SPECS / "tiny.par"), "--json", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"bubble", "makespan", "peak_live", "actions"} <= found.keys()
    assert len(found["actions"]) == len(found["peak_live"]) == 2
