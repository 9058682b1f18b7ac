"""Operations that are replaced where an axis is split: the replacement is equal, can be split, and adds up little."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from partita.compiler.graph import Builder, Node, Value
from partita.compiler.layout import MAX, SUM, State, is_split, layout_of
from partita.compiler.ops import OPS
from partita.compiler.ops.op import Op, ShardingRule
from partita.compiler.ops.pointwise import Constant
from partita.runtime.kernels.dtypes import DTYPES
from tests.compiler.interpret import interpret
from tests.compiler.ops.op_cases import CASES, Case
from tests.compiler.ops.placing import cut, join, on_ranks
from tests.compiler.ops.test_sharding_rules import all_ways, feeds


def node_of(case: Case, order: int, dtype: str = "f64") -> Node:
    """The case as a node, its floats in another dtype; what is computed in f32 at least stays so."""
    types = [type.with_dtype(dtype) if type.is_float else type for type in case.types(order)]
    scaled = ("layer_norm_gradient", "layer_norm_scale_gradient", "rms_norm_gradient")
    norms = dict.fromkeys(("normalize_gradient", *scaled), 2)
    wide = {**norms, "attend_gradient": -2}.get(case.op.name)
    if wide is not None:
        types[wide] = types[wide].with_dtype("f32" if dtype == "bf16" else dtype)
    build = Builder()
    build.apply_all(case.op, *(Value(f"x{i}", type) for i, type in enumerate(types)))
    return build.nodes[0]


def replaced(node: Node, axis: str) -> tuple[list[Node], tuple[Value, ...]] | None:
    build = Builder()
    results = node.op.split(build, node, axis)
    return None if results is None else (build.nodes, results)


def axes_of(case: Case) -> list[str]:
    """Axes of a case along which it is replaced."""
    node = node_of(case, 0)
    axes = dict.fromkeys(name for value in node.inputs for name in value.type.names)
    return [axis for axis in axes if replaced(node, axis)]


REPLACED = [(case, axis) for case in CASES for axis in axes_of(case)]
IDS = [f"{case.name}-{axis}" for case, axis in REPLACED]


def drawn(case: Case, node: Node) -> dict[Value, torch.Tensor]:
    tensors = feeds(case, [value.type for value in node.inputs], np.random.default_rng(4), integers=False)
    return {v: x.to(DTYPES[v.type.dtype]) for v, x in zip(node.inputs, tensors, strict=True)}


def test_every_replacement_has_a_case():
    assert {case.op.name for case, _ in REPLACED} == {name for name, op in OPS.items() if op.split is not Op.split}


@pytest.mark.parametrize(("case", "axis"), REPLACED, ids=IDS)
def test_axis_has_no_way_of_its_own(case: Case, axis: str):
    """An operation is replaced only where it cannot be split itself."""
    node = node_of(case, 0)
    for rule in all_ways(case.op, case.operands):
        assert axis not in (*rule.operands, *rule.results)
    nodes, _ = replaced(node, axis) or ([], ())
    assert {new.op.name for new in nodes} <= set(OPS)
    assert case.op.name not in {new.op.name for new in nodes}


@pytest.mark.few(11)
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize(("case", "axis"), REPLACED, ids=IDS)
def test_replacement_equals_the_node(case: Case, axis: str, dtype: str):
    """To the rounding of each result's own dtype: what is added up is added up in f32 at least."""
    for order in (0, 5, 11):
        node = node_of(case, order, dtype)
        new = replaced(node, axis)
        assert new is not None
        nodes, results = new
        assert [value.type for value in results] == [value.type for value in node.outputs]
        tensors = drawn(case, node)
        expected = interpret([node], tensors, node.outputs)
        for a, b in zip(interpret(nodes, tensors, results), expected, strict=True):
            close = {torch.bfloat16: 2**-7, torch.float32: 1e-5}.get(a.dtype, 1e-12)
            torch.testing.assert_close(a, b, rtol=close, atol=close * float(b.abs().max()))


