"""Graph → placed graph: which pipeline stage each node of the forward pass runs on.

Explicit placements (`place`) come first, of those the more exact; then iterations of the repeats that `stage` names,
balanced by the seconds that training takes for them: forward, backward, and what is computed again. A node outside the
iterations goes with the first one if it comes before it, otherwise with the preceding one; but never before the stage
of an operand. Without a `stage` rule, nodes go with their operands, or else with their readers.

Backward nodes are made later, on the stage of their forward node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from attrs import evolve, field, frozen

from partita.compiler.graph import Graph, Node, Value, readers_of
from partita.compiler.naming import around, is_in, matches, named_scopes
from partita.dsl.check.stages import no_such_stage, other_counts, stage_rules, too_few_layers
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.reprs import Shortened
from partita.dsl.spec import Layout, Mesh, PlaceRule, StageRule
from partita.dsl.syntax.source import Span

# A relative tolerance: sums of floats that differ by rounding are equal.
NEAR = 1e-9
DIGITS = 9  # of shares of the whole
# Costs are of what is not split over a mesh yet: smaller differences between ranks are not worth uneven stages.
KNOWN = 0.02
APART = -1  # instead of a stage: of nodes that are not weighed with any iteration
MAX_SHOWN = 4  # readers of a parameter on other stages; rules that go before one


@frozen
class Pipeline:
    """The pipeline that a layout declares: its mesh axis (None: no pipeline), ranks, and chunks per rank. `stage_ranks`
    are the ranks of the stages, as far as they are known before the schedule is.
    """

    axis: str | None
    ranks: int
    chunks: int
    span: Span | None = field(default=None, eq=False)
    stage_ranks: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.ranks * self.chunks


def pipeline_of(layout: Layout | None, mesh: Mesh | None, chunks: int) -> Pipeline:
    """The pipeline of a layout, whose rules name one mesh axis."""
    if layout is None or mesh is None:
        return Pipeline(None, 1, 1)
    rules = stage_rules(layout)
    if not rules:
        return Pipeline(None, 1, 1)
    axis, span = rules[-1].mesh_axis, rules[-1].span
    return Pipeline(axis, mesh.size(axis), chunks, span=span)


@frozen(repr=False)
class Iterations(Shortened):
    """The stages of iterations, by path: `staged` are those of the repeats that `stage` names, `placed` those that
    `place` has put on a range of stages.
    """

    staged: Mapping[str, int] = field(factory=dict)
    placed: Mapping[str, int] = field(factory=dict)


# The seconds that nodes of a graph of the forward pass take, with all that training computes for them, by their stages.
Weigh = Callable[[Graph], Mapping[int, float]]


def balanced(graph: Graph, pipeline: Pipeline, layout: Layout | None, weigh: Weigh) -> Iterations:
    """The stages of a graph's iterations, such that no rank has more to do than need be: by what the nodes are weighed
    with each iteration as a stage of its own. Raises Refused: E0403, E0404, E0409.
    """
    if pipeline.stages == 1:
        return Iterations()
    stage_rules, place_rules = _rules(layout)
    explicit = _Explicit.of(graph, place_rules, pipeline)
    placed: dict[str, int] = {}
    for scope, target in explicit.scopes.items():
        if target.ranged:
            placed |= _over_range(graph, scope, explicit, pipeline, weigh)
    if not stage_rules:
        return Iterations({}, placed)
    stages = explicit.stages(graph, placed)
    return Iterations(_over_pipeline(graph, stage_rules, pipeline, weigh, stages), placed)


def place(graph: Graph, pipeline: Pipeline, layout: Layout | None, iterations: Iterations) -> Graph:
    """The graph with every node's stage set, given those of iterations. Raises Refused: E0404, E0409."""
    if pipeline.stages == 1:
        return evolve(graph, nodes=tuple(node.changed(stage=0) for node in graph.nodes))
    stage_rules, place_rules = _rules(layout)
    explicit = _Explicit.of(graph, place_rules, pipeline)
    stages = _spread(graph, iterations.staged, explicit.stages(graph, iterations.placed))
    placed = _at(graph, stages)
    _check_parameters(placed, place_rules)
    idle = sorted(set(range(pipeline.stages)) - set(stages))
    if idle and not stage_rules:
        raise refuse(
            "E0404",
            f"stage {idle[0]} of {pipeline.stages} is empty",
            pipeline.span,
            notes=[
                f"{pipeline.ranks} ranks × {pipeline.chunks} chunks = {pipeline.stages} stages",
                *(each.message for each in idle_places(graph, pipeline, layout, iterations)),
            ],
            help=f"`place … -> {pipeline.axis}[{idle[0]}]`, or a `stage` rule, or fewer ranks or chunks",
        )
    return placed


