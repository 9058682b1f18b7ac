"""Joint graph → joint graph: values inside scopes named by `recompute` are not kept for the backward pass.

Within such a scope (one call of a block, one iteration of a repeat), backward nodes read copies of forward values,
recomputed from the scope's inputs just before they are needed. Values that enter or leave the scope are kept. Random
numbers are functions of their coordinates, so a second draw is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import evolve

from partita.compiler.graph import Graph, Node, Phase, Value, within, without_iterations
from partita.compiler.naming import named_scopes
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import RecomputeRule

RematScope = tuple[str, int | None]


def remat_scopes(graph: Graph, rules: Sequence[RecomputeRule], again: Collection[str] = ()) -> Graph:
    """Apply the rules; `again` are paths of further calls and iterations, from `recompute auto`.

    Raises Refused: E0409 (a name that matches nothing).
    """
    scopes = _scopes(graph, rules)
    if not scopes and not again:
        return graph
    scope_of = {value: _scope_of(node, scopes, again) for node in graph.nodes for value in node.outputs}
    producers = graph.producers()
    leaving = _leaving(graph, scope_of)
    copies: dict[Value, Value] = {}
    nodes: list[Node] = []

    def inner(value: Value) -> bool:
        node = producers.get(value)
        return (
            node is not None
            and node.phase is Phase.FORWARD
            and scope_of[value] is not None
            and value not in leaving
            and node.op.literal is None
        )

    def copy(target: Value) -> None:
        """Append the nodes that recompute `target`, in order; iterative, since scopes can be long."""
        stack = [target]
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
            nodes.append(node.changed(inputs=inputs, outputs=outputs, phase=Phase.BACKWARD))
            stack.pop()

    for node in graph.nodes:
        if node.phase in (Phase.BACKWARD, Phase.WEIGHT):
            for value in node.inputs:
                if inner(value):
                    copy(value)
            node = node.changed(inputs=tuple(copies[v] if inner(v) else v for v in node.inputs))
        nodes.append(node)
    return evolve(graph, nodes=tuple(nodes))


def _scopes(graph: Graph, rules: Sequence[RecomputeRule]) -> list[tuple[str, bool]]:
    """The recomputed scopes, as `named_scopes` has them, and whether each is a repeat (then each iteration is an
    instance).
    """
    declared = {without_iterations(scope.path): scope.repeat for scope in graph.scopes}
    scopes: list[tuple[str, bool]] = []
    for rule in rules:
        for path, span in zip(rule.paths, rule.path_spans, strict=True):
            if path == ("auto",):
                continue
            if path == ("all",):
                paths = _largest(declared)
                if not paths:
                    raise refuse(
                        "E0409",
                        "`recompute all` has nothing to recompute: the model has neither repeats nor blocks",
                        span,
                        help="make blocks of its parts: only the inputs of their calls are kept then",
                    )
            else:
                paths = named_scopes(graph.scopes, path)
            if not paths:
                raise refuse(
                    "E0409",
                    f"`{'.'.join(path)}` is not a block or repeat of the model",
                    span,
                    help=f"it has: {', '.join(dict.fromkeys(s.name for s in graph.scopes)) or 'none'}",
                )
            for scope in paths:
                numbered = scope.rpartition(".")[2].isdigit()
                scopes.append((scope, not numbered and declared[without_iterations(scope)]))
    return scopes


def _largest(declared: Mapping[str, bool]) -> list[str]:
    """What `recompute all` recomputes: the iterations of the outermost repeats; without any, the outermost calls of
    blocks. One that contains all others would have to be recomputed as a whole, which saves nothing: those within it
    are taken instead.
    """
    repeats = [scope for scope, repeat in declared.items() if repeat]
    scopes, inner = [], repeats or list(declared)
    while inner:
        scopes = [scope for scope in inner if not any(within(scope, other) for other in inner)]
        inner = [scope for scope in inner if len(scopes) == 1 and within(scope, scopes[0])] if not repeats else []
    return scopes


def _instance(scope: str, scopes: Sequence[tuple[str, bool]], again: Collection[str]) -> str | None:
    """The outermost recomputed call or iteration that contains a scope."""
    parts = scope.split(".")
    plain: list[str] = []
    for i, part in enumerate(parts):
        own, number = ".".join(parts[: i + 1]), part.isdigit()
        if not number:
            plain.append(part)
        every = ".".join(plain)
        # An iteration of a repeat, of this one or of all of its name; or a call.
        named = {(every, True), (".".join(parts[:i]), True)} if number else {(every, False)}
        if own in again or not {(own, False), *named}.isdisjoint(scopes):
            return own
    return None


def _scope_of(node: Node, scopes: Sequence[tuple[str, bool]], again: Collection[str]) -> RematScope | None:
    """The instance that contains a node, and its stage: a stage boundary within a scope makes two instances of it."""
    instance = _instance(node.scope, scopes, again)
    return None if instance is None else (instance, node.stage)


def _leaving(graph: Graph, scope_of: dict[Value, RematScope | None]) -> set[Value]:
    """Forward values that are results, or that a forward node outside their instance reads."""
    leaving = set(graph.outputs())
    for node in graph.nodes:
        if node.phase is Phase.FORWARD:
            own = scope_of[node.outputs[0]]
            leaving.update(value for value in node.inputs if scope_of.get(value) not in (None, own))
    return leaving
