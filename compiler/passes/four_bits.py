"""Matrices that are stored in four bits: their parts are parameters in their place, of which each reader makes numbers.

A matrix is made anew for each operation that reads it, forward and backward: so there is one at a time. Each reader has
the same numbers, as one that kept them would.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from partita.compiler.graph import Builder, Graph, Parameter, Value
from partita.compiler.ops.four_bits import Dequantize, FourBits


def in_four_bits(graph: Graph) -> Graph:
    """The graph, differentiated or not, with the parameters that have blocks in four bits."""
    forms = {
        each.value: FourBits(each.value.type, each.blocks[1], each.blocks[0])
        for each in graph.parameters
        if each.blocks
    }
    if not forms:
        return graph
    build, parts, parameters = Builder(graph.names), dict[Value, tuple[Value, ...]](), list[Parameter]()
    for each in graph.parameters:
        form = forms.get(each.value)
        own = [each] if form is None else list(_parts(build, each, form))
        parameters += own
        if form is not None:
            parts[each.value] = tuple(part.value for part in own)
    for node in graph.nodes:
        read = [value for value in dict.fromkeys(node.inputs) if value in forms]
        build.at(node).phase = node.phase
        whole = {value: _whole(build, value, forms[value], parts[value]) for value in read}
        build.nodes.append(
            evolve(node, inputs=tuple(whole.get(value, value) for value in node.inputs)) if read else node
        )
    return evolve(graph, nodes=tuple(build.nodes), parameters=tuple(parameters))


def _parts(build: Builder, parameter: Parameter, form: FourBits) -> Iterator[Parameter]:
    for name, type in form.types.items():
        value = build.value(f"{parameter.name}.{name}", type)
        initial = form.begins(name, parameter.initial)
        yield evolve(parameter, value=value, master=type, initial=initial, decays=False, blocks=None)


def _whole(build: Builder, value: Value, form: FourBits, parts: tuple[Value, ...]) -> Value:
    op = Dequantize(form.whole.axes, form.order, form.block, form.whole.dtype)
    return build.derive(op, value, *parts, ending="whole")