def idle_places(
    graph: Graph, pipeline: Pipeline, layout: Layout | None, iterations: Iterations
) -> Iterator[Diagnostic]:
    """Warnings (W0301) of names in `place` rules that place nothing, with the rules that go before them."""
    _, rules = _rules(layout)
    if pipeline.stages == 1 or not rules:
        return
    explicit = _Explicit.of(graph, rules, pipeline)
    of_nodes = [placement and placement[0] for placement in explicit.found(graph, iterations.placed)]
    for target in explicit.targets:
        # A parameter is not placed, but must be where the rule says.
        if target.parameters or target in of_nodes:
            continue
        overriding = (
            other
            for node, other in zip(graph.nodes, of_nodes, strict=True)
            if other is not None and any(is_in(node.scope, each) for each in target.scopes)
        )
        before = list(dict.fromkeys((*overriding, *(explicit.values[each] for each in target.values))))
        notes = [f"`{each}` ({each.span.place}) goes before it" for each in before]
        help = "name more exactly what it places, or remove it" if before else "remove it"
        yield Diagnostic("W0301", f"`{target}` places nothing", target.span, tuple(notes[:MAX_SHOWN]), help)


def _rules(layout: Layout | None) -> tuple[list[StageRule], list[PlaceRule]]:
    rules = layout.rules if layout else ()
    return [r for r in rules if isinstance(r, StageRule)], [r for r in rules if isinstance(r, PlaceRule)]


def _at(graph: Graph, stages: Sequence[int]) -> Graph:
    """The graph with these stages of its nodes."""
    nodes = (node.changed(stage=stage) for node, stage in zip(graph.nodes, stages, strict=True))
    return evolve(graph, nodes=tuple(nodes))


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


def _over_pipeline(
    graph: Graph, rules: Sequence[StageRule], pipeline: Pipeline, weigh: Weigh, explicit: Sequence[int | None]
) -> dict[str, int]:
    """The stage of every iteration of the staged repeats, in program order."""
    (rule,) = rules
    names = _repeats(graph, rule.repeats)
    for repeat in rule.repeats:
        if repeat not in names.values():
            raise refuse(
                "E0409",
                f"the model has no `repeat … as {repeat}`",
                rule.span,
                help=_nearest_help([s.name for s in graph.scopes if s.repeat]),
            )
    paths = _iterations(graph, names)
    stages = pipeline.stages
    if rule.counts is not None:
        if len(rule.counts) != stages or sum(rule.counts) != len(paths):
            raise Refused([other_counts(rule, len(paths), pipeline.ranks, pipeline.chunks)])
        counts = rule.counts
    else:
        if len(paths) < stages:
            raise Refused([too_few_layers(rule, len(paths), pipeline.ranks, pipeline.chunks)])
        # What is outside of iterations goes with one of them, as it will with a stage.
        numbers = {path: i for i, path in enumerate(paths)}
        apart = [None if stage is None else APART for stage in explicit]
        costs = weigh(_at(graph, _spread(graph, numbers, apart)))
        counts = balance([costs.get(i, 0.0) for i in range(len(paths))], pipeline.stage_ranks or range(stages))
    result: dict[str, int] = {}
    position = 0
    for stage, count in enumerate(counts):
        for path in paths[position : position + count]:
            result[path] = stage
        position += count
    return result


def balance(costs: Sequence[float], stage_ranks: Sequence[int]) -> tuple[int, ...]:
    """Counts of a split of `costs` into consecutive non-empty parts, one for each of the `stage_ranks`, such that the
    busiest rank has the least to do: it sets the pace of a pipeline. If every part has its own rank, that is the split
    with the cheapest most expensive part; of these, the one with the least sum of squares, which is the most even.
    Otherwise it is that split, with costs moved out of parts of the busiest rank as long as that makes it better, if in
    the end the busiest has less by more than costs are known.

    O(n² · parts), and O(n²) if costs are about equal; and O(parts²) for each part of the busiest rank, for each move.
    """
    total = [0.0]
    for value in costs:
        total.append(total[-1] + value)
    parts = len(stage_ranks)
    # Two searches: with both objectives in one, a prefix of the best split need not be the best of its costs.
    largest, _ = _cut(total, parts, max, float("inf"))
    _, counts = _cut(total, parts, lambda sum, own: sum + own * own, largest * (1 + NEAR))
    return counts if len(set(stage_ranks)) == parts or not total[-1] else _evened(total, counts, stage_ranks)


