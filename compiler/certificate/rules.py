"""The rules of layouts, held against one node at a time: what one rank computes is its share of the whole operation.

A value on one rank is *typed* by what the rank holds and by its layout; together they tell the whole tensor's type. A
local operation stands for the whole one if, along every mesh axis, the states of its operands and results are a `Way`
that the whole operation has (or everything is whole), and if it is the whole operation told of its shard: axes among
its fields resized, positions given. A change of layout stands for nothing: it leads from one layout of a value to
another, along its mesh axis alone, as it says (`Move.ends`). Parts are contiguous, so of
several mesh axes that split one axis only the innermost can be gathered, cut off or exchanged.

What is alike is checked once, so that a deep program costs little more than a shallow one.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from partita.compiler.graph import Value
from partita.compiler.layout import MAX, SUM, Layout, State, is_split, split_axes, whole_type
from partita.compiler.mesh import Mesh
from partita.compiler.ops.collective import Move
from partita.compiler.ops.op import Op
from partita.compiler.ops.position import TIME
from partita.dsl.types import Type

Typed = tuple[Type, Layout]


class Violation(Exception):
    """A law does not hold. `values` are those that it is about."""

    def __init__(self, message: str, *values: Value) -> None:
        super().__init__(message)
        self.values = values


def demand(holds: bool, message: str, *values: Value) -> None:
    """Raise Violation unless a law holds."""
    if not holds:
        raise Violation(message, *values)


@define(eq=False)
class Rules:
    """The rules on one mesh."""

    mesh: Mesh
    _wholes: dict[Typed, Type] = field(factory=dict)
    _operations: dict[tuple[Op, tuple[Typed, ...], tuple[Typed, ...]], Op] = field(factory=dict)
    _moves: set[tuple[Op, tuple[Typed, ...], tuple[Typed, ...]]] = field(factory=set)

    def whole(self, value: Value) -> Type:
        """The type of the whole tensor. Violation if the layout has no meaning for the type."""
        key = value.type, value.layout
        found = self._wholes.get(key)
        if found is None:
            self._check_layout(value)
            found = self._wholes[key] = whole_type(value.type, value.layout, self.mesh.sizes)
        return found

    def _check_layout(self, value: Value) -> None:
        states = dict(value.layout.states)
        ordered = tuple((over, states[over]) for over in self.mesh.sharding if over in states)
        demand(ordered == value.layout.states, "a layout has each mesh axis once, in the mesh's order", value)
        for state in states.values():
            known = state in (SUM, MAX) or value.type.has(state)
            demand(known, f"the value has no axis `{state}` to be split along", value)
        mixed = SUM in states.values() and MAX in states.values()
        demand(not mixed, "parts of a sum along one mesh axis cannot be parts of a maximum along another", value)

    # ------------------------------------------------------------ operations

    def operation(self, op: Op, operands: Sequence[Value], results: Sequence[Value]) -> Op:
        """The whole operation that a local one stands for. Violation if it stands for none."""
        key = op, tuple((v.type, v.layout) for v in operands), tuple((v.type, v.layout) for v in results)
        found = self._operations.get(key)
        if found is None:
            found = self._operations[key] = self._lifted(op, operands, results)
        return found

    def _lifted(self, op: Op, operands: Sequence[Value], results: Sequence[Value]) -> Op:
        placed = (*operands, *results)
        before, after = [self.whole(v) for v in operands], [self.whole(v) for v in results]
        self._infers(op, [v.type for v in operands], [v.type for v in results], "what one rank holds of", placed)
        whole = self._whole_operation(op, placed)
        self._infers(whole, before, after, "the whole of", placed)
        ways = {(way.operands, way.results) for way in whole.ways(before, after)}
        for over in self.mesh.sharding:
            have = tuple(v.layout.state(over) for v in operands)
            made = tuple(v.layout.state(over) for v in results)
            if any((*have, *made)) and (have, made) not in ways:
                change = f"({_listed(have)}) to ({_listed(made)})"
                raise Violation(f"along mesh axis `{over}`, no sharding rule of `{op.label}` maps {change}", *placed)
        return whole

    def _infers(self, op: Op, operands: list[Type], results: list[Type], of: str, values: Sequence[Value]) -> None:
        try:
            found = list(op.infer(*operands))
        except Exception as error:  # operations assert that their operands fit
            raise Violation(f"`{op.label}` cannot be applied to {of} its operands", *values) from error
        demand(found == results, f"`{op.label}` does not make {of} its results", *values)

    def _whole_operation(self, op: Op, placed: Sequence[Value]) -> Op:
        """The operation with its axes whole, and without positions on the mesh."""
        whole = op.unsharded(TIME)
        for value in placed:
            for _, state in value.layout.states:
                if is_split(state):
                    whole = whole.resized(state, self.whole(value).axis(state).size)
        demand(self._told(whole, placed) == op, f"`{op.label}` does not work on the shards that it is given", *placed)
        return whole

    def _told(self, whole: Op, placed: Sequence[Value]) -> Op:
        """The operation told of its shard: the sizes of what is split, and where it lies, outermost first."""
        told = whole
        for over in self.mesh.sharding:
            for axis in split_axes(v.layout.state(over) for v in placed):
                value = next(v for v in placed if v.layout.state(over) == axis)
                told = told.sharded(axis, value.type.axis(axis).size, over, self.mesh.sizes[over])
        return told

    # ------------------------------------------------------------ changes of layout

    def move(self, op: Move, sources: Sequence[Value], targets: Sequence[Value]) -> None:
        """Check a change of layout, each tensor of a bucket by itself."""
        key = op, tuple((v.type, v.layout) for v in sources), tuple((v.type, v.layout) for v in targets)
        if key in self._moves:
            return
        demand(op.count == len(sources) == len(targets), f"`{op.name}` has other tensors", *sources, *targets)
        demand(op.over in self.mesh.sharding, f"no tensor is laid out along mesh axis `{op.over}`", *sources)
        demand(op.parts == self.mesh.sizes[op.over], f"mesh axis `{op.over}` does not have {op.parts} ranks", *sources)
        types = [v.type for v in sources], [v.type for v in targets]
        self._infers(op, *types, "what one rank holds of", (*sources, *targets))
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            self._step(op, i, source, target)
        self._moves.add(key)

    def _step(self, op: Move, i: int, source: Value, target: Value) -> None:
        before, after = op.ends[i]
        order = self.mesh.sharding
        inner = {source.layout.state(other) for other in order[order.index(op.over) + 1 :]}
        leads = f"`{op.name}` converts {_listed([before])} to {_listed([after])} along mesh axis `{op.over}`"
        demand(source.layout.state(op.over) == before, f"{leads}, but its operand has another layout", source)
        demand(before != after, f"`{op.name}` does not change the layout", source)
        for axis in (before, after):
            innermost = not is_split(axis) or axis not in inner
            demand(innermost, f"axis `{axis}` is split along a mesh axis further inside `{op.over}`", source)
        reached = [(over, after if over == op.over else source.layout.state(over)) for over in order]
        states = tuple((over, state) for over, state in reached if state is not None)
        demand(target.layout.states == states, f"{leads}, but its result claims another layout", source, target)
        demand(self.whole(source) == self.whole(target), "the shards do not divide the full tensor", source)


def _listed(states: Sequence[State]) -> str:
    words = {None: "replicated", SUM: "sum", MAX: "max"}
    return ", ".join(words.get(state, str(state)) for state in states)
