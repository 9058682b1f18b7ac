"""A scan's body, expanded once, becomes the body of one operation; what does not need the loop is moved out of it.

An operation of the body that depends on no state is applied to all positions at once, before the loop: products with
what the loop reads, lookups, and random numbers, which so differ from position to position.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field

from partita.compiler.graph import Builder, Node, Value
from partita.compiler.ops.body import body_of
from partita.compiler.ops.op import Op
from partita.compiler.ops.position import Dropout
from partita.compiler.ops.scan import Scan
from partita.compiler.ops.shape import Expand
from partita.compiler.passes.guard import bounds, within
from partita.dsl.diagnostic import refuse
from partita.dsl.types import Axis


@define(eq=False)
class Loop:
    """A loop along an axis. `tensors` maps what the body sees one position of to the tensor, `made` are the values that
    remain in the loop.
    """

    axis: Axis
    backward: bool
    tensors: dict[Value, Value] = field(factory=dict)
    made: set[Value] = field(factory=set)
    literals: dict[Value, Node] = field(factory=dict)  # they are both in the loop and before it

    def seen(self, build: Builder, value: Value) -> Value:
        """What the body sees of a tensor: one position of it, if it has the axis."""
        if not value.type.has(self.axis.name):
            return value
        part = build.value(value.name, value.type.without([self.axis.name]))
        self.tensors[part] = value
        return part

    def closed(
        self,
        build: Builder,
        nodes: Sequence[Node],
        states: Sequence[Value],
        initial: Sequence[Value],
        updated: Sequence[Value],
        names: Sequence[str],
    ) -> tuple[list[Value], list[Node]]:
        """Append the scan of a body's nodes, and before it what needs no loop. `updated` are the states after one.

        Returns the states at all positions, and the nodes that remain in the loop. Raises Refused (E0401) for a lookup
        by ids that depend on states and may be out of range.
        """
        scope, span = build.scope, build.span
        self.made.update(states)
        inside = [node for node in nodes if not self._moved(build, node)]
        self._check_lookups(build, inside)
        for node in inside:
            if _draws(node.op):
                message = f"`{node.op.label}` draws random numbers, and depends on what the scan carries"
                raise refuse("E0401", message, node.span, help="`dropout(x, rate)` may depend on it")
        read = dict.fromkeys([value for node in inside for value in node.inputs] + list(updated))
        captured = [value for value in read if value not in self.made and value not in self.literals]
        sliced = [value for value in captured if self._tensor(value).type.has(self.axis.name)]
        shared = [value for value in captured if value not in sliced]
        body = body_of([*self.literals.values(), *inside], [*states, *sliced, *shared], [*updated, *updated])
        op = Scan(self.axis, body, len(states), len(sliced), len(updated), backward=self.backward)
        operands = [*initial, *map(self._tensor, sliced), *map(self._tensor, shared)]
        types = op.infer(*(value.type for value in operands))
        stems = [*(f"{name}.last" for name in names), *names]
        results = tuple(build.value(stem, type) for stem, type in zip(stems, types, strict=True))
        build.nodes.append(Node(op, tuple(operands), results, scope, span, build.phase, build.stage))
        return list(results[len(states) :]), inside

    def _check_lookups(self, build: Builder, inside: Sequence[Node]) -> None:
        """Nothing counts the ids in a loop that are out of range: they must be known to be within it."""
        before = bounds(build.nodes, {})
        intervals = {value: before[tensor] for value, tensor in self.tensors.items() if tensor in before}
        known = bounds([*self.literals.values(), *inside], before | intervals)
        for node in inside:
            lookup = node.op.ids([value.type for value in node.inputs])
            if lookup is not None:
                position, axis = lookup
                ids = node.inputs[position]
                if ids not in known or not within(known[ids], axis):
                    message = f"ids that depend on what the scan carries may be outside of `{axis.name}`"
                    help = f"bound them: `minimum(maximum(ids, 0), size({axis.name}) - 1)`"
                    raise refuse("E0401", message, node.span, help=help)

    def _tensor(self, value: Value) -> Value:
        """The tensor that the body sees as this value."""
        return self.tensors.get(value, value)

    def _moved(self, build: Builder, node: Node) -> bool:
        """Append a node of the body before the loop, for all positions at once; whether that is possible."""
        name = self.axis.name
        if node.op.literal is not None:
            build.nodes.append(node)
            self.literals[node.output] = node
            return True
        inputs = [self._tensor(value) for value in node.inputs]
        sliced = _draws(node.op) or any(value.type.has(name) for value in inputs)
        op = node.op.vmapped(self.axis) if sliced else node.op
        if op is None or any(value in self.made for value in node.inputs):
            self.made.update(node.outputs)
            return False
        build.at(node)
        if inputs and sliced:
            for i in node.op.to_broadcast([value.type for value in inputs], name):
                inputs[i] = build.apply(Expand((self.axis,)), inputs[i])
        types = op.infer(*(value.type for value in inputs))
        outputs = tuple(evolve(value, type=type) for value, type in zip(node.outputs, types, strict=True))
        build.nodes.append(evolve(node, op=op, inputs=tuple(inputs), outputs=outputs))
        self.tensors.update(zip(node.outputs, outputs, strict=True))
        return True


def _draws(op: Op) -> bool:
    """Whether an operation draws random numbers itself, rather than taking some."""
    return op.random and not isinstance(op, Dropout)