class Split:
    """A replacement in parts along one mesh axis: partial values are added up before what cannot take them."""

    def __init__(self, axis: str, parts: int, tensors: Mapping[Value, torch.Tensor]) -> None:
        self.axis, self.sizes = axis, {"x": parts}
        self.states: dict[Value, State] = {}
        self.parts: dict[Value, list[torch.Tensor]] = {}
        self.added: list[Value] = []
        for value, x in tensors.items():
            self.states[value] = axis if value.type.has(axis) else None
            at = layout_of([("x", self.states[value])])
            self.parts[value] = cut(x, value.type, at, self.sizes, np.random.default_rng(0))

    def run(self, node: Node) -> None:
        if isinstance(node.op, Constant):
            self.states[node.output] = None
            self.parts[node.output] = [torch.tensor(node.op.value, dtype=DTYPES[node.op.dtype])] * self.sizes["x"]
            return
        types, results = [v.type for v in node.inputs], [v.type for v in node.outputs]
        rule = self.rule(node)
        for value, state in zip(node.inputs, rule.operands, strict=True):
            if state != self.states[value]:
                self.parts[value] = [self.whole(value)] * self.sizes["x"]
                self.states[value] = None
                self.added.append(value)
        placed = [layout_of([("x", state)]) for state in (*rule.operands, *rule.results)]
        found = on_ranks(node.op, types, results, placed, self.sizes, [self.parts[v] for v in node.inputs])
        for value, state, parts in zip(node.outputs, rule.results, found, strict=True):
            self.states[value], self.parts[value] = state, parts

    def rule(self, node: Node) -> ShardingRule:
        """The way that takes most operands as they are; none takes a split one whole."""
        have = [self.states[value] for value in node.inputs]
        rules = [
            rule
            for rule in all_ways(node.op, [value.type for value in node.inputs])
            if all(a == b or (a in (SUM, MAX) and b is None) for a, b in zip(have, rule.operands, strict=True))
        ]
        assert rules, f"{node.op} cannot be split: {have}"
        return max(rules, key=lambda rule: sum(a == b for a, b in zip(have, rule.operands, strict=True)))

    def whole(self, value: Value) -> torch.Tensor:
        joined = join(self.parts[value], value.type, layout_of([("x", self.states[value])]), self.sizes)
        assert joined is not None, value
        return joined


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(("case", "axis"), REPLACED, ids=IDS)
def test_replacement_can_be_split(case: Case, axis: str, parts: int):
    """Nothing that is split is gathered, and what is added up has lost the axis."""
    node = node_of(case, 7)
    tensors = drawn(case, node)
    new = replaced(node, axis)
    assert new is not None
    nodes, results = new
    split = Split(axis, parts, tensors)
    for each in nodes:
        split.run(each)
    assert split.added
    assert not any(value.type.has(axis) for value in split.added)
    for value, expected in zip(results, interpret([node], tensors, node.outputs), strict=True):
        assert is_split(split.states[value]) == value.type.has(axis)
        torch.testing.assert_close(split.whole(value), expected, rtol=1e-12, atol=1e-12)


def test_the_first_of_equal_maxima_wins_wherever_it_lies():
    (case,) = (case for case in CASES if case.name == "argmax")
    node = node_of(case, 0)
    x = torch.zeros(node.inputs[0].type.shape, dtype=torch.float64)
    x[:, 2:] = 1.0
    nodes, (result,) = replaced(node, "b") or ([], ())
    for parts in (2, 3):
        split = Split("b", parts, {node.inputs[0]: x})
        for each in nodes:
            split.run(each)
        assert bool((split.whole(result) == 2).all())


def test_nan_counts_as_the_maximum_wherever_it_lies():
    """As torch has it; what indexes by the result stays within the axis."""
    (case,) = (case for case in CASES if case.name == "argmax")
    node = node_of(case, 0)
    x = torch.ones(node.inputs[0].type.shape, dtype=torch.float64)
    x[:, 3:] = torch.nan
    nodes, (result,) = replaced(node, "b") or ([], ())
    for parts in (2, 3):
        split = Split("b", parts, {node.inputs[0]: x})
        for each in nodes:
            split.run(each)
        assert bool((split.whole(result) == x.argmax(1)).all())
