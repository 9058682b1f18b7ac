"""Forward graph → graph of a part of its sequence: some positions, and what is kept of those before them.

A part is a shard of the sequence on a mesh axis `position`, so an operation can be applied to it where it has a
sharding rule along the sequence. What a rule needs whole is kept: each part adds its own positions to a state.
That is right where the operation looks back only, as causal attention does at keys and values. Recurrences have no such
rule, and continue from the state that they ended with (`Op.decode_step`). What does not depend on the sequence's input
is the same for all parts, and each computes it for its own positions where it can.

Values are tracked by the axis that is in parts: the sequence, or what it has been renamed to. No layout splits such an
axis, but that of a parameter: a part may have a single position, and a state must have all.
"""

from __future__ import annotations

from attrs import evolve, frozen

from partita.compiler.graph import Builder, Graph, Input, Node, Parameter, Value
from partita.compiler.layout import MAX, SUM, State, is_split, split_axes
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.decoding import UpdateCache
from partita.compiler.ops.op import Op, ShardingRule
from partita.compiler.ops.position import POSITION, Microbatch
from partita.compiler.ops.windows import Sliding
from partita.compiler.passes.differentiate import without_dead
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

STATE = "state "  # prefix of the names of states


@frozen
class NotInParts(Exception):
    """An operation that needs the whole sequence."""

    what: str
    span: Span | None


def decoded(graph: Graph, sequence: str, size: int, masters: bool = False) -> tuple[Graph, frozenset[str]]:
    """The graph for `size` positions of an axis, in which some inputs have this axis; and the axes that are in parts.
    States are buffers.

    Parameters are stored in the dtype in which they are read, unless there are `masters`. Raises NotInParts.
    """
    decoder = _Decoder(without_dead(graph), sequence, size, masters)
    return decoder.graph(), frozenset((sequence, *decoder.axis.values()))


