"""`ignore` of `cross_entropy` and `accuracy`: the mean is over what counts of the whole batch, however it is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from partita.compiler.passes.build import build
from partita.compiler.text.graph import graph_text, parse_graph
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.dsl.spec import Spec
from partita.runtime.interpreter import named
from partita.runtime.interpreter.named import Named
from tests.reference.compare import computed, meant, wrong

FILE = """\
axis batch = 6, seq = 4, embed = 4, vocab = 6
model m(x: [batch, seq, embed], targets: i64[batch, seq], weights: [batch]) {{
  param w: [embed, vocab] ~ normal(1.0)
  let logits = dot(x, w, over = embed)
  let plain = cross_entropy(logits, targets, over = vocab, ignore = {0})
  let weighted = cross_entropy(logits, targets, over = vocab, weights = weights * weights, ignore = {0})
  let computed = cross_entropy(logits, where(x0(x) > 0, targets, {0}), over = vocab, ignore = {0})
  loss plain + 0.3 * weighted + 0.2 * computed
  metric none = cross_entropy(logits, targets * 0 + {0}, over = vocab, ignore = {0})
  metric perplexity = exp(plain)
  metric right = accuracy(logits, targets, over = vocab, ignore = {0})
  metric weighed = accuracy(logits, targets, over = vocab, weights = weights * weights)
  metric both = accuracy(logits, targets, over = vocab, weights = weights * weights, ignore = {0})
  metric none_right = accuracy(logits, targets * 0 + {0}, over = vocab, ignore = {0})
}}
block x0(x: [batch, seq, embed]) {{
  return sum(x, over = embed)
}}
mesh ranks(data = 3, tensor = 2)
layout cut on ranks {{
  shard batch -> data
  shard vocab -> tensor
}}
layout positions on ranks {{
  shard seq -> tensor
  shard embed, state -> data
}}
layout whole on ranks {{ }}
schedule s = gpipe(microbatches = 2)
train {{
  layout = cut
  data = arrays("data.npz", holdout = 40%)
  optimizer = sgd(lr = 0.1)
  steps = 2
  eval = every(1, batches = 2)
  precision = f64
}}
"""
LAYOUTS = [
    ("ranks.data=1", "ranks.tensor=1", "layout=whole", "s.microbatches=1"),
    ("ranks.data=1", "ranks.tensor=1", "layout=whole", "s.microbatches=6"),
    (),
    ("ranks.data=1", "s.microbatches=3"),
    ("layout=positions", "ranks.data=2", "ranks.tensor=4"),
]


def files(folder: Path, ignored: int, overrides: tuple[str, ...], targets: np.ndarray | None = None) -> Spec:
    generator = np.random.default_rng(3)
    if targets is None:
        # As many as differ most from row to row: of some rows all, of others none.
        targets = generator.integers(0, 6, (20, 4))
        targets[generator.random((20, 4)) < np.linspace(0, 1.2, 20)[::-1, None]] = ignored
    arrays = {"x": generator.standard_normal((20, 4, 4)), "weights": generator.standard_normal(20)}
    np.savez(folder / "data.npz", targets=targets, **arrays)
    (folder / "m.par").write_text(FILE.format(ignored))
    found, diagnostics = load(folder / "m.par", overrides)
    assert found is not None, [each.render() for each in diagnostics]
    return found


@pytest.mark.soak
@pytest.mark.parametrize(("ignored", "overrides"), [(2, ()), *((-1, layout) for layout in LAYOUTS)])
def test_the_mean_is_over_what_counts_of_the_whole_batch(tmp_path: Path, ignored: int, overrides: tuple[str, ...]):
    expected = meant(files(tmp_path, ignored, LAYOUTS[0]), tmp_path)
    assert "metric perplexity of the evaluation after 2" in expected
    assert expected["metric none of step 1"].value == expected["metric none_right of step 1"].value == 0
    found = computed(files(tmp_path, ignored, overrides), tmp_path)
    assert wrong(found, expected) == []


@pytest.mark.soak
def test_the_reference_agrees_with_torch() -> None:
    logits, targets = torch.randn(5, 7, dtype=torch.float64), torch.tensor([3, -1, 0, -1, 6])
    found = named.cross_entropy(
        Named(logits, ("a", "v")), Named(targets, ("a",)), [], {"over": "v", "weights": False, "ignore": -1}
    )
    torch.testing.assert_close(found.data, torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1))


def test_the_graph_reads_back(tmp_path: Path) -> None:
    model = files(tmp_path, -1, LAYOUTS[0]).model
    assert model is not None
    text = graph_text(build(model, "f32"), places=False)
    assert "limit vocab=6 ignored -1" in text
    assert graph_text(parse_graph(text), places=False) == text


def test_only_what_is_ignored_may_be_out_of_range(tmp_path: Path) -> None:
    targets = np.zeros((20, 4), np.int64)
    targets[3, 2] = -2
    spec = files(tmp_path, -1, LAYOUTS[0], targets)
    with pytest.raises(Refused) as caught:
        computed(spec, tmp_path)
    assert [each.code for each in caught.value.diagnostics] == ["E0605"]
