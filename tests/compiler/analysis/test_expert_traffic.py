"""What experts send: tokens travel by one all-to-all there and one back, and experts stay where they are.

As in GShard, arXiv 2006.16668. Counts and bytes are those of one rank for one iteration of `layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from partita.compiler.pipeline import compile_spec
from partita.compiler.report.causes import Iteration, communication
from partita.compiler.state import Compilation
from partita.dsl.load import load

BATCH, SEQ, EMBED, FFN, EXPERTS, SLOTS, MICROBATCHES = 32, 16, 64, 256, 8, 6, 2
F32 = 4

FILE = """
axis batch = 32, seq = 16, embed = 64, ffn = 256, vocab = 32, experts = 8, chosen = 2, slots = 6
axis part = 2, own = seq / part

block moe(x: [batch, seq, embed]) {
  param gate: [embed, experts] ~ normal(0.5)
  param up, across: [experts, embed, ffn] ~ kaiming()
  param down: [experts, ffn, embed] ~ kaiming()
  let h = rms_norm(x, over = embed)
  let weight, id = top_k(softmax(dot(h, gate, over = embed), over = experts), experts -> chosen)
  PRODUCTS
}

model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.5)
  let x = embedding(tokens, table, over = vocab)
  repeat 4 as layer { let x = moe(x) }
  loss cross_entropy(dot(x, table, over = embed), targets, over = vocab)
}

mesh cluster(data = DATA, tensor = TENSOR)
layout split on cluster { RULES }
schedule plain = one_f_one_b(microbatches = 2)
train { data = random() optimizer = sgd(lr = 0.1) steps = 3 }
"""
SLOTTED = """let inside = dispatch(h, id, over = seq, into = [experts, slots])
  let u = silu(dot(inside, up, over = embed)) * dot(inside, across, over = embed)
  return x + combine(dot(u, down, over = ffn), id, weight, over = seq, from = [experts, slots])"""
PARTS = """let ids = split(id, seq -> [part, own])
  let inside = dispatch(split(h, seq -> [part, own]), ids, over = own, into = [experts, slots])
  let u = silu(dot(inside, up, over = embed)) * dot(inside, across, over = embed)
  let y = combine(dot(u, down, over = ffn), ids, split(weight, seq -> [part, own]), over = own, from = [experts, slots])
  return x + merge(y, [part, own] -> seq)"""
DROPLESS = """let u = silu(routed_dot(h, up, id, over = embed, along = experts))
  let v = u * routed_dot(h, across, id, over = embed, along = experts)
  return x + dot(routed_dot(v, down, id, over = ffn, along = experts), weight, over = chosen)"""


def compiled(
    folder: Path, products: str, data: int, tensor: int, *rules: str, overrides: Sequence[str] = ()
) -> Compilation:
    text = FILE.replace("PRODUCTS", products).replace("RULES", "  ".join(rules))
    path = folder / "experts.par"
    path.write_text(text.replace("DATA", str(data)).replace("TENSOR", str(tensor)))
    spec, diagnostics = load(path, overrides)
    assert spec is not None, diagnostics
    return compile_spec(spec)


def iteration_of(state: Compilation) -> Iteration:
    (iteration,) = communication(state).iterations
    return iteration


def activations(iteration: Iteration) -> list[tuple[str, str, str, int, float]]:
    return [(s.phase, s.kind, s.axis, s.count, s.bytes) for s in iteration.microbatch if s.of == "activations"]


def inside(data: int) -> int:
    """Bytes of one microbatch's [batch, experts, slots, embed] that a rank sends to others."""
    return BATCH // MICROBATCHES // data * EXPERTS * SLOTS * EMBED * F32 * (data - 1) // data


