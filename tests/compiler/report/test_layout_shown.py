"""What people and programs see of a layout: `compile` and `explain` fit their console, and answer any name."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, note
from rich.console import Console

from partita.cli import compile as compile_command
from partita.cli import explain as explain_command
from partita.cli.main import main
from partita.cli.table import Column, Table
from partita.compiler.graph import without_iterations
from partita.compiler.pipeline import compile_spec
from partita.compiler.report.causes import communication
from partita.compiler.report.explain import explain
from partita.compiler.report.summary import summarize
from partita.compiler.state import Compilation
from tests.compiler.report.layout_files import network, transformer
from tests.files import ROOT, checked
from tests.marks import examples
from tests.programs import Program, sharded_programs

RULES = (
    "shard batch -> data",
    "shard heads, ffn, vocab -> tensor",
    "shard seq -> tensor",
    "shard state -> data",
    "stage layer -> pipe",
)


@pytest.fixture(scope="module")
def state() -> Compilation:
    return transformer("data = 2, pipe = 2, tensor = 2", *RULES)


def shown(show: Callable[[Console], None], width: int) -> list[str]:
    output = io.StringIO()
    show(Console(file=output, width=width, highlight=False))
    return output.getvalue().splitlines()


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [80, 110])
def test_what_is_printed_fits(state: Compilation, width: int) -> None:
    pages = [
        shown(lambda console: compile_command.show(state, summarize(state), console), width),
        shown(lambda console: explain_command.show(communication(state), console), width),
        *(
            shown(lambda console, each=each: explain_command.show_tensor(each, console), width)  # type: ignore[misc]
            for name in ("wq", "attention.h", "nll", "tokens", "wte", "d(q)")
            for each in explain(state, name)
        ),
    ]
    for page in pages:
        assert len(page) > 5
        for line in page:
            assert len(line) <= width
            assert line == line.rstrip()


@given(program=sharded_programs())
@examples(2, suppress_health_check=list(HealthCheck))
def test_any_program_can_be_explained(program: Program) -> None:
    """Every tensor by its full name: each is described, within the console, and as JSON."""
    note(program.text)
    spec = checked(program.text, "random.par")
    state = compile_spec(spec)
    shown(lambda console: explain_command.show(communication(state), console), 80)
    given = [each.value for each in (*state.step.parameters, *state.step.inputs)]
    made = [value for node in state.step.nodes for value in node.outputs]
    for name in dict.fromkeys(without_iterations(value.name) for value in (*given, *made)):
        found = explain(state, name)
        assert name in [each.name for each in found]
        json.dumps([each.as_json() for each in found])
        for line in shown(lambda console, found=found: explain_command.show_tensors(found, console), 80):  # type: ignore[misc]
            assert len(line) <= 80


def test_a_name_may_be_a_value_in_one_turn_and_a_replacement_in_another() -> None:
    """The first iteration's `x` has no gradient, so that its values are fewer and its replacements begin sooner."""
    text = """axis batch = 2, embed = 4
model m(x: [batch, embed], y: [batch, embed]) {
  repeat 2 as layer {
    param w: [embed] ~ ones()
    let x = rms_norm(x * w * x, over = embed)
  }
  loss mse(x, y)
}
mesh cluster(tensor = 2)
layout cut on cluster { shard embed -> tensor }
train { data = random() optimizer = sgd(lr = 0.05) steps = 2 }
"""
    spec = checked(text, "turns.par")
    both = explain(compile_spec(spec), "m.layer.multiply~4")
    assert [each.names for each in both] == [("m.layer.1.multiply~4",), ("m.layer.0.multiply~4",)]


def test_columns_that_do_not_fit_are_left_out(state: Compilation) -> None:
    def headings(width: int) -> list[str]:
        page = shown(lambda console: explain_command.show(communication(state), console), width)
        return next(line.split() for line in page if line.startswith("  phase"))

    assert headings(120) == ["phase", "collective", "over", "tensor", "change", "times", "each", "bytes", "time"]
    assert headings(80) == ["phase", "collective", "over", "tensor", "times", "bytes", "time"]


@pytest.mark.soak
def test_a_deep_model_prints_no_more_than_a_shallow_one(capsys: pytest.CaptureFixture[str]) -> None:
    """96 layers on 48 stages of 1,024 ranks: what is alike stands in one row."""
    path = str(ROOT / "bench" / "models" / "gpt_175b.par")
    assert main(["compile", path]) == 0
    summary = capsys.readouterr().out.splitlines()
    assert main(["explain", path]) == 0
    causes = capsys.readouterr().out.splitlines()
    assert len(summary) < 40
    assert len(causes) < 90
    assert any(line.startswith("1 to 46 ") and "layer.2 … layer.93" in line for line in summary)
    assert "each iteration of gpt.layer (0 to 95) sends from each rank" in causes


def test_compile_says_how_bytes_are_counted(state: Compilation) -> None:
    page = " ".join(shown(lambda console: compile_command.show(state, summarize(state), console), 110))
    assert "an all-reduce of K bytes over N ranks sends 2K(N−1)/N per rank" in page


