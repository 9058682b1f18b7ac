"""Padding of axes: what stands in it reaches nothing that is real, for every operation along every axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from partita.compiler.graph import Builder, Graph, Input, Value
from partita.compiler.ops.op import Op
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.pointwise import Constant, Pointwise
from partita.compiler.passes.padded import padded
from partita.dsl.types import Type
from tests.compiler.ops.op_cases import CASES, Case
from tests.compiler.ops.placing import equal, run
from tests.compiler.ops.test_sharding_rules import feeds

# Operations that programs have only after the passes that pad and shard.
LATER = {
    *("microbatch", "sum_of_groups", "outer_sgd", "outer_nesterov", "ema", "momentum", "orthogonalize"),
    *("running_mean", "inverse_root", "factored_inverse_root", "go_on", "gather_slices", "place_slice", "keep"),
    *("block_sums", "attend_block", "attend_block_gradient", "block_ends", "delta_scan_blocks", "linear_scan_blocks"),
}
FAR = 1 << 40
PADDED = [
    case
    for case in CASES
    if not isinstance(case.op, Update) and case.op.name not in LATER and not getattr(case.op, "block", 0)
]


def graph_of(op: Op, types: Sequence[Type], garbage: bool) -> Graph:
    """The graph of one operation, whose results are outputs. With `garbage`, operands that are floats are quotients, of
    zeros where they are padded: nothing is known of these; and integers are sums with a number, which is no index.
    """
    build = Builder()
    build.stage = 0
    inputs, operands = [], []
    for i, type in enumerate(types):
        x = build.value(f"x{i}", type)
        inputs.append(Input(x.name, x))
        if garbage and type.is_float and type.axes:
            one = build.value(f"one{i}", type)
            inputs.append(Input(one.name, one))
            x = build.apply(Pointwise("divide"), x, one, name=f"q{i}")
        elif garbage and type.dtype == "i64" and type.axes:
            x = build.apply(Pointwise("add"), x, build.apply(Constant(FAR, "i64")), name=f"q{i}")
        operands.append(x)
    results = build.apply_all(op, *operands, name="result")
    loss = build.apply(Constant(0.0, "f32"), name="loss")
    asked = tuple((f"y{i}", value) for i, value in enumerate(results))
    return Graph("one", tuple(inputs), (), tuple(build.nodes), loss, asked=asked)


def results_of(graph: Graph, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph from its inputs, padded with zeros."""
    values: dict[Value, torch.Tensor] = {}
    for each in graph.inputs:
        x = given[each.name]
        more = [size - own for size, own in zip(each.value.type.shape, x.shape, strict=True)]
        values[each.value] = torch.nn.functional.pad(x, [n for size in reversed(more) for n in (0, size)])
    for node in graph.nodes:
        operands = [values[value].clone() for value in node.inputs]
        if isinstance(node.op, Constant):
            made = [torch.full((), node.op.value, dtype=DTYPES[node.op.dtype])]
        else:
            made = run(node.op, [value.type for value in node.inputs], operands, {})
        values.update(zip(node.outputs, made, strict=True))
    return [values[value] for _, value in graph.asked]


DTYPES = {
    **{"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16},
    **{"i64": torch.int64, "i32": torch.int32, "bool": torch.bool},
}


def paddings(case: Case) -> Iterator[tuple[str, ...]]:
    """The axes of a case's operands and results, each alone, and all together."""
    types = case.types(0)
    names = dict.fromkeys(name for type in (*types, *case.op.infer(*types)) for name in type.names)
    yield from ((name,) for name in names)
    yield tuple(names)


@pytest.mark.parametrize("garbage", [False, True], ids=["zeros", "garbage"])
@pytest.mark.parametrize("case", PADDED, ids=lambda case: case.name)
def test_padding_of_any_axis_changes_no_result(case: Case, garbage: bool):
    types = case.types(0)
    generator = np.random.default_rng(1)
    operands = feeds(case, types, generator, integers=True)
    given = {f"one{i}": torch.ones_like(x) for i, x in enumerate(operands)}
    for i, x in enumerate(operands):
        given[f"x{i}"] = x - FAR if garbage and x.dtype == torch.int64 and x.dim() else x
    graph = graph_of(case.op, types, garbage)
    expected = results_of(graph, given)
    for names in paddings(case):
        every = [axis for node in graph.nodes for value in (*node.inputs, *node.outputs) for axis in value.type.axes]
        sizes = {axis.name: axis.size + 2 for axis in every if axis.name in names}
        for found, whole in zip(results_of(padded(graph, sizes), given), expected, strict=True):
            assert found.shape == whole.shape, f"along {', '.join(names)}: {found.shape} of {whole.shape}"
            assert equal(found, whole), f"along {', '.join(names)}: {(found - whole).abs().max()} apart"
