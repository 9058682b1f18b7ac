"""Puts rows into the order of their experts once, rather than before each product, and back after it.

Takes the stages of a partitioned graph. Products by expert of the same ids are computed on rows that stand in the order
of these, and so is what lies between them, as far as it computes each row by itself (`Op.by_row`): activations, and
their gradients. Rows are taken into that order where a value enters, put back where one leaves, and summed directly
where a token's rows are.

    %r = routed_dot(%h, %up, %ids)          %order, %order.places, %order.ends = row_order(%ids)
    %u = silu(%r)                           %h.rows = take_rows(%h, %order)
    %y = routed_dot(%u, %down, %ids)        %r.rows = grouped_dot(%h.rows, %up, %order.ends)
    %z = dot(%y, %weight; over=chosen)      %u.rows = silu(%r.rows)
                                            %y.rows = grouped_dot(%u.rows, %down, %order.ends)
                                            %z = combine_rows(%y.rows, %order.places, %weight)

The order is that of the rows of one rank, so it can be chosen only after they are split; nothing in it is sent or
changes its layout. `partita.compiler.verify.row_orders` proves that the result computes what was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import singledispatch
from math import prod
from typing import TypeVar

from attrs import evolve, frozen

from partita.compiler.graph import Builder, Node, Phase, Value
from partita.compiler.layout import Layout, layout_of
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.experts import Routed, RoutedDot, RoutedWeightGradient, Routing
from partita.compiler.ops.grouped import (
    CombineRows,
    GroupedDot,
    GroupedWeightGradient,
    Permute,
    SortByExpert,
    Unpermute,
    layout_in_order,
)
from partita.compiler.ops.op import Op
from partita.compiler.ops.reduce import Reduce
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.dsl.types import Axis, Type

T = TypeVar("T")

PHASES = tuple(Phase)  # each reads what those before it made


def grouped(partitioned: PartitionedGraph) -> PartitionedGraph:
    """The same stages, with rows in the order of their experts between products."""
    names = partitioned.graph.names
    return evolve(partitioned, stages=tuple(_Stage(stage, names).grouped() for stage in partitioned.stages))


@frozen
class _Key:
    """What products must share to be computed on rows in one order: ids, rows, and which experts there are."""

    ids: Value
    rows: tuple[Axis, ...]
    order: SortByExpert

    def moved(self, value: Value) -> int:
        """Elements of a value with all its rows; 0 if it has none of their axes."""
        if not any(value.type.has(axis.name) for axis in self.rows):
            return 0
        named = prod(axis.size for axis in value.type.axes if axis not in self.rows)
        return named * prod(axis.size for axis in self.rows)

    def wide(self, value: Value) -> bool:
        """Whether a value has more than a number for each row: moving those costs nothing."""
        return self.moved(value) > prod(axis.size for axis in self.rows)

    def complete(self, type: Type) -> bool:
        """Whether a type has all axes of the rows."""
        return all(axis in type.axes for axis in self.rows)


class _Stage:
    def __init__(self, stage: StageGraph, names: Sequence[str]) -> None:
        self.stage = stage
        self.build = Builder(names)
        self.keys: dict[Node, _Key] = {}  # of the nodes that are computed in order
        self.of: dict[Value, _Key] = {}  # of their results that have rows
        self.orders: dict[_Key, list[tuple[Phase, tuple[Value, ...]]]] = {}
        self.inside: dict[tuple[_Key, Value], list[tuple[Phase, Value]]] = {}
        self.outside: dict[Value, list[tuple[Phase, Value]]] = {}
        self.nodes: list[Node] = []
        self.made = {value: i for i, node in enumerate(stage.nodes) for value in node.outputs}

    def grouped(self) -> StageGraph:
        """The stage, unchanged if it has no such products."""
        known: dict[tuple[object, ...], _Key] = {}
        for node in self.stage.nodes:
            key = _key(node)
            if key is not None:
                order = key.order
                alike = key.ids, frozenset(key.rows), order.along, order.guarded, order.shards
                self._join(node, known.setdefault(alike, key))
        if not self.keys:
            return self.stage
        while self._spread_forward() or self._spread_backward():
            pass
        for node in self.stage.nodes:
            self._node(node)
        return evolve(self.stage, nodes=tuple(self.nodes))

    # ------------------------------------------------------------ which nodes

    def _join(self, node: Node, key: _Key) -> None:
        self.keys[node] = key
        if key.complete(node.output.type):
            self.of[node.output] = key

    def _spread_forward(self) -> bool:
        """What computes row by row from results that are in order, and little else."""
        before = len(self.keys)
        for node in self.stage.nodes:
            known = ((self.of[value], value) for value in node.inputs if value in self.of)
            key = next((key for key, value in known if key.wide(value)), None)
            if key is not None and node not in self.keys and _by_row(node, key) and self._fits(node, key):
                self._join(node, key)
        return len(self.keys) > before

    def _spread_backward(self) -> bool:
        """What only nodes on rows in order read: rather its operands are taken into order than its result."""
        before = len(self.keys)
        readers: dict[Value, list[_Key | None]] = {}
        for node in reversed(self.stage.nodes):
            keys = readers.get(node.outputs[0], []) if len(node.outputs) == 1 else []
            key = keys[0] if keys else None
            if key is not None and all(each == key for each in keys) and self._may_precede(node, key):
                self._join(node, key)
            for value in node.inputs:
                own = self.keys.get(node)
                readers.setdefault(value, []).append(own if own and value is not own.ids else None)
        return len(self.keys) > before

    def _may_precede(self, node: Node, key: _Key) -> bool:
        known = self.made.get(key.ids, -1) < self.made[node.output]
        return (
            known and node not in self.keys and _by_row(node, key) and key.wide(node.output) and self._fits(node, key)
        )

    def _fits(self, node: Node, key: _Key) -> bool:
        """Whether fewer than two operands of its own size must be taken into order for a node."""
        moved = {value: key.moved(value) for value in (*node.inputs, node.output)}
        cost = sum(moved[value] for value in set(node.inputs) if self.of.get(value) != key)
        return cost < 2 * max(moved.values())

    # ------------------------------------------------------------ the new nodes

    def _node(self, node: Node) -> None:
        key = self.keys.get(node)
        if key is not None:
            self._in_order(node, key)
        elif (combined := self._combined(node)) is not None:
            self.nodes.append(combined)
        else:
            inputs = tuple(self._plain(value, node) for value in node.inputs)
            self.nodes.append(node if inputs == node.inputs else evolve(node, inputs=inputs))

    def _in_order(self, node: Node, key: _Key) -> None:
        _, _, ends = self._order(key, node)
        op = on_rows(node.op)
        product = op is not node.op
        inputs = tuple(
            ends
            if product and value is key.ids
            else self._rows(key, value, node)
            if key.moved(value)
            else self._plain(value, node)
            for value in node.inputs
        )
        if node.output not in self.of:
            self.nodes.append(evolve(node, op=op, inputs=inputs))
            return
        (type,) = op.infer(*(value.type for value in inputs))
        result = self._named(node.output, "rows", type, layout_in_order(node.output.layout, key.rows))
        self.nodes.append(evolve(node, op=op, inputs=inputs, outputs=(result,)))
        self.inside[key, node.output] = [(node.phase, result)]

    def _combined(self, node: Node) -> Node | None:
        """The sums of a token's rows, directly from these."""
        for x, *weights in (node.inputs, reversed(node.inputs)) if node.inputs and node.outputs else ():
            key = self.of.get(x)
            types = [value.type for value in (x, *weights)]
            if key is None or not key.wide(x) or x in weights:
                continue
            op = combining(node.op, types, node.outputs[0].type, key.rows)
            if op is not None:
                _, places, _ = self._order(key, node)
                factors = (self._plain(value, node) for value in weights)
                return evolve(node, op=op, inputs=(self._rows(key, x, node), places, *factors))
        return None

    def _order(self, key: _Key, reader: Node) -> tuple[Value, ...]:
        known = self.orders.setdefault(key, [])
        if (cached := _readable(known, reader)) is not None:
            return cached
        ids = self._plain(key.ids, reader)
        types = key.order.infer(ids.type)
        rows = layout_in_order(ids.layout, key.rows)
        layouts = rows, rows, layout_of(())
        endings = ("order", "order.places", "order.ends")
        values = tuple(
            Value(self.build.unique(f"{ids.name}.{ending}"), type, layout)
            for ending, type, layout in zip(endings, types, layouts, strict=True)
        )
        self._add(key.order, (ids,), values, reader)
        known.append((reader.phase, values))
        return values

    def _rows(self, key: _Key, value: Value, reader: Node) -> Value:
        """A value with its rows in order."""
        known = self.inside.setdefault((key, value), [])
        if (cached := _readable(known, reader)) is not None:
            return cached
        source, (order, *_) = self._plain(value, reader), self._order(key, reader)
        op = Permute(key.rows)
        (type,) = op.infer(source.type, order.type)
        result = self._named(value, "rows", type, layout_in_order(value.layout, key.rows))
        self._add(op, (source, order), (result,), reader)
        known.append((reader.phase, result))
        return result

    def _plain(self, value: Value, reader: Node) -> Value:
        """A value with its rows in their own order."""
        key = self.of.get(value)
        if key is None:
            return value
        known = self.outside.setdefault(value, [])
        if (cached := _readable(known, reader)) is not None:
            return cached
        result = self._named(value, "again", value.type, value.layout) if known else value
        _, places, _ = self._order(key, reader)
        op = Unpermute(key.rows, value.type.names)
        self._add(op, (self._rows(key, value, reader), places), (result,), reader)
        known.append((reader.phase, result))
        return result

    def _named(self, source: Value, ending: str, type: Type, layout: Layout) -> Value:
        return source.derived(self.build.unique(f"{source.name}.{ending}"), type, layout)

    def _add(self, op: Op, inputs: tuple[Value, ...], outputs: tuple[Value, ...], reader: Node) -> None:
        self.nodes.append(Node(op, inputs, outputs, reader.scope, reader.span, reader.phase, reader.stage))


