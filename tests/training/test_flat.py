"""Classes whose sizes do not divide are stored flat: evenly on all ranks, and with the numbers of what is whole."""

from __future__ import annotations

from collections import Counter
from math import lcm, prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from partita.compiler.verify.equivalence import validate
from partita.runtime.data.binding import open_data
from partita.runtime.rank import CompiledRun
from partita.runtime.training import VirtualRun
from tests.marks import examples, soak
from tests.runtime.checkpoint.runs import same, saved_every, tensors
from tests.runtime.checkpoint.runs import trained as saved_and_trained
from tests.runtime.checkpoint.test_reshard import held_once
from tests.training.test_partition import plan_of

FILE = """\
axis batch = ROWS, seq = 4, embed = EMBED, ffn = FFN, vocab = VOCAB

model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.2)
  let x = embedding(tokens, table, over = vocab)
  repeat 2 as layer {
    param up: [embed, ffn] ~ normal(0.3)
    param down: [ffn, embed] ~ normal(0.3)
    param bias: [embed] ~ zeros()
    let x = x + dot(gelu(dot(x, up, over = embed)), down, over = ffn) + bias
  }
  param tail: [] ~ ones()
  loss cross_entropy(dot(x * tail, table, over = embed), targets, over = vocab)
}
mesh ranks(MESH)
layout split on ranks {
  RULES
}
schedule s = one_f_one_b(microbatches = 2)
optimizer chosen { update matrices -> MATRICES update all -> OPTIMIZER }
train {
  optimizer = chosen
  data = random()
  precision = f32
  steps = 2
  EXTRA
  eval = every(1, batches = 1)
}
"""
ADAMW = "adamw(lr = 0.01, weight_decay = 0.1)"
ELEMENTWISE = (ADAMW, "lion(lr = 0.01)", "sgd(lr = 0.1, momentum = 0.9)", "sgd(lr = 0.1)")
USUAL = ("shard batch -> data, context", "shard ffn -> tensor")


def text_of(
    mesh: dict[str, int],
    rules: tuple[str, ...],
    sizes: tuple[int, int, int] = (5, 7, 11),
    optimizer: str = ADAMW,
    matrices: str = "",
    extra: str = "",
    rows: int | None = None,
) -> str:
    given = {
        "ROWS": rows or 2 * mesh["data"] * mesh["context"],
        **dict(zip(("EMBED", "FFN", "VOCAB"), sizes, strict=True)),
        "MESH": ", ".join(f"{name} = {size}" for name, size in mesh.items()),
        "RULES": "\n  ".join(rules),
        "MATRICES": matrices or optimizer,
        "OPTIMIZER": optimizer,
        "EXTRA": extra,
    }
    text = FILE
    for word, value in given.items():
        text = text.replace(word, str(value), 1)
    return text


def run_of(plan: CompiledRun, folder: Path) -> VirtualRun:
    """Two steps of a plan."""
    run = VirtualRun(plan)
    data = open_data(plan.program, plan.train, folder)
    for step in (1, 2):
        run.step(step, run.ranks[0].tensors(data.batch(step)), 0.01, 0.02)
    return run


def bytes_by_dtype(run: VirtualRun) -> dict[int, Counter[torch.dtype]]:
    """Of each rank, the bytes of what it keeps between steps and does not compute with, by dtype."""
    found = {}
    for rank in run.ranks:
        found[rank.rank] = Counter[torch.dtype]()
        for tensor in (*rank.memory.masters.values(), *rank.memory.states.values()):
            found[rank.rank][tensor.dtype] += tensor.nbytes
    return found


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    """Ranks of three axes, in some order."""
    sizes = {"data": draw(st.integers(2, 5)), "context": draw(st.integers(1, 3)), "tensor": draw(st.integers(1, 2))}
    return {name: sizes[name] for name in draw(st.permutations(list(sizes)))}


SIZES = st.tuples(st.integers(2, 9), st.integers(1, 5).map(lambda half: 2 * half), st.integers(3, 13))


