"""Operations that are replaced by blocks of an axis: the replacement is equal, in any number of parts, and small values
alone are exchanged.
"""

from __future__ import annotations

import pytest
import torch

from partita.compiler.graph import Builder, Node, Value
from partita.compiler.ops import OPS
from partita.compiler.ops.op import Op
from partita.compiler.verify.value_numbering import ValueNumbering
from tests.compiler.interpret import interpret
from tests.compiler.ops.op_cases import CASES, Case
from tests.compiler.ops.test_replaced import drawn, node_of


def divided(node: Node, axis: str, parts: int) -> tuple[list[Node], tuple[Value, ...]] | None:
    build = Builder()
    results = node.op.decompose(build, node, axis, parts)
    return None if results is None else (build.nodes, results)


def axes_of(case: Case) -> list[str]:
    node = node_of(case, 0)
    axes = dict.fromkeys(name for value in node.inputs for name in value.type.names)
    return [axis for axis in axes if divided(node, axis, 2)]


DIVIDED = [(case, axis) for case in CASES for axis in axes_of(case)]
IDS = [f"{case.name}-{axis}" for case, axis in DIVIDED]


def test_every_replacement_has_a_case():
    assert {case.op.name for case, _ in DIVIDED} == {
        name for name, op in OPS.items() if op.decompose is not Op.decompose
    }


@pytest.mark.few(20)
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize(("case", "axis"), DIVIDED, ids=IDS)
def test_replacement_equals_the_node(case: Case, axis: str, dtype: str):
    for parts, order in ((1, 3), (2, 0), (3, 5), (6, 11)):
        node = node_of(case, order, dtype)
        nodes, results = divided(node, axis, parts) or ([], ())
        assert [value.type for value in results] == [value.type for value in node.outputs]
        assert all(set(new.outputs) <= set(results) or set(new.outputs).isdisjoint(results) for new in nodes)
        tensors = drawn(case, node)
        expected = interpret([node], tensors, node.outputs)
        for a, b in zip(interpret(nodes, tensors, results), expected, strict=True):
            # What goes round is rounded in each part.
            close = {torch.bfloat16: 2**-6, torch.float32: 1e-5}.get(a.dtype, 1e-12)
            torch.testing.assert_close(a, b, rtol=close, atol=close * float(b.abs().max()))


@pytest.mark.parametrize(("case", "axis"), DIVIDED, ids=IDS)
def test_what_cannot_be_split_has_one_entry_for_each_part(case: Case, axis: str):
    """All else has a rule for the axis."""
    node = node_of(case, 0)
    nodes, _ = divided(node, axis, 3) or ([], ())
    for new in nodes:
        types, results = [value.type for value in new.inputs], [value.type for value in new.outputs]
        own = [i for i, type in enumerate(types) if type.has(axis)]
        rules = [rule for rule in new.op.sharding_rules(types, results) if all(rule.operands[i] == axis for i in own)]
        assert rules or all(type.axis(axis).size == 3 for type in types), new.op


@pytest.mark.parametrize(("case", "axis"), DIVIDED, ids=IDS)
def test_all_divisions_are_one_value(case: Case, axis: str):
    """To `verify` the primitives that make the results of a division make what the operation makes; of other operands
    they do not.
    """
    node = node_of(case, 0)
    numbering = ValueNumbering((2, 3))
    given = tuple(numbering.given("operand", i, type=value.type) for i, value in enumerate(node.inputs))
    whole = numbering.of(node.op, given)
    for parts in (2, 3):
        nodes, results = divided(node, axis, parts) or ([], ())
        numbers = dict(zip(node.inputs, given, strict=True))
        for new in nodes:
            operands = tuple(numbers[value] for value in new.inputs)
            found = numbering.known(new.op, operands)
            assert found is not None
            numbers.update(zip(new.outputs, found, strict=True))
        assert tuple(numbers[value] for value in results) == whole
        assert numbering.known(nodes[-1].op, (*operands[:-1], given[0])) is None
