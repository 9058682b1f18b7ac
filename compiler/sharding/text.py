"""The textual form of a sharded graph: that of the graph (`partita.compiler.text`), and a line for each parameter that
lies otherwise than whole: how it computes, and how its master, gradient and optimizer state are stored.

    graph tiny
    …
    layouts tiny.w compute {ffn/tensor} param {ffn/tensor} grad {ffn/tensor} state {ffn/tensor embed/data}

The choices of layouts, which explanations are made of, are not part of it: no pass reads them.
"""

from __future__ import annotations

from partita.compiler.graph import Graph
from partita.compiler.layout import WHOLE
from partita.compiler.sharding.shard import ParameterLayouts, ShardedGraph
from partita.compiler.text import graph_text, layout_text, matched, parse_graph, parse_layout

KINDS = ("compute", "param", "grad", "state")
LAYOUTS = "".join(rf" {kind} {{([^}}]*)}}" for kind in KINDS)
EVERYWHERE_WHOLE = ParameterLayouts(WHOLE, WHOLE, WHOLE, WHOLE)


def layouts_text(layouts: ParameterLayouts) -> str:
    """` compute {} param {} grad {} state {embed/data}`."""
    return "".join(f" {kind} {layout_text(getattr(layouts, kind))}" for kind in KINDS)


def sharded_text(sharded: ShardedGraph, places: bool = True) -> str:
    """The whole sharded graph; with `places`, nodes say where in the file they are from."""
    usual = layouts_text(EVERYWHERE_WHOLE)
    lines = (
        f"layouts {name}{text}\n"
        for name, layouts in sharded.parameters.items()
        if (text := layouts_text(layouts)) != usual
    )
    return graph_text(sharded.graph, places) + "".join(lines)


def parse_sharded(text: str) -> ShardedGraph:
    """The sharded graph of a textual form. ValueError with the line where it is not one."""
    layouts: dict[str, ParameterLayouts] = {}

    def read(rest: str) -> None:
        match = matched(rf"(\S+){LAYOUTS}", rest)
        layouts[match[1]] = ParameterLayouts(*map(parse_layout, match.groups()[1:]))

    graph: Graph = parse_graph(text, {"layouts": read})
    parameters = {each.name: layouts.pop(each.name, EVERYWHERE_WHOLE) for each in graph.parameters}
    if layouts:
        raise ValueError(f"there is no parameter {', '.join(layouts)}")
    return ShardedGraph(graph, parameters, {})
