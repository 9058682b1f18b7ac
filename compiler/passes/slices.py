"""Graph over whole sequences → graph of one slice: each microbatch goes through its sequence slice by slice.

Takes a graph with gradients, the axis, and the number of slices. Time is one more mesh axis, as it is for microbatches
(`partita.compiler.passes.microbatch`): along the slices, a value is split along one of its axes, partial (SUM or MAX),
or replicated, and a node needs a `ShardingRule` that fits its operands. Inputs keep the axis, and each slice takes its
positions.

Between the slices of a microbatch goes what an operation needs whole, if it looks back only (`Attention.is_causal`), as
causal attention does at keys and values: F gathers what earlier slices have, and B sums the terms of its gradient that
later slices have (`partita.compiler.ops.slices`). Values computed from inputs and samples alone may be needed whole in
any way: each slice computes them for itself. A value that does not depend on the sequence is the same in all slices,
and counts once.

What only metrics need and no rule fits is left to the end of the step. Anything else is an error that names the
operation (E0407).
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, field, frozen

from partita.compiler.graph import Builder, Gradient, Graph, Node, Phase, Value
from partita.compiler.layout import MAX, SUM, State, is_split, split_axes
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.op import Op, ShardingRule, accumulation
from partita.compiler.ops.position import SLICE, Microbatch
from partita.compiler.ops.slices import GatherSlices, KeepInFirstPart, OfSlices, PlaceSlice, ScatterSlices
from partita.compiler.passes.ancestors import ancestors
from partita.compiler.passes.batch_rules import PART, PORTION, WHOLE_SUM, WHOLE_TENSOR, from_inputs_alone
from partita.compiler.passes.differentiate import without_dead
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

# Costs of conversions, besides those of microbatches: gathering and scattering are better than what keeps a sum over
# slices, of a tensor with the whole axis, partial.
GATHER, SCATTER, PARTIAL_TENSOR = 3, 3, 50


@frozen(eq=False)
class Sliced:
    """The graph of one slice, the states of its values along the slices, and the nodes that are left to the end of the
    step.
    """

    graph: Graph
    states: Mapping[Value, State] = field(factory=dict)
    deferred: frozenset[Node] = frozenset()


def sliced(graph: Graph, axis: str, count: int, schedule: Span | None = None) -> Sliced:
    """The graph of one of `count` slices of an axis; `schedule` is the place that asks for them.

    Raises Refused (E0407).
    """
    return _Slicer(graph, axis, count, schedule).sliced()


class _Slicer:
    def __init__(self, graph: Graph, axis: str, count: int, schedule: Span | None) -> None:
        self.source = graph
        self.schedule = schedule
        self.axis = axis
        self.count = count
        self.build = Builder(graph.names)
        self.known = from_inputs_alone(graph)
        self.producers = graph.producers()
        self.essential = ancestors(graph, [graph.loss, *(each.value for each in graph.gradients)])
        self.state: dict[Value, State] = {}
        self.local: dict[Value, Value] = {}
        self.whole: dict[Value, Value] = {}
        self.parts: dict[tuple[Value, str, bool, int | None], Value] = {}
        self.once: dict[Value, Value] = {}
        self.gathered: dict[tuple[Value, int | None], Value] = {}
        self.scattered: dict[Value, Value] = {}
        # Sums over slices that are zero before each slice's own positions, with the axis of these.
        self.backward: dict[Value, str] = {}
        self.deferred: list[Node] = []
        # The first value computed in the same way: what is recomputed is what was gathered.
        self.same: dict[Value, Value] = {}
        self.made: dict[tuple[Op, tuple[Value, ...]], tuple[Value, ...]] = {}

    def sliced(self) -> Sliced:
        """Walk the nodes once."""
        self._check()
        for each in self.source.inputs:
            split = each.value.type.has(self.axis)
            self.state[each.value] = self.axis if split else None
            self.whole[each.value] = each.value
            self.local[each.value] = self._cut_out(each.value, each.value, self.axis) if split else each.value
        for parameter in self.source.parameters:
            self.state[parameter.value], self.local[parameter.value] = None, parameter.value
        for node in self.source.nodes:
            self._node(node)
        gradients = tuple(map(self._gradient, self.source.gradients))
        loss = self._loss()
        result = evolve(
            self.source,
            nodes=tuple(self.build.nodes),
            loss=loss,
            metrics=tuple((name, self.local.get(value, value)) for name, value in self.source.metrics),
            gradients=gradients,
        )
        states = {self.local[value]: state for value, state in self.state.items()}
        states.update(dict.fromkeys((loss, *(each.value for each in gradients)), SUM))
        return Sliced(without_dead(result), states, frozenset(self.deferred))

    def _check(self) -> None:
        if not any(each.value.type.has(self.axis) for each in self.source.inputs):
            message = f"no input of model `{self.source.name}` has the axis `{self.axis}`, which is cut into slices"
            raise refuse("E0407", message, self.schedule, help="name the axis of the sequence: `over = [batch, seq]`")
        if self.source.updates:
            each = self.source.updates[0]
            message = f"`{each.buffer}` is updated in every step, which is not possible with slices of `{self.axis}`"
            raise refuse("E0407", message, each.span, help="cut the batch alone: `over = batch`")

    # ------------------------------------------------------------ one node

    def _node(self, node: Node) -> None:
        self.build.at(node).phase = node.phase
        first = tuple(self.same.get(value, value) for value in node.inputs)
        self.same.update(zip(node.outputs, self.made.setdefault((node.op, first), node.outputs), strict=True))
        if any(value not in self.state for value in node.inputs):
            self._defer(node)
            return
        if not any(self.state[value] for value in node.inputs):
            self._emit(node, [self.local[value] for value in node.inputs], None)
            return
        rule = self._fit(node)
        if rule is None:
            if any(value in self.essential for value in node.outputs):
                raise self._cannot(node)
            self._defer(node)
        elif not any((*rule.operands, *rule.results)) and all(value in self.known for value in node.outputs):
            for value in node.outputs:
                self.state[value], self.local[value] = None, self._computed_whole(value)
        else:
            pairs = zip(node.inputs, rule.operands, strict=True)
            self._emit(node, [self._converted(value, want, node) for value, want in pairs], rule)

    def _fit(self, node: Node) -> ShardingRule | None:
        """The cheapest rule that the operands can be converted to."""
        types, results = [v.type for v in node.inputs], [v.type for v in node.outputs]
        everything = ShardingRule((None,) * len(types), (None,) * len(results))
        best: tuple[int, ShardingRule] | None = None
        for rule in (*node.op.sharding_rules(types, results), everything):
            if not self._divides(node, rule):
                continue
            pairs = zip(node.inputs, rule.operands, strict=True)
            costs = [self._cost(value, want, node) for value, want in pairs]
            if None not in costs:
                total = sum(cost for cost in costs if cost is not None)
                if best is None or total < best[0]:
                    best = total, rule
        return best[1] if best is not None else None

    def _divides(self, node: Node, rule: ShardingRule) -> bool:
        """Whether the slices of all split axes are equal, and results are only split where operands are."""
        pairs = zip((*node.inputs, *node.outputs), (*rule.operands, *rule.results), strict=True)
        split = [value.type.axis(state).size for value, state in pairs if is_split(state)]
        return all(size % self.count == 0 for size in split) and (
            any(map(is_split, rule.operands)) or not any(map(is_split, rule.results))
        )

    def _cost(self, value: Value, want: State, node: Node) -> int | None:
        """The cost of an operand in another state; None if that cannot be."""
        have = self.state[value]
        if have == want:
            return PARTIAL_TENSOR if value in self.backward else 0
        if have is None:
            return {SUM: PORTION, MAX: 0}.get(str(want), PART)
        if want is None and value in self.known:
            return WHOLE_TENSOR if is_split(have) else WHOLE_SUM
        if (
            want is None
            and is_split(have)
            and isinstance(node.op, Attention)
            and node.op.is_causal(have)
            and self._forward(value) is not None
        ):
            return GATHER
        if is_split(want) and self.backward.get(value) == want:
            return SCATTER
        return None

    def _converted(self, value: Value, want: State, node: Node) -> Value:
        have = self.state[value]
        if have == want or (have is None and want == MAX):
            return self.local[value]
        if have is None:
            return self._once(value) if want == SUM else self._part(value, str(want), node)
        if want is not None:
            return self._scattered(value, str(want))
        return self._computed_whole(value) if value in self.known else self._gathered(value, node)

    def _emit(self, node: Node, operands: list[Value], rule: ShardingRule | None) -> None:
        op, results = node.op, rule.results if rule is not None else (None,) * len(node.outputs)
        if rule is not None:
            op = self._cut(node, rule)
            gathered = [
                (value.type, str(self.state[value]))
                for value, want in zip(node.inputs, rule.operands, strict=True)
                if want is None and is_split(self.state[value])
            ]
            for value, state in zip(node.outputs, results, strict=True):
                if state == SUM and node.phase is not Phase.FORWARD:
                    self.backward.update((value, axis) for type, axis in gathered if type == value.type)
        outputs = []
        for value, state in zip(node.outputs, results, strict=True):
            local = evolve(value, type=self._size(value, state)) if is_split(state) else value
            self.state[value], self.local[value] = state, local
            outputs.append(local)
        self.build.nodes.append(evolve(node, op=op, inputs=tuple(operands), outputs=tuple(outputs)))

    def _cut(self, node: Node, rule: ShardingRule) -> Op:
        """The node's operation, for a slice."""
        op = node.op
        for axis in split_axes((*rule.operands, *rule.results)):
            value = next(v for v in (*node.inputs, *node.outputs) if v.type.has(axis))
            op = op.sharded(axis, value.type.axis(axis).size // self.count, SLICE, self.count)
        return op

    def _size(self, value: Value, axis: str) -> Type:
        """The type of a slice."""
        return value.type.resized(axis, value.type.axis(axis).size // self.count)

    def _defer(self, node: Node) -> None:
        """Leave a node to the end of the step, where it reads sums over all slices."""
        if any(is_split(self.state.get(value)) for value in node.inputs):
            raise self._cannot(node)
        inputs = tuple(self.local.get(value, value) for value in node.inputs)
        self.deferred.append(evolve(node, inputs=inputs))
        self.build.nodes.append(self.deferred[-1])

    # ------------------------------------------------------------ what is the same in all slices

    def _cut_out(self, value: Value, whole: Value, axis: str) -> Value:
        """This slice of a tensor."""
        length = whole.type.axis(axis).size
        op = Microbatch(axis, length // self.count, ((axis, SLICE, self.count),))
        return self.build.derive(op, value, whole, ending="of_slice")

    def _part(self, value: Value, axis: str, reader: Node) -> Value:
        """This slice of a value that is the same in all: computed for its positions alone, or cut out."""
        node = self.producers.get(value)
        rule = self._introducing(node, axis) if node is not None else None
        # A view of a tensor that outlives the microbatch is made where it is read.
        at = (reader.phase is Phase.FORWARD, reader.stage) if node is None else (True, None)
        key = (value, axis, *at)
        if key in self.parts:
            return self.parts[key]
        before = self.build.scope, self.build.span, self.build.stage, self.build.phase
        if node is not None:
            self.build.at(node).phase = node.phase
        if node is None or rule is None:
            self.parts[key] = self._cut_out(value, self.local[value], axis)
        else:
            pairs = zip(node.inputs, rule.operands, strict=True)
            operands = [self.local[each] if want is None else self._part(each, str(want), node) for each, want in pairs]
            self.parts[key] = self.build.derive(self._cut(node, rule), value, *operands, ending="of_slice")
        self.build.scope, self.build.span, self.build.stage, self.build.phase = before
        return self.parts[key]

    def _introducing(self, node: Node, axis: str) -> ShardingRule | None:
        """A rule by which a node of replicated operands that makes one value makes a slice of it."""
        if len(node.outputs) > 1:
            return None
        types, size = [v.type for v in node.inputs], node.output.type.axis(axis).size
        for rule in node.op.sharding_rules(types, [node.output.type]):
            pairs = [(v, state) for v, state in zip(node.inputs, rule.operands, strict=True) if state is not None]
            if rule.results == (axis,) and all(
                is_split(state) and value.type.axis(str(state)).size == size for value, state in pairs
            ):
                return rule
        return None

    def _computed_whole(self, value: Value) -> Value:
        """All positions of a value that depends on inputs alone."""
        needed = ancestors(self.source, [value], self.producers)
        for node in self.source.nodes:
            if any(result in needed and result not in self.whole for result in node.outputs):
                if not any(self.state.get(operand) for operand in node.inputs):
                    self.whole.update((result, self.local[result]) for result in node.outputs)
                    continue
                outputs = tuple(self.build.part(v, "whole") for v in node.outputs)
                self.whole.update(zip(node.outputs, outputs, strict=True))
                inputs = tuple(self.whole[operand] for operand in node.inputs)
                self.build.nodes.append(evolve(node, inputs=inputs, outputs=outputs, phase=Phase.FORWARD))
        return self.whole[value]

    def _once(self, value: Value) -> Value:
        """A value that is the same in all slices as a term of a sum over them."""
        if value not in self.once:
            self.once[value] = self.build.derive(KeepInFirstPart(SLICE), value, self.local[value], ending="once")
        return self.once[value]

    # ------------------------------------------------------------ between slices

    def _forward(self, value: Value) -> Value | None:
        """The value of the forward pass that a value is, if it is one."""
        first = self.same.get(value, value)
        producer = self.producers.get(first)
        return first if producer is None or producer.phase is Phase.FORWARD else None

    def _shared(self, type: Type, name: str) -> Value:
        """A tensor that the slices of a microbatch share, outside of all iterations: these share their functions."""
        scope, self.build.scope = self.build.scope, ""
        tensor = self.build.value(name, type)
        self.build.nodes.append(
            Node(OfSlices(tensor.name, type), (), (tensor,), "", self.build.span, self.build.phase, self.build.stage)
        )
        self.build.scope = scope
        return tensor

    def _gathered(self, value: Value, reader: Node) -> Value:
        """A value at the positions of this slice and of all earlier ones."""
        value = self._forward(value) or value
        key = value, reader.stage
        if key not in self.gathered:
            axis, before = str(self.state[value]), self.build.phase
            self.build.phase = Phase.FORWARD
            tensor = self._shared(value.type, f"{value.name}.slices")
            op = GatherSlices(axis, ((axis, SLICE, self.count),))
            self.gathered[key] = self.build.derive(op, value, tensor, self.local[value], ending="so_far")
            self.build.phase = before
        return self.gathered[key]

    def _scattered(self, value: Value, axis: str) -> Value:
        """This slice of a sum over this slice and all later ones."""
        if value not in self.scattered:
            before = self.build.scope, self.build.span, self.build.stage, self.build.phase
            node = self.producers[value]
            self.build.at(node).phase = node.phase
            type = value.type.with_dtype(accumulation(value.type.dtype))
            tensor = self._shared(type, f"{value.name}.slices")
            op = ScatterSlices(axis, type.axis(axis).size // self.count, ((axis, SLICE, self.count),))
            self.scattered[value] = self.build.derive(op, value, tensor, self.local[value], ending="of_slice")
            self.build.scope, self.build.span, self.build.stage, self.build.phase = before
        return self.scattered[value]

    # ------------------------------------------------------------ what leaves a slice

    def _gradient(self, gradient: Gradient) -> Gradient:
        """A contribution to a gradient, as a term of a sum over the slices."""
        value, state = gradient.value, self.state[gradient.value]
        if state == SUM:
            return evolve(gradient, value=self.local[value])
        node = self.producers[value]
        self.build.at(node).phase = node.phase
        if state is None:
            return evolve(gradient, value=self._once(value))
        key = value, str(state), False, None
        if key not in self.parts:
            size = value.type.axis(str(state)).size
            op = PlaceSlice(str(state), size, ((str(state), SLICE, self.count),))
            self.parts[key] = self.build.derive(op, value, self.local[value], ending="placed")
        return evolve(gradient, value=self.parts[key])

    def _loss(self) -> Value:
        """The loss, as a term of a sum over the slices."""
        loss = self.source.loss
        if self.state[loss] == SUM:
            return self.local[loss]
        self.build.at(self.producers[loss]).phase = Phase.FORWARD
        return self._once(loss)

    def _cannot(self, node: Node) -> Refused:
        what = f"`{node.span.text if node.span else node.op.label}`"
        states = [(value, self.state.get(value)) for value in node.inputs]
        if any(state in (SUM, MAX) for _, state in states):
            message = f"{what} is applied to a sum over `{self.axis}`, which is partial within a slice"
            help = "after the reduction over the sequence the loss may only be scaled or added to"
        else:
            message = f"{what} needs all of `{self.axis}`, which is cut into slices"
            help = "a position may depend on earlier ones, by attention that is `causal = true`, but not on later ones"
        notes = [f"{value.name}: {value.type}, {_described(state, self.axis)}" for value, state in states]
        return refuse("E0407", message, node.span, notes=notes, help=f"{help}; or cut the batch alone: `over = batch`")


def _described(state: State, axis: str) -> str:
    if state is None:
        return "the same in all slices"
    return f"partial over `{axis}`" if state in (SUM, MAX) else f"cut along `{state}`"
