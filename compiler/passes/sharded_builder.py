"""A builder of graphs on one rank's shards: operands are taken as they are stored, and resharded where they must be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve

from partita.compiler.graph import Builder, Node, Value
from partita.compiler.layout import MAX, SUM, Layout, State, global_type, layout_of, local_type
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.host import CopyOut, ToDevice, ToHost, WaitCopyOut
from partita.compiler.ops.op import Op, ShardingRule
from partita.compiler.passes.shard.choice import local_op
from partita.compiler.passes.shard.resharding import Resharding


class ShardedBuilder(Builder):
    """A builder whose values have layouts. Operations are given as for whole tensors.

    Along each mesh axis, operands stay as they are if a sharding rule of the operation takes them so; otherwise partial
    sums are reduced; otherwise all operands are gathered.
    """

    def __init__(self, resharding: Resharding, taken: Iterable[str] = ()) -> None:
        super().__init__(taken)
        self.resharding = resharding
        self._moved: dict[tuple[Value, Layout], Value] = {}

    def moved(self, value: Value, target: Layout) -> Value:
        """The value resharded to another layout; once for all its readers in one list of nodes. If ranks exchange
        parts of it, the result is on the device.
        """
        source = value
        known = self._moved.get((source, target))
        if known is not None and any(known in node.outputs for node in self.nodes):
            return known
        for step in self.resharding.path(value.type, value.layout, target):
            if isinstance(step.op, Collective):
                value = self.copied(value, False)
            moved = value.derived(self.unique(value.name), step.type, step.layout)
            self.nodes.append(Node(step.op, (value,), (moved,), self.scope, self.span, self.phase, self.stage))
            value = moved
        self._moved[source, target] = value
        return value

    def copied(self, value: Value, host: bool) -> Value:
        """The value in the host's memory, or in the device's."""
        if value.host == host:
            return value
        if host:
            return self.landed(self.copied_out(value), value)
        return self.laid_out(ToDevice(), (value,), (value.layout,), value.name)[0]

    def copied_out(self, value: Value) -> Value:
        """A value whose copy to the host's memory starts here."""
        return self.laid_out(CopyOut(), (value,), (value.layout,), f"{value.name}.coming")[0]

    def landed(self, in_flight: Value, value: Value) -> Value:
        """A value in the host's memory, once its copy there, `in_flight`, has landed."""
        return self.laid_out(WaitCopyOut(), (in_flight, value), (value.layout,), value.name)[0]

    def laid_out(
        self, op: Op, inputs: Sequence[Value], layouts: Sequence[Layout], name: str | None = None
    ) -> tuple[Value, ...]:
        """Append a local operation whose results have these layouts."""
        stem = name or f"{self.scope}.{op.label}"
        types = op.infer(*(value.type for value in inputs))
        names = [stem if not i else f"{stem}.{op.results[i]}" for i in range(len(types))]
        host = isinstance(op, ToHost) or (not isinstance(op, ToDevice) and any(value.host for value in inputs))
        outputs = tuple(
            evolve(self.value(each, type), layout=layout, host=host)
            for each, type, layout in zip(names, types, layouts, strict=True)
        )
        self.nodes.append(Node(op, tuple(inputs), outputs, self.scope, self.span, self.phase, self.stage))
        if op.literal is not None:
            self.literals.update(dict.fromkeys(outputs, op.literal))
        return outputs

    def apply_all(self, op: Op, *inputs: Value, name: str | None = None) -> tuple[Value, ...]:
        """Append an operation on whole tensors, as each rank computes its part of it."""
        mesh = self.resharding.mesh
        wholes = [global_type(value.type, value.layout, mesh.sizes) for value in inputs]
        results = op.infer(*wholes)
        rules = op.sharding_rules(wholes, results)
        before: list[dict[str, State]] = [dict(value.layout.states) for value in inputs]
        after: list[dict[str, State]] = [{} for _ in results]
        for over in mesh.sharding:
            rule = _rule(rules, [states.get(over) for states in before], len(results))
            for states, state in zip([*before, *after], (*rule.operands, *rule.results), strict=True):
                states[over] = state
        operands = [layout_of((over, states.get(over)) for over in mesh.sharding) for states in before]
        result_layouts = [layout_of((over, states.get(over)) for over in mesh.sharding) for states in after]
        # The operation on the shards, from the one on whole tensors.
        whole_inputs = tuple(Value("", type) for type in wholes)
        whole = Node(op, whole_inputs, tuple(Value("", type) for type in results), "")
        local = local_op(whole, operands, result_layouts, mesh)
        resharded = [self.moved(value, layout) for value, layout in zip(inputs, operands, strict=True)]
        outputs = self.laid_out(local, resharded, result_layouts, name)
        for value, type in zip(outputs, results, strict=True):
            assert value.type == local_type(type, value.layout, mesh.sizes), (op, value)
        return outputs


def _rule(rules: Sequence[ShardingRule], states: list[State], results: int) -> ShardingRule:
    """The rule that takes operands as they are, with partial sums reduced if need be, or else replicated."""
    replicated = ShardingRule((None,) * len(states), (None,) * results)
    reduced = [None if state in (SUM, MAX) else state for state in states]
    for candidate in (states, reduced):
        if not any(candidate):
            return replicated
        for rule in rules:
            if list(rule.operands) == candidate:
                return rule
    return replicated
