"""Warnings about operations of the file's own that undo data parallelism, since they do not declare a split."""

from __future__ import annotations

from collections.abc import Iterator

from partita.compiler.graph import Graph, Phase
from partita.compiler.layout import global_type
from partita.compiler.ops.custom import Custom
from partita.compiler.passes.shard.defaults import DefaultLayouts
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.syntax.source import Span


def undeclared_splits(graph: Graph, defaults: DefaultLayouts, batch: str) -> Iterator[Diagnostic]:
    """W0310 for each place of a sharded graph where an operation gathers the batch that the layout splits."""
    warned: set[Span | None] = set()
    for node in graph.nodes:
        help = node.op.splitting_help(batch) if isinstance(node.op, Custom) else None
        if help is None or node.phase is not Phase.FORWARD or node.span in warned:
            continue
        for value in node.inputs:
            whole = global_type(value.type, value.layout, defaults.mesh.sizes)
            default = defaults.default(value.tensor, whole, node.span)
            gathered = [over for over, state in default.states if batch == state != value.layout.state(over)]
            if gathered:
                warned.add(node.span)
                ranks = f"`{gathered[0]}` of {defaults.mesh.sizes[gathered[0]]}"
                message = f"the ranks along {ranks} all compute `{node.op.label}` for the whole `{batch}`"
                notes = (f"{value.name}: {whole}, gathered along `{gathered[0]}`",)
                yield Diagnostic("W0310", message, node.span, notes, help)
                break
