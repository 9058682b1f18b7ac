"""Every operation: its gradient is its derivative, every way of splitting it is sound, its types are what it makes."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.compiler.gradients import differentiate
from partita.compiler.graph import Builder, Graph, Node, Parameter, Value
from partita.compiler.ops.op import MAX, OPS, SUM
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.position import Positioned
from partita.compiler.ops.reduce import Reduce
from partita.dsl.spec import Call
from partita.dsl.types import Type
from tests.compiler.interpret import interpret
from tests.compiler.op_cases import CASES, WITHOUT_CASE, Case

BY_NAME = {case.name: case for case in CASES}


def test_every_op_has_a_case():
    assert set(OPS) - {case.op.name for case in CASES} == WITHOUT_CASE


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


def shuffled(type: Type, order: int) -> Type:
    orders = list(permutations(type.axes))
    return Type(type.dtype, orders[order % len(orders)])


def operands(case: Case, order: int) -> list[Value]:
    # Accumulated and updated tensors share one order; the order of the rest is the compiler's choice.
    fixed = case.op.name in ("adamw", "sgd", "scatter_add")
    return [Value(f"x{k}", type if fixed else shuffled(type, order >> k)) for k, type in enumerate(case.operands)]


@pytest.mark.parametrize("name", [case.name for case in CASES if case.differentiable])
@given(order=st.integers(0, 1 << 20), seed=st.integers(0, 1 << 20))
@settings(max_examples=5, deadline=None)
def test_gradient_is_the_derivative(name: str, order: int, seed: int):
    """Against central differences in float64, for a random linear function of all float results."""
    case = BY_NAME[name]
    values = operands(case, order)
    generator = np.random.default_rng(seed)
    feeds = {value: tensor(value.type, case, generator) for value in values}
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

    def evaluate() -> float:
        return float(interpret(build.nodes, feeds, [loss])[0])

    for value in floats:
        x = feeds[value]
        flat = x.reshape(-1)
        assert flat.data_ptr() == x.data_ptr()
        for k in range(min(flat.numel(), 12)):
            before = float(flat[k])
            step = 1e-6 * max(1.0, abs(before))
            flat[k] = before + step
            above = evaluate()
            flat[k] = before - step
            below = evaluate()
            flat[k] = before
            numeric = (above - below) / (2 * step)
            exact = float(found[value.name].reshape(-1)[k])
            assert exact == pytest.approx(numeric, rel=2e-5, abs=2e-6), f"d/d{value}[{k}]"


@pytest.mark.parametrize("name", sorted(BY_NAME))
@given(order=st.integers(0, 1 << 20), seed=st.integers(0, 1 << 20))
@settings(max_examples=3, deadline=None)
def test_every_way_is_sound(name: str, order: int, seed: int):
    """Each way, on as many ranks as an axis has elements: the parts make up the unsplit result."""
    case = BY_NAME[name]
    values = operands(case, order)
    generator = np.random.default_rng(seed)
    feeds = {value: tensor(value.type, case, generator) for value in values}
    build = Builder([value.name for value in values])
    build.apply_all(case.op, *values)
    (node,) = build.nodes
    whole = interpret([node], {v: x.clone() for v, x in feeds.items()}, list(node.outputs))
    ways = case.op.ways([v.type for v in values], [v.type for v in node.outputs])
    assert len(set(ways)) == len(ways)
    for way in ways:
        assert len(way.operands) == len(values)
        assert len(way.results) == len(node.outputs)
        axes = {s for s in (*way.operands, *way.results) if s not in (None, SUM, MAX)}
        if isinstance(case.op, Positioned) and _reads_its_place(case.op, axes):
            continue  # such ops need the rank's coordinate; `test_microbatches` runs them
        sizes = {v.type.axis(a).size for v in (*values, *node.outputs) for a in axes if v.type.has(a)}
        ranks = _common(sizes) if sizes else 3
        if ranks == 1:
            continue
        parts = []
        for rank in range(ranks):
            local = [
                _part(value, feeds[value], state, rank, ranks, generator)
                for value, state in zip(values, way.operands, strict=True)
            ]
            parts.append(local)
        for position, state in enumerate(way.operands):
            if state in (SUM, MAX):
                _share(parts, position, feeds[values[position]], state, generator)
        results = []
        for local in parts:
            op = case.op
            for axis in axes:
                size = next(v.type.axis(axis).size for v in (*values, *node.outputs) if v.type.has(axis))
                op = op.resized(axis, size // ranks)
            inner = Builder()
            given_values = [Value(v.name, _local(v.type, s, ranks)) for v, s in zip(values, way.operands, strict=True)]
            inner.apply_all(op, *given_values)
            (part,) = inner.nodes
            for value, expected, s in zip(part.outputs, node.outputs, way.results, strict=True):
                assert value.type == _local(expected.type, s, ranks), f"{way}: {value.type} of {expected.type}"
            results.append(interpret([part], dict(zip(given_values, local, strict=True)), list(part.outputs)))
        for k, (expected, state) in enumerate(zip(whole, way.results, strict=True)):
            pieces = [result[k] for result in results]
            if state == SUM:
                joined = torch.stack(pieces).sum(0)
            elif state == MAX:
                joined = torch.stack(pieces).amax(0)
            elif state is None:
                joined = pieces[0]
            else:
                joined = torch.cat(pieces, node.outputs[k].type.position(state))
            torch.testing.assert_close(joined, expected, rtol=1e-9, atol=1e-9, msg=lambda m, way=way: f"{way}: {m}")


def _reads_its_place(op: object, axes: set[str | None]) -> bool:
    return op.name in ("iota", "random") or (op.name == "rope" and op.over in axes)  # type: ignore[attr-defined]


def _common(sizes: set[int]) -> int:
    return min(sizes) if all(size % min(sizes) == 0 for size in sizes) else 1


def _local(type: Type, state: str | None, ranks: int) -> Type:
    if state in (None, SUM, MAX):
        return type
    return type.resized(state, type.axis(state).size // ranks)


def _part(value: Value, x: torch.Tensor, state: str | None, rank: int, ranks: int, generator: object) -> torch.Tensor:
    if state in (None, SUM, MAX):
        return x.clone()
    size = value.type.axis(state).size // ranks
    return x.narrow(value.type.position(state), rank * size, size).clone()


def _share(parts: list, position: int, x: torch.Tensor, state: str, generator: np.random.Generator) -> None:
    """Split a value into parts that sum to it, or whose maximum it is."""
    if state == MAX:
        for part in parts[:-1]:
            part[position] = x - torch.from_numpy(np.asarray(np.abs(generator.normal(size=x.shape))))
        return
    rest = x.clone()
    for part in parts[:-1]:
        piece = torch.from_numpy(np.asarray(generator.normal(size=x.shape)))
        part[position] = piece
        rest = rest - piece
    parts[-1][position] = rest


def test_nodes_run_in_any_operand_order():
    """A dot's result has a's axes first, whatever the order in memory."""
    case = BY_NAME["dot-two"]
    node: Node | None = None
    for order in range(8):
        values = operands(case, order)
        build = Builder()
        build.apply_all(case.op, *values)
        (node,) = build.nodes
        assert set(node.output.type.names) == {"a", "d"}
    assert node is not None