def _evened(total: Sequence[float], counts: tuple[int, ...], stage_ranks: Sequence[int]) -> tuple[int, ...]:
    """A split of the costs with these sums, made better by moves out of parts of the busiest home while any does: the
    less the busiest has, the better; then the more even ranks are; then the cheaper the most expensive part is.
    """

    def shares(counts: Sequence[int]) -> list[float]:
        edges = [0, *accumulate(counts)]
        return [(total[end] - total[start]) / total[-1] for start, end in pairwise(edges)]

    def held(parts: Sequence[float]) -> dict[int, float]:
        loads = dict.fromkeys(stage_ranks, 0.0)
        for home, part in zip(stage_ranks, parts, strict=True):
            loads[home] += part
        return loads

    def worth(counts: Sequence[int]) -> tuple[float, ...]:
        parts = shares(counts)
        each = held(parts).values()
        objectives = max(each), sum(x * x for x in each), max(parts), sum(x * x for x in parts)
        return tuple(round(value, DIGITS) for value in objectives)

    before, first = counts, worth(counts)
    best = first
    while True:
        busy = held(shares(counts))
        busiest = max(busy, key=lambda home: round(busy[home], DIGITS))
        givers = [i for i, home in enumerate(stage_ranks) if home == busiest and counts[i] > 1]
        moved = (
            tuple(count - (i == giver) + (i == taker) for i, count in enumerate(counts))
            for giver in givers
            for taker in range(len(counts))
        )
        candidate = min(((worth(each), each) for each in moved), default=(best, counts))
        if candidate[0] >= best:
            return counts if best[0] < first[0] * (1 - KNOWN) else before
        best, counts = candidate


