"""The update graph: what happens once a step, after the last microbatch.

FINISH nodes run on what a stage accumulated: the sum of a tied parameter's accumulators in stage order, and each
stage's share of the squared norm. What they make for everyone (loss, metrics, squares) is summed over all ranks: one
small vector, of which each entry is made on one rank, so that the sum is exact in any order. UPDATE nodes then run
on every rank for the parameters that it holds: a tied parameter is updated alike wherever it stands.
"""

from __future__ import annotations

from attrs import evolve, frozen

from partita.compiler.cut import Partitioned
from partita.compiler.graph import Accumulator, Builder, Node, Phase, Value
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.optimizer import AdamW, Sgd, Update
from partita.compiler.ops.pointwise import Cast, constant, pointwise
from partita.dsl.spec import Call
from partita.dsl.types import Type

# As torch.nn.utils.clip_grad_norm_ has it.
CLIP_EPSILON = 1e-6
STATISTIC = "f64"
SQUARE = "square "  # entries of that name are stages' shares of the squared gradient norm


@frozen(eq=False)
class ParameterUpdate:
    """How one parameter is updated.

    `stages` is its stage set; `totals` the accumulator values it sums, one for each stage that makes any, with that
    stage; `states` are the optimizer's tensors. `finish` and `update` are the nodes of both phases.
    """

    name: str
    stages: tuple[int, ...]
    totals: tuple[tuple[int, Value], ...]
    master: Value
    gradient: Value
    states: tuple[Value, ...]
    finish: tuple[Node, ...]
    update: tuple[Node, ...]
    decays: bool


@frozen(eq=False)
class UpdateGraph:
    """The end of a step. `statistics` are the entries of the vector, each with the stage that makes it.

    `sums` are the accumulators that are no gradients, each with its stage, and `metrics` the nodes that make metrics
    from them; `finish` the nodes by stage that make its share of the squared norm; `clip` the nodes that make the
    coefficient from `norms`, the entries of the squared norm (empty without clipping).
    """

    parameters: tuple[ParameterUpdate, ...]
    statistics: tuple[tuple[str, Value, int], ...]
    sums: tuple[tuple[Accumulator, int], ...]
    metrics: tuple[Node, ...]
    finish: tuple[tuple[int, tuple[Node, ...]], ...]
    norms: tuple[Value, ...]
    clip: tuple[Node, ...]


def optimizer(call: Call, decays: bool) -> Update:
    """The update operation of an optimizer call; weight decay is off for a parameter that does not decay."""
    arguments = call.arguments
    decay = float(arguments["weight_decay"]) if decays or arguments["decay"] == "all" else 0.0
    if call.name == "adamw":
        beta1, beta2 = arguments["betas"]
        return AdamW(float(beta1), float(beta2), float(arguments["eps"]), decay)
    assert call.name == "sgd", call.name
    return Sgd(float(arguments["momentum"]), bool(arguments["nesterov"]), decay)


