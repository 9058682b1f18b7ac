"""Takes rows out of the order of their experts (`partita.compiler.passes.group`), and validates that they were in one.

Returns stages in which each value is that of rows in their own order: an operation on rows in order stands for the same
one on these, since it computes each row by itself, sums over all of them, or knows their experts by the same order.
What the stages then compute is validated as that of any other stages. Invariants:

- A value is made before it is read, in the same phase or an earlier one.
- A permutation is used only as what it is, with values of the rows that it was made for, and on its own stage.
- An operation reads rows in one order only, and besides them nothing that has axes of the rows.
- Nothing else reads rows in order; so they are not sent, not accumulated, and their layout is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatchmethod

from attrs import define, evolve, field, frozen

from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import Layout, State, layout_of
from partita.compiler.ops.grouped import (
    ROWS,
    CombineRows,
    GroupedDot,
    GroupedWeightGradient,
    Permute,
    SortByExpert,
    Unpermute,
    in_order,
    layout_in_order,
)
from partita.compiler.ops.op import Op
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.verify.checker import Checker, quoted
from partita.compiler.verify.rules import Violation, require
from partita.dsl.types import Type

PHASES = tuple(Phase)


def in_own_order(partitioned: PartitionedGraph, check: Checker) -> PartitionedGraph:
    """The stages with all rows in their own order."""
    return evolve(partitioned, stages=tuple(_Stage(check, stage).plain() for stage in partitioned.stages))


@frozen(eq=False)
class _Order:
    """A permutation of rows: what made it, and of which ids."""

    op: SortByExpert
    ids: Value
    results: tuple[Value, ...]

    def same(self, other: _Order) -> bool:
        """Whether rows stand alike: the same is made of the same ids, perhaps in another phase."""
        return self.op == other.op and self.ids == other.ids

    @property
    def names(self) -> set[str]:
        """The axes of the rows."""
        return {axis.name for axis in self.op.rows}


@define(eq=False)
class _Stage:
    check: Checker
    stage: StageGraph
    orders: dict[Value, _Order] = field(factory=dict)  # by their results
    rows: dict[Value, tuple[_Order, Value]] = field(factory=dict)  # values in order, and in their own order
    instead: dict[Value, Value] = field(factory=dict)
    named: dict[Value, Value] = field(factory=dict)
    made: dict[Value, int] = field(factory=dict)  # in which phase

    def plain(self) -> StageGraph:
        """The stage, as it is if all its rows are in their own order."""
        if not any(value.type.has(ROWS) for node in self.stage.nodes for value in node.outputs):
            return self.stage
        inputs = [each.value for each in self.stage.inputs] + [each.value for each in self.stage.parameters]
        self.made = dict.fromkeys(inputs, 0)
        nodes: list[Node] = []
        for node in self.stage.nodes:
            with self.check.at(node.span, f"on stage {self.stage.index}"):
                for value in node.inputs:
                    early = self.made.get(value, len(PHASES)) <= PHASES.index(node.phase)
                    require(early, f"`{value.name}` is read before it is made, or is not made at all", value)
                nodes += self._plain(node.op, node)
            self.made.update(dict.fromkeys(node.outputs, PHASES.index(node.phase)))
        return evolve(self.stage, nodes=tuple(map(self._renamed, nodes)))

    def _renamed(self, node: Node) -> Node:
        """The node with values under the names that they have where they are in their own order."""
        inputs, outputs = (tuple(self.named.get(v, v) for v in values) for values in (node.inputs, node.outputs))
        same = inputs == node.inputs and outputs == node.outputs
        return node if same else evolve(node, inputs=inputs, outputs=outputs)

    @singledispatchmethod
    def _plain(self, op: Op, node: Node) -> Sequence[Node]:
        known = [self.rows[value][0] for value in node.inputs if value in self.rows]
        if known:
            return [self._by_row(node, known[0])]
        inputs = tuple(map(self._own, node.inputs))
        return [node if inputs == node.inputs else evolve(node, inputs=inputs)]

    # ------------------------------------------------------------ operations on rows in order

    @_plain.register(SortByExpert)
    def _ordered(self, op: SortByExpert, node: Node) -> Sequence[Node]:
        ids = self._own(node.inputs[0])
        self._infers(node)
        order = _Order(op, ids, node.outputs)
        self.orders.update(dict.fromkeys(node.outputs, order))
        self.check.nodes += 1
        return ()

    @_plain.register(Permute)
    def _taken(self, op: Permute, node: Node) -> Sequence[Node]:
        x, order = self._own(node.inputs[0]), self._order(node, 0)
        require(op.rows == order.op.rows, f"{quoted(node)} takes other rows than were put in order", *node.inputs)
        self._infers(node)
        self._stands_for(node.output, order, x)
        self.check.nodes += 1
        return ()

    @_plain.register(Unpermute)
    def _put(self, op: Unpermute, node: Node) -> Sequence[Node]:
        own, order = self._in_order(node.inputs[0]), self._order(node, 1)
        self._alike(node, order, node.inputs[:1])
        require(op.rows == order.op.rows, f"{quoted(node)} puts other rows than were put in order", *node.inputs)
        self._infers(node)
        (value,) = node.outputs
        same = (value.type, value.layout) == (own.type, own.layout)
        require(same, f"`{value.name}` is not what was put in order", value, own)
        self.instead[value] = own
        if own not in self.made:  # nobody else made it under a name
            self.named.setdefault(own, value)
        self.check.nodes += 1
        return ()

    @_plain.register(CombineRows)
    def _combined(self, op: CombineRows, node: Node) -> Sequence[Node]:
        x, _, *weights = node.inputs
        self._alike(node, self._order(node, 1), (x,))
        self._infers(node)
        own = self._in_order(x)
        require(op.rows == self._order(node, 1).op.rows, f"{quoted(node)} sums other rows than are in order", x)
        complete = all(axis in own.type.axes for axis in op.rows)
        require(complete, f"{quoted(node)} sums rows that are copies of each other", x, own)
        own_weights = [self._own(value) for value in weights]
        plain = op.plain(own.type, *(value.type for value in own_weights))
        return [evolve(node, op=plain, inputs=(own, *own_weights))]

    @_plain.register(GroupedDot)
    def _product(self, op: GroupedDot, node: Node) -> Sequence[Node]:
        x, second, _ = node.inputs
        order = self._order(node, 2, 2)
        self._alike(node, order, (x,))
        self._infers(node)
        plain, w = op.plain(order.op), self._own(second)
        alike = (op.share, op.guarded, w.type.axis(op.along)) == (plain.share, plain.guarded, order.op.along)
        require(alike, f"{quoted(node)} has other experts", *node.inputs)
        return [self._made(node, plain, (self._in_order(x), w, order.ids), order)]

    @_plain.register(GroupedWeightGradient)
    def _outer(self, op: GroupedWeightGradient, node: Node) -> Sequence[Node]:
        x, _, d = node.inputs
        order = self._order(node, 2)
        self._alike(node, order, (x, d))
        self._infers(node)
        plain, owns = op.plain(order.op), [self._in_order(value) for value in (x, d)]
        alike = op.share == plain.share and order.op.along in op.table
        require(alike, f"{quoted(node)} has other experts", *node.inputs)
        axes = {axis for value in (*owns, order.ids) for axis in value.type.axes}
        require({*order.op.rows} <= axes, f"{quoted(node)} sums rows that are copies of each other", *owns)
        return [evolve(node, op=plain, inputs=(owns[0], order.ids, owns[1]))]

    def _by_row(self, node: Node, order: _Order) -> Node:
        require(len(node.outputs) == 1, f"{quoted(node)} reads rows in order", *node.inputs)
        require(
            node.op.elementwise_over(order.names), f"{quoted(node)} does not compute each row by itself", *node.inputs
        )
        inside = [value for value in node.inputs if value in self.rows]
        self._alike(node, order, inside)
        owns = [self.rows[value][1] if value in self.rows else self._own(value) for value in node.inputs]
        beside = [value for value in node.inputs if value not in self.rows]
        mixed = any(value.type.has(name) for value in beside for name in order.names)
        require(not mixed, f"{quoted(node)} reads rows in two orders", *node.inputs)
        self._infers(node)
        return self._made(node, node.op, owns, order)

    # ------------------------------------------------------------ values

    def _made(self, node: Node, op: Op, inputs: Sequence[Value], order: _Order) -> Node:
        """The operation on rows in their own order; its result, which need not be anywhere, is laid out as follows."""
        (value,) = node.outputs
        (type,) = op.infer(*(each.type for each in inputs))
        layout = self._layout(op, inputs, type, value, order)
        own = evolve(value, type=type, layout=layout)
        self._stands_for(value, order, own)
        return evolve(node, op=op, inputs=tuple(inputs), outputs=(own,))

    def _layout(self, op: Op, inputs: Sequence[Value], type: Type, value: Value, order: _Order) -> Layout:
        """The only layout by the operation's rules that is the value's once rows are in order."""
        rules = op.sharding_rules([each.type for each in inputs], [type])
        chosen: list[tuple[str, State]] = []
        for over in self.check.rules.mesh.sharding:
            have = tuple(each.layout.state(over) for each in inputs)
            states = {rule.results[0] for rule in rules if rule.operands == have} if any(have) else {None}
            claimed = value.layout.state(over)
            fits = [state for state in states if (ROWS if state in order.names else state) == claimed]
            require(len(fits) == 1, f"`{value.name}` has no layout of rows in their own order", value, *inputs)
            chosen.append((over, fits[0]))
        return layout_of(chosen)

    def _stands_for(self, value: Value, order: _Order, own: Value) -> None:
        expected = in_order(own.type, order.op.rows)
        alike = value.type.dtype == expected.dtype and {*value.type.axes} == {*expected.axes}
        require(alike, f"`{value.name}` is not {own.type} in order", value, own)
        layout = layout_in_order(own.layout, order.op.rows)
        require(value.layout == layout, f"`{value.name}` is not laid out as `{own.name}`", value, own)
        self.rows[value] = order, own

    def _own(self, value: Value) -> Value:
        """A value that must not be in order."""
        require(value not in self.rows, f"`{value.name}` is read as if its rows were in their own order", value)
        require(value not in self.orders, f"`{value.name}` is read as if it were no permutation", value)
        return self.instead.get(value, value)

    def _in_order(self, value: Value) -> Value:
        """What a value is that must be in order."""
        if value not in self.rows:
            raise Violation(f"`{value.name}` is read as if its rows were in order", value)
        return self.rows[value][1]

    def _order(self, node: Node, result: int, position: int | None = None) -> _Order:
        """That of which a node reads a result: 0 the order, 1 the places, 2 the ends."""
        value = node.inputs[1 if position is None else position]
        order = self.orders.get(value)
        if order is None or order.results[result] is not value:
            raise Violation(f"`{value.name}` is not what puts rows in order", value)
        return order

    def _alike(self, node: Node, order: _Order, values: Sequence[Value]) -> None:
        for value in values:
            self._in_order(value)
            require(self.rows[value][0].same(order), f"{quoted(node)} reads rows in another order", value)

    def _infers(self, node: Node) -> None:
        try:
            inferred = node.op.infer(*(value.type for value in node.inputs))
        except Exception as error:  # operations assert that their operands fit
            raise Violation(f"{quoted(node)} cannot be applied to its operands", *node.inputs) from error
        require(
            inferred == tuple(value.type for value in node.outputs), f"{quoted(node)} has another type", *node.outputs
        )