def test_compile_names_what_a_rule_for_a_class_leaves_whole() -> None:
    """`data` splits what it can; `tensor` of 5 divides neither parameter. Both are flat, unless that is not enough."""
    rules = "shard batch -> data", "shard state -> tensor, data"
    state = network("data = 2, tensor = 5", *rules, optimizer="adafactor(lr = 0.1)")
    found = summarize(state).as_json()
    assert (found["flat"], found["undivided"]) == ({}, {"tensor": ["net.up", "net.down"]})
    page = " ".join(shown(lambda console: compile_command.show(state, summarize(state), console), 110))
    assert "replicated, not stored split over tensor: net.up, net.down; no axis divides evenly, and" in page
    state = network("data = 2, tensor = 5", *rules)
    found = summarize(state).as_json()
    assert (found["flat"], found["undivided"]) == ({"data, tensor": ["net.up", "net.down"]}, {})
    page = " ".join(shown(lambda console: compile_command.show(state, summarize(state), console), 110))
    assert "stored flat over data, tensor: net.up, net.down; no axis divides evenly" in page


def test_the_keys_of_json_are_stable(state: Compilation) -> None:
    found = summarize(state).as_json()
    keys = {"ranks", "stages", "parameters", "peak_memory", "collectives", "transfers", "seconds"}
    assert keys <= set(found)
    assert found["ranks"] == 8 == len(found["peak_memory"])
    for each in found["collectives"]:
        assert {"kind", "axis", "phase", "count", "bytes", "line"} <= set(each)
    assert json.loads(json.dumps(found)) == found
    assert {"shard", "cut", "assemble"} <= set(found["seconds"])


def test_both_commands_count_the_same(state: Compilation) -> None:
    """Their objects, for programs: by line in one, by kind, axis, phase and line in the other."""
    compiled = summarize(state).as_json()["collectives"]
    explained = [
        {"file": line["file"], "line": line["line"], **each}
        for line in communication(state).as_json()["lines"]
        for each in line["collectives"]
    ]

    def sums(rows: list[dict[str, object]]) -> dict[tuple[object, ...], list[float]]:
        found: dict[tuple[object, ...], list[float]] = {}
        for row in rows:
            key = tuple(row[name] for name in ("file", "line", "phase", "axis", "kind"))
            total = found.setdefault(key, [0.0, 0.0])
            for i, name in enumerate(("count", "bytes")):
                total[i] += float(str(row[name]))
        return found

    assert sums(compiled) == sums(explained)
    assert len(compiled) > 20


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["explain", str(ROOT / "specs" / "tiny.par"), *words])
    output = capsys.readouterr()
    return status, output.out + output.err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wqq", "`wqq` is not a tensor of this program; did you mean `wq`?"),
        ("layer.3.atention.wq", "did you mean `layer.attention.wq`?"),
        ("d(attention.qq)", "did you mean `d("),
        ("layer.99.attention.wq", "it has 4 iterations, the first is `tiny.layer.0.attention.wq`"),
        ("attention", "but is a part of the model: name a tensor in it, such as `attention.wq`"),
        ("layer.2", "but is a part of the model: name a tensor in it, such as `attention.wq`"),
        ("", "`` is not a tensor of this program"),
        (".", "`.` is not a tensor of this program"),
        ("d(", "`d(` is not a tensor of this program"),
        (")(", "`)(` is not a tensor of this program"),
        ("[bold]", "`[bold]` is not a tensor of this program"),
        ("\x1b[2J", "`\ufffd[2J` is not a tensor of this program"),
        ("x" * 5000, "is not a tensor of this program\n"),
    ],
)
def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str], name: str, expected: str) -> None:
    status, output = answer(capsys, name)
    assert status == 2
    assert expected in output


@pytest.mark.soak
def test_names_are_shown_instead_of_one_that_is_like_none(capsys: pytest.CaptureFixture[str]) -> None:
    _, output = answer(capsys, "nothing_like_it")
    names = re.findall("`(\\w+)`", output.splitlines()[1])
    assert len(names) == 4
    for name in names:
        assert answer(capsys, name)[0] == 0


def test_more_than_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "wq", "wk") == (2, "partita: one NAME at a time, not wq, wk\n")


def test_a_name_among_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    status, output = answer(capsys, "batch=16", "wq", "laptop.pipe=1")
    assert status == 0
    assert output.startswith("tiny.layer.attention.wq: f32[embed=128, heads=4, key=32], a parameter in 4 iterations\n")


def test_the_loss_and_metrics_by_their_names(state: Compilation) -> None:
    (found,) = explain(state, "loss")
    assert found.name == "gpt.cross_entropy"
    assert str(found.made) == "sum/data sum/tensor"


def test_one_rank_communicates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status, output = answer(capsys, "laptop.pipe=1")
    assert (status, output) == (0, "tiny: 1 rank, 8 microbatches\nno communication\n")


def test_a_table_wraps_its_last_column() -> None:
    columns = [Column("name"), Column("empty"), Column("because")]
    rows = [("wq", "", "the first rule splits it over tensor"), ("w", "", "short")]
    assert list(Table(columns, rows, 24).lines()) == [
        "wq    the first rule",
        "      splits it over",
        "      tensor",
        "w     short",
    ]