def update_graph(partitioned: Partitioned, call: Call | None, clip: float | None) -> UpdateGraph:
    """The end of a step for a partitioned graph. Without an optimizer (evaluation) only loss and metrics."""
    graph = partitioned.graph
    build = Builder(p.name for p in graph.parameters)
    squares: dict[int, list[Value]] = {}
    parameters: list[ParameterUpdate] = []
    by_stage: dict[int, list[Node]] = {}
    accumulated = {
        (accumulator.parameter, stage.index)
        for stage in partitioned.stages
        for accumulator in stage.accumulators
        if accumulator.parameter
    }
    stage_sets = partitioned.stage_sets()
    for parameter in graph.parameters if call else ():
        stages = stage_sets[parameter.name]
        totals = tuple(
            (stage, Value(f"total(d({parameter.name}))@{stage}", parameter.master))
            for stage in stages
            if (parameter.name, stage) in accumulated
        )
        build.scope, build.span, build.phase, build.stage = (
            parameter.name,
            parameter.span,
            Phase.FINISH,
            stages[0],
        )
        build.nodes = []
        gradient = totals[0][1]
        for _, value in totals[1:]:
            gradient = pointwise(build, "add", gradient, value, name=f"gradient({parameter.name})")
        finish = build.nodes
        build.nodes = []
        square = _square(build, gradient)
        squares.setdefault(stages[0], []).append(square)
        by_stage.setdefault(stages[0], []).extend(build.nodes)
        parameters.append(
            ParameterUpdate(
                parameter.name,
                stages,
                totals,
                Value(f"master({parameter.name})", parameter.master),
                gradient,
                (),
                tuple(finish),
                (),
                parameter.decays,
            )
        )
    norms: dict[int, Value] = {}
    for stage, values in squares.items():
        build.scope, build.span, build.phase, build.stage = f"stage {stage}", None, Phase.FINISH, stage
        build.nodes = []
        total = build.apply(Cast(STATISTIC), values[0])
        for value in values[1:]:
            total = pointwise(build, "add", total, build.apply(Cast(STATISTIC), value))
        norms[stage] = total
        by_stage[stage].extend(build.nodes)
    metrics = tuple(node for node in graph.nodes if node.phase is Phase.FINISH)
    sums = tuple(
        (accumulator, stage.index)
        for stage in partitioned.stages
        for accumulator in stage.accumulators
        if accumulator.parameter is None
    )
    homes = {value: node.home for node in metrics for value in node.outputs}
    homes |= {accumulator.value: stage for accumulator, stage in sums}
    statistics = [("loss", graph.loss, homes[graph.loss])]
    statistics += [(name, value, homes[value]) for name, value in graph.metrics]
    ordered = sorted(norms)
    statistics += [(f"{SQUARE}{stage}", norms[stage], stage) for stage in ordered]
    build.nodes = []
    coefficient = _coefficient(build, [norms[stage] for stage in ordered], clip) if norms else None
    clip_nodes = tuple(build.nodes)
    updated = tuple(_updated(build, each, call, coefficient) for each in parameters) if call else ()
    return UpdateGraph(
        updated,
        tuple(statistics),
        sums,
        metrics,
        tuple((stage, tuple(nodes)) for stage, nodes in sorted(by_stage.items())),
        tuple(norms[stage] for stage in ordered),
        clip_nodes,
    )


def _square(build: Builder, gradient: Value) -> Value:
    """The sum of squares of a gradient."""
    if not gradient.type.axes:
        return pointwise(build, "multiply", gradient, gradient)
    return build.apply(Dot(gradient.type.names), gradient, gradient)


def _coefficient(build: Builder, squares: list[Value], clip: float | None) -> Value | None:
    """min(1, clip / (norm + ε)), with the squared norm added in stage order."""
    if clip is None:
        return None
    build.scope, build.span, build.phase, build.stage = "clip", None, Phase.UPDATE, None
    total = squares[0]
    for square in squares[1:]:
        total = pointwise(build, "add", total, square)
    norm = pointwise(build, "sqrt", total, name="norm")
    safe = pointwise(build, "add", norm, constant(build, CLIP_EPSILON, norm))
    ratio = pointwise(build, "divide", constant(build, float(clip), norm), safe)
    return pointwise(build, "minimum", ratio, constant(build, 1.0, norm), name="clip")


def _updated(build: Builder, each: ParameterUpdate, call: Call, coefficient: Value | None) -> ParameterUpdate:
    op = optimizer(call, each.decays)
    type: Type = each.master.type
    states = tuple(Value(f"{state}({each.name})", type) for state in op.states)
    build.scope, build.phase, build.stage = each.name, Phase.UPDATE, None
    build.nodes = []
    gradient = each.gradient
    if coefficient is not None:
        factor = build.apply(Cast(type.dtype), coefficient) if type.dtype != STATISTIC else coefficient
        gradient = pointwise(build, "multiply", gradient, factor)
    build.apply_all(op, each.master, gradient, *states, name=f"new({each.name})")
    return evolve(each, states=states, update=tuple(build.nodes))
