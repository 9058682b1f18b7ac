"""What docs/reference says of dtypes: at bf16, what is summed, normalized or stored is f32."""

from __future__ import annotations

from functools import cache

import pytest

from partita.compiler.graph import Graph, Node
from partita.compiler.ops.loss import NegativeLogLikelihood
from partita.compiler.ops.normalize import Normalize
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.reduce import Reduce
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.dsl.load import load
from tests.files import ROOT

FILES = ROOT / "tests" / "planted" / "files"


@cache
def compiled(name: str) -> Compilation:
    spec, diagnostics = load(FILES / f"{name}.par", ["train.precision=bf16"])
    assert spec is not None, diagnostics
    return compile_spec(spec)


def functions(graph: Graph, *names: str) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, Pointwise) and node.op.function in names]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.par")))
def test_what_lasts_is_wide(name: str):
    """Parameters that are trained, as they are stored, their gradients, states of the optimizer, the loss and metrics;
    but for the states of the optimizer whose point it is that they are not.
    """
    state = compiled(name)
    frozen = {each.name for each in state.forward.parameters if not each.trained and not each.buffer}
    lasting = [each for each in state.program.parameters if each.type.is_float and each.name not in frozen]
    assert {record.type.dtype for record in lasting} == {"f32"}
    assert {each.type.dtype for stage in state.program.stages for each in stage.accumulators} <= {"f32", "i64"}
    for each in state.update.parameters:
        assert each.gradient.type.dtype == "f32"
        coded = state.rules[each.name].call.name == "adamw_8bit"
        assert {value.type.dtype for value in each.states} <= ({"f32", "u8"} if coded else {"f32"})
    assert {value.type.dtype for _, value in (("", state.forward.loss), *state.forward.metrics)} <= {"f32", "i64"}
    # Of a sparse table the rows are cast that a step looks up.
    wide = set(state.tables.over)
    types = [parameter.value.type for parameter in state.forward.parameters if parameter.name not in wide]
    assert {type.dtype for type in types if type.axes and type.is_float} == {"bf16"}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.par")))
def test_sums_and_losses_are_wide(name: str):
    graph = compiled(name).forward
    assert graph is not None
    for node in graph.nodes:
        if isinstance(node.op, Reduce) and node.op.function == "sum" and node.inputs[0].type.is_float:
            assert node.output.type.dtype == "f32", node
        if isinstance(node.op, NegativeLogLikelihood):
            assert {value.type.dtype for value in node.outputs} == {"f32"}
        if isinstance(node.op, Normalize):
            assert node.outputs[1].type.dtype == "f32"
