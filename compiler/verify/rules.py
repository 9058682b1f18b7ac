"""Layout rules, checked one node at a time: what a rank computes is its share of the global operation.

A value's local type and its layout determine the global type. A local operation implements a global one if, along every
mesh axis, the states of its operands and results match a `ShardingRule` of the global one (or all are replicated), and
if it is the global one specialized to the shard (`Op.sharded`): axes among its fields resized, positions set. A
resharding converts one layout of a value into another, along its mesh axis only, as `Reshard.ends` says. Shards are
contiguous: if several mesh axes split one tensor axis, only the innermost can be gathered, sliced or exchanged. A flat
tensor has the form that its own axes and states give, and an operation on it computes each element by itself.

Results are memoized by operation, types and layouts: a deep program costs little more than a shallow one.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from partita.compiler.graph import Value
from partita.compiler.layout import (
    MAX,
    SUM,
    Layout,
    State,
    global_type,
    is_split,
    local_type,
    split_axes,
    tensor_type,
)
from partita.compiler.mesh import Mesh
from partita.compiler.ops.collective import Reshard
from partita.compiler.ops.op import Op
from partita.compiler.ops.position import SLICE, TIME
from partita.dsl.types import Type

Typed = tuple[Type, Layout]


class Violation(Exception):
    """An invariant does not hold. `values` are those it concerns."""

    def __init__(self, message: str, *values: Value) -> None:
        super().__init__(message)
        self.values = values


def require(holds: bool, message: str, *values: Value) -> None:
    """Raise Violation unless `holds`."""
    if not holds:
        raise Violation(message, *values)


@define(eq=False)
class Rules:
    """The rules on one mesh."""

    mesh: Mesh
    _wholes: dict[Typed, Type] = field(factory=dict)
    _operations: dict[tuple[Op, tuple[Typed, ...], tuple[Typed, ...]], Op] = field(factory=dict)
    _reshardings: set[tuple[Op, tuple[Typed, ...], tuple[Typed, ...]]] = field(factory=set)

    def whole(self, value: Value) -> Type:
        """The global type of a value. Raises Violation if the layout is not valid for the type."""
        key = value.type, value.layout
        whole = self._wholes.get(key)
        if whole is None:
            self._check_layout(value)
            whole = self._wholes[key] = global_type(value.type, value.layout, self.mesh.sizes)
        return whole

    def tensor(self, value: Value) -> Type:
        """The global type of a value with its own axes, also if it is flat. Raises Violation as `whole` does."""
        self.whole(value)
        return tensor_type(value.type, value.layout, self.mesh.sizes)

    def _check_layout(self, value: Value) -> None:
        states = dict(value.layout.states)
        ordered = tuple((over, states[over]) for over in self.mesh.sharding if over in states)
        require(ordered == value.layout.states, "a layout has each mesh axis once, in the mesh's order", value)
        for state in states.values():
            known = state in (SUM, MAX) or value.type.has(state)
            require(known, f"the value has no axis `{state}` to be split along", value)
        mixed = SUM in states.values() and MAX in states.values()
        require(not mixed, "parts of a sum along one mesh axis cannot be parts of a maximum along another", value)
        flat = value.layout.flat
        if flat is not None:
            split = set(split_axes(states.values())) - {flat.axis}
            kept = tuple(axis.name for axis in flat.axes if axis.name in split)
            require(flat.kept == kept, f"the flat value is split along {', '.join(split) or 'nothing'}", value)
            type = local_type(Type(value.type.dtype, flat.axes), value.layout, self.mesh.sizes)
            require(type == value.type, f"the flat value is not {type}", value)

    # ------------------------------------------------------------ operations

    def operation(self, op: Op, operands: Sequence[Value], results: Sequence[Value]) -> Op:
        """The global operation that a local one implements. Raises Violation if there is none."""
        key = op, tuple((v.type, v.layout) for v in operands), tuple((v.type, v.layout) for v in results)
        whole = self._operations.get(key)
        if whole is None:
            whole = self._operations[key] = self._lifted(op, operands, results)
        return whole

    def _lifted(self, op: Op, operands: Sequence[Value], results: Sequence[Value]) -> Op:
        placed = (*operands, *results)
        before, after = [self.whole(v) for v in operands], [self.whole(v) for v in results]
        self._infers(op, [v.type for v in operands], [v.type for v in results], "what one rank holds of", placed)
        whole = self._whole_operation(op, placed)
        self._infers(whole, before, after, "the whole of", placed)
        rules = {(rule.operands, rule.results) for rule in whole.sharding_rules(before, after)}
        for over in self.mesh.sharding:
            have = tuple(v.layout.state(over) for v in operands)
            result_states = tuple(v.layout.state(over) for v in results)
            if any((*have, *result_states)) and (have, result_states) not in rules:
                change = f"({_listed(have)}) to ({_listed(result_states)})"
                raise Violation(f"along mesh axis `{over}`, no sharding rule of `{op.label}` maps {change}", *placed)
        return self._unflattened(whole, placed)

    def _unflattened(self, whole: Op, placed: Sequence[Value]) -> Op:
        """The operation on tensors with their own axes, of which flat ones have the elements in the same order."""
        every = [value.layout.flat for value in placed if value.type.axes]
        forms = [form for form in every if form is not None]
        if not forms:
            return whole
        flat, alike = forms[0], len(set(every)) == 1
        require(alike, f"`{whole.label}` works on tensors of which not all are flat alike", *placed)
        unflattened = whole.unflattened((flat.axis, *flat.kept), flat.axes)
        if unflattened is None:
            raise Violation(f"`{whole.label}` does not compute each element of a flat tensor by itself", *placed)
        return unflattened

    def _infers(self, op: Op, operands: list[Type], results: list[Type], of: str, values: Sequence[Value]) -> None:
        try:
            inferred = list(op.infer(*operands))
        except Exception as error:  # operations assert that their operands fit
            raise Violation(f"`{op.label}` cannot be applied to {of} its operands", *values) from error
        require(inferred == results, f"`{op.label}` does not make {of} its results", *values)

    def _whole_operation(self, op: Op, placed: Sequence[Value]) -> Op:
        """The operation at global sizes, without positions on the mesh."""
        whole = op.unsharded((TIME, SLICE, self.mesh.pipe))  # parts of ranks are so in the single-device program
        for value in placed:
            for _, state in value.layout.states:
                if is_split(state):
                    whole = whole.resized(state, self.whole(value).axis(state).size)
        require(self._told(whole, placed) == op, f"`{op.label}` does not work on the shards that it is given", *placed)
        return whole

    def _told(self, whole: Op, placed: Sequence[Value]) -> Op:
        """The operation specialized to its shard: the sizes of split axes, and positions, outermost mesh axis first."""
        specialized = whole
        for over in self.mesh.sharding:
            for axis in split_axes(v.layout.state(over) for v in placed):
                value = next(v for v in placed if v.layout.state(over) == axis)
                specialized = specialized.sharded(axis, value.type.axis(axis).size, over, self.mesh.sizes[over])
        return specialized

    # ------------------------------------------------------------ resharding

    def reshard(self, op: Reshard, sources: Sequence[Value], targets: Sequence[Value]) -> None:
        """Check a resharding, each tensor of a bucket on its own."""
        key = op, tuple((v.type, v.layout) for v in sources), tuple((v.type, v.layout) for v in targets)
        if key in self._reshardings:
            return
        require(op.count == len(sources) == len(targets), f"`{op.name}` has other tensors", *sources, *targets)
        if op.reforms:
            self._reform(op, sources[0], targets[0])
            self._reshardings.add(key)
            return
        require(op.over in self.mesh.sharding, f"no tensor is laid out along mesh axis `{op.over}`", *sources)
        require(op.parts == self.mesh.sizes[op.over], f"mesh axis `{op.over}` does not have {op.parts} ranks", *sources)
        types = [v.type for v in sources], [v.type for v in targets]
        self._infers(op, *types, "what one rank holds of", (*sources, *targets))
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            self._step(op, i, source, target)
        self._reshardings.add(key)

    def _reform(self, op: Reshard, source: Value, target: Value) -> None:
        """A step to or from a flat form, which keeps the states; `_check_layout` says what the form must be."""
        self._infers(op, [source.type], [target.type], "what one rank holds of", (source, target))
        before, after = source.layout.flat, target.layout.flat
        fits = op.flattens == (before is None) and op.flattens != (after is None)
        require(fits, f"`{op.name}` of such a value", source)
        require(source.layout.states == target.layout.states, f"`{op.name}` does not split anything", source, target)
        own, other = (set(self.tensor(value).axes) for value in (source, target))
        require(own == other, "it is another tensor", source, target)
        if after is not None:
            order = tuple(axis.name for axis in after.axes)
            require(op.takes(order), "its elements are in another order", source, target)

    def _step(self, op: Reshard, i: int, source: Value, target: Value) -> None:
        before, after = op.ends[i]
        order = self.mesh.sharding
        inner = {source.layout.state(other) for other in order[order.index(op.over) + 1 :]}
        leads = f"`{op.name}` converts {_listed([before])} to {_listed([after])} along mesh axis `{op.over}`"
        require(source.layout.state(op.over) == before, f"{leads}, but its operand has another layout", source)
        require(before != after, f"`{op.name}` does not change the layout", source)
        for axis in (before, after):
            innermost = not is_split(axis) or axis not in inner
            require(innermost, f"axis `{axis}` is split along a mesh axis further inside `{op.over}`", source)
        reached = [(over, after if over == op.over else source.layout.state(over)) for over in order]
        states = tuple((over, state) for over, state in reached if state is not None)
        alike = target.layout == Layout(states, source.layout.flat)
        require(alike, f"{leads}, but its result claims another layout", source, target)
        require(self.whole(source) == self.whole(target), "the shards do not divide the full tensor", source)


def _listed(states: Sequence[State]) -> str:
    words = {None: "replicated", SUM: "sum", MAX: "max"}
    return ", ".join(words.get(state, str(state)) for state in states)
