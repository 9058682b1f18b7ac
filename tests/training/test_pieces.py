"""`overlap tensor in 4`: collectives in pieces change no number, and hide behind the products beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.compiler.analysis.memory import peak_memory
from partita.compiler.analysis.time import predict
from partita.compiler.pipeline import compile_spec
from partita.dsl.load import load_text
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.verify import verify
from tests.commands import computed, here, partita
from tests.compiler.analysis.test_memory import peak_of
from tests.compiler.test_text import check_every_pass
from tests.files import ROOT, SPECS
from tests.marks import examples

FILE = ROOT / "tests" / "planted" / "files" / "pieces.par"
TEXT = FILE.read_text()
OVERLAP = "overlap tensor in 3"


def spec_of(*overrides: str, text: str = TEXT) -> Any:
    given, diagnostics = load_text(text, "lm.par", overrides)
    assert given is not None, [each.render() for each in diagnostics]
    return given


def holds(spec: Any) -> None:
    found = verify(spec)
    assert found.passed, [each.render() for each in (*found.diagnostics, *([found.reason] if found.reason else []))]


# ---------------------------------------------------------------- the numbers


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """A file in which pieces may divide the rows of a microbatch, positions, or nothing."""
    tensor, pipe = draw(st.sampled_from([2, 3])), draw(st.sampled_from([1, 2]))
    microbatches, rows = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    layout = draw(st.sampled_from(["places", "sums_"]))
    text = TEXT.replace(OVERLAP, f"overlap tensor in {draw(st.integers(2, 5))}")
    text = text.replace("heads = 4", "heads = 6").replace("vocab = 16", "vocab = 24")
    schedule = draw(st.sampled_from(["one", "apart_"]))
    return text, (
        f"ranks.tensor={tensor}",
        f"ranks.pipe={pipe}",
        f"layout={layout}",
        f"schedule={schedule}",
        f"schedule.microbatches={microbatches}",
        f"batch={microbatches * rows}",
        f"seq={tensor * draw(st.integers(1, 6))}",
    )


@given(case=cases())
@examples(2, suppress_health_check=list(HealthCheck))
def test_the_numbers_are_those_of_one_device(case: tuple[str, tuple[str, ...]]):
    """To 1e-10, in float64: losses, gradients, parameters after updates; and the program is proven equivalent."""
    holds(spec_of(*case[1], text=case[0]))


@pytest.mark.soak
@given(case=cases())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_numbers_are_those_of_one_device_however_it_is_cut(case: tuple[str, tuple[str, ...]]):
    holds(spec_of(*case[1], text=case[0]))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_models_of_the_field_are_verified(name: str):
    text = (SPECS / f"{name}.par").read_text()
    holds(spec_of(text=text.replace("shard seq -> tensor", "shard seq -> tensor\n  overlap tensor in 4")))


@pytest.mark.few(1)
@pytest.mark.parametrize("overrides", [(), ("layout=rows_", "schedule=apart_"), ("layout=sums_",)])
def test_what_the_passes_make_reads_back_as_the_same(overrides: tuple[str, ...]):
    check_every_pass(spec_of(*overrides))


@pytest.mark.soak
def test_processes_train_as_the_virtual_cluster_does_to_the_last_bit(tmp_path: Path):
    """Over Gloo, where pieces really are under way together; and as without pieces, up to rounding."""
    (tmp_path / "lm.par").write_text(TEXT)
    (tmp_path / "whole.par").write_text(TEXT.replace(OVERLAP, ""))
    runs = {"gloo": (partita, "lm.par"), "virtual": (here, "lm.par"), "whole": (here, "whole.par")}
    for name, (command, file) in runs.items():
        transport = "gloo" if name == "gloo" else "virtual"
        done = command("run", file, f"--run-dir={name}", "--transport", transport, "ranks.pipe=1", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    gloo, virtual, whole = (computed(tmp_path / name) for name in runs)
    assert gloo == virtual
    assert len(gloo) >= 2
    for a, b in zip(gloo, whole, strict=True):
        assert dict(a) == pytest.approx(dict(b), rel=1e-10)


# ---------------------------------------------------------------- memory and time


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["places", "rows_"])
def test_the_bound_of_memory_holds(layout: str):
    sizes = ("batch=4", "seq=64", "embed=64", "ffn=256", "key=16", "vocab=128", "train.precision=f32")
    spec = spec_of(*sizes, f"layout={layout}", "ranks.pipe=1", "schedule.microbatches=2")
    plan = prepare(spec)
    runs = []

    def run() -> None:
        runs.append(VirtualRun(plan, strict=False))
        batch = {each.name: torch.zeros(each.type.shape, dtype=torch.int64) for each in plan.program.inputs}
        for step in (1, 2):
            runs[0].step(step, batch, 0.1)

    peak = peak_of(run)
    bound = len(runs[0].ranks) * peak_memory(plan.training, plan.training.plan.ranks[0])
    assert 0.7 * bound <= peak <= bound, (bound, peak)


def test_all_pieces_under_way_are_held():
    """What pieces of a sum send and receive is together what the whole does; but its part is made piece by piece."""
    wide = """
        axis batch = 8, embed = 32, ffn = 64
        model m(x: [batch, embed]) {
          param up: [embed, ffn] ~ ones()
          param down: [ffn, embed] ~ ones()
          loss mean(tanh(dot(dot(x, up, over = embed), down, over = ffn)))
        }
        mesh ranks(tensor = 2)
        layout cut on ranks { shard ffn -> tensor shard batch -> tensor overlap tensor in PIECES }
        train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
    """
    found = [compile_spec(spec_of(text=wide.replace("PIECES", str(pieces)))) for pieces in (1, 4)]
    whole, pieces = (state.plan.stages[0].peaks["F"] for state in found)
    part = 4 * 4 * 32  # of the sum, which one rank makes
    assert pieces == whole - part + part // 4


DEVICE = "ranks(pipe = 1, tensor = 2) { device = device(flops = 1TFLOP/s, memory = 1GiB, bandwidth = 10TB/s) LINK }"


def exposed(pieces: int, gigabytes: float) -> float:
    """Seconds that a step of a larger model waits for its link, where pieces cost nothing else."""
    link = f"link = [tensor -> link(bandwidth = {gigabytes}GB/s, latency = 0ns)]"
    text = TEXT.replace("ranks(pipe = 2, tensor = 2)", DEVICE.replace("LINK", link))
    text = text.replace(OVERLAP, f"overlap tensor in {pieces}")
    sizes = ("batch=1", "seq=2048", "embed=1024", "ffn=4096", "heads=8", "key=128", "vocab=1024")
    spec = spec_of(*sizes, "schedule.microbatches=1", "train.precision=f32", text=text)
    return predict(compile_spec(spec)).exposed


@pytest.mark.soak
def test_the_more_pieces_the_less_is_exposed():
    """With a link that is faster than the products: of each collective, little more than a piece."""
    whole, two, four, eight = (exposed(pieces, 2.0) for pieces in (1, 2, 4, 8))
    assert two < 0.75 * whole
    assert four < 0.75 * two
    assert eight < four


def test_over_a_slow_link_no_more_hides_than_products_take():
    whole, eight = exposed(1, 0.01), exposed(8, 0.01)
    assert 0.5 * whole < eight < whole


# ---------------------------------------------------------------- what a file may say


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("overlap tensor in 0", "E0310"),
        ("overlap tensor in 2.5", "E0310"),
        ("overlap context in 2", "E0313"),
        ("overlap tensor in 2 overlap tensor in 3", "E0420"),
        ("overlap tensor, tensor in 2", "E0420"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rule: str, code: str):
    given, diagnostics = load_text(TEXT.replace(OVERLAP, rule), "lm.par")
    assert given is None
    assert [each.code for each in diagnostics if each.code.startswith("E")] == [code]


@pytest.mark.parametrize("rule", ["overlap pipe in 2", "overlap tensor in 7"])
def test_a_rule_that_cuts_nothing_gives_a_warning(rule: str):
    """Nothing is sent along the pipeline beside a product; and seven rows are not there."""
    changed = TEXT.replace(OVERLAP, rule)
    small = ("batch=1", "seq=2", "schedule.microbatches=1")
    state = compile_spec(spec_of(*small, text=changed))
    assert "W0301" in {each.code for each in state.warnings}
