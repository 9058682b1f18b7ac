"""Axes that do not divide, by rule padded or repeated over ranks: the numbers of one rank, and nothing of it stored."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, note
from hypothesis import strategies as st

from partita.cli.main import main
from partita.compiler.passes.padded import padded_sizes
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Refused
from partita.runtime.data.binding import open_data
from partita.runtime.rank import CompiledRun
from partita.runtime.training import VirtualRun
from tests.marks import examples, soak
from tests.runtime.checkpoint.runs import saved_every, tensors
from tests.runtime.checkpoint.runs import trained as saved_and_trained
from tests.runtime.checkpoint.test_reshard import held_once
from tests.training.test_partition import plan_of

FILE = """\
axis batch = ROWS, seq = SEQ, vocab = VOCAB
axis embed = EMBED, groups = GROUPS, heads = HEADS, key = 4, ffn = FFN, experts = EXPERTS, chosen = 1

block attention(x: [batch, seq, embed]) {
  param wq: [embed, groups, heads, key] ~ normal(0.3)
  param wk, wv: [embed, groups, key] ~ normal(0.3)
  param wo: [groups, heads, key, embed] ~ normal(0.3)
  let h = layer_norm(x, over = embed)
  let q = rope(rms_norm(dot(h, wq, over = embed), over = key), over = seq, pairs = key)
  let k = rope(dot(h, wk, over = embed), over = seq, pairs = key)
  let a = attend(q, k, dot(h, wv, over = embed), over = seq, along = key, causal = true)
  return x + dropout(dot(a, wo, over = [groups, heads, key]), 0.1)
}

block mixture(x: [batch, seq, embed]) {
  param gate: [experts, embed] ~ normal(0.3)
  param up: [experts, embed, ffn] ~ normal(0.3)
  param bias: [experts, ffn] ~ normal(0.3)
  param down: [ffn, embed] ~ normal(0.3)
  let share = softmax(dot(x, gate, over = embed), over = experts)
  let hidden = dot(rms_norm(x, over = embed), up, over = embed) + bias
  let mixed = dot(dot(share, silu(hidden), over = experts), down, over = ffn)
  return x + mixed / (1 + mean(exp(share), over = experts))
}

model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.3)
  buffer seen: [vocab] ~ zeros()
  let x = embedding(tokens, table, over = vocab)
  repeat 2 as layer { let x = mixture(attention(x)) }
  let logits = dot(x, table, over = embed)
  update seen = seen + sum(stop_gradient(logits), over = [batch, seq])
  loss cross_entropy(logits, targets, over = vocab, ignore = 0)
  metric accuracy = accuracy(logits, targets, over = vocab)
  metric highest = max(logits, over = [batch, seq, vocab])
}
mesh ranks(MESH)
layout split on ranks {
  RULES
}
schedule s = one_f_one_b(microbatches = PARTS)
optimizer chosen { update matrices -> OPTIMIZER update all -> adamw(lr = 0.01) }
train {
  data = random()
  optimizer = chosen
  precision = f64
  clip = 0.5
  steps = 2
  eval = every(1, batches = 2)
}
"""
ADAMW = "adamw(lr = 0.01, weight_decay = 0.1)"
WHOLE = ["adafactor(lr = 0.01)", "muon(lr = 0.01)", "lion(lr = 0.01)", "sgd(lr = 0.1, momentum = 0.9)", ADAMW]
SIZES = {"ROWS": 5, "SEQ": 6, "VOCAB": 13, "EMBED": 6, "GROUPS": 2, "HEADS": 3, "FFN": 7, "EXPERTS": 3}
AXES = ("seq", "vocab", "embed", "groups", "heads", "ffn", "experts", "key")


def text_of(mesh: dict[str, int], rules: tuple[str, ...], parts: int = 2, optimizer: str = ADAMW, **sizes: int) -> str:
    given = {
        **{name: str(sizes.get(name, size)) for name, size in SIZES.items()},
        "MESH": ", ".join(f"{name} = {size}" for name, size in mesh.items()),
        "RULES": "\n  ".join(rules),
        "PARTS": str(parts),
        "OPTIMIZER": optimizer,
    }
    text = FILE
    for word, value in given.items():
        text = text.replace(f" {word}" if word in SIZES else word, f" {value}" if word in SIZES else value, 1)
    return text


def run_of(plan: CompiledRun, folder: Path) -> tuple[VirtualRun, list[object]]:
    """Two steps and an evaluation of a plan, with what they report."""
    run, found = VirtualRun(plan), list[object]()
    data = open_data(plan.program, plan.train, folder)
    for step in (1, 2):
        found += run.step(step, run.ranks[0].tensors(data.batch(step)), 0.01, 0.02)
        found += run.metrics().values()
    loss, metrics, _ = run.evaluate(*(run.ranks[0].tensors(data.holdout_batch(i)) for i in range(2)))
    return run, [*found, loss, *metrics.values()]


def agrees(text: str, folder: Path) -> VirtualRun:
    """A file's ranks train what one rank trains, by a program that is valid."""
    plan = plan_of(text)
    for state, of in ((plan.training, None), (plan.evaluation, plan.training)):
        assert state is not None
        validation = validate(state, training=of)
        assert validation.passed, "\n\n".join(each.render() for each in validation.problems)
    run, found = run_of(plan, folder)
    alone = plan_of(text.replace("layout split", "layout other", 1) + ONE, ("layout=alone", "s.microbatches=1"))
    whole, expected = run_of(alone, folder)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-9)
    for name, tensor in whole.parameters().items():
        assert run.parameters()[name].shape == tensor.shape
        torch.testing.assert_close(run.parameters()[name], tensor, rtol=1e-8, atol=1e-8)
    return run


