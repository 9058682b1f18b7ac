"""Validates the end of a step: reductions, gradients, statistics.

Each gradient accumulator is reduced to the layout that the update needs; the result is called a total. A parameter's
gradient is the sum of its totals in stage order. The statistics vector is all-reduced over all ranks, so each entry
must be partial (sum) along every mesh axis to count once. The entries are the loss, the metrics, and per stage the
squared gradient norm of the parameters whose first stage it is: together, every parameter once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import define, field

from partita.compiler.graph import Node, Parameter, Phase, Value
from partita.compiler.layout import SUM, layout_of
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Op
from partita.compiler.ops.pointwise import Cast, Pointwise
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.passes.update import SQUARE, STATISTIC, ParameterUpdate, UpdateGraph
from partita.compiler.verify.checker import Checker, quoted
from partita.compiler.verify.reference import Reference
from partita.compiler.verify.rules import require
from partita.compiler.verify.value_numbering import UNKNOWN, ValueNumbering
from partita.dsl.types import Type

# Available values, with their value numbers.
Values = dict[Value, int]

ADD = Pointwise("add")


@define(eq=False)
class Ending:
    """Checks the end of a step against the single-device program. `gradients` has their value numbers by parameter."""

    partitioned: PartitionedGraph
    update: UpdateGraph
    layouts: Mapping[str, ParameterLayouts]
    whole: Reference
    check: Checker
    gradients: dict[str, int] = field(factory=dict)
    squares: list[str] = field(factory=list)  # the entries of the squared norms
    _totals: dict[str, dict[int, tuple[Value, int]]] = field(factory=dict)
    _there: dict[int, Values] = field(factory=dict)

    def run(self) -> None:
        """Check everything up to the all-reduce of the statistics."""
        self._there = {stage.index: {} for stage in self.partitioned.stages}
        with self.check.at(where="the reductions"):
            self._reductions()
        stage_sets = self.partitioned.stage_sets()
        for each in self.update.parameters:
            with self.check.at(self.declared(each.name).span, f"the gradient of `{each.name}`"):
                self._gradient(each, stage_sets[each.name])
        for stage, nodes in self.update.finish:
            self.nodes(nodes, self._there[stage], Phase.FINISH, f"the squares of stage {stage}", new=True)
        for node in self.update.metrics:
            self.nodes([node], self._there[node.placed_on], Phase.FINISH, "the loss and the metrics")
        with self.check.at(where="the statistics"):
            self._statistics()

    def declared(self, name: str) -> Parameter:
        """A parameter of the single-device program."""
        return self.whole.parameters[name][0]

    def nodes(self, nodes: Iterable[Node], values: Values, phase: Phase, where: str, new: bool = False) -> None:
        """Add the nodes' results to `values`. Unless `new`, the single-device program must compute them too."""
        for node in nodes:
            with self.check.at(node.span, where):
                for value in node.outputs:
                    require(value not in values, f"`{value.name}` is made twice", value)
                    values[value] = UNKNOWN
                require(node.phase is phase, f"{quoted(node)} is in phase {node.phase}")
                for value in node.inputs:
                    require(value in values, f"`{value.name}` is not available", value)
                operands = tuple(values[value] for value in node.inputs)
                values.update(zip(node.outputs, self.check.results(node, operands, new), strict=True))

    # ------------------------------------------------------------ totals and gradients

    def _reductions(self) -> None:
        """Each stage's accumulators are reduced to its totals."""
        reduce = dict(self.update.reduce)
        require(len(reduce) == len(self.update.reduce), "a stage is reduced twice")
        require(reduce.keys() <= self._there.keys(), "a stage that does not exist is reduced")
        sums = {accumulator.value: stage for accumulator, stage in self.update.sums}
        for stage, totals in zip(self.partitioned.stages, self.update.totals, strict=True):
            where = f"the reductions of stage {stage.index}"
            values: Values = {}
            for each in stage.accumulators:
                name = (each.name,) if each.parameter is None else (each.name, stage.index)
                values[each.value] = self.check.numbering.given("total", *name, type=self._type(each.name))
            for node in reduce.get(stage.index, ()):
                with self.check.at(node.span, where):
                    require(node.op.reshards, f"{quoted(node)} is not a resharding")
                self.nodes([node], values, Phase.REDUCE, where)
            for each, total in zip(stage.accumulators, totals, strict=True):
                with self.check.at(where=where):
                    meant = values.get(total) == values[each.value]
                    require(meant, f"`{total.name}` is no total of `{each.name}`", total)
                    if each.parameter is None:
                        require(total is each.value, f"`{each.name}` is not reduced here", total)
                        require(sums.pop(total, None) == stage.index, f"`{each.name}` is not among the sums", total)
                        self._there[stage.index][total] = values[total]
                    else:
                        wanted = self.layouts[each.parameter].state
                        require(total.layout == wanted, f"a gradient is not reduced to {wanted}", total)
                        self._totals.setdefault(each.parameter, {})[stage.index] = total, values[total]
        require(not sums, "there are sums that are no accumulators of a stage", *sums)

    def _type(self, accumulator: str) -> Type:
        return self.whole.accumulators[accumulator][0].value.type

    def _gradient(self, each: ParameterUpdate, stages: tuple[int, ...]) -> None:
        """A gradient is the sum of its totals in stage order. It is available on the first stage, which squares it."""
        require(each.stages == stages, f"`{each.name}` is not updated on the stages that have it, {stages}")
        require(each.layouts is self.layouts[each.name], "its layouts are other ones")
        own = self._totals[each.name]
        found = [(stage, total) for stage, (total, _) in sorted(own.items())]
        require(list(each.totals) == found, "the totals are not those of all stages that make any")
        values = dict(own.values())
        self.nodes(each.finish, values, Phase.FINISH, f"the gradient of `{each.name}`", new=True)
        number = values[found[0][1]]
        for _, total in found[1:]:
            (number,) = self.check.numbering.of(ADD, (number, values[total]))
        gradient = each.gradient
        require(values.get(gradient) == number, f"`{gradient.name}` is not the sum of all totals", gradient)
        wanted = each.layouts.state
        require(
            gradient.layout == wanted,
            f"the gradient does not have the layout of the optimizer's state, {wanted}",
            gradient,
        )
        self.gradients[each.name] = number
        self._there[stages[0]] |= values

    # ------------------------------------------------------------ statistics

    def _statistics(self) -> None:
        """The loss and the metrics, then the squares by stage; each partial (sum) along every mesh axis."""
        everywhere = layout_of((over, SUM) for over in self.check.rules.mesh.sharding)
        wanted = dict(self.whole.statistics)
        by_stage: dict[int, list[str]] = {}
        for each in self.update.parameters:
            by_stage.setdefault(each.stages[0], []).append(each.name)
        self.squares = [f"{SQUARE}{stage}" for stage in sorted(by_stage)]
        names = [*wanted, *self.squares]
        require([name for name, _, _ in self.update.statistics] == names, f"the entries are not {', '.join(names)}")
        for name, value, stage in self.update.statistics:
            with self.check.at(where=f"the statistic `{name}`"):
                require(value in self._there[stage], f"`{value.name}` is not on stage {stage}", value)
                require(not value.type.axes, "an entry is a number", value)
                require(value.layout == everywhere, "an entry counts once if it is parts of a sum on all axes", value)
                number = self._there[stage][value]
                if name in wanted:
                    require(
                        number == wanted[name],
                        f"`{value.name}` is not the `{name}` of the single-device program",
                        value,
                    )
                else:
                    squares = [square(self.check.numbering, self.gradients[each]) for each in by_stage[stage]]
                    once = sums_up(self.check.numbering, number, squares)
                    require(once, f"`{value.name}` does not add the square of each gradient once", value)

    def entry(self, name: str) -> tuple[Value, int]:
        """The value of a statistics entry, and its value number."""
        value, stage = next((value, stage) for other, value, stage in self.update.statistics if other == name)
        return value, self._there[stage][value]


def square(numbering: ValueNumbering, gradient: int) -> int:
    """The value number of a gradient's sum of squares, in the dtype of the statistics."""
    type = numbering.types[gradient]
    product: Op = Dot(type.names) if type.axes else Pointwise("multiply")
    (number,) = numbering.of(product, (gradient, gradient))
    return numbering.of(Cast(STATISTIC), (number,))[0]


def sums_up(numbering: ValueNumbering, number: int, terms: list[int]) -> bool:
    """Whether a value is the sum of `terms`, each exactly once, in any order and association."""
    left = Counter(terms)
    stack = [number]
    while stack:
        number = stack.pop()
        if left[number] > 0:
            left[number] -= 1
        elif number != UNKNOWN and numbering.made[number][0] == ADD:
            stack.extend(numbering.made[number][1])
        else:
            return False
        if len(stack) > len(terms):
            return False
    return not left.total()
