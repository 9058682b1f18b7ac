"""Claims of `expect` blocks: every measure, what is said of those that fail, and the laws of what they count."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note
from hypothesis import strategies as st

from partita.cli.main import main
from partita.compiler.analysis.memory import HOST, PARTS, largest, memory_report, peak_memory
from partita.compiler.analysis.traffic import EACH_MICROBATCH
from partita.compiler.pipeline import compile_spec
from partita.compiler.report.claims import COMPARISONS, MEASURES, Outcome, failures, layers, outcomes
from partita.compiler.report.summary import summarize
from partita.compiler.state import Compilation
from partita.dsl.config import builtins
from partita.dsl.diagnostic import Refused
from partita.dsl.syntax.source import Source, Span
from partita.dsl.syntax.units import BYTES, PLAIN, RATIO, SECONDS, read, written
from tests.compiler.report.layout_files import GPT, NETWORK
from tests.files import SPECS, checked
from tests.marks import examples
from tests.programs import Program, sharded_programs

# For each measure a claim of specs/gpt.par that holds, and one that fails.
CLAIMS = {
    "peak_memory": ("peak_memory <= 40GiB", "peak_memory < 200MiB"),
    "bubble": ("bubble <= 10%", "bubble == 0%"),
    "step_time": ("step_time < 1s", "step_time <= 1us"),
    "tokens_per_second": ("tokens_per_second > 1_000", "tokens_per_second >= 1e12"),
    "mfu": ("mfu > 0%", "mfu >= 99%"),
    "exposed_communication": ("exposed_communication <= 90%", "exposed_communication <= 1 / 1_000 * 1%"),
    "bytes": ("bytes(pipe) > 1MiB", "bytes(tensor) <= 2 * 1KiB"),
    "collectives": ("collectives(tensor) <= 10", "collectives(tensor) <= 9"),
    "count": ("count(reduce_scatter, tensor) == 4", "count(all_gather, tensor) != 6"),
}


def transformer(claims: str) -> Compilation:
    """specs/gpt.par with other claims."""
    before, _ = GPT.split("expect {")
    return compile_spec(checked(f"{before}expect {{\n  {claims}\n}}\n", "gpt.par"))


@cache
def found() -> dict[str, Outcome]:
    """The outcomes of all claims above."""
    state = transformer("\n  ".join(claim for both in CLAIMS.values() for claim in both))
    return {each.text: each for each in outcomes(state, summarize(state))}


def test_every_measure_of_the_language_has_a_value() -> None:
    assert set(MEASURES) == set(builtins.MEASURES) == set(CLAIMS)


@pytest.mark.soak
@pytest.mark.parametrize("measure", CLAIMS)
def test_every_measure_holds_and_fails(measure: str) -> None:
    true, false = CLAIMS[measure]
    assert found()[true].holds
    assert not found()[true].notes
    assert not found()[false].holds
    (diagnostic,) = failures([found()[true], found()[false]])
    assert diagnostic.code == "E0705"
    assert diagnostic.span is not None
    assert diagnostic.span.text == false
    assert diagnostic.notes
    assert diagnostic.help


MESSAGES = {
    "collectives(tensor) <= 9": """\
error[E0705]: `collectives(tensor) <= 9` does not hold: it is 10
   --> gpt.par:84:3
    |
84  |   collectives(tensor) <= 9
    |   ^^^^^^^^^^^^^^^^^^^^^^^^
    = gpt.layer.0: 2 forward all_gather, 2 forward reduce_scatter, 2 backward all_gather, 2 weight all_gather, \
2 backward reduce_scatter
    = 5 by gpt.par:25, `return x + dot(gelu(dot(h, up, over = embed)), down, over = ffn)`
    = 2 by gpt.par:12, `let q = dot(h, wq, over = embed)`
    = 2 by gpt.par:16, `return x + dot(a, wo, over = [heads, key])`
    help: `partita explain` shows the tensors, and which rule of the layout causes them""",
    "bytes(tensor) <= 2 * 1KiB": """\
error[E0705]: `bytes(tensor) <= 2 * 1KiB` does not hold: it is 792MiB
   --> gpt.par:82:3
    |
