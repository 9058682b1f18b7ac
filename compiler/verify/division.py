"""Validates the division of an axis among all ranks of the pipeline: its parts amount to the undivided graph.

The undivided graph is numbered (`value_numbering`), and each of its values that may be in parts has a number for every
rank's part. What the parts are follows from the undivided operations, however the division was made:

- A rank's share of an operation by one of its sharding rules makes that rank's part of the result: a shard along the
  axis, a term of a sum, or what a maximum is taken of.
- All terms added in the order of the ranks are the sum; likewise the maximum.
- What the parts contribute to an operation (`PartialReduction`), put together, are its results.

Every value of the divided graph must have one of these numbers, on a stage of the rank whose part it is. Loss, metrics,
outputs and updates must be whole, and the contributions to a gradient must be all parts of what it was. A parameter in
parts has one part on each rank, with the initializer of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import define, evolve, field

from partita.compiler.graph import Builder, Gradient, Graph, Node, Parameter, Value
from partita.compiler.layout import MAX, SUM, State, is_split, split_axes
from partita.compiler.ops.op import Op, ShardingRule
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.traits import PartialReduction, Redundant
from partita.compiler.schedules.schedule import SharedVocabulary
from partita.compiler.verify.checker import Checker, quoted
from partita.compiler.verify.reference import Reference
from partita.compiler.verify.rules import Violation, require
from partita.compiler.verify.value_numbering import ValueNumbering
from partita.dsl.types import Type

COMBINED = {SUM: "add", MAX: "maximum"}


@define(eq=False)
class Division:
    """Checks a graph in parts over a mesh axis against the undivided one.

    `shares` are the numbers of the results of operations on the parts of a rank: by operation, operands and rank.
    """

    undivided: Graph
    divided: Graph
    over: str
    spread: SharedVocabulary
    check: Checker
    numbering: ValueNumbering = field(factory=ValueNumbering)
    shares: dict[tuple[Op, tuple[int, ...], int], tuple[int, ...]] = field(factory=dict)

    def run(self) -> None:
        """Check the graph."""
        axes = {each.part.axis for each in self.divided.parameters if each.part is not None}
        whole = Reference.of(self.undivided, self.numbering)
        for node in self.undivided.nodes:
            if any(value.type.has(axis) for value in (*node.inputs, *node.outputs) for axis in axes):
                self._divide(node, whole, axes)
        numbers: dict[Value, int] = {each.value: whole.inputs[each.name, each.batch] for each in self.divided.inputs}
        for parameter in self.divided.parameters:
            with self.check.at(parameter.span):
                numbers[parameter.value] = self._parameter(parameter, whole)
        for node in self.divided.nodes:
            with self.check.at(node.span, f"on stage {node.stage}, in parts over `{self.over}`"):
                operands = tuple(numbers[value] for value in node.inputs)
                numbers.update(zip(node.outputs, self._results(node, operands), strict=True))
        with self.check.at():
            self._ends(numbers, whole)

    # ------------------------------------------------------------ what the parts are

    def _part(self, number: int, state: State, rank: int) -> int:
        """The number of a rank's part of a value."""
        if state is None:
            return number
        type = self.numbering.types[number]
        if is_split(state):
            type = self._cut(type, state)
        return self.numbering.given("part", number, state, rank, type=type)

    def _cut(self, type: Type, axis: str) -> Type:
        size = type.axis(axis).size if type.has(axis) else 0
        return type.resized(axis, size // self.spread.ranks) if size else type

    def _divide(self, node: Node, whole: Reference, axes: set[str]) -> None:
        """Number a node's shares by every sharding rule and by its parts, and what becomes of them."""
        operands = tuple(whole.values[value] for value in node.inputs)
        results = tuple(whole.values[value] for value in node.outputs)
        types = [value.type for value in node.inputs], [value.type for value in node.outputs]
        for rule in node.op.sharding_rules(*types) if node.outputs else ():
            states = *rule.operands, *rule.results
            if any(states) and axes.issuperset(split_axes(states)):
                self._by_rule(node, rule, operands, results)
        axis = next((each for each in axes if any(value.type.has(each) for value in node.inputs)), None)
        if axis is not None and isinstance(node.op, PartialReduction):
            self._by_parts(node, node.op, axis, operands, results)

    def _local(self, op: Op, axis: str, values: Sequence[Value]) -> Op:
        """An operation on a rank's shard of an axis, of these values of the whole."""
        size = next(value.type.axis(axis).size for value in values if value.type.has(axis))
        return op.sharded(axis, size // self.spread.ranks, self.over, self.spread.ranks)

    def _by_rule(self, node: Node, rule: ShardingRule, operands: Sequence[int], results: Sequence[int]) -> None:
        op = node.op
        for axis in split_axes((*rule.operands, *rule.results)):
            op = self._local(op, axis, (*node.inputs, *node.outputs))
        for rank in range(self.spread.ranks):
            parts = [self._part(*each, rank) for each in zip(operands, rule.operands, strict=True)]
            shares = tuple(self._part(*each, rank) for each in zip(results, rule.results, strict=True))
            self.shares[op, tuple(parts), rank] = shares
        for number, state in zip(results, rule.results, strict=True):
            if state is not None and not is_split(state):
                self._combine(number, state)

    def _combine(self, number: int, state: str) -> None:
        """All parts of a sum or a maximum, in order, are the value."""
        build = Builder()
        parts = [self._part(number, state, rank) for rank in range(self.spread.ranks)]
        values = [Value(f"part {rank}", self.numbering.types[part]) for rank, part in enumerate(parts)]
        joined = values[0]
        for value in values[1:]:
            joined = pointwise(build, COMBINED[state], joined, value)
        self._learn(build.nodes, dict(zip(values, parts, strict=True)), (joined,), (number,))

    def _by_parts(
        self, node: Node, op: PartialReduction, axis: str, operands: Sequence[int], results: Sequence[int]
    ) -> None:
        contributions, numbers = [], dict[Value, int]()
        for rank in range(self.spread.ranks):
            inputs = []
            for value, number in zip(node.inputs, operands, strict=True):
                split = axis if value.type.has(axis) else None
                inputs.append(Value(f"{value.name} {rank}", self._cut(value.type, axis)))
                numbers[inputs[-1]] = self._part(number, split, rank)
            build = Builder()
            contribution = op.partial_reduce(build, evolve(node, inputs=tuple(inputs)), axis)
            if contribution is None:
                return
            for new in build.nodes:
                local = self._local(new.op, axis, node.inputs)
                key = local, tuple(numbers[value] for value in new.inputs), rank
                if key not in self.shares:
                    names = [("contribution", *key, i) for i in range(len(new.outputs))]
                    types = [value.type for value in new.outputs]
                    shares = (self.numbering.given(*name, type=type) for name, type in zip(names, types, strict=True))
                    self.shares[key] = tuple(shares)
                numbers.update(zip(new.outputs, self.shares[key], strict=True))
            contributions.append(contribution)
        build = Builder()
        self._learn(build.nodes, numbers, op.combine_parts(build, node, contributions), results)

    def _learn(
        self, nodes: Sequence[Node], numbers: dict[Value, int], results: Sequence[Value], known: Sequence[int]
    ) -> None:
        """Number nodes whose `results` have `known` numbers."""
        named = dict(zip(results, known, strict=True))
        for node in nodes:
            operands = tuple(numbers[value] for value in node.inputs)
            if all(value in named for value in node.outputs):
                outputs = self.numbering.learn(node.op, operands, tuple(named[value] for value in node.outputs))
            else:
                outputs = self.numbering.of(node.op, operands)
            numbers.update(zip(node.outputs, outputs, strict=True))

    # ------------------------------------------------------------ what the graph has

    def _parameter(self, parameter: Parameter, whole: Reference) -> int:
        part = parameter.part
        if part is None:
            return whole.parameters[parameter.name][1]
        declared, number = whole.parameters[part.name]
        own = parameter.value
        require(part.over == self.over and part.master == declared.master, f"`{own.name}` is no part of it", own)
        size = declared.master.axis(part.axis).size
        cut = declared.master.resized(part.axis, size // self.spread.ranks)
        require(size % self.spread.ranks == 0 and parameter.master == cut, f"`{own.name}` has another size", own)
        same = parameter.initial is declared.initial and parameter.fans == declared.fans
        require(same and parameter.decays == declared.decays, f"`{own.name}` does not begin as the whole", own)
        return self._part(number, part.axis, part.rank)

    def _results(self, node: Node, operands: tuple[int, ...]) -> tuple[int, ...]:
        self.check.nodes += 1
        rank = self._rank(node.stage)
        numbers = self.shares.get((node.op, operands, rank)) if rank is not None else None
        if numbers is None:
            numbers = self.numbering.known(node.op, operands)
        if (
            numbers is None
            and isinstance(node.op, Redundant)
            and node.op.simplified(self.numbering, operands) is not None
        ):
            numbers = self.numbering.of(node.op, operands)
        if numbers is None:
            message = f"{quoted(node)}, `{node.op.label}` of these operands, is no part of the undivided program"
            raise Violation(message, *node.inputs)
        return numbers

    def _rank(self, stage: int | None) -> int | None:
        """The rank whose parts a stage computes with."""
        spread = self.spread
        ranks = range(spread.ranks)
        return next((rank for rank in ranks if stage in (spread.output(rank), spread.input(rank))), None)

    def _ends(self, numbers: dict[Value, int], whole: Reference) -> None:
        graph = self.divided
        step_metrics = {name: numbers[value] for name, value in (("loss", graph.loss), *graph.metrics)}
        require(step_metrics == whole.step_metrics, "the loss or a metric is not that of the undivided program")
        updates = {each.buffer: numbers[each.value] for each in graph.updates}
        require(updates == whole.updates, "an update of a buffer is not that of the undivided program")
        outputs = [(name, numbers[value]) for name, value in graph.asked]
        expected = [(name, whole.values[value]) for name, value in self.undivided.asked]
        require(outputs == expected, "an output is not that of the undivided program")
        contributions = Counter((each.parameter, numbers[each.value]) for each in graph.gradients)
        parts: dict[str, list[Parameter]] = {}
        for parameter in graph.parameters:
            if parameter.part is not None:
                parts.setdefault(parameter.part.name, []).append(parameter)
        for name, own in parts.items():
            ranks = [each.part.rank for each in own if each.part is not None]
            require(ranks == list(range(self.spread.ranks)), f"`{name}` does not have a part on each rank")
        for each in self.undivided.gradients:
            contributions -= self._gradient(
                each, whole.values[each.value], contributions, parts.get(each.parameter, ())
            )
        wrong = next(iter(contributions), None)
        require(wrong is None, f"the gradient of `{wrong and wrong[0]}` has terms that the undivided program has not")

    def _gradient(
        self, each: Gradient, number: int, contributions: Counter[tuple[str, int]], parts: Sequence[Parameter]
    ) -> Counter[tuple[str, int]]:
        """The contributions that make up one of the undivided program."""
        ranks = range(self.spread.ranks)
        if parts:
            axes = [own.part.axis for own in parts if own.part is not None]
            own = [(p.name, self._part(number, axis, r)) for p, axis, r in zip(parts, axes, ranks, strict=True)]
        elif contributions[each.parameter, number]:
            own = [(each.parameter, number)]
        else:
            own = [(each.parameter, self._part(number, SUM, rank)) for rank in ranks]
        missing = Counter(own) - contributions
        require(not missing, f"the gradient of `{each.parameter}` lacks a term of the undivided program")
        return Counter(own)
