"""Which parameters are sparse: tables whose gradients stay the rows that a step looks up.

Takes the graph over the full batch, with gradients, and the updates of parameters. A parameter is sparse if all that
the step does with it is to look up rows along one axis, by ids of the batch; and if its update changes no other rows,
or is told to leave them (`sparse = true`).
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from partita.compiler.graph import Builder, Graph, Node, Parameter, Value, readers_of, substitute
from partita.compiler.ops.lookup import ScatterAdd
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.pointwise import Cast
from partita.compiler.ops.sparse import UpdateRows
from partita.compiler.ops.traits import LooksUp
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.spec import Train
from partita.dsl.syntax.source import Span


@frozen
class Tables:
    """For each sparse parameter, the axis along which rows are looked up; for each other one that is looked up in, or
    whose update is told to be sparse, why it is not.
    """

    over: Mapping[str, str]
    dense: Mapping[str, str]


def tables(graph: Graph, updates: Mapping[str, Update], batch: str, slices: int, train: Train) -> Tables:
    """Find the sparse parameters. `slices` are the parts of a sequence in which microbatches are cut."""
    producers = {node.outputs[0]: node for node in graph.nodes if isinstance(node.op, ScatterAdd) and node.op.adds_rows}
    contributions: dict[str, list[object]] = {}
    for each in graph.gradients:
        contributions.setdefault(each.parameter, []).append(producers.get(each.value))
    over: dict[str, str] = {}
    dense: dict[str, str] = {}
    for parameter in graph.parameters:
        update = updates.get(parameter.name)
        if update is None:
            continue
        nodes = [node for value, node in producers.items() if node in contributions.get(parameter.name, ())]
        axes = {node.op.over for node in nodes if isinstance(node.op, ScatterAdd)}
        terms = contributions.get(parameter.name, [])
        if not nodes:
            if update.lazy:
                dense[parameter.name] = "it is not looked up in"
            continue
        others = {each.value for each in graph.gradients if each.parameter != parameter.name}
        if not update.may_be_sparse:
            dense[parameter.name] = "its optimizer updates all rows"
        elif len(axes) > 1 or any(each is None for each in terms) or any(n.outputs[0] in others for n in nodes):
            dense[parameter.name] = "it is not only looked up in, along one axis"
        elif not all(value.type.has(batch) for node in nodes for value in node.inputs):
            dense[parameter.name] = f"rows are looked up that do not depend on `{batch}`"
        elif not all(update.by_rows(axis) for axis in axes):
            dense[parameter.name] = "its optimizer tells rows apart along another axis"
        elif update.whole:
            dense[parameter.name] = "its optimizer updates it as a whole"
        elif train.ema is not None:
            dense[parameter.name] = "`ema` keeps a mean of all rows"
        elif train.delay:
            dense[parameter.name] = "gradients of earlier steps have all rows"
        elif train.dense and not update.lazy:
            dense[parameter.name] = "this is the reference, which updates all rows"
        elif slices > 1:
            dense[parameter.name] = "microbatches are cut into slices"
        elif parameter.part is not None:
            dense[parameter.name] = "all ranks of the pipeline share its rows"
        elif parameter.value.type != parameter.master:
            dense[parameter.name] = f"what computes is a copy of it in {parameter.value.type.dtype}"
        else:
            (over[parameter.name],) = axes
    return Tables(over, dense)


def cast_by_rows(graph: Graph, updates: Mapping[str, Update]) -> Graph:
    """The graph in which rows are cast after they are looked up, not all of a table before, where the table may be
    sparse and what computes has a narrower dtype than its master.
    """
    readers = readers_of(graph.nodes)
    masters: dict[Value, Value] = {}
    for parameter in graph.parameters:
        value, update = parameter.value, updates.get(parameter.name)
        own = readers.get(value, [])
        looked_up = all(isinstance(node.op, LooksUp) and node.inputs[0] is not value for node in own)
        if update is not None and update.may_be_sparse and looked_up and own and value.type != parameter.master:
            masters[value] = evolve(value, type=parameter.master)
    if not masters:
        return graph
    build = Builder(graph.names)
    nodes: list[Node] = []
    for node in graph.nodes:
        local = substitute(node, masters)
        if local is not node:
            dtype = local.inputs[1].type.dtype
            rows = build.part(node.output, "rows", node.output.type.with_dtype(dtype))
            nodes.append(evolve(local, outputs=(rows,)))
            local = evolve(node, op=Cast(node.output.type.dtype), inputs=(rows,))
        nodes.append(local)
    parameters = tuple(evolve(each, value=masters.get(each.value, each.value)) for each in graph.parameters)
    return evolve(graph, nodes=tuple(nodes), parameters=parameters)


def sparse_updates(updates: Mapping[str, Update], over: Mapping[str, str]) -> dict[str, Update]:
    """The updates, those of sparse parameters of their rows."""
    return {name: UpdateRows.of(update, over[name]) if name in over else update for name, update in updates.items()}


def check_lazy(sparse: Tables, graph: Graph, updates: Mapping[str, Update], spans: Mapping[str, Span | None]) -> None:
    """Refuse (E0416) an update that is told to be sparse, of what cannot be."""
    wrong: list[Parameter] = [
        each for each in graph.parameters if each.name in sparse.dense and updates[each.name].lazy
    ]
    refused = [
        refuse(
            "E0416",
            f"the update of `{each.name}` cannot be sparse: {sparse.dense[each.name]}",
            spans.get(each.name) or each.span,
            notes=[f"{each.name}: {each.master}" + (f", declared at {each.span.place}" if each.span else "")],
            help="leave out `sparse`, or `update embeddings -> …` for the tables alone",
        )
        for each in wrong
    ]
    if refused:
        raise Refused(diagnostic for each in refused for diagnostic in each.diagnostics)
