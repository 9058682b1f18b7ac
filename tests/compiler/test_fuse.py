"""Which layer norms have their three gradients made by one operation."""

from __future__ import annotations

import pytest

from partita.compiler.graph import Phase
from partita.compiler.ops.normalize import LayerNormGradient, NormalizeGradient
from partita.compiler.pipeline import compile_spec
from tests.files import checked

FILE = """
axis batch = 8, embed = 16, next = embed
model net(x: [batch, embed]) {{
  param w: [embed, next] ~ normal(0.1)
  param scale: [embed] ~ ones()
  param shift: [embed] ~ zeros()
  let h = rename(dot(x, w, over = embed), next -> embed)
  let y = {norm}
  loss mean(y * y{more})
}}
mesh m(data = 2)
layout split on m {{ {rule} }}
train {{ model = net layout = split data = random() optimizer = sgd(lr = 0.1) steps = 1 {precision} }}
"""
AFFINE = "layer_norm(h, over = embed, scale = scale, shift = shift)"


@pytest.mark.parametrize(
    ("norm", "more", "precision", "fused"),
    [
        (AFFINE, "", "", True),
        ("layer_norm(h, over = embed, scale = scale) + shift", "", "", True),
        ("rms_norm(h, over = embed, scale = scale) + shift", "", "", False),
        # The scale has a second gradient, which has nothing to do with the norm.
        (AFFINE, " + scale", "", True),
        # In every dtype, so that a copy in f64 has the structure of the whole.
        (AFFINE, "", "precision = bf16", True),
    ],
)
def test_a_scaled_and_shifted_norm_is_fused(norm: str, more: str, precision: str, fused: bool) -> None:
    text = FILE.format(norm=norm, more=more, precision=precision, rule="shard batch -> data")
    joint = compile_spec(checked(text, "fuse.par")).joint
    assert joint is not None
    ops = [node.op for node in joint.nodes]
    assert any(isinstance(op, LayerNormGradient) for op in ops) == fused
    assert any(isinstance(op, NormalizeGradient) for op in ops) != fused


def test_nothing_is_left_of_what_it_replaces() -> None:
    joint = compile_spec(
        checked(FILE.format(norm=AFFINE, more="", precision="", rule="shard batch -> data"), "fuse.par")
    ).joint
    assert joint is not None
    producers = joint.producers()
    (node,) = [node for node in joint.nodes if isinstance(node.op, LayerNormGradient)]
    assert node.phase is Phase.BACKWARD
    made = {gradient.parameter: gradient.value for gradient in joint.gradients}
    assert node.outputs[1:] == (made["net.scale"], made["net.shift"])
    read = {value for each in joint.nodes for value in each.inputs} | set(joint.outputs())
    assert all(value in read for value in producers)


def test_where_the_norm_is_split_it_is_its_parts_again() -> None:
    sharded = compile_spec(
        checked(FILE.format(norm=AFFINE, more="", precision="", rule="shard embed -> data"), "fuse.par")
    ).sharded
    assert sharded is not None
    assert not any(isinstance(node.op, LayerNormGradient) for node in sharded.graph.nodes)