def _key(node: Node) -> _Key | None:
    """Of a product by expert."""
    pair = order_of(node.op, [value.type for value in node.inputs], [value.type for value in node.outputs])
    if pair is None:
        return None
    position, order = pair
    return _Key(node.inputs[position], order.rows, order)


def _by_row(node: Node, key: _Key) -> bool:
    """Whether an operation computes each row by itself."""
    alone = len(node.outputs) == 1 and node.op.elementwise_over({axis.name for axis in key.rows})
    return alone and key.complete(node.output.type)


def _readable(known: Iterable[tuple[Phase, T]], reader: Node) -> T | None:
    """What a node can read of what was made in several phases."""
    return next((value for phase, value in known if PHASES.index(phase) <= PHASES.index(reader.phase)), None)


# ---------------------------------------------------------------- operations on rows in order


@singledispatch
def order_of(op: Op, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, SortByExpert] | None:
    """Of a product by expert the position of its ids, and what puts their rows in order; None for other operations, and
    where rows have matrices of their own besides.
    """
    return None


@order_of.register(RoutedDot)
def _(op: RoutedDot, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, SortByExpert] | None:
    x, w, ids = operands
    return _order(2, op, x, Routing(x, w, ids, op.over, op.along))


@order_of.register(RoutedWeightGradient)
def _(op: RoutedWeightGradient, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, SortByExpert] | None:
    x, ids, _ = operands
    return _order(1, op, x, Routing(x, results[0], ids, op.over, op.along))


