"""Operations that prevent the capture of a step (`graphs = true`), which is launched as one CUDA graph after the first.

The launches of a graph have the same arguments each time, without host intervention. So everything that differs from
step to step must be in memory: batches and parameters do, random numbers do not, as their keys are computed on
the host from the number of the step.
"""

from __future__ import annotations

from partita.compiler.graph import Node
from partita.compiler.state import Cut
from partita.dsl.check.exclusions import uncaptured
from partita.dsl.diagnostic import Refused


def check_captured(state: Cut) -> None:
    """Raises Refused: E0422 for each place that cannot be captured."""
    inside = (node for nodes in state.forward.inside.values() for node in nodes)
    stages = (node for stage in state.partitioned.stages for node in stage.nodes)
    places = {(node.span, why): None for node in (*state.forward.nodes, *inside, *stages) if (why := _varies(node))}
    diagnostics = [uncaptured(f"this {why}", span) for span, why in places]
    if diagnostics:
        raise Refused(diagnostics)


def _varies(node: Node) -> str:
    return node.op.capture_blocker([value.type for value in node.inputs], [value.type for value in node.outputs])