82  |   bytes(tensor) <= 2 * 1KiB
    |   ^^^^^^^^^^^^^^^^^^^^^^^^^
    = rank 3 of the pipeline sends the most
    = 360MiB by gpt.par:25, `return x + dot(gelu(dot(h, up, over = embed)), down, over = ffn)`
    = 144MiB by gpt.par:12, `let q = dot(h, wq, over = embed)`
    = 144MiB by gpt.par:16, `return x + dot(a, wo, over = [heads, key])`
    help: `partita explain` shows the tensors, and which rule of the layout causes them""",
}


@pytest.mark.parametrize("claim", MESSAGES)
def test_a_claim_that_fails_says_what_contributes_most(claim: str) -> None:
    assert found()[claim].diagnostic("E0705").render() == MESSAGES[claim]


def test_of_memory_the_rank_its_parts_and_tensors_are_named() -> None:
    first, second = found()["peak_memory < 200MiB"].notes
    assert first.startswith("rank 3 of the pipeline, among the microbatches: activations ")
    assert all(part in first for part in PARTS)
    assert second.startswith("most of its activations: gpt.logits ")


def test_of_a_bubble_the_ranks_and_the_critical_path_are_named() -> None:
    first, second = found()["bubble == 0%"].notes
    assert first.startswith("rank 3 of the pipeline is busy the longest, ")
    assert "waits the longest" in first
    assert second.startswith("the critical path: ")
    assert "on rank 3" in second


@pytest.mark.soak
def test_a_value_near_its_limit_is_written_in_full() -> None:
    value = found()["bubble <= 10%"].value
    state = transformer(f"bubble <= {(value - 1e-9) * 100:.12f}%")
    (outcome,) = outcomes(state, summarize(state))
    assert not outcome.holds
    assert len(outcome.shown) > len("8.43%")


@pytest.mark.soak
@pytest.mark.parametrize("comparison", list(COMPARISONS))
def test_every_comparison_is_exact(comparison: str) -> None:
    """On a count of 10."""
    state = transformer(" ".join(f"collectives(tensor) {comparison} {limit}" for limit in (9, 10, 11)))
    expected = {
        "<=": [False, True, True],
        "<": [False, False, True],
        ">=": [True, True, False],
        ">": [True, False, False],
        "==": [False, True, False],
        "!=": [True, False, True],
    }
    assert [each.holds for each in outcomes(state, summarize(state))] == expected[comparison]


@pytest.mark.soak
def test_bytes_along_the_pipeline_are_those_of_its_messages() -> None:
    """The first rank holds three of twelve stages and a copy of the tied embedding."""
    activation = 64 // 16 // 2 * 1024 // 2 * 768 * 2
    tied = 50_304 // 2 * 768 * 4
    state = transformer("bytes(pipe) == 0B")
    (outcome,) = outcomes(state, summarize(state))
    # Each of its three stages sends 16 microbatches on, and all but the first one sends as many back.
    assert outcome.value == 16 * (3 + 2) * activation + tied // 2
    assert [note.split(" by ")[1] for note in outcome.notes[1:]] == [
        "gpt.layer.mlp.add",
        "d(gpt.layer.mlp.add)",
        "d(gpt.wte)",
    ]


def test_a_model_without_repeats_is_one_layer() -> None:
    text = NETWORK.replace("repeat 2 as layer {{", "").replace("over = hidden)\n  }}", "over = hidden)")
    text = text.format(mesh="tensor = 2", rules="shard hidden -> tensor", microbatches=2)
    text += "expect { collectives(tensor) == 1 count(all_reduce, tensor) == 1 }"
    state = compile_spec(checked(text, "net.par"))
    assert [each.value for each in outcomes(state, summarize(state))] == [1, 1]


@pytest.mark.parametrize(
    ("claim", "code"),
    [
        ("step_time <= 50", "E0307"),
        ("step_time <= 50%", "E0307"),
        ("tokens_per_second >= 1GB/s", "E0307"),
        ("exposed_communication <= 0.1", "E0307"),
        ("count(all_gather, all_gather) <= 1", "E0313"),
        ("count(gather, tensor) <= 1", "E0306"),
        ("count(all_gather) <= 1", "E0210"),
        ("bubble(pipe) <= 8%", "E0209"),
        ("bytes(way = tensor) <= 8B", "E0209"),
        ("collectives(tensors) <= 8", "E0313"),
    ],
)
def test_what_a_measure_does_not_take_is_refused(claim: str, code: str) -> None:
    with pytest.raises(Refused) as refused:
        transformer(claim)
    assert [each.code for each in refused.value.diagnostics] == [code]


# ---------------------------------------------------------------- laws


@given(program=sharded_programs())
@examples(4, suppress_health_check=list(HealthCheck))
def test_laws_of_memory_and_of_counts(program: Program) -> None:
    """Parts of memory add up, none is negative, and nothing in it is larger than it. Kinds of collectives add up in
    each layer, and all layers are no more than the program.
    """
    note(program.text)
    state = compile_spec(checked(program.text, "random.par"))
    for rank in state.program.ranks:
        bound = memory_report(state, rank)
        parts = {part: getattr(bound, part) for part in PARTS}
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == bound.total == peak_memory(state, rank)
        for part in ("parameters", "gradients", "state"):
            assert sum(largest(state, rank, part).values()) <= parts[part]
    summary = summarize(state)
    kinds = builtins.MEASURES["count"].takes[0].kind.choices  # type: ignore[union-attr]
    for axis in state.mesh.sharding:
        along = [each for each in summary.collectives if each.axis == axis]
        assert sum(map(len, layers(state, along).values())) <= sum(each.phase in EACH_MICROBATCH for each in along)
        counts = [MEASURES["count"].value(state, summary, kind, axis) for kind in kinds]
        every = MEASURES["collectives"].value(state, summary, axis)
        assert max(counts) <= every <= sum(counts)
        if len({tuple(sorted(each.kind for each in own)) for own in layers(state, along).values()}) == 1:
            assert every == sum(counts)


@given(value=st.floats(1e-9, 1e15), dimension=st.sampled_from([PLAIN, RATIO, BYTES, SECONDS]))
def test_what_is_written_is_read_back(value: float, dimension: str) -> None:
    quantity = read(written(value, dimension), Span(Source("", ""), 0, 0))
    assert quantity.dimension == dimension
    assert float(quantity.value) == pytest.approx(value, rel=0.006)


# ---------------------------------------------------------------- commands


def file_with(claims: str, folder: Path) -> str:
    path = folder / "net.par"
    text = NETWORK.format(mesh="data = 2, pipe = 2", rules="shard batch -> data stage layer -> pipe", microbatches=2)
    path.write_text(f"{text}\nexpect {{\n  {claims}\n}}\n", encoding="utf-8")
    return str(path)


TWO = "bubble <= 1%\n  peak_memory <= 1MiB\n  collectives(data) == 7"


def test_compile_fails_with_every_claim_that_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = file_with(TWO, tmp_path)
    assert main(["compile", file]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("error[E0705]") == 2
    rows = [line.split() for line in captured.out.splitlines()]
    assert ["collectives(data)", "==", "7", "fails", "0"] in rows
    assert any(row[:4] == ["peak_memory", "<=", "1MiB", "holds"] for row in rows)
    assert main(["compile", file, "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert [list(each) for each in out["expectations"]] == [
        ["measure", "argument", "comparison", "limit", "value", "holds"]
    ] * 3
    assert out["expectations"][2] == {
        "measure": "collectives",
        "argument": ["data"],
        "comparison": "==",
        "limit": 7.0,
        "value": 0,
        "holds": False,
    }
    assert [each["holds"] for each in out["expectations"]] == [False, True, False]


def test_compile_passes_where_claims_hold(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compile", file_with("peak_memory <= 1MiB", tmp_path)]) == 0
    assert not capsys.readouterr().err


def test_the_json_of_compile_has_the_prediction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = file_with("peak_memory <= 1MiB", tmp_path)
    assert main(["compile", file, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["rows_per_second"] == pytest.approx(8 / out["step_time"])
    assert 0 < out["mfu"] < 1
    assert 0 <= out["exposed_communication"] < 1
    assert list(out["memory"]) == [*PARTS, HOST]
    assert not any(out["memory"][HOST])
    device = [out["memory"][part] for part in PARTS]
    assert [sum(parts) for parts in zip(*device, strict=True)] == out["peak_memory"]
    assert main(["schedule", file, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["step_time"], again["makespan"]) == (out["step_time"], out["makespan"])


@pytest.mark.soak
def test_verify_reports_claims(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", file_with(TWO, tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("error[E0705]") == 2
    assert "bubble <= 1%, collectives(data) == 7" in captured.out
    assert main(["verify", file_with("peak_memory <= 1MiB", tmp_path)]) == 0
    assert "1 of `expect`" in capsys.readouterr().out


def test_a_run_warns_and_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = file_with(TWO, tmp_path)
    assert main(["run", file, "--transport", "virtual", "--run-dir", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("warning[W0701]") == 2


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gpt", "llama", "mlp", "tiny"])
def test_the_claims_of_the_files_that_users_start_from_hold(name: str) -> None:
    spec = checked((SPECS / f"{name}.par").read_text(encoding="utf-8"), f"{name}.par")
    state = compile_spec(spec)
    assert all(each.holds for each in outcomes(state, summarize(state)))
