"""Says what lies in the host's memory, as `offload` asks: parameters, with what the optimizer keeps of them; and values
of a stage, between F and the backward pass.

Values are those that F makes, or receives, and that the backward pass reads, if one of the two is inside of a named
block or repeat. A view goes with the tensor whose memory it shares. What a stage has anyway stays: inputs, parameters
and what the prologue makes, constants, and what slices of a sequence share. Nodes stay as they are, since a copy
changes nothing that they read; which microbatches are copied, and when, is up to the schedule.

What reads copies of parameters is in `partita.compiler.passes.prefetch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve

from partita.compiler.analysis.liveness import roots
from partita.compiler.graph import Graph, Node, Parameter, Phase, Value
from partita.compiler.naming import is_in, matches, named_scopes
from partita.compiler.ops.slices import OfSlices
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.dsl.check.layouts import CLASSES, PARAM
from partita.dsl.config.builtins import ALL
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.spec import OffloadRule
from partita.dsl.syntax.source import Span

# The scopes of a path; None: all.
Scopes = Sequence[str] | None


def offloaded(partitioned: PartitionedGraph, rules: Sequence[OffloadRule]) -> PartitionedGraph:
    """The same stages, which say what the rules offload. Raises Refused (E0409) for a name that matches nothing."""
    named = [scopes for _, _, scopes in _named(partitioned.graph, rules)]
    if not named:
        return partitioned
    stages = tuple(evolve(each, offloaded=tuple(_chosen(each, named))) for each in partitioned.stages)
    return evolve(partitioned, stages=stages)


def without_effect(partitioned: PartitionedGraph, rules: Sequence[OffloadRule]) -> Iterator[Diagnostic]:
    """Warnings (W0301) of names for which no stage keeps anything."""
    for path, span, scopes in _named(partitioned.graph, rules):
        if not any(True for stage in partitioned.stages for _ in _chosen(stage, [scopes])):
            yield Diagnostic(
                "W0301",
                f"`offload {path}` applies to nothing: it keeps nothing for the backward pass",
                span,
                help="remove it",
            )


def parameters_on_host(graph: Graph, rules: Sequence[OffloadRule]) -> frozenset[str]:
    """The parameters that rules keep in the host's memory: all (`param`), or those that they name. Of a parameter in
    parts, each is one.
    """
    paths = {path for rule in rules for path in rule.paths}
    return frozenset(
        each.name
        for each in (graph.parameters if paths else ())
        if not each.buffer and ((PARAM,) in paths or any(_is(each, path) for path in paths))
    )


def activation_paths(graph: Graph, rule: OffloadRule) -> list[int]:
    """The positions of those paths of a rule that do not name parameters, or a class of tensors."""
    return [
        i
        for i, path in enumerate(rule.paths)
        if path[0] not in CLASSES and not any(_is(each, path) for each in graph.parameters)
    ]


def _is(parameter: Parameter, path: Sequence[str]) -> bool:
    """Whether a path names a parameter, or what it is a part of."""
    return matches(path, parameter.name if parameter.part is None else parameter.part.name)


def _named(graph: Graph, rules: Sequence[OffloadRule]) -> Iterator[tuple[str, Span, Scopes]]:
    """Each path of the rules, where it stands, and its scopes."""
    for rule in rules:
        for i in activation_paths(graph, rule):
            path, span = rule.paths[i], rule.path_spans[i]
            scopes = None if path == (ALL,) else named_scopes(graph.scopes, path)
            if scopes == []:
                raise refuse(
                    "E0409",
                    f"`{'.'.join(path)}` is not a block, repeat or parameter of the model",
                    span,
                    help=f"it has: {', '.join(dict.fromkeys(s.name for s in graph.scopes)) or 'none'}",
                )
            yield ".".join(path), span, scopes


def _chosen(stage: StageGraph, named: Sequence[Scopes]) -> Iterator[Value]:
    """The values of a stage that F makes and the backward pass reads, one of the two in one of the scopes."""
    alias_root = roots(stage.nodes)
    makers = {v: node for node in stage.nodes if node.phase is Phase.FORWARD for v in node.outputs}
    saved: dict[Value, None] = {}
    inside: set[Value] = set()  # the memory of what has to do with the scopes
    for node in stage.nodes:
        if node.phase not in (Phase.BACKWARD, Phase.WEIGHT):
            continue
        in_scope = any(_inside(node, scopes) for scopes in named)
        for value in node.inputs:
            tensor = alias_root.get(value, value)
            maker = makers.get(tensor)
            if (
                value in makers
                and maker is not None
                and maker.op.literal is None
                and not isinstance(maker.op, OfSlices)
            ):
                saved[value] = None
                if in_scope or any(_inside(maker, scopes) for scopes in named):
                    inside.add(tensor)
    yield from (value for value in makers if value in saved and alias_root.get(value, value) in inside)


def _inside(node: Node, scopes: Scopes) -> bool:
    return scopes is None or any(is_in(node.scope, scope) for scope in scopes)
