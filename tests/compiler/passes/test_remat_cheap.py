"""What is made again rather than kept, and what is not."""

from __future__ import annotations

import pytest

from partita.compiler.graph import Phase
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from tests.files import checked

FILE = """
axis batch = 8, embed = 16, ffn = 32
block gated(x: [batch, embed]) {{
  param scale, shift: [embed] ~ ones()
  param up, gate: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  let h = layer_norm(x, over = embed, scale = scale, shift = shift)
  let product = dot(h, up, over = embed) * silu(dot(h, gate, over = embed))
  return x + dot(product, down, over = ffn)
}}
model net(x: [batch, embed]) {{
  repeat 2 as layer {{ let x = gated(x) }}
  loss mean(x * x)
}}
mesh m(data = 2)
layout split on m {{ shard batch -> data {rules} }}
train {{ model = net layout = split data = random() optimizer = sgd(lr = 0.1) steps = 1 }}
"""
CHAIN = """
axis batch = 4, embed = 8
model net(x: [batch, embed]) {
  param bias: [embed] ~ normal(0.1)
  let a = x + bias
  repeat 6 as turn { let a = a + x }
  loss mean(a * a)
}
train { model = net data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


def made_again(state: Compilation) -> list[str]:
    """Names of the values of the first iteration that the backward pass makes again."""
    nodes = state.joint.nodes
    assert all(node.phase is not Phase.FORWARD for node in nodes for v in node.outputs if v.name.endswith(".again"))
    return [v.name for node in nodes for v in node.outputs if v.name.endswith(".again")]


def test_scaled_norms_and_gated_products():
    """They are made of what is kept in any case, and do not stand in the frame."""
    state = compile_spec(checked(FILE.format(rules=""), "gated.par"))
    names = [name for name in made_again(state) if ".layer.0." in name]
    assert any(name.endswith(".h.again") for name in names), names
    assert any(name.endswith(".product.again") for name in names), names
    kept = state.program.stages[0].saved
    # By tensor: the norm, its rate (but for the first, as inputs have no gradient), two products and the silu of each
    # layer, and the result.
    rows = 4  # of a rank
    layer = rows * 16 + rows + 3 * rows * 32
    assert kept == 4 * (2 * layer - rows + rows * 16)


@pytest.mark.few(1)
@pytest.mark.parametrize("iterations", [6, 3000])
def test_chains_are_cut(iterations: int):
    """The end of a long chain does not bring all of it back."""
    state = compile_spec(checked(CHAIN.replace("repeat 6", f"repeat {iterations}"), "chain.par"))
    assert len(made_again(state)) <= 2
