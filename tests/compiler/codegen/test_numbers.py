"""A number that repeats along axes stands in emitted source as a number, where something else has the axes."""

from __future__ import annotations

import pytest
import torch

from partita.compiler.codegen.writer import Writer
from partita.compiler.graph import Builder, Value
from partita.compiler.ops.loss import NegativeLogLikelihoodGradient
from partita.compiler.ops.op import Argument
from partita.compiler.ops.pointwise import Constant, Pointwise
from partita.compiler.ops.reduce import Reduce
from partita.compiler.ops.shape import Arrange, Expand
from partita.dsl.types import Axis, Type
from partita.runtime import kernels
from tests.compiler.interpret import interpret

A, B, CLASSES = Axis("a", 2), Axis("b", 3), Axis("classes", 5)
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
HALF = torch.full((2, 3), 0.5)
MASK = torch.tensor([[True, False, True], [False, False, True]])


def _source(build: Builder, given: list[Value], wanted: Value) -> str:
    writer = Writer(("x", "c"), {value: Argument(value.name, value.type) for value in given})
    writer.block(build.nodes, {wanted})
    return "\n".join(writer.body())


@pytest.mark.parametrize(
    ("function", "others", "made", "expected"),
    [
        ("multiply", [X], False, HALF * X),
        ("maximum", [X], False, torch.maximum(HALF, X)),
        ("equal", [X], False, HALF == X),
        # Nothing else has the axes.
        ("multiply", [torch.tensor(3.0)], True, HALF * 3),
        ("multiply", [torch.tensor([1.0, 2.0])], True, HALF * torch.tensor([[1.0], [2.0]])),
        # torch takes no numbers here, or would choose the dtype.
        ("multiply_add", [X, X], True, HALF * X + X),
    ],
)
def test_an_operand(function: str, others: list[torch.Tensor], made: bool, expected: torch.Tensor):
    build = Builder()
    half = build.apply(Expand((A, B)), build.apply(Constant(0.5, "f32")))
    values = [Value(f"x{i}", Type("f32", (A, B)[: other.dim()])) for i, other in enumerate(others)]
    result = build.apply(Pointwise(function), half, *values)
    assert ("torch.full" in _source(build, values, result)) == made
    (found,) = interpret(build.nodes, dict(zip(values, others, strict=True)), [result])
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_both_results_of_where():
    build = Builder()
    mask = Value("mask", Type("bool", (A, B)))
    half, zero = (build.apply(Expand((A, B)), build.apply(Constant(each, "f32"))) for each in (0.5, 0.0))
    result = build.apply(Pointwise("where"), mask, half, zero)
    (found,) = interpret(build.nodes, {mask: MASK}, [result])
    assert torch.equal(found, torch.where(MASK, HALF, torch.zeros(2, 3)))


def test_what_outlives_the_function_is_a_tensor():
    build = Builder()
    half = build.apply(Expand((A, B)), build.apply(Constant(0.5, "f32")))
    (found,) = interpret(build.nodes, {}, [half])
    assert torch.equal(found, HALF)


def test_operations_that_take_no_numbers():
    build = Builder()
    half = build.apply(Expand((A, B)), build.apply(Constant(0.5, "f32")))
    turned = build.apply(Arrange(("b", "a")), half)
    total = build.apply(Reduce("sum", ("a",), "f32"), half)
    found = interpret(build.nodes, {}, [turned, total])
    assert torch.equal(found[0], HALF.t())
    assert torch.equal(found[1], torch.ones(3))


@pytest.mark.parametrize("first", [None, 0, 3])
def test_the_gradient_of_a_loss_has_the_same_bits(first: int | None):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator)
    targets = torch.randint(0, 5 if first is None else 8, (2, 3), generator=generator)
    denominator = torch.logsumexp(logits, -1)
    number = 1 / 3
    found = kernels.nll_gradient(number, logits, targets, denominator, first)
    expected = kernels.nll_gradient(torch.full((2, 3), number), logits, targets, denominator, first)
    assert torch.equal(found, expected)


def test_the_loss_is_told_the_number():
    build = Builder()
    plain = Type("f32", (A, B))
    half = build.apply(Expand((A, B)), build.apply(Constant(0.5, "f32")))
    given = [Value("logits", Type("f32", (A, B, CLASSES))), Value("targets", Type("i64", (A, B))), Value("z", plain)]
    result = build.apply(NegativeLogLikelihoodGradient("classes"), half, *given)
    assert "kernels.nll_gradient(0.5, logits, targets, z)" in _source(build, given, result)
