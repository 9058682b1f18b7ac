"""What does not depend on a loop's states is computed for all of its positions at once: as at each of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from partita.dsl.types import Axis, Type
from tests.compiler.ops.op_cases import CASES, Case
from tests.compiler.ops.test_sharding_rules import feeds, run

POSITION = Axis("p", 2)
# What comes after the loops of the language: updates, rows of tables in parts, matrices of an optimizer, eight bits.
LATER = {
    *("coalesce", "merge_rows", "distinct_ids", "rowwise_adagrad", "factored_inverse_root", "adafactor"),
    *("orthogonalize", "stack", "unstack", "float8_dot"),
}
AT_ONCE = [
    case
    for case in CASES
    if case.operands and not case.op.random and case.op.name not in LATER and case.op.vmapped(POSITION) is not None
]


@pytest.mark.parametrize("case", AT_ONCE, ids=lambda case: case.name)
def test_all_positions_at_once_are_each_of_them(case: Case):
    generator = np.random.default_rng(0)
    positions = [feeds(case, case.operands, generator, integers=False) for _ in range(POSITION.size)]
    types = [Type(type.dtype, (POSITION, *type.axes)) for type in case.operands]
    expected = [run(case.op, case.operands, [x.clone() for x in operands], {}) for operands in positions]
    op = case.op.vmapped(POSITION)
    assert op is not None
    found = run(op, types, [torch.stack(x) for x in zip(*positions, strict=True)], {})
    results = zip(found, op.infer(*types), case.op.infer(*case.operands), strict=True)
    for number, (value, type, alone) in enumerate(results):
        value = value.permute([type.position(name) for name in (POSITION.name, *alone.names)])
        whole = torch.stack([each[number] for each in expected])
        torch.testing.assert_close(value, whole, equal_nan=True)
