"""What torch compiles: segments that look at nothing but tensors, and the same numbers as without."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note
from torch._subclasses.fake_tensor import FakeTensor

from partita.runtime import kernels
from partita.runtime.kernels.compiling import is_tracing
from partita.runtime.kernels.positions import rope
from partita.runtime.rank import prepare
from partita.runtime.stages import load_source
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches, settled
from partita.runtime.verification.verify import verify
from tests.files import checked
from tests.marks import examples
from tests.programs import Program, sharded_programs

MODEL = """
axis batch = 4, seq = 8, embed = 16, heads = 2, key = embed / heads, ffn = 32, vocab = 32
block layer(x: [batch, seq, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ normal(0.2)
  param wo: [heads, key, embed] ~ normal(0.2)
  param up: [embed, ffn] ~ normal(0.2)
  param down: [ffn, embed] ~ normal(0.2)
  let h = rms_norm(x, over = embed)
  let q = rope(dot(h, wq, over = embed), over = seq, pairs = key)
  let k = rope(dot(h, wk, over = embed), over = seq, pairs = key)
  let a = attend(q, k, dot(h, wv, over = embed), over = seq, along = key, causal = true)
  let x = x + dropout(dot(a, wo, over = [heads, key]), rate = 0.1)
  return x + dot(gelu(dot(layer_norm(x, over = embed), up, over = embed)), down, over = ffn)
}
model gpt(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.2)
  let x = embedding(tokens, wte, over = vocab)
  repeat 2 as layer { let x = layer(x) }
  loss cross_entropy(dot(x, wte, over = embed), targets, over = vocab)
}
mesh m(pipe = 2, tensor = 2)
layout split on m { stage layer -> pipe  shard heads, ffn -> tensor }
schedule s = one_f_one_b(microbatches = 2)
train { model = gpt layout = split schedule = s data = random() optimizer = adamw(lr = 1e-2) steps = 2 }
"""


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch):
    """Segments as they stand: torch compiles nothing."""
    load_source.cache_clear()
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    yield
    load_source.cache_clear()


def trained(text: str, *overrides: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses, norms and final parameters of two steps."""
    plan = prepare(checked(text, "compiled.par", overrides))
    run = VirtualRun(plan)
    steps = [run.step(i + 1, batch, 1e-2) for i, batch in enumerate(batches(plan.program, 0)[:2])]
    return steps, run.parameters()


def totals(function: ast.FunctionDef) -> set[str]:
    """The arguments to which a segment may add: totals, which come last."""
    assert ast.unparse(function.decorator_list[0]) == "kernels.compiled"
    names = [each.arg for each in function.args.args]
    found = [name for name in names if name.startswith("total_")]
    assert names[len(names) - len(found) :] == found
    return set(found)


def changed(function: ast.FunctionDef) -> set[str]:
    """The names of what a function changes in place."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # `total.add_(x)`, `total[0].copy_(x)`, or `torch.maximum(total, x, out=total)`
            written = [each.value for each in node.keywords if each.arg == "out"]
            if re.search(r"[a-z0-9]_$", node.func.attr):
                written.append(node.func.value)
            found.update(re.match(r"\w*", ast.unparse(each))[0] for each in written if not isinstance(each, ast.BinOp))
    return found


@given(program=sharded_programs())
@examples(1, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@pytest.mark.timeout(1200)
def test_segments_are_pure_and_change_nothing(uncompiled: None, program: Program):
    """Where torch compiles nothing, a program in segments computes the same bits; a segment sees no moment."""
    note(program.text)
    spec = checked(program.text, "random.par")
    assume(settled(spec) is not None)
    segmented = prepare(checked(program.text, "random.par", ["train.compile=true"]))
    source = segmented.program.source
    note(source)
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and function.decorator_list:
            names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            assert "c" not in names, function.name
            assert not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(function))
            assert changed(function) <= totals(function), f"{function.name} changes other tensors in place"
    results = []
    for plan in (prepare(spec), segmented):
        run = VirtualRun(plan)
        batch = batches(plan.program, plan.train.seed)[0]
        results.append((run.step(1, batch, 1e-3), run.parameters()))
    (first, parameters), (second, others) = results
    assert first == second
    for name, value in parameters.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.soak
def test_compiled_as_without():
    """Over pipeline and tensor, with dropout, rope and both norms: the same training to rounding."""
    plain, compiled = (trained(MODEL, f"train.compile={flag}") for flag in ("false", "true"))
    assert "kernels.compiled" in prepare(checked(MODEL, "compiled.par", ["train.compile=true"])).program.source
    for one, other in zip(plain[0], compiled[0], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for name, value in plain[1].items():
        torch.testing.assert_close(value, compiled[1][name], rtol=1e-4, atol=1e-5)
    again = trained(MODEL, "train.compile=true")
    assert again[0] == compiled[0]
    assert all(torch.equal(value, again[1][name]) for name, value in compiled[1].items())


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_turned_back_in_a_segment_is_read_as_a_matrix(dtype: torch.dtype):
    """It lies in memory as its result's axes do, whoever traces it."""
    x, w = torch.randn(1, 2, 6, 18, dtype=dtype), torch.randn(36, 5, dtype=dtype)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernels.matmul(rope(x, 0, 100.0, True, (0, 2, 1, 3)).reshape(6, 36), w)

    torch.testing.assert_close(kernels.compiled(function)(x, w), function(x, w))


def test_a_segment_adds_to_totals_itself():
    """What is no product: gradients of scales and biases, losses and metrics, in the kernels that make them."""
    source = prepare(checked(MODEL, "compiled.par", ["train.compile=true"])).program.source
    inside = [each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef) and each.decorator_list]
    assert any(totals(each) for each in inside)
    for function in inside:
        assert totals(function) == changed(function)
    outside = "\n".join(ast.unparse(each) for each in ast.parse(source).body if each not in inside)
    assert not re.search(r"total_d_\w+\.add_\(|\ba\[\d+\]\.(add_|copy_)\(", outside)


def test_a_segment_is_called_as_it_is_traced(monkeypatch: pytest.MonkeyPatch):
    """What it keeps is made by a call that takes the same kernels, adds to no total, and has no memory."""
    inner = "torch._inductor.compile_fx.compile_fx_inner"
    monkeypatch.setattr(inner, lambda graph, given: lambda tensors: graph(*tensors))
    traced = []

    @kernels.compiled
    def segment(x: torch.Tensor, total: torch.Tensor) -> None:
        traced.append((is_tracing(), isinstance(x, FakeTensor)))
        total.add_(x.sum())

    x, total = torch.ones(3), torch.ones(())
    for count in (1, 2):
        assert segment(x, total) == ()
        assert total == 1 + 3 * count
    assert traced == [(True, True), (True, False)]
    assert not is_tracing()


@pytest.mark.soak
def test_a_compiled_file_verifies():
    """`verify` runs what torch compiles against one device that compiles nothing."""
    found = verify(checked(MODEL, "compiled.par", ["train.compile=true"]))
    assert found.passed
