"""Joint graph → joint graph: inner values of the scopes that `recompute` names are not kept for the backward pass.

Within such a scope (one call of a block, one turn of a repeat) a backward node that reads a forward value gets a
copy, computed from the scope's own inputs just before it is needed. What enters and what leaves the scope is kept.
Random numbers are functions of their coordinates, so that a second drawing is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import evolve

from partita.compiler.graph import Graph, Node, Phase, Value, without_turns
from partita.compiler.lowering.placement import named_scopes
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import RecomputeRule

Home = tuple[str, int | None]


def recompute(graph: Graph, rules: Sequence[RecomputeRule], again: Collection[str] = ()) -> Graph:
    """Apply the rules; and compute `again` the calls and turns of these paths, for `recompute auto`.

    Raises Refused: E0409 (a name that matches nothing).
    """
    scopes = _scopes(graph, rules)
    if not scopes and not again:
        return graph
    home = {value: _home(node, scopes, again) for node in graph.nodes for value in node.outputs}
    producers = graph.producers()
    leaving = _leaving(graph, home)
    copies: dict[Value, Value] = {}
    nodes: list[Node] = []

    def inner(value: Value) -> bool:
        node = producers.get(value)
        return (
            node is not None
            and node.phase is Phase.FORWARD
            and home[value] is not None
            and value not in leaving
            and node.op.literal is None
        )

    def copy(wanted: Value, phase: Phase) -> None:
        """Append what makes `wanted` again, in order; iterative, since scopes can be long."""
        stack = [wanted]
        while stack:
            value = stack[-1]
            if value in copies:
                stack.pop()
                continue
            node = producers[value]
            missing = [v for v in node.inputs if inner(v) and v not in copies]
            if missing:
                stack.extend(missing)
                continue
            outputs = tuple(v.derived(f"{v.name}.again") for v in node.outputs)
            copies.update(zip(node.outputs, outputs, strict=True))
            inputs = tuple(copies.get(v, v) if inner(v) else v for v in node.inputs)
            nodes.append(evolve(node, inputs=inputs, outputs=outputs, phase=phase))
            stack.pop()

    for node in graph.nodes:
        if node.phase in (Phase.BACKWARD, Phase.WEIGHT):
            for value in node.inputs:
                if inner(value):
                    copy(value, Phase.BACKWARD)
            node = evolve(node, inputs=tuple(copies[v] if inner(v) else v for v in node.inputs))
        nodes.append(node)
    return evolve(graph, nodes=tuple(nodes))


def _scopes(graph: Graph, rules: Sequence[RecomputeRule]) -> list[tuple[str, bool]]:
    """Paths without turns of what is recomputed, and whether each is a repeat (whose turns are the instances)."""
    declared = {without_turns(scope.path): scope.repeat for scope in graph.scopes}
    found: list[tuple[str, bool]] = []
    for rule in rules:
        for path, span in zip(rule.paths, rule.path_spans, strict=True):
            if path == ("auto",):
                continue
            if path == ("all",):
                # The turns of the outermost repeats: their inputs are what is kept.
                paths = [scope for scope, repeat in declared.items() if repeat]
            else:
                paths = named_scopes(graph, path)
            if not paths:
                raise refuse(
                    "E0409",
                    f"`{'.'.join(path)}` is not a block or repeat of the model",
                    span,
                    help=f"it has: {', '.join(dict.fromkeys(s.name for s in graph.scopes)) or 'none'}",
                )
            found.extend((scope, declared[scope]) for scope in paths)
    return found


def _instance(scope: str, scopes: Sequence[tuple[str, bool]], again: Collection[str]) -> str | None:
    """The outermost recomputed call or turn that a scope stands in."""
    parts = scope.split(".")
    plain: list[str] = []
    for i, part in enumerate(parts):
        if again and ".".join(parts[: i + 1]) in again:
            return ".".join(parts[: i + 1])
        if not part.isdigit():
            plain.append(part)
            if (".".join(plain), False) in scopes:
                return ".".join(parts[: i + 1])
        elif (".".join(plain), True) in scopes:
            return ".".join(parts[: i + 1])
    return None


def _home(node: Node, scopes: Sequence[tuple[str, bool]], again: Collection[str]) -> Home | None:
    """The instance that a node belongs to, and its stage: a cut through a scope makes two instances of it."""
    instance = _instance(node.scope, scopes, again)
    return None if instance is None else (instance, node.stage)


def _leaving(graph: Graph, home: dict[Value, Home | None]) -> set[Value]:
    """Forward values that a forward node outside their instance reads, or that are results."""
    leaving = set(graph.outputs())
    for node in graph.nodes:
        if node.phase is Phase.FORWARD:
            own = home[node.outputs[0]]
            leaving.update(value for value in node.inputs if home.get(value) not in (None, own))
    return leaving