def _cut(
    total: Sequence[float], parts: int, joined: Callable[[float, float], float], limit: float
) -> tuple[float, tuple[int, ...]]:
    """The cheapest split and its cost, with no part above `limit`; `joined` adds a part to a cost.

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
                if own > limit or (known is not None and joined(0.0, own) >= known[0]):
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


@frozen(eq=False)
class _Target:
    """A path of a `place` rule, with what it names: scopes, the first outputs of nodes, and whether parameters."""

    rule: PlaceRule
    path: str
    span: Span
    scopes: tuple[str, ...]
    values: tuple[str, ...]
    parameters: bool

    @property
    def ranged(self) -> bool:
        """Whether this is placed on several stages."""
        return self.rule.first < self.rule.last

    def __str__(self) -> str:
        return f"place {self.path} -> {self.rule.mesh_axis}[{_range(self.rule)}]"


@frozen(eq=False)
class _Explicit:
    """What `place` rules ask for: their targets, and for each scope and each value the one that it is placed by."""

    targets: Sequence[_Target]
    scopes: Mapping[str, _Target]
    values: Mapping[str, _Target]

    @classmethod
    def of(cls, graph: Graph, rules: Sequence[PlaceRule], pipeline: Pipeline) -> _Explicit:
        """Raises Refused: E0404, E0409."""
        targets = [
            _target(graph, rule, path, span, pipeline)
            for rule in rules
            for path, span in zip(rule.paths, rule.path_spans, strict=True)
        ]
        return cls(
            targets,
            _first(targets, lambda target: target.scopes),
            _first(targets, lambda target: target.values),
        )

    def home(self, path: str) -> str | None:
        """The innermost scope around a path that is named: in this iteration, or else in all."""
        return next((scope for scope in around(path) if scope in self.scopes), None)

    def found(self, graph: Graph, iterations: Mapping[str, int]) -> list[tuple[_Target, int] | None]:
        """By what each node is placed, and on which stage, given those of iterations over ranges."""
        return [self._found(node, iterations) for node in graph.nodes]

    def stages(self, graph: Graph, iterations: Mapping[str, int]) -> list[int | None]:
        """The stage of each node, as far as one is asked for."""
        return [None if each is None else each[1] for each in self.found(graph, iterations)]

    def _found(self, node: Node, iterations: Mapping[str, int]) -> tuple[_Target, int] | None:
        if node.outputs and node.outputs[0].name in self.values:
            target = self.values[node.outputs[0].name]
            return target, target.rule.first
        parts = node.scope.split(".")
        for i in range(len(parts), 0, -1):
            path = ".".join(parts[:i])
            home = self.home(path)
            if home is None:
                return None
            target = self.scopes[home]
            if path in iterations:
                return target, iterations[path]
            if not target.ranged:
                return target, target.rule.first
        return None


def _first(targets: Sequence[_Target], names: Callable[[_Target], Sequence[str]]) -> dict[str, _Target]:
    """The target by which each name is placed: of those with this name, one that names the fewest; of these, the
    first.
    """
    result: dict[str, _Target] = {}
    for target in sorted(targets, key=lambda each: len(names(each))):
        for name in names(target):
            result.setdefault(name, target)
    return result


def _target(graph: Graph, rule: PlaceRule, path: tuple[str, ...], span: Span, pipeline: Pipeline) -> _Target:
    if not 0 <= rule.first <= rule.last < pipeline.stages:
        raise Refused([no_such_stage(rule, pipeline.ranks, pipeline.chunks)])
    target = _Target(
        rule,
        ".".join(path),
        span,
        tuple(named_scopes(graph.scopes, path)),
        tuple(node.outputs[0].name for node in graph.nodes if any(matches(path, v.name) for v in node.outputs)),
        any(matches(path, parameter.name) for parameter in graph.parameters),
    )
    if not target.scopes and not target.values and not target.parameters:
        names = [s.name for s in graph.scopes] + [p.name.rsplit(".", 1)[-1] for p in graph.parameters]
        raise refuse(
            "E0409",
            f"`{target.path}` is not a block, repeat, parameter or value of the model",
            span,
            help=_nearest_help(names),
        )
    if target.ranged and target.values:
        raise refuse(
            "E0404",
            f"value `{target.path}` is on one stage, not on {rule.first} to {rule.last}",
            span,
        )
    return target


def _over_range(graph: Graph, scope: str, explicit: _Explicit, pipeline: Pipeline, weigh: Weigh) -> dict[str, int]:
    """Iterations of a scope's outermost repeats, but for those that are placed by themselves, balanced over a range of
    stages; the rest of the scope follows.
    """
    target = explicit.scopes[scope]
    inside = {s.path: s.name for s in graph.scopes if s.repeat and is_in(s.path, scope)}
    names = {path: name for path, name in inside.items() if explicit.home(path) == scope}
    if inside and not names:
        return {}
    paths = _iterations(graph, names)
    stage_ranks = (pipeline.stage_ranks or range(pipeline.stages))[target.rule.first : target.rule.last + 1]
    count = len(stage_ranks)
    if len(paths) < count:
        raise refuse(
            "E0403",
            f"`{scope}` has {len(paths)} iterations for {count} stages",
            target.span,
            help="place it on fewer stages, or repeat more often",
        )
    numbers = {path: i for i, path in enumerate(paths)}
    own = (
        iteration_of(node.scope, names)
        if explicit.home(node.scope) == scope and not (node.outputs and node.outputs[0].name in explicit.values)
        else None
        for node in graph.nodes
    )
    costs = weigh(_at(graph, [numbers.get(path or "", APART) for path in own]))
    counts = balance([costs.get(i, 0.0) for i in range(len(paths))], stage_ranks)
    stages = (stage for stage, many in enumerate(counts, target.rule.first) for _ in range(many))
    return dict(zip(paths, stages, strict=True))


def _spread(graph: Graph, iterations: Mapping[str, int], explicit: Sequence[int | None]) -> list[int]:
    """The stage of every node, given those of iterations and explicit placements."""
    names = {path.rsplit(".", 1)[0]: "" for path in iterations}
    stages: list[int | None] = []
    at: dict[Value, int] = {}
    current = min(iterations.values()) if iterations else None
    for node, placed in zip(graph.nodes, explicit, strict=True):
        iteration = iteration_of(node.scope, names) if iterations else None
        fed = [at[value] for value in node.inputs if value in at]
        if placed is not None:
            stage: int | None = placed
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
    assigned: list[int] = []
    for node, stage in zip(reversed(graph.nodes), reversed(stages), strict=True):
        if stage is None:
            stage = min((at[value] for value in node.outputs if value in at), default=0)
        for value in node.inputs:
            at[value] = min(at.get(value, stage), stage)
        assigned.append(stage)
    return assigned[::-1]


def _check_parameters(graph: Graph, rules: Sequence[PlaceRule]) -> None:
    """Refuse (E0404) a placed parameter that is read outside its stages."""
    readers = readers_of(graph.nodes)
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
                        f"`{parameter.name}` is placed on {_range(rule)}, but stage {stages[0]} reads it",
                        span,
                        notes=list(lines)[:MAX_SHOWN],
                        help="place what reads it there too, or leave the parameter where it is read",
                    )


def _range(rule: PlaceRule) -> str:
    """The stages of a rule, as a file says them."""
    return f"{rule.first}..{rule.last}" if rule.first < rule.last else f"{rule.first}"


def _nearest_help(names: Sequence[str]) -> str | None:
    known = list(dict.fromkeys(names))
    return f"it has: {', '.join(known[:12])}" if known else None
