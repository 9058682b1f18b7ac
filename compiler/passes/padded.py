"""The joint graph → the same with some axes longer than they are, so that they divide over mesh axes and microbatches.

What stands past the end of such an axis, its *padding*, is zero in inputs, parameters and buffers, and anything in what
is computed from them. It must not reach what is real, so an operation that reduces over the axis reads zeros there (or
what else adds nothing to it, `Op.neutral`). Most values need no mask for that, as a product with zeros is zero: of each
value is known whether its padding is zero, or at least finite. An operation that needs the whole axis gets it without
its padding, gathered; so does a file's output. No layout splits a sequence that goes through in parts
(`partita.compiler.passes.decode`): of what has its axis, only parameters are stored with padding.

Gradients are zero in the padding of parameters, so that these stay zero, and that norms and states are as without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

from attrs import evolve

from partita.compiler.graph import Builder, Graph, Node, Phase, Value
from partita.compiler.layout import MAX, SUM
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.lookup import ScatterAdd
from partita.compiler.ops.op import ShardingRule
from partita.compiler.ops.pointwise import Pointwise, constant, pointwise
from partita.compiler.ops.position import Iota, Positioned
from partita.compiler.ops.shape import Pad, Slice
from partita.compiler.ops.traits import SameTensor
from partita.dsl.types import FLOATS, INTEGERS, Axis, Type, integers

INFINITY = float("inf")
# Those of a microbatch, in order: what one makes, later ones can read.
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)


class Padding(IntEnum):
    """What is known of a value's padding along an axis."""

    ZERO = 0
    FINITE = 1
    ANY = 2


def padded(
    graph: Graph,
    sizes: Mapping[str, int],
    batches: tuple[str, int] | None = None,
    stored: Mapping[str, int] = MappingProxyType({}),
) -> Graph:
    """The graph with these sizes of some axes, each at least its own. With `batches`, the axis of rows and their number
    in one, this axis is of several batches, and each of them is padded. Those in `stored` are longer only in parameters
    that are no states.
    """
    return _Pass(graph, sizes, batches, stored).run() if sizes or stored else graph


def padded_sizes(graph: Graph) -> dict[str, int]:
    """The sizes that a padded graph has of the axes that are padded in it."""
    axes = (axis for value in graph.values for axis in value.type.axes if axis.name in graph.own_sizes)
    sizes: dict[str, int] = {}
    for axis in axes:
        sizes[axis.name] = max(sizes.get(axis.name, 0), axis.size)
    return sizes


