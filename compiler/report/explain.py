"""Explains a tensor's layout: `partita explain FILE NAME`.

For each tensor of a given name in a finished compilation: its default layout by mesh axis with the rule that set it,
and the rules shadowed by earlier ones; how a parameter, its gradient and its optimizer state are stored; the copies of
a value in other layouts and the lines that read them; and the sharding rules that its operation could have used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import evolve, fields, frozen, has

from partita.compiler.analysis.traffic import traffic
from partita.compiler.graph import Input, Node, Parameter, Value, without_iterations
from partita.compiler.layout import Layout, State, global_type, local_type, state_text
from partita.compiler.naming import end_of, instead_of, means
from partita.compiler.ops.collective import Reshard, is_reshard
from partita.compiler.passes.assign import Unfit
from partita.compiler.passes.shard.choice import Option
from partita.compiler.passes.shard.defaults import default_layouts
from partita.compiler.passes.shard.reasons import ShadowedRule, Split, shadowed_rules, splits, storing, undivided
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.report.causes import TensorTraffic, traffic_of
from partita.compiler.report.shares import MatrixShare, matrix_shares
from partita.compiler.state import Compilation
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type


@frozen(eq=False)
class Stored:
    """How the parameter, gradient or optimizer state is stored between uses, by the rules for its class, if any. The
    gradient is that accumulated over microbatches: partial where it is reduced at the end of the step. No axis divides
    over the mesh axes `flat`, over which it is stored flat, and `whole`, along which it is replicated.
    """

    what: str
    layout: Layout
    type: Type
    rules: tuple[Span, ...]
    whole: tuple[str, ...]
    flat: tuple[str, ...] = ()


@frozen(eq=False)
class Copy:
    """The value in another layout: the resharding steps, their phase, and the lines that read it."""

    layout: Layout
    type: Type
    steps: tuple[str, ...]
    phase: str
    readers: tuple[Span, ...]


@frozen(eq=False)
class Alternative:
    """A sharding rule of the operation that computes the value, along one mesh axis, with the resharding it would need
    in seconds. Resharding weights (or what a decomposition was made for) counts a thousandfold, as a last resort.
    """

    mesh_axis: str
    states: str
    seconds: float
    taken: bool
    reshards_weights: bool


@frozen(eq=False)
class Explanation:
    """Everything that determines a tensor's layout. `names` has one per iteration; the first is described.

    `type` is the global type (of one microbatch), `local` that of a shard in the default layout. `made` is the layout
    in which `operation` computes it; `instead` are the operations that replace one that cannot be sharded. `rule` is
    that of an optimizer with several, for a parameter, behind those that are `unfit` for it, and `shares` is who works
    on it as a whole matrix. Of a sparse parameter, a step touches the `rows` along this axis that it looks up; `dense`
    says why a table that could be is not so. `moved` is the communication of it, or of a parameter's gradient and
    updates, in all iterations. `offloaded` are the stages that keep it in the host's memory between F and the backward
    pass. A parameter may be `on_host`, in the host's memory, as a file if it is `mapped`.
    """

    names: tuple[str, ...]
    role: str
    type: Type
    local: Type
    span: Span | None
    default: Layout
    splits: tuple[Split, ...]
    late: tuple[ShadowedRule, ...]
    stages: tuple[int, ...]
    stored: tuple[Stored, ...] = ()
    rule: Span | None = None
    unfit: tuple[Unfit, ...] = ()
    rows: str | None = None
    dense: str | None = None
    shares: tuple[MatrixShare, ...] = ()
    operation: str | None = None
    made: Layout | None = None
    instead: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    copies: tuple[Copy, ...] = ()
    moved: tuple[TensorTraffic, ...] = ()
    offloaded: tuple[int, ...] = ()
    on_host: bool = False
    mapped: bool = False

    @property
    def name(self) -> str:
        """The name without iteration numbers."""
        return without_iterations(self.names[0])

    def as_json(self) -> dict[str, Any]:
        """As an object of `explain --json`."""
        result: dict[str, Any] = _plain(self)
        return result


def explain(state: Compilation, name: str) -> tuple[Explanation, ...]:
    """The tensors of a name, joined where they differ only in their iteration. Raises ValueError if there are none."""
    tensors = _Tensors(state)
    resolved = tensors.results.get(name, name)
    # A value of the program and one of a decomposition may have the same name, in different iterations.
    groups: dict[tuple[str, bool, str], list[str]] = {}
    for each in tensors.names():
        if means(resolved, each):
            key = without_iterations(each), each in tensors.whole, tensors.told_apart(each)
            groups.setdefault(key, []).append(each)
    if not groups:
        raise ValueError(f"`{name}` is not a tensor of this program{instead_of(name, list(tensors.names()))}")
    return tuple(tensors.explained(tuple(names)) for names in groups.values())


class _Tensors:
    """The tensors of a compilation, by name."""

    def __init__(self, state: Compilation) -> None:
        self.state = state
        self.mesh = state.mesh
        self.records = traffic(state)
        self.defaults = default_layouts(state.spec, state.mesh)
        # The file's names of the loss and the metrics are not those of their values.
        self.results = {name: value.name for name, value in (("loss", state.placed.loss), *state.placed.metrics)}
        self.parameters: dict[str, Parameter] = {each.name: each for each in state.step.parameters}
        self.inputs = {each.value.name: each for each in state.step.inputs}
        self.whole: dict[str, tuple[Value, Node]] = {
            value.name: (value, node) for node in state.step.nodes for value in node.outputs
        }
        self.graph = state.sharded.graph
        self.local = {
            value.name: (value, node) for node in self.graph.nodes if not is_reshard(node.op) for value in node.outputs
        }

    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        yield from dict.fromkeys((*self.parameters, *self.inputs, *self.whole, *self.local))

    def told_apart(self, name: str) -> str:
        """What rules for some iterations make of a tensor: its rule of the optimizer, and its layout."""
        rule = self.state.rules.get(name)
        layouts = self.state.sharded.parameters.get(name)
        layout = self.local[name][0].layout if name in self.local else None
        return f"{rule and rule.span} {layouts} {layout}"

    def explained(self, names: tuple[str, ...]) -> Explanation:
        """The first of the tensors, which differ only in their iteration, with the communication of all."""
        own = set(names)
        for stacked in self.state.update.stacked:
            if not own.isdisjoint(stacked.parameters):
                own |= {value.name for node in stacked.nodes for value in node.outputs}
        moved = traffic_of(each for each in self.records if (each.parameter or each.tensor) in own)
        return evolve(self._first(names), moved=moved)

    def _first(self, names: tuple[str, ...]) -> Explanation:
        name = names[0]
        if name in self.parameters:
            return self._parameter(names, self.parameters[name])
        if name in self.inputs:
            return self._input(names, self.inputs[name])
        known = self.whole if name in self.whole else self.local
        value, node = known[name]
        type = global_type(value.type, value.layout, self.mesh.sizes)
        stages = tuple(sorted({stage for each in names for stage in self._stages(*known[each])}))
        explanation = self._value(self._of(names, "a value", type, node.span, stages, value.tensor), name)
        return evolve(explanation, offloaded=self._offloaded(set(names)))

    def _offloaded(self, names: set[str]) -> tuple[int, ...]:
        """The stages that copy values of some names to the host's memory."""
        copying = {stage.index for stage in self.state.plan.stages if self.state.plan.offloads(stage.index)}
        stages = self.state.partitioned.stages
        return tuple(s.index for s in stages if s.index in copying and any(v.name in names for v in s.offloaded))

    def _stages(self, value: Value, node: Node) -> tuple[int, ...]:
        """The stages that compute a value: one, unless updates of buffers are made of it."""
        if node.stage is not None:
            return (node.stage,)
        update = self.state.update
        return tuple(
            stage
            for buffer in update.buffers
            if any(value.name == each.name for maker in update.nodes_of([buffer]) for each in maker.outputs)
            for stage in buffer.stages
        )

    # ------------------------------------------------------------ default layout

    def _of(
        self,
        names: tuple[str, ...],
        role: str,
        type: Type,
        span: Span | None,
        stages: tuple[int, ...],
        tensor: str | None = None,
    ) -> Explanation:
        """`tensor` is the file's name of the first, if it differs."""
        tensor = tensor or names[0]
        default = self.defaults.default(tensor, type, span)
        local = local_type(type, default, self.mesh.sizes)
        reasons = splits(self.defaults, tensor, type), shadowed_rules(self.defaults, tensor, type)
        return Explanation(names, role, type, local, span, default, *reasons, stages)

    def _input(self, names: tuple[str, ...], model_input: Input) -> Explanation:
        """An input is read directly in any layout, since data is a function of seed and step."""
        stages = [
            s.index for s in self.state.partitioned.stages if any(each.name == model_input.name for each in s.inputs)
        ]
        parts = [each.value for each in self.graph.inputs if each.name == model_input.name]
        copies = []
        for part in parts:
            readers = [node for node in self.graph.nodes if part in node.inputs and node.span is not None]
            phases = dict.fromkeys(node.phase.name.lower() for node in readers)
            spans = dict.fromkeys(node.span for node in readers if node.span is not None)
            copies.append(Copy(part.layout, part.type, ("reading",), ", ".join(phases), tuple(spans)))
        explanation = self._of(names, "an input", model_input.value.type, model_input.span, tuple(stages))
        return evolve(explanation, copies=tuple(copies))

    # ------------------------------------------------------------ parameters

    def _parameter(self, names: tuple[str, ...], parameter: Parameter) -> Explanation:
        stages = tuple(sorted({s for each in names for s in self.state.plan.parameter(each).stages}))
        role = "a buffer" if parameter.buffer else "a parameter"
        explanation = self._of(names, role, parameter.master, parameter.span, stages)
        layouts = self.state.sharded.parameters[parameter.name]
        kinds = ("param", "grad", "state") if parameter.trained else () if parameter.buffer else ("param",)
        rule, update = self.state.rules.get(parameter.name), self.state.updates.get(parameter.name)
        if (part := parameter.part) is not None:
            count = part.master.axis(part.axis).size // parameter.master.axis(part.axis).size
            role = f"{role} in {count} parts, one for each rank of {part.over}"
            explanation = evolve(explanation, names=(part.name,), role=role, type=part.master)
        return evolve(
            explanation,
            shares=matrix_shares(self.state, names),
            rule=rule.span if rule and len(self.state.train.optimizer.rules) > 1 else None,
            unfit=self.state.unfit.get(parameter.name, ()),
            rows=self.state.tables.over.get(parameter.name),
            dense=self.state.tables.dense.get(parameter.name) if update is not None and update.keeps_rows else None,
            local=explanation.local.with_dtype(parameter.value.type.dtype),
            stored=tuple(self._stored(parameter, layouts, kind) for kind in kinds),
            copies=self._copies(parameter.name),
            on_host=parameter.name in self.state.prefetched,
            mapped=parameter.name in self.state.mapped,
        )

    def _stored(self, parameter: Parameter, layouts: ParameterLayouts, kind: str) -> Stored:
        layout: Layout = getattr(layouts, kind)
        rules = storing(self.defaults, kind, parameter.name, layouts.compute, layout)
        whole = undivided(self.defaults, kind, parameter.name, layout)
        if kind == "grad" and parameter.name in self.state.tables.over:
            value = next(each.gradient for each in self.state.update.parameters if each.name == parameter.name)
            return Stored(kind, value.layout, value.type, rules, whole)
        if kind == "grad":
            layout = next(each.value.layout for each in self.graph.accumulators if each.parameter == parameter.name)
        flat = layout.over(layout.flat.axis) if layout.flat is not None else ()
        return Stored(kind, layout, local_type(parameter.master, layout, self.mesh.sizes), rules, whole, flat)

    # ------------------------------------------------------------ values

    def _value(self, explanation: Explanation, name: str) -> Explanation:
        if name not in self.local:
            return evolve(
                explanation, operation=self.whole[name][1].op.label, instead=self._instead(self.whole[name][1])
            )
        value, node = self.local[name]
        explanation = evolve(explanation, operation=node.op.label, copies=self._copies(name))
        choice = self.state.sharded.choices.get(node)
        if choice is None:
            return explanation
        whole = self.whole.get(name, (value, node))[1]
        options = sorted(choice.options, key=lambda each: (each.mesh_axis, not each.taken, each.seconds))
        return evolve(
            explanation,
            made=value.layout,
            alternatives=tuple(
                Alternative(each.mesh_axis, _states(whole, each), each.seconds, each.taken, each.reshards_weights)
                for each in options
            ),
        )

    def _instead(self, replaced: Node) -> tuple[str, ...]:
        """The operations that replace one that cannot be sharded as its operands are."""
        return tuple(
            dict.fromkeys(
                node.op.label
                for name, (_, node) in self.local.items()
                if name not in self.whole and node.span is replaced.span and node.scope == replaced.scope
            )
        )

    def _copies(self, name: str) -> tuple[Copy, ...]:
        """The value's copies in other layouts, in program order."""
        steps: dict[Value, tuple[str, ...]] = {}
        resharded: list[tuple[Value, Node]] = []
        readers: dict[Value, dict[Span, None]] = {}
        for node in self.graph.nodes:
            for i, value in enumerate(node.inputs):
                if value.name != name and value not in steps:
                    continue
                if isinstance(node.op, Reshard):
                    moved = node.outputs[i]
                    steps[moved] = (*steps.get(value, ()), node.op.words)
                    resharded.append((moved, node))
                elif node.span is not None:
                    readers.setdefault(value, {})[node.span] = None
        return tuple(
            Copy(value.layout, value.type, steps[value], node.phase.name.lower(), tuple(readers[value]))
            for value, node in resharded
            if value in readers
        )


def _states(node: Node, option: Option) -> str:
    """A sharding rule: `h: replicated, wq: heads → q: heads`."""
    if not any((*option.rule.operands, *option.rule.results)):
        return "all replicated"

    def words(values: Sequence[Value], states: Sequence[State]) -> str:
        pairs = zip(values, states, strict=True)
        return ", ".join(f"{end_of(value.name)}: {state_text(state)}" for value, state in pairs)

    return f"{words(node.inputs, option.rule.operands)} → {words(node.outputs, option.rule.results)}"


def _plain(value: Any) -> Any:
    """Records as JSON: types and layouts as printed, spans as file, line and text."""
    if isinstance(value, Span):
        return {"file": value.source.name, "line": value.line, "text": value.text}
    if isinstance(value, (Layout, Type)):
        return str(value)
    if isinstance(value, TensorTraffic):
        return value.as_json()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if has(type(value)):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(type(value))}
    return value