@pytest.mark.few(1)
@pytest.mark.parametrize("data", [2, 4])
def test_tokens_travel_by_two_exchanges_forward_and_two_backward(tmp_path: Path, data: int):
    iteration = iteration_of(compiled(tmp_path, SLOTTED, data, 1, "shard batch -> data", "shard experts -> data"))
    assert activations(iteration) == [
        ("forward", "all_to_all", "data", 2, 2 * inside(data)),
        ("backward", "all_to_all", "data", 2, 2 * inside(data)),
    ]
    # Of the parameters the gate alone, once a step: the experts' gradients are complete where they are.
    assert all(share.of != "parameters" for share in iteration.microbatch)
    sent = [(share.phase, share.kind, share.count) for share in iteration.step]
    assert sent == [("prologue", "all_gather", 1), ("reduce", "reduce_scatter", 1)]
    gate = EMBED * EXPERTS * F32 * (data - 1) // data
    assert [share.bytes for share in iteration.step] == [gate, gate]


def test_each_expert_may_be_split_as_well(tmp_path: Path):
    """What is partial then is added up after tokens are back, not in the slots."""
    rules = ("shard batch -> data", "shard experts -> data", "shard ffn -> tensor")
    iteration = iteration_of(compiled(tmp_path, SLOTTED, 2, 2, *rules))
    tokens = BATCH // MICROBATCHES // 2 * SEQ * EMBED * F32
    assert activations(iteration) == [
        ("forward", "all_to_all", "data", 2, 2 * inside(2)),
        ("forward", "all_reduce", "tensor", 1, tokens),
        ("backward", "all_to_all", "data", 2, 2 * inside(2)),
        ("backward", "all_reduce", "tensor", 1, tokens),
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("link", ["memory", "link(bandwidth = 100MB/s, latency = 1us)"])
def test_what_is_partial_in_slots_of_split_sequences_is_added_up_before_tokens_travel(tmp_path: Path, link: str):
    """Then a rank has slots of its own part alone: they travel as without tensor parallelism, however slow their link,
    and no ids do. What came is gathered over `tensor` and once more for the gradients of the experts, but does not
    travel again.
    """
    rules = ("shard batch -> data", "shard experts -> data", "shard ffn, part, seq -> tensor")
    links = f"cluster.link=[data -> {link}, tensor -> nvlink4]"
    state = compiled(tmp_path, PARTS, 4, 8, *rules, overrides=["part=8", "slots=1", links])
    own = BATCH // MICROBATCHES // 4 * EXPERTS * EMBED * F32  # bytes of the slots of one part
    assert activations(iteration_of(state)) == [
        ("forward", "all_to_all", "data", 2, 2 * own * 3 // 4),
        ("forward", "all_gather", "tensor", 1, 7 * own),
        ("forward", "reduce_scatter", "tensor", 1, 7 * own),
        ("backward", "all_to_all", "data", 2, 2 * own * 3 // 4),
        ("backward", "all_gather", "tensor", 2, 2 * 7 * own),
        ("backward", "reduce_scatter", "tensor", 1, 7 * own),
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_without_slots_the_products_of_each_expert_are_split(tmp_path: Path, ranks: int):
    """One sum of the tokens forward, as in a network without experts."""
    iteration = iteration_of(compiled(tmp_path, DROPLESS, 1, ranks, "shard ffn -> tensor"))
    tokens = 2 * BATCH // MICROBATCHES * SEQ * EMBED * F32 * (ranks - 1) // ranks
    forward, *_ = activations(iteration)
    assert forward == ("forward", "all_reduce", "tensor", 1, tokens)


def test_products_cost_what_their_rows_cost(tmp_path: Path):
    """Not what all experts would."""
    tokens, chosen = BATCH * SEQ, 2
    products = 3 * (3 * tokens * chosen * 2 * EMBED * FFN)  # forward, and twice as many backward
    rest = 3 * 2 * tokens * EMBED * EXPERTS + 3 * 2 * tokens * chosen * EMBED
    head = 3 * 2 * tokens * EMBED * 32
    state = compiled(tmp_path, DROPLESS, 1, 1, "shard batch -> data")
    assert state.flops == 4 * (products + rest) + head