ONE = "mesh one(data = 1)\nlayout alone on one { shard batch -> data }\n"


@given(
    mesh=st.fixed_dictionaries({"data": st.integers(1, 3), "tensor": st.integers(2, 4)}),
    parts=st.integers(1, 3),
    sizes=st.fixed_dictionaries({name: st.integers(1, 9) for name in SIZES}),
    over=st.lists(st.sampled_from(AXES), min_size=1, max_size=4, unique=True),
    stored=st.sampled_from([(), ("shard state -> data",), ("shard param -> data, tensor",)]),
)
@examples(8, suppress_health_check=list(HealthCheck))
def test_padded_axes_train_what_one_rank_trains(mesh, parts, sizes, over, stored, tmp_path_factory) -> None:
    rules = ("shard batch -> data padded", f"shard {', '.join(over)} -> tensor padded", *stored)
    text = text_of(mesh, rules, parts, **sizes)
    note(text)
    agrees(text, tmp_path_factory.getbasetemp())


@given(
    mesh=st.fixed_dictionaries({"data": st.integers(1, 2), "tensor": st.sampled_from([4, 6, 8])}),
    groups=st.integers(2, 4),
    heads=st.integers(1, 4),
)
@examples(4, suppress_health_check=list(HealthCheck))
def test_repeated_axes_train_what_one_rank_trains(mesh, groups, heads, tmp_path_factory) -> None:
    kind = "repeated" if mesh["tensor"] % groups == 0 or groups == 4 else "padded"
    rules = (
        "shard batch -> data padded",
        f"shard groups -> tensor {kind}",
        "shard heads, ffn, vocab -> tensor padded",
        "shard state -> data, tensor",
    )
    text = text_of(mesh, rules, GROUPS=groups, HEADS=heads)
    note(text)
    agrees(text, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("optimizer", [*WHOLE[:2], *soak(*WHOLE[2:])])
def test_any_optimizer_updates_what_is_padded(optimizer: str, tmp_path: Path):
    """By means and matrices of what there is."""
    rules = ("shard batch -> data padded", "shard heads, ffn, vocab, experts -> tensor padded", "shard state -> data")
    agrees(text_of({"data": 2, "tensor": 2}, rules, optimizer=optimizer), tmp_path)


def test_a_transformer_has_hardly_a_mask():
    """Products with zeros are zeros: heads and hidden units are not masked at all, and classes once; gradients are of
    what reads real numbers at padded heads.
    """
    text = text_of({"data": 1, "tensor": 2}, ("shard heads, ffn, vocab -> tensor padded",), parts=1)
    nodes = plan_of(text.replace("experts = 3", "experts = 2")).training.joint.nodes
    masked = Counter(value.tensor for node in nodes for value in node.outputs if value.tensor.endswith(".masked"))
    read = ("lm.logits", *(f"lm.layer.{i}.attention.wo" for i in range(2)))
    assert masked == {f"{name}.masked": 1 for name in read}


def test_checkpoints_have_no_padding(tmp_path: Path):
    """They are read on any ranks."""
    rules = ("shard batch -> data padded", "shard heads, ffn, vocab -> tensor padded", "shard param -> data")
    texts = (
        text_of({"data": 2, "tensor": 4}, rules),
        text_of({"data": 3, "tensor": 1}, rules),
        text_of({"data": 1, "tensor": 3}, rules),
    )
    runs = [saved_and_trained(saved_every(plan_of(text), 2), tmp_path).run for text in texts]
    for run in runs[1:]:
        found, expected = tensors(run), tensors(runs[0])
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    held_once(runs[0].plan, tmp_path)


def test_what_is_padded_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With what it costs; what is stored in parts has its own size in all that is reported."""
    file = tmp_path / "uneven.par"
    file.write_text(
        text_of({"data": 2, "tensor": 2}, ("shard batch -> data padded", "shard heads, vocab -> tensor padded"))
    )
    assert main(["compile", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "padded: batch from 5 to 8, vocab from 13 to 14, heads from 3 to 4; products take" in shown
    plan = plan_of(file.read_text())
    assert padded_sizes(plan.training.joint) == {"batch": 8, "vocab": 14, "heads": 4}
    assert {str(record.type) for record in plan.program.parameters} >= {"f64[vocab=13, embed=6]"}


@pytest.mark.parametrize(
    ("rules", "code", "message"),
    [
        ("shard state -> data padded", "E0419", "`padded` says how an axis is split"),
        ("shard seq -> data padded by zigzag", "E0419", "positions in zigzag order cannot be padded"),
        ("shard heads -> tensor repeated", "E0411", "axis `heads` of 3 has no part that `tensor` of 4 could repeat"),
        ("shard heads -> tensor", "E0411", "axis `heads` of 3 does not divide over `tensor` of 4"),
        ("shard batch -> data", "E0406", "axis `batch` of 5 does not divide into 2 microbatches"),
    ],
)
def test_what_cannot_be_uneven_is_refused(rules: str, code: str, message: str):
    mesh = {"data": 2, "tensor": 4}
    other = "shard ffn -> tensor padded" if "tensor" not in rules else "shard batch -> data padded"
    with pytest.raises(Refused) as refused:
        plan_of(text_of(mesh, (rules, other)))
    assert any(each.code == code and each.message.startswith(message) for each in refused.value.diagnostics)


@pytest.mark.parametrize(
    ("optimizer", "rules", "message"),
    [
        (
            "adamw_8bit(lr = 0.01, block_size = 16)",
            ("shard ffn -> tensor padded",),
            "`ffn` cannot be padded: `adamw_8bit`",
        ),
        (
            "adamw(lr = 0.01, sparse = true)",
            ("shard vocab -> tensor padded",),
            "`batch` cannot be padded: `adamw` updates",
        ),
    ],
)
def test_updates_that_would_see_padding_are_refused(optimizer: str, rules: tuple[str, ...], message: str):
    text = text_of(
        {"data": 2, "tensor": 2}, ("shard batch -> data padded", *rules), optimizer=optimizer, EMBED=80, FFN=63
    )
    text = text.replace("dot(x, table, over = embed)", "dot(x, other, over = embed)")
    text = text.replace("  buffer seen", "  param other: [vocab, embed] ~ normal(0.3)\n  buffer seen")
    with pytest.raises(Refused) as refused:
        plan_of(text)
    found = [(each.code, each.message) for each in refused.value.diagnostics]
    assert len(found) == 1, found
    assert found[0][0] == "E0419"
    assert found[0][1].startswith(message)


def test_repeats_are_mesh_axes_of_their_own():
    """Ranks keep their numbers; whatever is split over the mesh axis is split over both."""
    rules = ("shard batch -> data padded", "shard groups -> tensor repeated", "shard ffn -> tensor padded")
    plan = plan_of(text_of({"data": 1, "tensor": 4}, rules))
    assert plan.program.mesh.axes == (("data", 1), ("tensor", 2), ("tensor_repeats", 2))
    split = {record.name: dict(record.layout.states) for record in plan.program.parameters}
    assert split["lm.layer.0.attention.wk"] == {"tensor": "groups"}
    assert split["lm.layer.0.mixture.bias"] == {"tensor": "ffn", "tensor_repeats": "ffn"}
    assert prod(size for _, size in plan.program.mesh.axes) == 4
