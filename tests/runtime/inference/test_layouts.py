"""In the file's own layout a model writes what it writes on one device, and computes the same outputs."""

from __future__ import annotations

from random import Random

import pytest
import torch
from attrs import evolve

from partita.compiler.ops.decoding import UpdateCache
from partita.compiler.passes.decode import STATE
from partita.compiler.pipeline import compile_outputs
from partita.compiler.verify.proxy import single
from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Spec
from partita.runtime import outputs
from partita.runtime.inference.choice import Choice
from partita.runtime.inference.ranks import LocalRanks
from partita.runtime.inference.sampling import Writer, writer_of
from partita.runtime.outputs import Outputs
from partita.runtime.regions import in_slabs, whole_region
from partita.runtime.transports.virtual import VirtualCluster
from tests.files import checked
from tests.marks import soak
from tests.runtime.inference.models import ZOO, drawn, logits_of
from tests.zoo.layouts import MISFITS, WHOLE_BATCH, draw

GREEDY = Choice(temperature=0)
TOLERANCE = 1e-4

TEXT = """
axis batch = 8, seq = 8, past = seq, embed = 8, heads = 2, key = 4, vocab = 12
block mixer(x: [batch, seq, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ normal(0.5)
  param wo: [heads, key, embed] ~ normal(0.5)
  let k = rename(dot(x, wk, over = embed), seq -> past)
  let v = rename(dot(x, wv, over = embed), seq -> past)
  let s = dot(dot(x, wq, over = embed), k, over = key)
  let a = dot(softmax(where(expand(iota(seq), past) >= iota(past), s, -1e9), over = past), v, over = past)
  return x + 0.1 * cumsum(shift(x, over = seq), over = seq) + dot(a, wo, over = [heads, key])
}
block causal(x: [batch, seq, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ normal(0.5)
  param wo: [heads, key, embed] ~ normal(0.5)
  let a = attend(dot(x, wq, over = embed), dot(x, wk, over = embed), dot(x, wv, over = embed),
                 over = seq, along = key, causal = true)
  return x + 0.1 * cumsum(shift(x, over = seq), over = seq) + dot(a, wo, over = [heads, key])
}
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(1.0)
  param places: [seq, embed] ~ normal(1.0)
  let x = embedding(tokens, table, over = vocab) + places
  repeat 4 as layer { let x = BLOCK(x) }
  let logits = dot(rms_norm(x, over = embed), table, over = embed)
  loss cross_entropy(logits, targets, over = vocab)
  output logits = logits
  output firsts = cast(tokens, f32) * 0.5
  output least = tokens < 3
}
mesh cluster(data = 2, pipe = 2, tensor = 2)
layout own on cluster {
  shard batch -> data
  shard RULES -> tensor
  shard param -> data
  stage layer -> pipe
}
schedule turns = interleaved_1f1b(microbatches = 4, chunks = 2)
train { data = random() optimizer = sgd(lr = 0.02) steps = 1 }
"""


def model(block: str = "causal", rules: str = "heads, vocab, seq") -> Spec:
    return checked(TEXT.replace("BLOCK", block).replace("RULES", rules), "m.par")


def in_layout(given: Spec, kept: bool = True, seed: int = 0) -> Writer:
    """What writes with the ranks of the file's mesh, strictly."""
    assert given.mesh is not None
    ranks = given.mesh.ranks
    return writer_of(given, here=LocalRanks(range(ranks), VirtualCluster(ranks, True, seed)), cached=kept)


def same(given: Spec, kept: bool = True, lengths: tuple[int, ...] = (5, 6, 3), seed: int = 0) -> Writer:
    """Check that a file writes in its layout what it writes on one device; returns what writes there."""
    one, several = writer_of(given, cached=kept), in_layout(given, kept, seed)
    weights = drawn(one)
    one.ranks.set_parameters(weights)
    several.ranks.set_parameters(weights)
    ids = torch.randint(0, one.model.vocab.size, (one.model.window,), generator=torch.Generator().manual_seed(seed))
    for length in lengths:
        expected = logits_of(one, ids[:length].tolist())
        found = logits_of(several, ids[:length].tolist())
        assert float((found - expected).abs().max()) < TOLERANCE * float(expected.abs().max())
    prompt = ids[:3].tolist()
    assert list(several.written(prompt, 10, GREEDY)) == list(one.written(prompt, 10, GREEDY))
    return several


def test_a_model_writes_in_its_own_layout() -> None:
    """Sequence, tensor and data parallel, with parameters split, on stages of two chunks; longer than the window."""
    writer = same(model())
    assert writer.scoring.anew is None
    whole = sum(tensor.numel() for tensor in drawn(writer_of(model())).values())
    for rank in writer.ranks.ranks:
        own = [tensor.numel() for name, tensor in rank.memory.masters.items() if not name.startswith(STATE)]
        assert sum(own) < whole / 3, "parameters stay split"
        assert not rank.memory.states, "there is no state of an optimizer"


