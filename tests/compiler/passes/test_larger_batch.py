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


def test_what_depends_on_their_number_is_refused() -> None:
    given = model("batch")
    assert with_larger_batch(given, "batch", 1) is given
    with pytest.raises(Refused, match="parameter `w` depends on the number of rows of `batch`") as caught:
        with_larger_batch(given, "batch", 2)
    assert [each.code for each in caught.value.diagnostics] == ["E0407"]


MADE = """axis batch = 8, two = 2, rows = two * batch, others = batch, three = 3, thrice = 24, embed = 4, one = 1
axis more = batch + 1, view = 2, half = batch / view, group = 4, groups = batch / group, quarter = 2
block f(x: [batch, embed]) { return tanh(x) }
model m(x: [batch, embed], y: [batch, two, embed] MORE) {
  param w: [embed] ~ normal(1.0)
  let h = x * w
  STATEMENTS
  loss mean(h) + mean(y) + mean(r)
}
"""
# What is made of the batch, and the sizes that follow with half and with twice as many rows.
FOLLOWING = {
    "merged and split again": (
        "let r = split(f(merge(y, [batch, two] -> rows), batch -> rows), rows -> [batch, two])",
        {"rows": 2},
    ),
    "merged behind another": ("let r = split(merge(y, [two, batch] -> rows), rows -> [two, batch])", {"rows": 2}),
    "renamed": ("let r = dot(h, rename(h, batch -> others), over = embed)", {"others": 1}),
    "joined and taken apart": (
        """let c = concat(h, gather(y, 0, along = two), [batch, batch] -> rows)
           let r = slice(c, rows -> batch, start = size(batch)) - slice(c, rows -> batch)""",
        {"rows": 2},
    ),
    "joined and split": ("let r = split(concat(h, h, [batch, batch] -> rows), rows -> [two, batch])", {"rows": 2}),
    "a size that the file does not compute": (
        "let r = split(concat(h, h, h, [batch, batch, batch] -> thrice), thrice -> [three, batch])",
        {"thrice": 3},
    ),
    "split into groups": ("let r = mean(split(h, batch -> [groups, group]), over = group)", {"groups": 1 / 4}),
    "a number more": ("let r = concat(h, expand(w, one), [batch, one] -> more)", {"more": None}),
}
REFUSED = {
    "views": ("let r = split(h, batch -> [view, half])", "`split(h, batch -> [view, half])`"),
    "a part": ("let r = slice(h, batch -> half)", "`slice(h, batch -> half)`"),
    "a part in the middle": (
        "let r = slice(concat(h, h, h, [batch, batch, batch] -> thrice), thrice -> batch, start = 8)",
        "`slice(concat(",
    ),
    "windows": ("let r = patches(h, batch -> half, size = two, stride = 2)", "`patches("),
    "greatest": ("let r, i = top_k(h, batch -> quarter) let r = r + 0 * cast(i, f32)", "`top_k("),
    "a row": ("let r = gather(h, 7, along = batch)", "`gather(h, 7, along = batch)`"),
    "the last row": ("let r = gather(h, size(batch) - 1, along = batch)", "`gather("),
    "another parameter": ("param r: [others, embed] ~ ones()  let r = r + rename(h, batch -> others)", "parameter `r`"),
    "another input": ("let r = z + rename(h, batch -> others)", "input `z`"),
    "no whole size": ("let r = split(h, batch -> [groups, group])", "axis `groups`"),
}


def made(statements: str, more: str = "") -> Model:
    found = checked(MADE.replace("STATEMENTS", statements).replace("MORE", more) + TEXT[TEXT.index("train") :], "m.par")
    assert found.model is not None
    return found.model


@pytest.mark.parametrize("times", [2, Fraction(1, 2)])
@pytest.mark.parametrize(("statements", "axes"), FOLLOWING.values(), ids=FOLLOWING)
def test_what_is_made_of_rows_follows_their_number(
    statements: str, axes: dict[str, float | None], times: int | Fraction
) -> None:
    graph = build(with_larger_batch(made(statements), "batch", times), "f32")
    types = [value.type for node in graph.nodes for value in (*node.inputs, *node.outputs)]
    rows = int(8 * times)
    for axis, factor in axes.items():
        expected = rows * factor if factor is not None else rows + 1
        assert {each.axis(axis).size for each in types if each.has(axis)} == {expected}


@pytest.mark.parametrize(("statements", "what"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_keep_rows_together_is_named(statements: str, what: str) -> None:
    given = made(statements, ", z: [others, embed]" if "z +" in statements else "")
    with pytest.raises(Refused) as caught:
        with_larger_batch(given, "batch", Fraction(1, 8 if "groups" in what else 2), "as a group")
    (found,) = caught.value.diagnostics
    assert found.message.startswith(what if "axis" not in what else f"the size of {what}"), found.message
    assert found.message.endswith("depends on the number of rows of `batch`")
    assert found.span is not None
    assert found.notes == ("as a group",)


def test_numbers_computed_from_sizes_follow_one_change_after_another() -> None:
    given = model(use="h * w * (size(embed) + 10 * size(batch))")
    smaller = evolve(given, body=Resized({"embed": 2}).body(given.body))
    nodes = build(with_larger_batch(smaller, "batch", 2), "f32").nodes
    assert 2 + 10 * 8 in [node.op.value for node in nodes if isinstance(node.op, Constant)]
