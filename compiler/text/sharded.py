"""The textual form of a sharded graph: that of the graph (`partita.compiler.text.graph`), and for each parameter that
is not replicated a line with its layouts: for compute, of its master, of its gradient and of its optimizer state.

    graph tiny
    …
    layouts tiny.w compute {ffn/tensor} param {ffn/tensor} grad {ffn/tensor} state {ffn/tensor embed/data}

The recorded choices of layouts are not part of it: they serve explanations, and no pass reads them.
"""

from __future__ import annotations

from partita.compiler.graph import Graph
from partita.compiler.layout import REPLICATED
from partita.compiler.passes.shard.shard import ParameterLayouts, ShardedGraph
from partita.compiler.text.graph import graph_text, layout_text, matched, parse_graph, parse_layout

KINDS = ("compute", "param", "grad", "state")
LAYOUTS = "".join(rf" {kind} {{([^}}]*)}}" for kind in KINDS)
ALL_REPLICATED = ParameterLayouts(REPLICATED, REPLICATED, REPLICATED, REPLICATED)


def layouts_text(layouts: ParameterLayouts) -> str:
    """` compute {} param {} grad {} state {embed/data}`."""
    return "".join(f" {kind} {layout_text(getattr(layouts, kind))}" for kind in KINDS)


def sharded_text(sharded: ShardedGraph, places: bool = True) -> str:
    """The sharded graph as text; with `places`, nodes have their source locations."""
    usual = layouts_text(ALL_REPLICATED)
    lines = (
        f"layouts {name}{text}\n"
        for name, layouts in sharded.parameters.items()
        if (text := layouts_text(layouts)) != usual
    )
    return graph_text(sharded.graph, places) + "".join(lines)


def parse_sharded(text: str) -> ShardedGraph:
    """Parses a sharded graph. Raises ValueError with the offending line."""
    layouts: dict[str, ParameterLayouts] = {}

    def read(rest: str) -> None:
        match = matched(rf"(\S+){LAYOUTS}", rest)
        layouts[match[1]] = ParameterLayouts(*map(parse_layout, match.groups()[1:]))

    graph: Graph = parse_graph(text, {"layouts": read})
    parameters = {each.name: layouts.pop(each.name, ALL_REPLICATED) for each in graph.parameters}
    if layouts:
        raise ValueError(f"there is no parameter {', '.join(layouts)}")
    return ShardedGraph(graph, parameters, {})
