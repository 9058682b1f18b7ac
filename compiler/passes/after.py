"""Checks of what becomes of parameters after their update: it is made of parameters and buffers alone."""

from __future__ import annotations

from collections.abc import Collection

from partita.compiler.graph import BufferWrite, Graph
from partita.compiler.passes.ancestors import ancestors
from partita.dsl import spec
from partita.dsl.diagnostic import Refused, refuse


def check_after(
    graph: Graph, updated: Collection[str], train: spec.Train, offload: spec.OffloadRule | None = None
) -> None:
    """Refuse (E0225) what depends on a batch, or changes a parameter that no step updates; (E0407) what is kept of
    parameters elsewhere, and would not be changed with them.
    """
    inputs = {each.value for each in graph.inputs}
    for each in (each for each in graph.updates if each.after):
        needed = ancestors(graph, [each.value])
        drawn = any(node.op.random for node in graph.nodes if needed.intersection(node.outputs))
        if drawn or needed & inputs:
            help = "keep what a step needs of it in a buffer: `update peak = max(…)`, then read `peak`"
            raise _refused(each, "depends on the batch", help)
        if each.buffer not in updated:
            raise _refused(each, "changes what no rule of the optimizer updates", "train it, or remove this")
        kept = {"`ema`": train.ema is not None, "`sync = paired()`": train.paired, "`offload`": offload is not None}
        for what in (name for name, said in kept.items() if said):
            raise _refused(
                each, f"does not go with {what}, which keeps parameters as updates left them", f"drop {what}"
            )


def _refused(each: BufferWrite, why: str, help: str) -> Refused:
    return refuse("E0225", f"`after update` of `{each.buffer}` {why}", each.span, help=help)
