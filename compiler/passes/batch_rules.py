"""Which sharding rule of an operation a microbatch follows, along the axis that is split over time.

A value's state is that of a microbatch: split along an axis, partial, or replicated, which is the full batch's value.
Operands can be converted at some cost; the cheapest rule is taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction

from attrs import field, frozen

from partita.compiler.graph import Graph, Node, Phase, Value
from partita.compiler.layout import MAX, SUM, State, is_split
from partita.compiler.ops.op import Op, ShardingRule

# Costs of converting a value from one state to another. A part of an available value is almost free; splitting is
# better than computing over the full batch, and a full-batch sum better than a full-batch tensor. Where a sum meets a
# value that depends on parameters, a full-batch sum beats a partial one, to which only linear functions apply.
PORTION, PART, WHOLE_SUM, PARTIAL_SUM, WHOLE_TENSOR = 1, 2, 10, 11, 100


@frozen(eq=False)
class BatchRules:
    """Chooses rules along `batch`, which is split into `count` microbatches. `from_inputs` are the values that can be
    computed over the full batch before the first one, and `early` says whether they may. Equal nodes are decided once.
    """

    batch: str
    count: int | Fraction
    from_inputs: frozenset[Value]
    early: bool
    _known: dict[Hashable, ShardingRule | None] = field(factory=dict, init=False)

    def at_once(self, node: Node, states: Sequence[State]) -> bool:
        """Whether a node takes replicated operands as they are, and makes replicated results."""
        return not any(states) and not self._introduces_batch(node) and not self._meets_whole_batch(node)

    def alone(self, node: Node) -> bool:
        """Whether its results are among those that can be computed over the full batch."""
        return all(value in self.from_inputs for value in node.outputs)

    def _introduces_batch(self, node: Node) -> bool:
        """Whether a node introduces the batch axis (positions, random numbers, expansion)."""
        return (
            self.count != 1
            and any(value.type.has(self.batch) for value in node.outputs)
            and not any(value.type.has(self.batch) for value in node.inputs)
        )

    def _meets_whole_batch(self, node: Node) -> bool:
        """Whether all operands that have the batch axis come from inputs alone, but the results do not."""
        return (
            self.count != 1
            and not self.alone(node)
            and all(value in self.from_inputs or not value.type.has(self.batch) for value in node.inputs)
            and any(value.type.has(self.batch) for value in node.inputs)
        )

    def fit(self, node: Node, states: Sequence[State]) -> ShardingRule | None:
        """The cheapest sharding rule that the operands can be converted to; None if there is none."""
        operands = tuple((value.type, value in self.from_inputs) for value in node.inputs)
        results = tuple((value.type, value in self.from_inputs) for value in node.outputs)
        key = node.op.structural_key, operands, results, tuple(states)
        rule = self._known.get(key, ...)
        if rule is ...:
            rule = self._known[key] = self._decide(node, states)
        return rule

    def _decide(self, node: Node, states: Sequence[State]) -> ShardingRule | None:
        types = [value.type for value in node.inputs]
        everything = ShardingRule((None,) * len(types), (None,) * len(node.outputs))
        alone = self.alone(node)
        meets = self._meets_whole_batch(node)
        introduces = self._introduces_batch(node)
        best: tuple[int, ShardingRule] | None = None
        for rule in (*node.op.sharding_rules(types, [value.type for value in node.outputs]), everything):
            if not self._sensible(rule, introduces):
                continue
            costs = [
                self._conversion(value, have, want, alone)
                for value, have, want in zip(node.inputs, states, rule.operands, strict=True)
            ]
            if None not in costs:
                total = sum(cost for cost in costs if cost is not None)
                total += WHOLE_TENSOR if meets and self.batch not in rule.operands else 0
                if best is None or total < best[0]:
                    best = (total, rule)
        return best[1] if best else None

    def _sensible(self, rule: ShardingRule, introduces: bool) -> bool:
        """Whether a rule splits results only if it splits operands, or the node introduces the batch axis."""
        if introduces:
            return self.batch in rule.results
        return any(map(is_split, rule.operands)) or not any(map(is_split, rule.results))

    def _conversion(self, value: Value, have: State, want: State, alone: bool) -> int | None:
        """The cost of a conversion between states; None if impossible. `alone`: the reader needs inputs alone."""
        partial = have in (SUM, MAX)
        known = value in self.from_inputs
        if have == want:
            return PARTIAL_SUM if partial and known and not alone else 0
        if have is None:
            if want in (SUM, MAX):
                return PORTION
            return PART if known else None
        if known and self.early and want not in (SUM, MAX):
            return (WHOLE_SUM if partial else WHOLE_TENSOR) + (0 if want is None else PART)
        return None


def from_inputs_alone(graph: Graph) -> frozenset[Value]:
    """Values computed from the model's inputs, constants and random numbers, without parameters.

    Random numbers are functions of their coordinates, so they can be drawn for the full batch. So can rematerialized
    values; but cotangents, which sometimes need nothing else either, are left alone. What is of one slice is not.
    """
    alone = {each.value for each in graph.inputs}
    canonical: dict[tuple[Op, tuple[Value, ...]], tuple[Value, ...]] = {}
    same: dict[Value, Value] = {}  # the first value computed in the same way
    for node in graph.nodes:
        if all(value in alone for value in node.inputs) and not node.op.microbatch_dependent:
            key = node.op, tuple(same.get(value, value) for value in node.inputs)
            if node.phase is Phase.FORWARD or key in canonical:
                alone.update(node.outputs)
                same.update(zip(node.outputs, canonical.setdefault(key, node.outputs), strict=True))
    return frozenset(alone)
