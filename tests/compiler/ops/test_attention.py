"""What attention costs, and what is said of what no fused kernel has."""

from __future__ import annotations

from attrs import evolve

from partita.compiler.ops.attend import Attend, AttendGradient
from partita.compiler.passes.resized import Resized
from partita.compiler.pipeline import compile_spec
from partita.dsl.types import Axis, Type
from tests.files import checked

SEQ, HEADS, KEY, VALUE = Axis("seq", 64), Axis("heads", 2), Axis("key", 4), Axis("value", 12)
Q, V = Type("f32", (SEQ, HEADS, KEY)), Type("f32", (SEQ, HEADS, VALUE))

FILE = """
axis batch = 4, seq = 8, heads = 2, key = 4
model m(x: [batch, seq, heads, key], doc: i64[batch, seq]) {
  param w: [heads, key] ~ ones()
  repeat 2 as layer {
    let x = attend(x * w, x, x, over = seq, along = key, segments = doc, MORE)
  }
  loss mean(x)
}
mesh one(data = 1) { device = DEVICE }
layout whole on one { shard batch -> data }
train { data = arrays("data.npz")  optimizer = sgd(lr = 0.1)  steps = 1 }
"""


def flops(op: Attend | AttendGradient, v: Type = Q) -> int:
    return op.flops((Q, Q, v), ())


def test_a_window_costs_the_pairs_that_it_leaves():
    whole = Attend("seq", "key", False, 1.0)
    pairs = sum(abs(i - j) < 5 for i in range(64) for j in range(64))
    # Positions count from the middle of each: the corners are left out by halves.
    assert abs(flops(evolve(whole, window=5)) * 64**2 / flops(whole) - pairs) <= 64
    causal = evolve(whole, causal=True)
    assert flops(causal) == flops(whole) // 2
    assert flops(evolve(causal, window=5)) == flops(evolve(whole, window=5)) // 2
    assert flops(evolve(causal, window=64)) == flops(evolve(causal, window=1000)) == flops(causal)


def test_values_of_another_size_cost_their_own():
    own = Attend("seq", "key", False, 1.0, values="value")
    assert flops(own, V) == 2 * 64 * 64 * 2 * (4 + 12)
    assert flops(AttendGradient("seq", "key", False, 1.0, values="value"), V) == 2 * 64 * 64 * 2 * (3 * 4 + 2 * 12)


def said(more: str, device: str = "cpu") -> list[str]:
    spec = checked(FILE.replace("MORE", more).replace("DEVICE", device), "m.par")
    return [each.message for each in compile_spec(spec).warnings if each.code == "W0303"]


def test_what_no_fused_kernel_has_is_said_once_for_each_place():
    assert said("causal = true, window = 3") == []
    assert said("causal = true, dropout = 0") == []
    (one,) = said("softcap = 3, dropout = 10%")
    assert one == "no fused kernel supports `softcap` and `dropout`: the scores of this attention are materialized"
    (gpu,) = said("softcap = 3", "h100")  # `segments` as well, of which a kernel is given a matrix
    assert gpu == "no fused kernel supports `softcap`: the scores of this attention are materialized"


def test_a_window_stays_a_part_of_its_axis():
    """In the small copies that `verify` runs a window must not become all of the axis."""
    assert Resized.window(4096, 8192, 6) == 3
    assert Resized.window(8191, 8192, 6) == 5
    assert Resized.window(8192, 8192, 6) == 8192
    assert Resized.window(2, 8192, 6) == 1
    assert Resized.window(3, 8, 1) == 1
