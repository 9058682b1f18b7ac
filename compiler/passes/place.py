"""Graph → placed graph: which pipeline stage each node of the forward pass runs on.

Explicit placements (`place`) come first; then iterations of the repeats that `stage` names, balanced by cost. A node
outside the iterations goes with the first one if it comes before it, otherwise with the preceding one; but never before
the stage of an operand. Without a `stage` rule, nodes go with their operands, or else with their readers.

Backward nodes are made later, on the stage of their forward node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, field, frozen

from partita.compiler.graph import Graph, Node, Value, without_iterations
from partita.compiler.naming import matches
from partita.dsl.diagnostic import refuse
from partita.dsl.paths import is_end
from partita.dsl.source import Span
from partita.dsl.spec import Layout, Mesh, PlaceRule, StageRule

# A relative tolerance: sums of floats that differ by rounding are equal.
NEAR = 1e-9
MOST_SHOWN = 4  # readers of a parameter on other stages


@frozen
class Pipeline:
    """The pipeline that a layout declares: its mesh axis (None: no pipeline), ranks, and chunks per rank."""

    axis: str | None
    ranks: int
    chunks: int
    span: Span | None = field(default=None, eq=False)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.ranks * self.chunks


def pipeline_of(layout: Layout | None, mesh: Mesh | None, chunks: int) -> Pipeline:
    """The pipeline of a layout. Raises Refused (E0404) if rules name two mesh axes."""
    if layout is None or mesh is None:
        return Pipeline(None, 1, 1)
    axes = {rule.mesh_axis: rule for rule in layout.rules if isinstance(rule, (StageRule, PlaceRule))}
    if len(axes) > 1:
        first, second = list(axes.values())[:2]
        raise refuse(
            "E0404",
            f"stages are cut over two mesh axes, `{first.mesh_axis}` and `{second.mesh_axis}`",
            second.span,
            help="use one mesh axis for the pipeline",
        )
    if not axes:
        return Pipeline(None, 1, 1)
    ((axis, rule),) = axes.items()
    return Pipeline(axis, mesh.size(axis), chunks, span=rule.span)


def place(
    graph: Graph,
    pipeline: Pipeline,
    layout: Layout | None,
    cost: Callable[[Node], float],
    like: Graph | None = None,
) -> Graph:
    """The graph with every node's stage set; iterations are balanced by the costs of another graph of the model, if it
    shall be `like` that. Raises Refused: E0403, E0404, E0409.
    """
    if pipeline.stages == 1:
        return evolve(graph, nodes=tuple(node.changed(stage=0) for node in graph.nodes))
    rules = layout.rules if layout else ()
    stage_rules = [rule for rule in rules if isinstance(rule, StageRule)]
    place_rules = [rule for rule in rules if isinstance(rule, PlaceRule)]
    balanced = graph if like is None else like
    explicit_stage = _explicit_stages(balanced, place_rules, pipeline, cost)
    iterations: dict[str, int] = {}
    if stage_rules:
        known = [explicit_stage(node) for node in balanced.nodes]
        iterations = _balanced_iterations(balanced, stage_rules, pipeline, cost, known)
    explicit = [explicit_stage(node) for node in graph.nodes]
    stages = _spread(graph, iterations, explicit)
    nodes = tuple(node.changed(stage=stage) for node, stage in zip(graph.nodes, stages, strict=True))
    placed = evolve(graph, nodes=nodes)
    _check_parameters(placed, place_rules)
    idle = sorted(set(range(pipeline.stages)) - set(stages))
    if idle and not stage_rules:
        raise refuse(
            "E0404",
            f"stage {idle[0]} of {pipeline.stages} is empty",
            pipeline.span,
            help="place operations on it, or use fewer ranks or chunks",
        )
    return placed


# ---------------------------------------------------------------- iterations


def iteration_of(scope: str, names: Mapping[str, str]) -> str | None:
    """The path of the outermost iteration that contains a scope, of the repeats in `names` (path → name)."""
    parts = scope.split(".")
    for i in range(1, len(parts)):
        if parts[i].isdigit() and ".".join(parts[:i]) in names:
            return ".".join(parts[: i + 1])
    return None


def _repeats(graph: Graph, names: Sequence[str]) -> dict[str, str]:
    return {path: name for path, name in graph.repeats.items() if name in names}


def _iterations(graph: Graph, names: Mapping[str, str]) -> list[str]:
    """All iterations of repeats in program order, including those that compute nothing; of nested repeats, only the
    outermost.
    """
    return [
        f"{scope.path}.{iteration}"
        for scope in graph.scopes
        if scope.path in names and iteration_of(scope.path, names) is None
        for iteration in range(scope.iterations or 0)
    ]


def _balanced_iterations(
    graph: Graph,
    rules: Sequence[StageRule],
    pipeline: Pipeline,
    cost: Callable[[Node], float],
    explicit: Sequence[int | None],
) -> dict[str, int]:
    """The stage of every iteration of the staged repeats, in program order."""
    (rule, *others) = rules
    if others:
        raise refuse(
            "E0404", "a layout has at most one `stage` rule", others[0].span, help="name all repeats in one rule"
        )
    names = _repeats(graph, rule.repeats)
    for repeat in rule.repeats:
        if repeat not in names.values():
            raise refuse(
                "E0409",
                f"the model has no `repeat … as {repeat}`",
                rule.span,
                help=_nearest_help([s.name for s in graph.scopes if s.repeat]),
            )
    costs = dict.fromkeys(_iterations(graph, names), 0.0)
    pending = 0.0
    current: str | None = None
    for node, stage in zip(graph.nodes, explicit, strict=True):
        current = iteration_of(node.scope, names) or current
        if stage is not None:
            continue
        if current is None:
            pending += cost(node)
        else:
            costs[current] += cost(node)
    paths = list(costs)
    if paths:
        costs[paths[0]] += pending
    stages = pipeline.stages
    if rule.counts is not None:
        if len(rule.counts) != stages or sum(rule.counts) != len(paths):
            raise refuse(
                "E0404",
                f"`stage` gives {len(rule.counts)} counts, {sum(rule.counts)} layers in all, "
                f"for {stages} stages and {len(paths)} layers",
                rule.span,
                notes=[f"{pipeline.ranks} ranks × {pipeline.chunks} chunks = {stages} stages"],
                help="give one count for each stage, adding up to the number of layers",
            )
        counts = rule.counts
    else:
        if len(paths) < stages:
            raise refuse(
                "E0403",
                f"{stages} stages for {len(paths)} iterations of `{', '.join(rule.repeats)}`",
                rule.span,
                notes=[f"{pipeline.ranks} ranks × {pipeline.chunks} chunks = {stages} stages"],
                help="use fewer ranks or chunks, or repeat more often",
            )
        counts = balance([costs[path] for path in paths], stages)
    result: dict[str, int] = {}
    position = 0
    for stage, count in enumerate(counts):
        for path in paths[position : position + count]:
            result[path] = stage
        position += count
    return result


def balance(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Counts of a split of `costs` into consecutive non-empty parts that minimizes the most expensive part.

    Of the splits with that maximum, the one with the least sum of squares, which is the most even. O(n² · parts), and
    O(n²) if costs are about equal.
    """
    total = [0.0]
    for value in costs:
        total.append(total[-1] + value)
    # Two searches: with both objectives in one, a prefix of the best split need not be the best of its costs.
    largest, _ = _cut(total, parts, max, float("inf"))
    _, counts = _cut(total, parts, lambda sum, own: sum + own * own, largest * (1 + NEAR))
    return counts


