"""Which parameters are sparse: tables whose gradients stay the rows that a step looks up.

Takes the graph over the full batch, with gradients, and the updates of parameters. A parameter is sparse if all that
the step does with it is to look up rows along one axis, by ids of the batch; and if its update changes no other rows,
or is told to leave them (`sparse = true`).
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from partita.compiler.graph import Graph, Parameter
from partita.compiler.ops.lookup import ScatterAdd
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.sparse import UpdateRows
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.source import Span
from partita.dsl.spec import Train


@frozen
class Tables:
    """For each sparse parameter, the axis along which rows are looked up; for each other one that is looked up in, or
    whose update is told to be sparse, why it is not.
    """

    over: Mapping[str, str]
    dense: Mapping[str, str]


def tables(graph: Graph, updates: Mapping[str, Update], batch: str, slices: int, train: Train) -> Tables:
    """Find the sparse parameters. `slices` are the parts of a sequence in which microbatches are cut."""
    made = {node.outputs[0]: node for node in graph.nodes if isinstance(node.op, ScatterAdd)}
    given: dict[str, list[object]] = {}
    for each in graph.gradients:
        given.setdefault(each.parameter, []).append(made.get(each.value))
    over: dict[str, str] = {}
    dense: dict[str, str] = {}
    for parameter in graph.parameters:
        update = updates.get(parameter.name)
        if update is None:
            continue
        nodes = [node for value, node in made.items() if node in given.get(parameter.name, ())]
        axes = {node.op.over for node in nodes if isinstance(node.op, ScatterAdd)}
        terms = given.get(parameter.name, [])
        others = [each.value for each in graph.gradients if each.parameter != parameter.name]
        if not nodes:
            if update.lazy:
                dense[parameter.name] = "it is not looked up in"
        elif not (update.lazy or update.keeps_rows):
            dense[parameter.name] = "its optimizer updates all rows"
        elif len(axes) > 1 or any(each is None for each in terms) or any(n.outputs[0] in others for n in nodes):
            dense[parameter.name] = "it is not only looked up in, along one axis"
        elif not all(value.type.has(batch) for node in nodes for value in node.inputs):
            dense[parameter.name] = f"rows are looked up that do not depend on `{batch}`"
        elif update.whole:
            dense[parameter.name] = "its optimizer updates it as a whole"
        elif train.ema is not None:
            dense[parameter.name] = "`ema` keeps a mean of all rows"
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


def by_rows(updates: Mapping[str, Update], over: Mapping[str, str]) -> dict[str, Update]:
    """The updates, those of sparse parameters of their rows."""
    return {name: UpdateRows.of(update, over[name]) if name in over else update for name, update in updates.items()}


def check_lazy(found: Tables, graph: Graph, updates: Mapping[str, Update], spans: Mapping[str, Span | None]) -> None:
    """Refuse (E0416) an update that is told to be sparse, of what cannot be."""
    wrong: list[Parameter] = [each for each in graph.parameters if each.name in found.dense and updates[each.name].lazy]
    refused = [
        refuse(
            "E0416",
            f"the update of `{each.name}` cannot be sparse: {found.dense[each.name]}",
            spans.get(each.name) or each.span,
            notes=[f"{each.name}: {each.master}" + (f", declared at {each.span.place}" if each.span else "")],
            help="leave out `sparse`, or `update embeddings -> …` for the tables alone",
        )
        for each in wrong
    ]
    if refused:
        raise Refused(diagnostic for each in refused for diagnostic in each.diagnostics)