class _Decoder:
    def __init__(self, graph: Graph, sequence: str, size: int, masters: bool) -> None:
        self.source = graph
        self.masters = masters
        self.sequence = sequence
        self.size = size
        self.build = Builder(graph.names)
        self.axis: dict[Value, str] = {}  # of what depends on the sequence's input: the axis that is in parts
        self.local: dict[Value, Value] = {}
        self.parts: dict[tuple[Value, str], Value] = {}  # of what does not
        self.kept: dict[Value, Value] = {}
        self.states: list[Parameter] = []
        self.producers = graph.producers()

    def graph(self) -> Graph:
        """Walk the nodes once."""
        inputs = tuple(map(self._input, self.source.inputs))
        for node in self.source.nodes:
            self._node(node)
        outputs = tuple((name, self.local[value]) for name, value in self.source.asked if self._whole(name, value))
        parameters = self.source.parameters
        if not self.masters:
            parameters = tuple(evolve(each, master=each.value.type) for each in parameters)
        return without_dead(
            evolve(
                self.source,
                inputs=inputs,
                parameters=(*parameters, *self.states),
                nodes=tuple(self.build.nodes),
                asked=outputs,
            )
        )

    def _whole(self, name: str, value: Value) -> bool:
        if self.axis.get(value) != self.sequence:
            raise NotInParts(f"output `{name}` has no `{self.sequence}`", None)
        return True

    def _input(self, each: Input) -> Input:
        if not each.value.type.has(self.sequence):
            return each
        self.axis[each.value] = self.sequence
        local = self.local[each.value] = evolve(each.value, type=each.value.type.resized(self.sequence, self.size))
        return evolve(each, value=local)

    def _node(self, node: Node) -> None:
        self.build.at(node).phase = node.phase
        axes = {self.axis[value] for value in node.inputs if value in self.axis}
        if not axes:
            self.build.nodes.append(node)
            return
        rule = self._rule(node)
        if rule is not None:
            pairs = zip(node.inputs, rule.operands, strict=True)
            operands = [self._operand(value, state) for value, state in pairs]
            self._emit(node, operands, rule)
            return
        (axis, *others) = axes
        results = None
        if not others:
            values = [self._operand(value, axis if value.type.has(axis) else None) for value in node.inputs]
            results = node.op.decode_step(self.build, values, axis, lambda type: self._state(node.outputs[0], type))
        if results is None:
            text = node.span.text if node.span else node.op.label
            what = f"`{node.op.name} {axis}`" if text == axis else f"`{text}`"
            raise NotInParts(f"{what} needs all of `{axis}`", node.span)
        renamed = node.op.renamed(axis) if isinstance(node.op, Sliding) else axis
        for value, local in zip(node.outputs, results, strict=True):
            if local.type.has(renamed):
                self.axis[value], self.local[value] = renamed, local

    def _rule(self, node: Node) -> ShardingRule | None:
        """A rule by which the node can be applied to a part: the first one."""
        types, results = [v.type for v in node.inputs], [v.type for v in node.outputs]
        return next((rule for rule in node.op.sharding_rules(types, results) if self._fits(node, rule)), None)

    def _fits(self, node: Node, rule: ShardingRule) -> bool:
        states = (*rule.operands, *rule.results)
        if SUM in states or MAX in states or None in rule.results:
            return False
        lengths = {
            value.type.axis(state).size
            for value, state in zip((*node.inputs, *node.outputs), states, strict=True)
            if state is not None
        }
        in_parts = False
        for value, state in zip(node.inputs, rule.operands, strict=True):
            have = self.axis.get(value)
            if have is None:
                continue
            if state is None and not (isinstance(node.op, Attention) and node.op.is_causal(have)):
                return False
            if state is not None and state != have:
                return False
            in_parts = in_parts or state is not None
        return in_parts and len(lengths) == 1

    def _operand(self, value: Value, state: State) -> Value:
        """An operand in the state that a rule asks for."""
        if value in self.axis:
            return self._kept(value) if state is None else self.local[value]
        return value if state is None else self._part(value, state)

    def _part(self, value: Value, axis: str) -> Value:
        """The positions of a value that does not depend on the sequence's input: computed for these, or cut out."""
        if (value, axis) not in self.parts:
            node = self.producers.get(value)
            rule = self._introducing(node, axis) if node is not None else None
            if node is None or rule is None:
                length = value.type.axis(axis).size
                cut = Microbatch(axis, self.size, ((axis, POSITION, -(-length // self.size)),))
                self.parts[value, axis] = self.build.derive(cut, value, value, ending="part")
            else:
                operands = [
                    each if state is None else self._part(each, state)
                    for each, state in zip(node.inputs, rule.operands, strict=True)
                ]
                before = self.build.scope, self.build.span
                self.build.at(node)
                op = self._cut(node, rule)
                self.parts[value, axis] = self.build.derive(op, value, *operands, ending="part")
                self.build.scope, self.build.span = before
        return self.parts[value, axis]

    def _introducing(self, node: Node, axis: str) -> ShardingRule | None:
        """A rule by which a node that makes one value makes only some positions of it."""
        if len(node.outputs) > 1:
            return None
        size = node.output.type.axis(axis).size
        for rule in node.op.sharding_rules([v.type for v in node.inputs], [node.output.type]):
            pairs = [(v, state) for v, state in zip(node.inputs, rule.operands, strict=True) if state is not None]
            if rule.results == (axis,) and all(
                state not in (SUM, MAX) and value.type.axis(str(state)).size == size for value, state in pairs
            ):
                return rule
        return None

    def _emit(self, node: Node, operands: list[Value], rule: ShardingRule) -> None:
        outputs = []
        for value, state in zip(node.outputs, filter(is_split, rule.results), strict=True):
            local = evolve(value, type=value.type.resized(state, self.size))
            self.axis[value], self.local[value] = state, local
            outputs.append(local)
        op = self._cut(node, rule)
        self.build.nodes.append(evolve(node, op=op, inputs=tuple(operands), outputs=tuple(outputs)))

    def _cut(self, node: Node, rule: ShardingRule) -> Op:
        """The node's operation, for a part."""
        op = node.op
        for axis in split_axes((*rule.operands, *rule.results)):
            value = next(v for v in (*node.inputs, *node.outputs) if v.type.has(axis))
            op = op.sharded(axis, self.size, POSITION, -(-value.type.axis(axis).size // self.size))
        return op

    # ------------------------------------------------------------ states

    def _kept(self, value: Value) -> Value:
        """All positions of a value so far."""
        if value not in self.kept:
            axis = self.axis[value]
            length = value.type.axis(axis).size
            state = self._state(value, value.type)
            op = UpdateCache(axis, ((axis, POSITION, -(-length // self.size)),))
            self.kept[value] = self.build.derive(op, value, state, self.local[value], ending="kept")
        return self.kept[value]

    def _state(self, value: Value, type: Type) -> Value:
        """A new state, named after a value."""
        state = Value(self.build.unique(f"{STATE}{value.name}"), type)
        self.states.append(Parameter(state, type, Call("zeros", {}), (1, 1), decays=False, buffer=True, is_state=True))
        return state