def _cut(
    total: Sequence[float], parts: int, joined: Callable[[float, float], float], most: float
) -> tuple[float, tuple[int, ...]]:
    """The cheapest split and its cost, with no part above `most`; `joined` adds a part to a cost.

    Costs are sums of floats: differences within rounding do not justify an uneven split.
    """
    n = len(total) - 1
    # best[i]: cost and counts of the first i values in the parts so far, if they can be split so.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for part in range(parts):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(part + 1, n - (parts - part - 1) + 1):
            for start in range(end - 1, part - 1, -1):
                own = total[end] - total[start]
                known = following.get(end)
                if own > most or (known is not None and joined(0.0, own) >= known[0]):
                    break  # longer parts cost even more
                before = best.get(start)
                if before is None:
                    continue
                cost = joined(before[0], own)
                if known is None or cost < known[0] * (1 - NEAR):
                    following[end] = cost, (*before[1], end - start)
        best = following
    return best[n]


# ---------------------------------------------------------------- place


def named_scopes(graph: Graph, path: Sequence[str]) -> list[str]:
    """Paths (without iterations) of the blocks and repeats that a rule's path names, by segment or declared name."""
    found = []
    declared = {without_iterations(scope.path): scope.name for scope in graph.scopes}
    for scope in declared:
        parts = scope.split(".")
        names = [declared.get(".".join(parts[: i + 1]), part) for i, part in enumerate(parts)]
        if is_end(path, scope) or names[-len(path) :] == list(path):
            found.append(scope)
    return found