class _Pass:
    def __init__(
        self, graph: Graph, sizes: Mapping[str, int], batches: tuple[str, int] | None, stored: Mapping[str, int]
    ) -> None:
        self.graph = graph
        self.sizes = sizes
        self.stored = stored
        self.own = {axis.name: axis.size for value in graph.values for axis in value.type.axes if axis.name in sizes}
        lasting = [each for each in graph.parameters if stored and not each.is_state]
        self.own |= {axis.name: axis.size for each in lasting for axis in each.value.type.axes if axis.name in stored}
        self.lasting = {each.value for each in lasting}
        self.short: dict[tuple[Value, int | None], Value] = {}
        # The rows of each of several batches, and those with padding.
        self.batches: dict[str, tuple[int, int]] = {}
        if batches is not None:
            axis, rows = batches
            self.batches[axis] = rows, sizes[axis] // (self.own[axis] // rows)
        self.build = Builder(graph.names)
        self.made: dict[Value, Value] = {}
        # Of values with the axis; values of operations that get it whole are not listed.
        self.state: dict[tuple[Value, str], Padding] = {}
        self.masked: dict[tuple[Value, str, float, int | None, Phase], Value] = {}
        self.inside: dict[Node, Sequence[Node]] = {}

    def run(self) -> Graph:
        """Walk the nodes once."""
        for value in self.graph.leaves:
            self._leaf(value)
        for node in self.graph.nodes:
            self._node(node)
        graph = self.graph
        parameters = tuple(
            evolve(each, value=self.made[each.value], master=self._type(each.master, each.value))
            for each in graph.parameters
        )
        made = graph.producers()
        gradients = [evolve(each, value=self._zeroed(each.value, made, each.stage)) for each in graph.gradients]
        updates = [evolve(each, value=self._zeroed(each.value, made)) for each in graph.updates]
        asked = [(name, self._without(value, made)) for name, value in graph.asked]
        return evolve(
            graph,
            inputs=tuple(evolve(each, value=self.made[each.value]) for each in graph.inputs),
            parameters=parameters,
            nodes=tuple(self.build.nodes),
            loss=self.made[graph.loss],
            metrics=tuple((name, self._without(value, made)) for name, value in graph.metrics),
            gradients=tuple(gradients),
            updates=tuple(updates),
            asked=tuple(asked),
            inside=self.inside,
            own_sizes=self.own,
        )

    def _type(self, type: Type, leaf: Value) -> Type:
        for name, size in (*self.sizes.items(), *(self.stored.items() if leaf in self.lasting else ())):
            type = type.resized(name, size)
        return type

    def _axes(self, types: Sequence[Type]) -> list[str]:
        """The padded axes of some types."""
        return [name for name in self.sizes if any(type.has(name) for type in types)]

    def _leaf(self, value: Value) -> None:
        self.made[value] = evolve(value, type=self._type(value.type, value))
        self.state.update(((self.made[value], axis), Padding.ZERO) for axis in self._axes([value.type]))

    # ------------------------------------------------------------ one node

    def _node(self, node: Node) -> None:
        axes = self._axes([value.type for value in (*node.inputs, *node.outputs)])
        rules = {axis: self._rule(node, axis) for axis in axes}
        whole = [axis for axis, rule in rules.items() if rule is None]
        if whole:
            build = self.build.fresh().at(node)
            build.phase = node.phase
            results = node.op.split(build, node, whole[0])
            if results is not None:
                for each in build.nodes:
                    self._node(each)
                self.made.update((value, self.made[one]) for value, one in zip(node.outputs, results, strict=True))
                return
        self._at(node)
        op, inputs = node.op, [self._read_here(value) for value in node.inputs]
        states: dict[str, list[Padding]] = {}
        for axis, rule in rules.items():
            if rule is None:
                inputs = [self._cut(value, axis) for value in inputs]
                continue
            states[axis] = self._read(node, axis, rule, inputs)
            op = op.resized(axis, self.sizes[axis])
            if axis in self.batches and isinstance(op, Positioned):
                op = op.of_batches(axis, *self.batches[axis])
        types = [value.type for value in node.outputs]
        for axis in states:
            types = [type.resized(axis, self.sizes[axis]) if type.has(axis) else type for type in types]
        outputs = [
            value if value.type == type else evolve(value, type=type)
            for value, type in zip(node.outputs, types, strict=True)
        ]
        made = node.changed(op=op, inputs=tuple(inputs), outputs=tuple(outputs))
        if node in self.graph.inside:
            self.inside[made] = self.graph.inside[node]
        self.build.nodes.append(made)
        for value, output in zip(node.outputs, outputs, strict=True):
            for axis, found in states.items():
                if output.type.has(axis):
                    self.state[output, axis] = found[node.outputs.index(value)]
            for axis in whole:
                if output.type.has(axis):
                    output = self._lengthened(output, axis)
            self.made[value] = output
            if value.cotangent and not any(each.type.has(axis) for each in inputs for axis in states):
                # What spreads a number over the axis: the gradient of a sum. Zeros here keep all that follow.
                for axis in states:
                    self.made[value] = self._mask(self.made[value], axis)

    def _read_here(self, value: Value) -> Value:
        """What an operation reads: of a parameter that is only stored with padding, what is real."""
        key = value, self.build.stage
        if value in self.lasting and key not in self.short:
            found = self.made[value]
            for axis in self.stored:
                found = self._cut(found, axis)
            self.short[key] = found
        return self.short.get(key, self.made[value])

    def _at(self, node: Node) -> None:
        self.build.at(node).phase = node.phase

    def _rule(self, node: Node, axis: str) -> ShardingRule | None:
        """The rule by which an operation works at each position of an axis by itself, or reduces over it; None if it
        has none, or if nothing is known that would keep its padding out of a sum.
        """
        results = [value.type for value in node.outputs]
        read = [axis if value.type.has(axis) else None for value in node.inputs]
        for rule in _rules(node):
            states = zip(rule.results, results, strict=True)
            if list(rule.operands) == read and all(
                state == axis if type.has(axis) else state in (None, SUM, MAX) for state, type in states
            ):
                if SUM not in rule.results or node.op.neutral(axis):
                    return rule
                return rule if any(self._linear(node, axis)) else None
        if isinstance(node.op, Attention) and node.op.is_causal(axis) and any(read):
            return ShardingRule(tuple(read), tuple(axis if type.has(axis) else None for type in results))
        return None

    @staticmethod
    def _linear(node: Node, axis: str) -> Iterator[list[int]]:
        """Yields operands with an axis in which an operation is linear together: where these are zero, so are all of
        its results.
        """
        for rule in _rules(node):
            partial = [i for i, state in enumerate(rule.operands) if state == SUM]
            alone = {*rule.operands} <= {SUM, None} and {*rule.results} == {SUM}
            if partial and alone and all(node.inputs[i].type.has(axis) for i in partial):
                yield partial

    def _read(self, node: Node, axis: str, rule: ShardingRule, inputs: list[Value]) -> list[Padding]:
        """Mask the operands of which the padding would reach what is real. Returns what is known of the results."""
        fill = node.op.neutral(axis)
        having = [i for i, value in enumerate(node.inputs) if value.type.has(axis)]
        if fill:
            for i in having:
                inputs[i] = self._mask(inputs[i], axis, fill)
            return [Padding.ZERO] * len(node.outputs)
        known = [self.state.get((value, axis), Padding.FINITE) for value in inputs]
        sets = list(self._linear(node, axis))
        zeros = any(all(known[i] is Padding.ZERO for i in each) for each in sets)
        if SUM in rule.results or rule not in _rules(node):
            least = min(sets, key=lambda each: sum(inputs[i].type.bytes for i in each), default=())
            for i in having:
                if known[i] is Padding.ANY or (i in least and not zeros):
                    inputs[i], known[i] = self._mask(inputs[i], axis), Padding.ZERO
            zeros = zeros or bool(sets)
        for i in having:
            if inputs[i].type.dtype in INTEGERS and self._is_index(node, axis, i):
                inputs[i], known[i] = self._mask(inputs[i], axis), Padding.ZERO  # that of something that there is
            elif MAX in rule.results:
                inputs[i] = self._mask(inputs[i], axis, -INFINITY)
            elif isinstance(node.op, Pointwise) and i in node.op.divisors and not inputs[i].type.is_float:
                inputs[i] = self._mask(inputs[i], axis, 1)
        read = [known[i] for i in having]
        if Padding.ANY in read or not node.op.is_finite:
            return [Padding.ANY] * len(node.outputs)
        if zeros or (isinstance(node.op, ScatterAdd) and node.op.adds_rows == axis):
            return [Padding.ZERO] * len(node.outputs)
        floats = [i for i, value in enumerate(inputs) if value.type.is_float]
        all_zero = all(known[i] is Padding.ZERO for i in floats)
        first = Padding.ZERO if floats and all_zero and node.op.keeps_zeros else Padding.FINITE
        return [first, *[Padding.FINITE] * (len(node.outputs) - 1)]

    @staticmethod
    def _is_index(node: Node, axis: str, position: int) -> bool:
        """Whether an operand of integers may be used as indices."""
        ids = node.op.ids([value.type for value in node.inputs])
        if node.op.reduces or node.op.rearranges or isinstance(node.op, SameTensor) or node.op.is_view:
            return ids is not None and ids[0] == position
        return not node.op.elementwise_over((axis,))

    # ------------------------------------------------------------ with zeros, and without padding

    def _mask(self, value: Value, axis: str, fill: float = 0.0) -> Value:
        """A value with another padding; itself, where it is known to be zero. Each stage makes it once, where it first
        needs it.
        """
        if not fill and self.state.get((value, axis)) is Padding.ZERO:
            return value
        now = self.build.phase
        for phase in PHASES[: PHASES.index(now)] if now in PHASES else ():
            if (before := self.masked.get((value, axis, fill, self.build.stage, phase))) is not None:
                return before
        key = value, axis, fill, self.build.stage, now
        if key not in self.masked:
            build, type = self.build, value.type
            positions = build.apply(Iota(type.axis(axis)))
            rows = self.own[axis]
            if axis in self.batches:
                rows, longer = self.batches[axis]
                positions = pointwise(build, "remainder", positions, constant(build, longer, positions))
            real = pointwise(build, "less", positions, constant(build, rows, positions))
            other = constant(build, _lowest(type.dtype) if fill == -INFINITY else _number(fill, type.dtype), type)
            masked = build.derive(Pointwise("where"), value, real, value, other, ending="masked")
            self.masked[key] = masked
            self.state.update(
                {(masked, each): self.state.get((value, each), Padding.FINITE) for each in self._axes([type])}
            )
            self.state[masked, axis] = Padding.FINITE if fill else Padding.ZERO
        return self.masked[key]

    def _cut(self, value: Value, axis: str) -> Value:
        """A value without its padding along an axis."""
        if not value.type.has(axis):
            return value
        cut = self.build.derive(Slice(axis, Axis(axis, self.own[axis]), 0), value, value, ending="without_padding")
        return self._alike(cut, value, axis)

    def _lengthened(self, value: Value, axis: str) -> Value:
        """A value with zeros past the end of an axis."""
        long = self.build.derive(Pad(axis, Axis(axis, self.sizes[axis]), 0), value, value, ending="padded")
        self._alike(long, value, axis)
        self.state[long, axis] = Padding.ZERO
        return long

    def _alike(self, value: Value, other: Value, but: str) -> Value:
        """A value of which the same is known along other axes."""
        for axis in self._axes([value.type]):
            if axis != but and (other, axis) in self.state:
                self.state[value, axis] = self.state[other, axis]
        return value

    def _zeroed(self, value: Value, made: Mapping[Value, Node], stage: int | None = None) -> Value:
        """A value with zeros as its padding, on a stage or on its own."""
        if value in made:
            self._at(made[value])
        found = self.made[value]
        for axis in self._axes([found.type]):
            if stage is not None:
                self.build.stage = stage
            found = self._mask(found, axis)
        return found

    def _without(self, value: Value, made: Mapping[Value, Node]) -> Value:
        """A value without any padding."""
        if value in made:
            self._at(made[value])
        found = self._read_here(value)
        for axis in self._axes([found.type]):
            found = self._cut(found, axis)
        return found


def _rules(node: Node) -> tuple[ShardingRule, ...]:
    """The sharding rules of a node's operation on its operands."""
    return node.op.sharding_rules([value.type for value in node.inputs], [value.type for value in node.outputs])


def _lowest(dtype: str) -> float:
    """What no element is less than."""
    return -INFINITY if dtype in FLOATS else integers(dtype)[0]


def _number(value: float, dtype: str) -> float:
    """A number as one of a dtype."""
    return bool(value) if dtype == "bool" else value if dtype in FLOATS else int(value)
