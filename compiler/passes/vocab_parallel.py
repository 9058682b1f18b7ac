"""Joint graph → joint graph: an axis that all ranks of the pipeline share, such as a vocabulary, is divided into parts.

Every rank holds a part of each parameter with the axis, and computes with it on stages of its own
(`partita.compiler.schedules.schedule.SharedVocabulary`): lookups before the first stage, and the output layer after the
last one. As along any mesh axis, each value is split along the axis, partial (SUM or MAX), or whole, by the sharding
rules of the operations; an operation without a rule may say what each part contributes (`PartialReduction`). Nothing
is exchanged but values that are whole or partial, by the sends and receives between stages:

- a partial value is summed up where it is read, in order of the ranks;
- what follows from all output parts, such as the loss, and what their gradients need of it, is on the loss stage.

So F flows from input parts to stages, output parts and the loss stage, and B back; nothing else has to know of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from attrs import evolve

from partita.compiler.graph import Builder, Gradient, Graph, Node, Parameter, Part, Phase, Value
from partita.compiler.layout import MAX, SUM, State, is_split, split_axes
from partita.compiler.ops.op import ShardingRule
from partita.compiler.ops.pointwise import Detach, pointwise
from partita.compiler.ops.traits import PartialReduction
from partita.compiler.schedules.schedule import SharedVocabulary
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax.source import Span

INPUTS, OUTPUTS = "inputs", "outputs"
COMBINED = {SUM: "add", MAX: "maximum"}


def spread(
    graph: Graph, axes: Mapping[str, Span], over: str, ranks: int, stages: int, portable: set[Value]
) -> tuple[Graph, SharedVocabulary | None]:
    """Divide `axes`, each with the place that asks for it, over the mesh axis `over` of so many ranks and stages.

    `portable` values are computed wherever they are read. The graph as it is, and None, if no operation has such an
    axis. Raises Refused (E0417) for what cannot be divided.
    """
    divided = _Divided(graph, axes, over, SharedVocabulary(ranks, stages), portable)
    return divided.graph()


Each = TypeVar("Each")


def of_parts(graph: Graph, by_name: Mapping[str, Each]) -> dict[str, Each]:
    """What is known of parameters by name, for a graph in which some are in parts."""
    names = ((each.name, each.part.name if each.part else each.name) for each in graph.parameters)
    return {name: by_name[whole] for name, whole in names if whole in by_name}


class _Divided:
    def __init__(
        self, graph: Graph, axes: Mapping[str, Span], over: str, stages: SharedVocabulary, portable: set[Value]
    ) -> None:
        self.source, self.axes, self.over, self.portable = graph, axes, over, portable
        self.ranks = range(stages.ranks)
        self.build = Builder(graph.names)
        self.state: dict[Value, State] = {}
        self.kind: dict[Value, str] = {}  # of the values that are in parts: inputs or outputs
        self.parts: dict[Value, tuple[Value, ...]] = {}
        self.local: dict[Value, Value] = {}
        self.combined: dict[tuple[Value, int | None], Value] = {}
        self.late: set[Value] = set()  # made in F of the loss stage
        self.returned: set[Value] = set()  # made in B from what the output parts return
        self.passed: dict[Value, Value] = {}
        self.stage_of: dict[Value, int | None] = {}
        kinds = self._kinds()
        self.stages = evolve(stages, inputs=INPUTS in kinds, outputs=OUTPUTS in kinds)
        self.wanted = self._wanted_by_parts() if self.stages.outputs else set[Value]()

    def graph(self) -> tuple[Graph, SharedVocabulary | None]:
        """Walk the nodes once."""
        if not (self.stages.inputs or self.stages.outputs):
            return self.source, None
        parameters = [part for each in self.source.parameters for part in self._parameter(each)]
        for node in self.source.nodes:
            self._node(node)
        graph = evolve(
            self.source,
            parameters=tuple(parameters),
            loss=self._end(self.source.loss),
            metrics=tuple((name, self._end(value)) for name, value in self.source.metrics),
            gradients=tuple(part for each in self.source.gradients for part in self._gradient(each)),
            updates=tuple(evolve(each, value=self._end(each.value)) for each in self.source.updates),
            asked=tuple((name, self._asked(name, value)) for name, value in self.source.asked),
        )
        return evolve(graph, nodes=tuple(self.build.nodes)), self.stages

    def _asked(self, name: str, value: Value) -> Value:
        """An output of the model, whole."""
        state = self.state.get(value)
        if state is not None and is_split(state):
            raise self._refused(state, f"output `{name}` is needed whole", None)
        return self._end(value)

    # ------------------------------------------------------------ what is where

    def _touches(self, node: Node) -> bool:
        """Whether a node has values with a divided axis."""
        return any(map(self._divides, (*node.inputs, *node.outputs)))

    def _divides(self, value: Value) -> bool:
        return any(value.type.has(axis) for axis in self.axes)

    def _kinds(self) -> set[str]:
        """The kinds of parts that there are. What output parts make without the axis, such as the gradient of what they
        read, may be what input parts read.
        """
        for node in self.source.nodes:
            if self._touches(node):
                before = {self.kind[value] for value in node.inputs if value in self.kind and self._divides(value)}
                whole = [v for v in node.inputs if not self._divisible(v.type.names) and v not in self.portable]
                after = OUTPUTS in before or (node.phase is Phase.FORWARD and any(self._computed(v) for v in whole))
                self.kind |= dict.fromkeys(node.outputs, OUTPUTS if after else INPUTS)
        self._return_with_outputs()
        return set(self.kind.values())

    def _return_with_outputs(self) -> None:
        """In B output parts come before input parts, so they make what they read themselves: the gradient of
        `sum(wte * wte)` in a loss, which is added to that of `dot(x, wte)`.
        """
        read: set[Value] = set()
        for node in reversed(self.source.nodes):
            if node.phase is Phase.FORWARD or not self._touches(node):
                continue
            if any(value in read for value in node.outputs):
                self.kind |= dict.fromkeys(node.outputs, OUTPUTS)
            if any(self.kind[value] == OUTPUTS for value in node.outputs):
                read.update(node.inputs)

    def _computed(self, value: Value) -> bool:
        return not any(parameter.value is value for parameter in self.source.parameters)

    def _divisible(self, names: Iterable[str]) -> bool:
        return any(name in self.axes for name in names)

    def _wanted_by_parts(self) -> set[Value]:
        """What output parts read in B."""
        needed: set[Value] = set()
        for node in reversed(self.source.nodes):
            if node.phase is Phase.FORWARD:
                continue
            parts = self._touches(node) and self.kind[node.outputs[0]] == OUTPUTS
            if parts or (not self._touches(node) and any(value in needed for value in node.outputs)):
                needed.update(node.inputs)
        return needed

    # ------------------------------------------------------------ parameters

    def _parameter(self, parameter: Parameter) -> list[Parameter]:
        value = parameter.value
        axis = next((name for name in value.type.names if name in self.axes), None)
        if axis is None:
            self.state[value], self.local[value] = None, value
            return [parameter]
        if parameter.buffer:
            raise self._refused(axis, f"buffer `{parameter.name}` has it", parameter.span)
        size = value.type.axis(axis).size // len(self.ranks)
        type, master = value.type.resized(axis, size), parameter.master.resized(axis, size)
        parts = []
        for rank in self.ranks:
            part = self.build.part(value, str(rank), type)
            whole = Part(parameter.name, parameter.master, axis, self.over, rank)
            parts.append(evolve(parameter, value=part, master=master, part=whole))
        self.state[value], self.parts[value] = axis, tuple(each.value for each in parts)
        return parts

    def _gradient(self, each: Gradient) -> list[Gradient]:
        state, value = self.state[each.value], each.value
        if state is None:
            own = self.local[value]
            stage = self.stage_of.get(own, each.stage)
            return [evolve(each, value=own, stage=stage if own in self.stage_of else each.stage)]
        gradients = []
        for rank, part in zip(self.ranks, self.parts[value], strict=True):
            name = f"{each.parameter}.{rank}" if is_split(state) else each.parameter
            gradients.append(Gradient(name, part, self.stage_of[part]))
        return gradients

    def _end(self, value: Value) -> Value:
        """A value at the end of the step."""
        if self.state.get(value) is None:
            return self.local.get(value, value)
        self.build.stage, self.build.phase = self.stages.loss, Phase.FORWARD
        return self._whole(value, self.stages.loss)

    # ------------------------------------------------------------ nodes

    def _node(self, node: Node) -> None:
        self.build.at(node).phase = node.phase
        if self._touches(node):
            self._divide(node)
            return
        for value in node.inputs:
            self.local.setdefault(value, value)  # an input of the model
        if all(value in self.portable for value in node.outputs):
            self._append(node, node.stage, [self.local[value] for value in node.inputs])
            return
        stage = self._stage(node)
        self.build.stage = stage
        inputs = [self._whole(value, stage) for value in node.inputs]
        self._append(node, stage, inputs)

    def _stage(self, node: Node) -> int | None:
        """The stage of a node without the axis."""
        of_outputs = [v for v in node.inputs if self.state.get(v) is not None and self.kind.get(v) == OUTPUTS]
        late = any(self.local.get(value) in self.late for value in node.inputs)
        if node.phase is Phase.FORWARD:
            if not (of_outputs or late):
                return node.stage
            if node.stage != self.stages.stages - 1:
                raise self._refused(None, "what follows from it is on an earlier stage than the last", node.span)
            self.late.update(node.outputs)
            return self.stages.loss
        returned = bool(of_outputs) or any(self.local.get(value) in self.returned for value in node.inputs)
        if returned:
            self.returned.update(node.outputs)
        needed = late or any(value in self.wanted for value in node.outputs)
        if returned and needed:
            raise self._refused(None, "its gradient is needed twice", node.span)
        return self.stages.loss if needed and not returned else node.stage

    def _append(self, node: Node, stage: int | None, inputs: Sequence[Value]) -> None:
        for value in node.outputs:
            self.state[value], self.local[value], self.stage_of[value] = None, value, stage
        same = stage == node.stage and tuple(inputs) == node.inputs
        self.build.nodes.append(node if same else evolve(node, inputs=tuple(inputs), stage=stage))

    def _whole(self, value: Value, stage: int | None) -> Value:
        """A value, or the sum or maximum of its parts, on a stage."""
        state = self.state.get(value)
        if state is None:
            return self.local[value]
        if is_split(state):
            raise self._refused(state, f"`{value.name}` is needed whole", self.build.span)
        key = value, stage
        if key not in self.combined:
            first, *others = self.parts[value]
            for other in others:
                first = pointwise(self.build, COMBINED[state], first, other, name=f"{value.name}.whole")
                self.stage_of[first] = stage
            self.combined[key] = first
            if self.build.phase is Phase.FORWARD and stage == self.stages.loss:
                self.late.add(first)
        return self.combined[key]

    # ------------------------------------------------------------ parts

    def _divide(self, node: Node) -> None:
        """One node for each part, by a sharding rule."""
        kind = self.kind[node.outputs[0]] if node.outputs else OUTPUTS
        stage = self.stages.output if kind == OUTPUTS else self.stages.input
        for value in node.inputs:
            if value not in self.state:
                self.state[value], self.local[value] = None, value
        states = [state if is_split(state := self.state[value]) else None for value in node.inputs]
        rule = self._rule(node, states)
        if rule is None:
            self._contribute(node, states, stage)
            return
        by_output: list[list[Value]] = [[] for _ in node.outputs]
        for rank in self.ranks:
            op = node.op
            for axis in split_axes((*rule.operands, *rule.results)):
                op = op.sharded(axis, self._size(node, axis), self.over, len(self.ranks))
            inputs = self._operands(node, states, stage, rank)
            outputs = []
            for i, (value, state) in enumerate(zip(node.outputs, rule.results, strict=True)):
                type = value.type.resized(state, self._size(node, state)) if is_split(state) else value.type
                outputs.append(self.build.part(value, str(rank), type))
                by_output[i].append(outputs[-1])
                self.stage_of[outputs[-1]] = stage(rank)
            new = evolve(node, op=op, inputs=inputs, outputs=tuple(outputs), stage=stage(rank))
            self.build.nodes.append(new)
        for value, state, parts in zip(node.outputs, rule.results, by_output, strict=True):
            self.state[value], self.parts[value] = state, tuple(parts)

    def _rule(self, node: Node, states: Sequence[State]) -> ShardingRule | None:
        """The rule that fits operands which are split or whole, and splits the results that have a divided axis."""
        types = [value.type for value in node.inputs], [value.type for value in node.outputs]
        for rule in node.op.sharding_rules(*types):
            split = all(
                state in value.type.names if is_split(state) else not self._divisible(value.type.names)
                for value, state in zip(node.outputs, rule.results, strict=True)
            )
            named = all(state in self.axes for state in split_axes((*rule.operands, *rule.results)))
            if list(rule.operands) == list(states) and split and named and any((*rule.operands, *rule.results)):
                return rule
        return None

    def _size(self, node: Node, axis: str) -> int:
        value = next(value for value in (*node.inputs, *node.outputs) if value.type.has(axis))
        size = value.type.axis(axis).size
        if size % len(self.ranks):
            raise self._refused(axis, f"{size} does not divide into {len(self.ranks)} parts", node.span)
        return size // len(self.ranks)

    def _operands(
        self, node: Node, states: Sequence[State], stage: Callable[[int], int], rank: int
    ) -> tuple[Value, ...]:
        """The operands of a rank's part."""
        self.build.stage = stage(rank)
        operands = []
        for value, state in zip(node.inputs, states, strict=True):
            late = self.local.get(value) in self.late or (
                self.state[value] is not None and self.kind.get(value) == OUTPUTS
            )
            if state is not None:
                operands.append(self.parts[value][rank])
            elif late and node.phase is Phase.FORWARD:
                raise self._at_once(node)
            elif self.local.get(value) in self.late and node.phase is not Phase.FORWARD:
                operands.append(self._passed_on(value))
            else:
                operands.append(self._whole(value, stage(rank)))
        return tuple(operands)

    def _passed_on(self, value: Value) -> Value:
        """A value of F of the loss stage, in its B, which comes before that of the parts."""
        own = self.local[value]
        if own not in self.passed:
            stage, phase = self.build.stage, self.build.phase
            self.build.stage, self.build.phase = self.stages.loss, Phase.BACKWARD
            self.passed[own] = self.build.derive(Detach(), own, own, ending="returned")
            self.build.stage, self.build.phase = stage, phase
        return self.passed[own]

    def _contribute(self, node: Node, states: Sequence[State], stage: Callable[[int], int]) -> None:
        """What each part contributes to the results of a node, and the results on the loss stage."""
        axis = next(iter(split_axes(states)), None)
        contributions = []
        for rank in self.ranks if axis is not None and node.phase is Phase.FORWARD else ():
            inputs = self._operands(node, states, stage, rank)
            before = len(self.build.nodes)
            if not isinstance(node.op, PartialReduction):
                break
            contribution = node.op.partial_reduce(self.build, evolve(node, inputs=inputs), axis or "")
            if contribution is None:
                break
            for i, new in enumerate(self.build.nodes[before:], before):
                op = new.op.sharded(axis or "", self._size(node, axis or ""), self.over, len(self.ranks))
                self.build.nodes[i] = evolve(new, op=op)
            contributions.append(contribution)
        if not contributions or not isinstance(node.op, PartialReduction):
            raise self._at_once(node)
        self.build.stage = self.stages.loss
        results = node.op.combine_parts(self.build, node, contributions)
        for value, result in zip(node.outputs, results, strict=True):
            self.state[value], self.local[value], self.stage_of[result] = None, result, self.stages.loss
            self.late.add(result)

    def _at_once(self, node: Node) -> Refused:
        axis = next(each for v in (*node.inputs, *node.outputs) for each in v.type.names if each in self.axes)
        what = f"`{node.span.text}`" if node.span else f"`{node.op.label}`"
        return self._refused(axis, f"{what} needs all of it at once", node.span)

    def _refused(self, axis: str | None, because: str, span: Span | None) -> Refused:
        name = axis or next(iter(self.axes))
        return refuse(
            "E0417",
            f"axis `{name}` cannot be split over the pipeline's `{self.over}`: {because}",
            self.axes[name],
            notes=[f"`{span.text}`   ({span.place})"] if span is not None else (),
            help="split it over another mesh axis, or not at all",
        )