@pytest.mark.soak
@given(
    mesh=meshes(),
    sizes=SIZES,
    kind=st.sampled_from(["state", "grad", "param"]),
    optimizer=st.sampled_from(ELEMENTWISE),
    over=st.sampled_from(["data", "data, context", "context, data"]),
)
@examples(3, suppress_health_check=list(HealthCheck))
def test_every_rank_keeps_as_much_as_any(mesh, sizes, kind, optimizer, over, tmp_path_factory) -> None:
    """And trains what one rank trains."""
    rules = (*USUAL, f"shard {kind} -> {over}")
    text = text_of(mesh, rules, sizes, optimizer, extra="clip = 0.5").replace("f32", "f64")
    note(text)
    plan = plan_of(text)
    validation = validate(plan.training)
    assert validation.passed, "\n\n".join(each.render() for each in validation.problems)
    run = run_of(plan, tmp_path_factory.getbasetemp())
    assert len({tuple(sorted(each.items(), key=str)) for each in bytes_by_dtype(run).values()}) == 1
    for record in plan.program.parameters:
        held = [rank.memory.masters[record.name].numel() for rank in run.ranks]
        copies = prod(mesh.values()) // prod(mesh[name] for name, _ in record.layout.states)
        padding = sum(held) // copies - record.type.elements
        assert 0 <= padding < len(run.ranks)
    ones = tuple(f"ranks.{name}=1" for name in mesh)
    whole = run_of(plan_of(text, ones), tmp_path_factory.getbasetemp())
    for name, expected in whole.parameters().items():
        torch.testing.assert_close(run.parameters()[name], expected, rtol=1e-6, atol=1e-6)


BITS = [("sgd(lr = 0.1, momentum = 0.9)", "ema = 0.9"), *soak(*((each, "") for each in ELEMENTWISE[1:]))]


@pytest.mark.soak
@pytest.mark.parametrize(("optimizer", "extra"), BITS)
def test_the_numbers_are_those_of_data_parallelism_to_the_last_bit(optimizer: str, extra: str, tmp_path: Path):
    """As where axes divide: a reduction adds the same numbers in the same order. (What a kernel rounds may depend on
    where an element lies, as in AdamW's.)
    """
    mesh = {"data": 3, "context": 1, "tensor": 2}
    for sizes in ((5, 14, 11), (6, 12, 18)):
        alone, stored = (
            run_of(plan_of(text_of(mesh, (*USUAL, *rules), sizes, optimizer, extra=extra)), tmp_path)
            for rules in ((), ("shard state -> data",))
        )
        flat = {record.layout.flat is not None for record in stored.plan.program.parameters if record.type.axes}
        assert flat == {sizes == (5, 14, 11)}
        same(tensors(stored), tensors(alone))
        same(stored.gradients(), alone.gradients())


@pytest.mark.soak
@pytest.mark.parametrize("matrices", ["muon(lr = 0.01)", "adafactor(lr = 0.01)"])
def test_what_needs_whole_tensors_gets_them(matrices: str, tmp_path: Path):
    """Matrices for Muon are gathered; what Adafactor updates stays whole."""
    mesh = {"data": 3, "context": 1, "tensor": 2}
    rules = (*USUAL, "shard state -> data")
    text = text_of(mesh, rules, (5, 14, 11), matrices=matrices).replace("f32", "f64")
    plan = plan_of(text)
    assert validate(plan.training).passed
    flat = {record.name for record in plan.program.parameters if record.layout.flat is not None}
    assert ("lm.layer.0.up" in flat) == matrices.startswith("muon")
    assert "lm.layer.0.bias" in flat
    run = run_of(plan, tmp_path)
    whole = run_of(plan_of(text, tuple(f"ranks.{name}=1" for name in mesh)), tmp_path)
    for name, expected in whole.parameters().items():
        torch.testing.assert_close(run.parameters()[name], expected, rtol=1e-6, atol=1e-6)


@given(
    before=meshes(), after=meshes(), kinds=st.tuples(*[st.sampled_from(["state", "grad", "param"])] * 2), sizes=SIZES
)
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
def test_checkpoints_know_nothing_of_flat_parts(before, after, kinds, sizes, tmp_path_factory) -> None:
    """From any number of ranks to any; files hold each element once, and no zeros behind them."""
    folder, runs = tmp_path_factory.mktemp("flat"), []
    rows = 2 * lcm(*(mesh["data"] * mesh["context"] for mesh in (before, after)))
    for mesh, kind in zip((before, after), kinds, strict=True):
        text = text_of(mesh, (*USUAL, f"shard {kind} -> data, context"), sizes, extra="ema = 0.9", rows=rows)
        note(text)
        runs.append(saved_and_trained(saved_every(plan_of(text), 2), folder).run)
    same(tensors(runs[1]), tensors(runs[0]))
    held_once(runs[0].plan, folder)
