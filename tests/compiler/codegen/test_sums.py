"""Sums that products and norms make themselves, and views that several lines share: to the same bits, and no longer."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.codegen.writer import Writer
from partita.compiler.graph import Builder, Value
from partita.compiler.ops import dot
from partita.compiler.ops.collective import AllReduce
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.normalize import LayerNormGradient, LayerNormScaleGradient, NormalizeGradient, RmsNormGradient
from partita.compiler.ops.op import Argument, Op
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.shape import Rename
from partita.dsl.types import Axis, Type
from tests.compiler.interpret import interpret

ROWS, DEPTH, COLUMNS = Axis("rows", 3), Axis("depth", 4), Axis("columns", 5)
LEFT, RIGHT = Value("left", Type("f32", (ROWS, DEPTH))), Value("right", Type("f32", (DEPTH, COLUMNS)))
X = Value("x", Type("f32", (ROWS, COLUMNS)))
DOT, ADD, MULTIPLY = Dot(("depth",)), Pointwise("add"), Pointwise("multiply")


def source(build: Builder, given: list[Value], wanted: set[Value]) -> list[str]:
    """What is written of the nodes."""
    writer = Writer(("x", "c"), {value: Argument(value.name, value.type) for value in given})
    writer.block(build.nodes, wanted)
    return writer.body()


def test_a_product_adds_itself():
    build = Builder()
    total = build.apply(ADD, X, build.apply(DOT, LEFT, RIGHT), name="total")
    assert source(build, [X, LEFT, RIGHT], {total}) == ["total = torch.mm(left, right).add_(x)"]


def test_the_later_of_two_products_adds_the_other():
    build = Builder()
    first, second = (build.apply(DOT, LEFT, RIGHT, name=name) for name in ("first", "second"))
    total = build.apply(ADD, second, first, name="total")
    lines = source(build, [LEFT, RIGHT], {total})
    assert lines == ["first = torch.mm(left, right)", "total = torch.mm(left, right).add_(first)", "del first"]


def test_what_is_read_elsewhere_stays():
    for again in (True, False):
        build = Builder()
        product = build.apply(DOT, LEFT, RIGHT, name="product")
        total = build.apply(ADD, X, product, name="total")
        wanted = {total, build.apply(MULTIPLY, product, X) if again else product}
        assert source(build, [X, LEFT, RIGHT], wanted)[:2] == ["product = torch.mm(left, right)", "total = x + product"]


def test_what_is_made_later_cannot_be_added():
    build = Builder()
    product = build.apply(DOT, LEFT, RIGHT, name="product")
    other = build.apply(MULTIPLY, X, X, name="other")
    total = build.apply(ADD, product, other, name="total")
    assert "total = product + other" in source(build, [X, LEFT, RIGHT], {total})


def test_an_addition_that_repeats_one_operand_stays():
    build = Builder()
    row = Value("row", Type("f32", (COLUMNS,)))
    total = build.apply(ADD, build.apply(DOT, LEFT, RIGHT, name="product"), row, name="total")
    assert "total = product + row" in source(build, [row, LEFT, RIGHT], {total})


def added_to(read: Op | None, first: bool = False) -> list[str]:
    """What is written of a product that is added to `h`, of which a node before has made something that is read later;
    or is added to that `first`.
    """
    build = Builder()
    h = build.apply(MULTIPLY, X, X, name="h")
    other = h if read is None else build.apply(read, h, name="other")
    product = build.apply(DOT, LEFT, RIGHT, name="product")
    total = build.apply(ADD, other if first else h, product, name="total")
    wanted = {total, build.apply(MULTIPLY, other, other, name="last")} if read is not None else {total}
    return source(build, [X, LEFT, RIGHT], wanted)


def test_a_large_product_is_added_into_what_nothing_else_has(monkeypatch: pytest.MonkeyPatch):
    """Not into what a view is of, or what is being sent; and what may still be on its way is not waited for."""
    monkeypatch.setattr(dot, "LARGE", 0)
    assert all("total = kernels.sum_matmul(h, left, right)" in added_to(each) for each in (None, Pointwise("exp")))
    kept = "total = kernels.matmul(left, right).add_(h)"
    assert kept in added_to(Rename((("rows", "lines"),)))
    assert kept in added_to(AllReduce("data", 2))
    assert "total = other + product" in added_to(AllReduce("data", 2), first=True)


def test_gradients_of_norms_add():
    d, y = (Value(name, X.type) for name in ("d", "y"))
    rate, scale = Value("rate", Type("f32", (ROWS,))), Value("scale", Type("f32", (COLUMNS,)))
    tensors = {
        v: torch.randn(v.type.shape, generator=torch.Generator().manual_seed(i)) for i, v in enumerate((d, y, X))
    }
    tensors |= {rate: torch.rand(3) + 0.5, scale: torch.rand(5)}
    for op, operands in (
        (NormalizeGradient(("columns",), True), (d, y, rate)),
        (NormalizeGradient(("columns",), False), (d, y, rate)),
        (NormalizeGradient(("rows",), True), (d, y, scale)),  # not over the last
        (LayerNormGradient(("columns",)), (d, y, rate, scale)),
        (LayerNormScaleGradient(("columns",)), (d, y, rate, scale)),
        (RmsNormGradient(("columns",)), (d, y, rate, scale)),
    ):
        build = Builder()
        gradient, *others = build.apply_all(op, *operands)
        total = build.apply(ADD, gradient, X, name="total")
        feeds = {v: tensors[v] for v in (*operands, X)}
        assert any("plus=x" in line for line in source(build, list(feeds), {total, *others}))
        (apart,) = interpret(build.nodes[:-1], feeds, [gradient])
        (found,) = interpret(build.nodes, feeds, [total])
        assert torch.equal(found, apart + tensors[X])


@given(data=st.data())
def test_any_graph_computes_the_same(data: st.DataObject):
    generator = torch.Generator().manual_seed(0)
    build = Builder()
    expected = {value: torch.randn(value.type.shape, generator=generator) for value in (X, LEFT, RIGHT)}
    feeds = dict(expected)
    values = [X]
    for number in range(data.draw(st.integers(1, 8))):
        u, v = (data.draw(st.sampled_from(values)) for _ in range(2))
        match data.draw(st.sampled_from(("dot", "add", "add", "multiply"))):
            case "dot":
                left = build.apply(MULTIPLY, LEFT, LEFT)
                made = build.apply(DOT, left, RIGHT, name=f"v{number}")
                expected[made] = torch.mm(expected[LEFT] * expected[LEFT], expected[RIGHT])
            case "add":
                made = build.apply(ADD, u, v, name=f"v{number}")
                expected[made] = expected[u] + expected[v]
            case _:
                made = build.apply(MULTIPLY, u, v, name=f"v{number}")
                expected[made] = expected[u] * expected[v]
        values.append(made)
    wanted = data.draw(st.lists(st.sampled_from(values[1:]), min_size=1, unique=True))
    kept = {value: tensor.clone() for value, tensor in feeds.items()}
    for value, found in zip(wanted, interpret(build.nodes, feeds, wanted), strict=True):
        assert torch.equal(found, expected[value]), value
    assert all(torch.equal(tensor, kept[value]) for value, tensor in feeds.items()), "an operand was changed"


def test_a_view_that_several_lines_take_is_made_once_and_ends_with_its_tensor():
    build = Builder()
    batch = Axis("batch", 2)
    x = Value("x", Type("f32", (batch, ROWS, DEPTH)))
    h = build.apply(MULTIPLY, x, x, name="h")
    once = build.apply(DOT, h, RIGHT, name="once")
    twice = build.apply(DOT, h, RIGHT, name="twice")
    last = build.apply(MULTIPLY, once, twice, name="last")
    lines = source(build, [x, RIGHT], {last})
    assert lines[:5] == [
        "h = x * x",
        "h_matrix = h.reshape(6, 4)",
        "once = torch.mm(h_matrix, right).view(2, 3, 5)",
        "twice = torch.mm(h_matrix, right).view(2, 3, 5)",
        "del h, h_matrix",
    ]
    assert not re.search(r"[\0\1\2]", "".join(lines))


def test_a_view_that_one_line_takes_stays_there():
    build = Builder()
    x = Value("x", Type("f32", (Axis("batch", 2), ROWS, DEPTH)))
    h = build.apply(MULTIPLY, x, x, name="h")
    once = build.apply(DOT, h, RIGHT, name="once")
    assert source(build, [x, RIGHT], {once}) == ["h = x * x", "once = torch.mm(h.reshape(6, 4), right).view(2, 3, 5)"]