def test_what_does_not_divide_writes_in_its_own_layout() -> None:
    """Of a sequence in parts only the table of places has padding: where it is stored."""
    uneven = TEXT.replace("BLOCK", "causal").replace("RULES -> tensor", "heads, vocab, seq -> tensor padded")
    writer = same(checked(uneven.replace("seq = 8", "seq = 9"), "m.par"))
    assert writer.scoring.anew is None
    masters = writer.ranks.ranks[0].memory.masters
    assert masters["m.places"].shape[0] == 5
    assert masters[f"{STATE}m.layer.0.causal.dot~2"].shape[1] == 9


def test_one_rank_chooses_from_whole_sums() -> None:
    """Logits are sums over two ranks, both of which then have them."""
    same(model("causal", "embed"), lengths=(5,))


def test_what_takes_the_whole_window_writes_in_its_own_layout() -> None:
    """Positions and what they look at are split over the ranks."""
    assert same(model("mixer", "past, seq, vocab"), lengths=(2, 5, 8)).scoring.anew is not None


def test_states_are_where_they_are_written() -> None:
    """Keys are split by heads, as they are computed, and have all positions."""
    given = model("causal", "seq, past, key, vocab")
    state = compile_outputs(given, ("logits",), ("seq", 1))
    kept = [node for node in state.sharded.graph.nodes if isinstance(node.op, UpdateCache)]
    layouts = {each.name: each.value.layout for each in state.sharded.graph.parameters}
    assert len(kept) == 2 * 4
    for node in kept:
        assert node.inputs[0].name in layouts, "it is written where it is stored"
        assert node.inputs[0].layout == layouts[node.inputs[0].name]
        assert not node.inputs[0].layout.over("seq")
    # A parameter lies as in training.
    assert layouts["m.places"].over("seq") == ("tensor",)


@pytest.mark.parametrize("rules", ["past, vocab, seq", "embed"])
def test_outputs_are_whole_on_the_first_rank(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split, or partial sums; and handed over in many blocks."""
    monkeypatch.setattr(outputs, "MAX_AT_ONCE", 120)
    given = model("mixer", rules)
    one = Outputs(given)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(type.shape, generator=generator) for name, type in one.parameters.items()}
    several = Outputs(given, here=LocalRanks(range(8), VirtualCluster(8)))
    inputs = {"tokens": torch.randint(0, 12, (8, 8), generator=generator)}
    for each in (one, several):
        each.set_parameters(weights)
    expected, found = one(inputs), several(inputs)
    assert found.keys() == expected.keys() == {"logits", "firsts", "least"}
    for name, whole in expected.items():
        assert found[name].dtype == whole.dtype
        assert found[name].shape == whole.shape
        assert float((found[name].double() - whole.double()).abs().max()) <= TOLERANCE * float(
            whole.double().abs().max()
        )


@pytest.mark.parametrize("most", [1, 5, 6, 7, 100])
def test_blocks_cover_a_tensor_once(most: int) -> None:
    covered = torch.zeros(3, 2, 5)
    for _, block in in_slabs(whole_region((3, 2, 5)), most):
        covered[block] += 1
        assert covered[block].numel() <= most
    assert bool((covered == 1).all())
    assert list(in_slabs((), most)) == [((), ())]


def test_rows_are_as_few_as_the_layout_allows() -> None:
    """One for each rank over which they are split; all of them where sizes depend on their number."""
    writer = in_layout(model())
    tokens = {each.name: each.type for each in writer.scoring.programs[0].inputs}["tokens"]
    assert tokens.axis("batch").size == 2
    assert writer_of(single(model())).scoring.programs[0].inputs[0].type.axis("batch").size == 1


DECODERS = ("tiny", "gemma2", "gla", "gpt2", "llama3", "lstm", "mamba2", "mixtral", "deepseek_v3", "qwen3_moe", "lora")


@pytest.mark.parametrize("file", soak(*DECODERS))
@pytest.mark.parametrize("kept", [True, False])
def test_any_layout_of_a_shipped_model_writes_the_same(file: str, kept: bool) -> None:
    """However it is laid out."""
    path = ZOO / f"{file}.par"
    path = path if path.exists() else ZOO.parent / f"{file}.par"
    done = 0
    for seed in range(60):
        layout = draw(Random(f"writes {file} {seed}"), path)
        try:
            given = layout.spec()
            same(evolve(given, train=evolve(given.trained[1], precision="f32")), kept, seed=seed)
            done += 1
        except Exception as error:
            if isinstance(error, Refused) and {each.code for each in error.diagnostics} <= MISFITS | WHOLE_BATCH:
                continue
            error.add_note(str(layout))
            raise
    assert done >= 10