def _order(position: int, op: Routed, x: Type, routing: Routing) -> tuple[int, SortByExpert] | None:
    order = SortByExpert(tuple(routing.rows), routing.along, op.guarded, op.shards)
    # One vector for all indices has no rows to put in order.
    same = not any(x.has(axis.name) for axis in routing.rows)
    return None if routing.shared or same else (position, order)


@singledispatch
def on_rows(op: Op) -> Op:
    """The operation on rows in order; of products by expert, with the ends of these in place of ids."""
    return op


@on_rows.register(RoutedDot)
def _(op: RoutedDot) -> Op:
    return GroupedDot(op.over, op.along, op.guarded, op.share)


@on_rows.register(RoutedWeightGradient)
def _(op: RoutedWeightGradient) -> Op:
    return GroupedWeightGradient(op.over, op.along, op.table, op.share)


@singledispatch
def combining(op: Op, operands: Sequence[Type], result: Type, rows: tuple[Axis, ...]) -> CombineRows | None:
    """An operation that sums rows of its first operand, as they are or times a number each, on rows in order."""
    return None


@combining.register(Dot)
def _(op: Dot, operands: Sequence[Type], result: Type, rows: tuple[Axis, ...]) -> CombineRows | None:
    fits = all({*each.axes} == {*rows} for each in operands[1:])
    return _combining(op.over, operands, result, rows) if fits else None


@combining.register(Reduce)
def _(op: Reduce, operands: Sequence[Type], result: Type, rows: tuple[Axis, ...]) -> CombineRows | None:
    fits = op.function == "sum" and op.dtype == operands[0].dtype
    return _combining(op.over, operands, result, rows) if fits else None


def _combining(
    over: tuple[str, ...], operands: Sequence[Type], result: Type, rows: tuple[Axis, ...]
) -> CombineRows | None:
    alike = operands[0].is_float and all(each.dtype == result.dtype for each in operands)
    proper = bool(over) and {*over} < {axis.name for axis in rows}
    return CombineRows(rows, over, result.names) if alike and proper else None