def _explicit_stages(
    graph: Graph, rules: Sequence[PlaceRule], pipeline: Pipeline, cost: Callable[[Node], float]
) -> Callable[[Node], int | None]:
    """The stage that `place` rules ask for, for each node."""
    by_scope: dict[str, int] = {}
    by_iteration: dict[str, int] = {}
    by_value: dict[str, int] = {}
    for rule in rules:
        if not 0 <= rule.first <= rule.last < pipeline.stages:
            raise refuse(
                "E0404",
                f"there is no stage {max(rule.first, rule.last)}: stages are 0 to {pipeline.stages - 1}",
                rule.span,
                help=f"{pipeline.ranks} ranks × {pipeline.chunks} chunks make {pipeline.stages} stages",
            )
        for path, span in zip(rule.paths, rule.path_spans, strict=True):
            scopes = named_scopes(graph, path)
            values = [node for node in graph.nodes if any(matches(path, v.name) for v in node.outputs)]
            parameters = [p for p in graph.parameters if matches(path, p.name)]
            if not scopes and not values and not parameters:
                names = [s.name for s in graph.scopes] + [p.name.rsplit(".", 1)[-1] for p in graph.parameters]
                raise refuse(
                    "E0409",
                    f"`{'.'.join(path)}` is not a block, repeat, parameter or value of the model",
                    span,
                    help=_nearest_help(names),
                )
            if rule.first == rule.last:
                by_scope |= dict.fromkeys(scopes, rule.first)
                by_value |= dict.fromkeys((node.outputs[0].name for node in values), rule.first)
                continue
            for scope in scopes:
                by_iteration |= _over_range(graph, scope, rule, span, cost)
            if values:
                raise refuse(
                    "E0404",
                    f"value `{'.'.join(path)}` is on one stage, not on {rule.first} to {rule.last}",
                    span,
                )

    def explicit(node: Node) -> int | None:
        if node.outputs and node.outputs[0].name in by_value:
            return by_value[node.outputs[0].name]
        parts = node.scope.split(".")
        for i in range(len(parts), 0, -1):
            prefix = ".".join(parts[:i])
            if prefix in by_iteration:
                return by_iteration[prefix]
            if without_iterations(prefix) in by_scope:
                return by_scope[without_iterations(prefix)]
        return None

    return explicit


def _over_range(graph: Graph, scope: str, rule: PlaceRule, span: Span, cost: Callable[[Node], float]) -> dict[str, int]:
    """Iterations of a scope's outermost repeats, balanced over a range of stages; the rest of the scope follows."""
    names = {
        s.path: s.name for s in graph.scopes if s.repeat and (without_iterations(s.path) + ".").startswith(scope + ".")
    }
    costs = dict.fromkeys(_iterations(graph, names), 0.0)
    for node in graph.nodes:
        iteration = iteration_of(node.scope, names)
        if iteration is not None:
            costs[iteration] += cost(node)
    count = rule.last - rule.first + 1
    if len(costs) < count:
        raise refuse(
            "E0403",
            f"`{scope}` has {len(costs)} iterations for {count} stages",
            span,
            help="place it on fewer stages, or repeat more often",
        )
    result: dict[str, int] = {}
    paths = iter(costs)
    for stage, iterations in enumerate(balance(list(costs.values()), count), rule.first):
        for _ in range(iterations):
            result[next(paths)] = stage
    return result


def _spread(graph: Graph, iterations: dict[str, int], explicit: Sequence[int | None]) -> list[int]:
    """The stage of every node, given those of iterations and explicit placements."""
    names = {path.rsplit(".", 1)[0]: "" for path in iterations}
    stages: list[int | None] = []
    at: dict[Value, int] = {}
    current = min(iterations.values()) if iterations else None
    for node, wanted in zip(graph.nodes, explicit, strict=True):
        iteration = iteration_of(node.scope, names) if iterations else None
        fed = [at[value] for value in node.inputs if value in at]
        if wanted is not None:
            stage: int | None = wanted
        elif iteration is not None:
            stage = current = iterations[iteration]
        elif current is not None:
            stage = max([current, *fed])
        else:
            stage = max(fed) if fed else None
        stages.append(stage)
        if stage is not None:
            at |= dict.fromkeys(node.outputs, stage)
    # Without a `stage` rule: nodes without placed operands go where they are first read.
    found: list[int] = []
    for node, stage in zip(reversed(graph.nodes), reversed(stages), strict=True):
        if stage is None:
            stage = min((at[value] for value in node.outputs if value in at), default=0)
        for value in node.inputs:
            at[value] = min(at.get(value, stage), stage)
        found.append(stage)
    return found[::-1]


def _check_parameters(graph: Graph, rules: Sequence[PlaceRule]) -> None:
    """Refuse (E0404) a placed parameter that is read outside its stages."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in dict.fromkeys(node.inputs):
            readers.setdefault(value, []).append(node)
    for rule in rules:
        for path, span in zip(rule.paths, rule.path_spans, strict=True):
            for parameter in graph.parameters:
                if not matches(path, parameter.name):
                    continue
                outside = [n for n in readers.get(parameter.value, ()) if not rule.first <= n.placed_on <= rule.last]
                if outside:
                    stages = sorted({node.placed_on for node in outside})
                    lines = dict.fromkeys(
                        f"stage {node.placed_on}: `{node.span.text}`   ({node.span.place})"
                        for node in outside
                        if node.span
                    )
                    raise refuse(
                        "E0404",
                        f"`{parameter.name}` is placed on {rule.first}..{rule.last}, but stage {stages[0]} reads it",
                        span,
                        notes=list(lines)[:MOST_SHOWN],
                        help="place what reads it there too, or leave the parameter where it is read",
                    )


def _nearest_help(names: Sequence[str]) -> str | None:
    known = list(dict.fromkeys(names))
    return f"it has: {', '.join(known[:12])}" if known else None
