"""Every operation has a case, and its gradient is its derivative."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from partita.compiler.graph import Builder, Graph, Parameter, Value
from partita.compiler.ops import OPS
from partita.compiler.ops.collective import Reshard
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.reduce import Reduce
from partita.compiler.passes.differentiate import differentiate
from partita.dsl.spec import Call
from partita.dsl.types import Type
from tests.compiler.interpret import interpret, prepare
from tests.compiler.ops.op_cases import CASES, WITHOUT_CASE, Case, fitted
from tests.marks import examples

BY_NAME = {case.name: case for case in CASES}


def test_every_op_has_a_case():
    moves = {name for name, op in OPS.items() if issubclass(op, Reshard)}
    assert set(OPS) - {case.op.name for case in CASES} - moves == WITHOUT_CASE


def test_every_op_says_what_it_is():
    for name, op in OPS.items():
        assert op.__doc__, f"{name} has no docstring"


def tensor(type: Type, case: Case, generator: np.random.Generator) -> torch.Tensor:
    if type.dtype == "i64":
        return torch.from_numpy(generator.integers(0, case.limit, type.shape))
    if type.dtype == "bool":
        # The first of each row is true: a softmax over nothing has no value.
        mask = generator.random(type.shape) < 0.5
        mask[..., 0] = True
        return torch.from_numpy(mask)
    x = generator.normal(size=type.shape)
    return torch.from_numpy(np.asarray(np.abs(x) + 0.5 if case.positive else x))


def operands(case: Case, order: int) -> list[Value]:
    return [Value(f"x{k}", type) for k, type in enumerate(case.types(order))]


@pytest.mark.parametrize("name", [case.name for case in CASES if case.differentiable])
@given(order=st.integers(0, 1 << 20), seed=st.integers(0, 1 << 20))
@example(order=0, seed=0)
@example(order=1, seed=0)  # kernels may have another path where the last two axes change places
@examples(1)
def test_gradient_is_the_derivative(name: str, order: int, seed: int):
    """Against central differences in float64, for a random linear function of all float results: along a random
    direction of each operand, in which all its elements change at once, and of some elements alone.
    """
    case = BY_NAME[name]
    values = operands(case, order)
    generator = np.random.default_rng(seed)
    types = [value.type for value in values]
    feeds = dict(zip(values, fitted(case, types, [tensor(each, case, generator) for each in types]), strict=True))
    build = Builder([value.name for value in values])
    results = build.apply_all(case.op, *values)
    # Results after the first serve the gradient alone, and carry none.
    target = results[0]
    weight = Value("weight", target.type)
    feeds[weight] = torch.from_numpy(np.asarray(generator.normal(size=target.type.shape)))
    loss = build.apply(Reduce("sum", target.type.names, "f64"), pointwise(build, "multiply", target, weight))
    floats = [value for value in values if value.type.is_float]
    parameters = tuple(Parameter(v, v.type, Call("zeros", {}), (1, 1), False) for v in floats)
    joint = differentiate(Graph("test", (), parameters, tuple(build.nodes), loss))
    contributions = [gradient.value for gradient in joint.gradients]
    found: dict[str, torch.Tensor] = {}
    outputs = interpret(joint.nodes, feeds, contributions)
    for gradient, output in zip(joint.gradients, outputs, strict=True):
        value = next(v for v in floats if v.name == gradient.parameter)
        # A contribution may have its axes in another order than the parameter.
        order_ = [gradient.value.type.names.index(n) for n in value.type.names]
        arranged = output.permute(*order_) if order_ else output
        found[value.name] = found.get(value.name, 0) + arranged

    forward = prepare(build.nodes, list(feeds), [loss])

    def evaluate() -> float:
        return float(forward(list(feeds.values()))[0])

    for value in floats:
        x = feeds[value]
        flat = x.reshape(-1)
        assert flat.data_ptr() == x.data_ptr()
        gradient = found[value.name].reshape(-1)
        everywhere = torch.from_numpy(generator.choice((-1.0, 1.0), flat.numel()))
        directions = [everywhere]
        # From anywhere: at its start positions are zero, and nothing is masked.
        for k in generator.permutation(flat.numel())[:2].tolist():
            directions.append(torch.zeros_like(everywhere).index_fill(0, torch.tensor([k]), 1.0))
        before = flat.clone()
        for direction in directions:
            step = 1e-6 * before.abs().clamp(min=1.0) * direction
            flat.copy_(before + step)
            above = evaluate()
            flat.copy_(before - step)
            below = evaluate()
            flat.copy_(before)
            exact = float(gradient.dot(step)) / 1e-6
            assert exact == pytest.approx((above - below) / 2e-6, rel=2e-5, abs=2e-6), f"d/d{value} along {direction}"


@pytest.mark.parametrize("name", BY_NAME)
def test_results_do_not_depend_on_the_order_of_axes(name: str):
    """Axes are known by name; how they lie in memory is the compiler's choice."""
    case = BY_NAME[name]
    generator = np.random.default_rng(2)
    feeds = fitted(case, case.operands, [tensor(type, case, generator) for type in case.operands])
    expected: list[torch.Tensor] = []
    for order in (0, 3, 10):
        values = operands(case, order)
        turned = [x.permute(iteration(type, v.type)) for x, type, v in zip(feeds, case.operands, values, strict=True)]
        build = Builder()
        results = build.apply_all(case.op, *values)
        found = interpret(build.nodes, {v: x.clone() for v, x in zip(values, turned, strict=True)}, results)
        named = [x.permute(iteration(v.type, sorted_axes(v.type))) for v, x in zip(results, found, strict=True)]
        expected = expected or named
        for a, b in zip(named, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def sorted_axes(type: Type) -> Type:
    return Type(type.dtype, tuple(sorted(type.axes, key=lambda axis: axis.name)))


def iteration(have: Type, wanted: Type) -> list[int]:
    return [have.position(name) for name in wanted.names]
