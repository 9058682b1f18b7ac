"""A model with more rows: all that has the batch's axis has them, and what depends on their number is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
from attrs import evolve

from partita.compiler.ops.pointwise import Constant
from partita.compiler.passes.build import build
from partita.compiler.passes.larger_batch import with_larger_batch
from partita.compiler.passes.resized import Resized
from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Model
from tests.files import checked

TEXT = """axis batch = 4, embed = 3, half = HALF
block f(x: [batch, embed]) { return tanh(x) }
model m(x: [batch, embed]) {
  param w: [AXIS] ~ normal(1.0)
  let h = x
  repeat 2 as layer { let h = f(h) }
  loss mean(USE)
  output placed = h * cast(iota(batch), f32)
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


def model(axis: str = "embed", use: str = "h * w", half: str = "2") -> Model:
    found = checked(TEXT.replace("AXIS", axis).replace("USE", use).replace("HALF", half), "m.par").model
    assert found is not None
    return found


@pytest.mark.parametrize("outputs", [(), ("placed",)])
@pytest.mark.parametrize(("times", "rows"), [(1, 4), (2, 8), (Fraction(5, 4), 5)])
def test_all_that_has_the_axis_has_more_rows(times: int | Fraction, rows: int, outputs: tuple[str, ...]) -> None:
    graph = build(with_larger_batch(model(), "batch", times), "f32", outputs=outputs)
    types = [value.type for node in graph.nodes for value in (*node.inputs, *node.outputs)]
    assert {each.axis("batch").size for each in types if each.has("batch")} == {rows}


@pytest.mark.parametrize(
    ("axis", "use", "half"), [("batch", "h * w", "2"), ("half", "slice(h, batch -> half) * w", "batch / 2")]
)
def test_what_depends_on_their_number_is_refused(axis: str, use: str, half: str) -> None:
    given = model(axis, use, half)
    assert with_larger_batch(given, "batch", 1) is given
    with pytest.raises(Refused, match="depends on the number of rows of `batch`") as caught:
        with_larger_batch(given, "batch", 2)
    assert [each.code for each in caught.value.diagnostics] == ["E0407"]


def test_numbers_computed_from_sizes_follow_one_change_after_another() -> None:
    given = model(use="h * w * (size(embed) + 10 * size(batch))")
    smaller = evolve(given, body=Resized({"embed": 2}).body(given.body))
    nodes = build(with_larger_batch(smaller, "batch", 2), "f32").nodes
    assert 2 + 10 * 8 in [node.op.value for node in nodes if isinstance(node.op, Constant)]
