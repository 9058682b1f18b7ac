"""The end of a step: reductions, gradients, statistics.

Every total of a gradient is reduced to the layout in which the update wants it, and a parameter's gradient is the sum
of its totals in the order of stages. The vector of statistics is added over all ranks, so that each entry must be
parts of a sum along every mesh axis: then it counts once. The entries are the loss, the metrics, and for each stage
the squares of the gradients of the parameters that it is the first to have: together, of every parameter once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import define, field

from partita.compiler.certificate.meanings import UNKNOWN, Meanings
from partita.compiler.certificate.report import Checker, quoted
from partita.compiler.certificate.rules import demand
from partita.compiler.certificate.whole import Whole
from partita.compiler.graph import Node, Parameter, Phase, Value
from partita.compiler.layout import SUM, layout_of
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Op
from partita.compiler.ops.pointwise import Cast, Pointwise
from partita.compiler.partition.cut import PartitionedGraph
from partita.compiler.partition.update import SQUARE, STATISTIC, ParameterUpdate, UpdateGraph
from partita.compiler.sharding.shard import ParameterLayouts
from partita.dsl.types import Type

# Values that can be read somewhere, with what they mean.
Values = dict[Value, int]

ADD = Pointwise("add")


@define(eq=False)
class Ending:
    """The end of a step, held against the whole program's. `gradients` are what the sums of totals mean."""

    partitioned: PartitionedGraph
    update: UpdateGraph
    layouts: Mapping[str, ParameterLayouts]
    whole: Whole
    check: Checker
    gradients: dict[str, int] = field(factory=dict)
    _totals: dict[str, dict[int, tuple[Value, int]]] = field(factory=dict)
    _there: dict[int, Values] = field(factory=dict)

    def run(self) -> None:
        """Check all that comes before the sum over all ranks."""
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
            self.nodes([node], self._there[node.home], Phase.FINISH, "the loss and the metrics")
        with self.check.at(where="the statistics"):
            self._statistics()

    def declared(self, name: str) -> Parameter:
        """A parameter of the single-device program."""
        return self.whole.parameters[name][0]

    def nodes(self, nodes: Iterable[Node], values: Values, phase: Phase, where: str, new: bool = False) -> None:
        """Add to `values` what nodes make of them; unless `new`, nothing that the whole program has not."""
        for node in nodes:
            with self.check.at(node.span, where):
                for value in node.outputs:
                    demand(value not in values, f"`{value.name}` is made twice", value)
                    values[value] = UNKNOWN
                demand(node.phase is phase, f"{quoted(node)} is in phase {node.phase}")
                for value in node.inputs:
                    demand(value in values, f"`{value.name}` is not available", value)
                operands = tuple(values[value] for value in node.inputs)
                values.update(zip(node.outputs, self.check.results(node, operands, new), strict=True))

    # ------------------------------------------------------------ totals and gradients

    def _reductions(self) -> None:
        """What each stage has accumulated becomes its totals."""
        reduce = dict(self.update.reduce)
        demand(len(reduce) == len(self.update.reduce), "a stage is reduced twice")
        demand(reduce.keys() <= self._there.keys(), "a stage that does not exist is reduced")
        sums = {accumulator.value: stage for accumulator, stage in self.update.sums}
        for stage, totals in zip(self.partitioned.stages, self.update.totals, strict=True):
            where = f"the reductions of stage {stage.index}"
            values: Values = {}
            for each in stage.accumulators:
                name = (each.name,) if each.parameter is None else (each.name, stage.index)
                values[each.value] = self.check.meanings.given("total", *name, type=self._type(each.name))
            for node in reduce.get(stage.index, ()):
                with self.check.at(node.span, where):
                    demand(node.op.reshards, f"{quoted(node)} is not a resharding")
                self.nodes([node], values, Phase.REDUCE, where)
            for each, total in zip(stage.accumulators, totals, strict=True):
                with self.check.at(where=where):
                    meant = values.get(total) == values[each.value]
                    demand(meant, f"`{total.name}` is no total of `{each.name}`", total)
                    if each.parameter is None:
                        demand(total is each.value, f"`{each.name}` is not reduced here", total)
                        demand(sums.pop(total, None) == stage.index, f"`{each.name}` is not among the sums", total)
                        self._there[stage.index][total] = values[total]
                    else:
                        wanted = self.layouts[each.parameter].state
                        demand(total.layout == wanted, f"a gradient is not reduced to {wanted}", total)
                        self._totals.setdefault(each.parameter, {})[stage.index] = total, values[total]
        demand(not sums, "there are sums that are no accumulators of a stage", *sums)

    def _type(self, accumulator: str) -> Type:
        return self.whole.accumulators[accumulator][0].value.type

    def _gradient(self, each: ParameterUpdate, stages: tuple[int, ...]) -> None:
        """The sum of the totals in the order of stages; its square is made on the first stage."""
        demand(each.stages == stages, f"`{each.name}` is not updated on the stages that have it, {stages}")
        demand(each.layouts is self.layouts[each.name], "its layouts are other ones")
        own = self._totals[each.name]
        found = [(stage, total) for stage, (total, _) in sorted(own.items())]
        demand(list(each.totals) == found, "the totals are not those of all stages that make any")
        values = dict(own.values())
        self.nodes(each.finish, values, Phase.FINISH, f"the gradient of `{each.name}`", new=True)
        number = values[found[0][1]]
        for _, total in found[1:]:
            (number,) = self.check.meanings.of(ADD, (number, values[total]))
        gradient = each.gradient
        demand(values.get(gradient) == number, f"`{gradient.name}` is not the sum of all totals", gradient)
        wanted = each.layouts.state
        demand(
            gradient.layout == wanted,
            f"the gradient does not have the layout of the optimizer's state, {wanted}",
            gradient,
        )
        self.gradients[each.name] = number
        self._there[stages[0]] |= values

    # ------------------------------------------------------------ statistics

    def _statistics(self) -> None:
        """The loss and the metrics, then the squares by stage; each as parts of a sum along every mesh axis."""
        everywhere = layout_of((over, SUM) for over in self.check.rules.mesh.sharding)
        wanted = dict(self.whole.statistics)
        by_stage: dict[int, list[str]] = {}
        for each in self.update.parameters:
            by_stage.setdefault(each.stages[0], []).append(each.name)
        names = [*wanted, *(f"{SQUARE}{stage}" for stage in sorted(by_stage))]
        demand([name for name, _, _ in self.update.statistics] == names, f"the entries are not {', '.join(names)}")
        for name, value, stage in self.update.statistics:
            with self.check.at(where=f"the statistic `{name}`"):
                demand(value in self._there[stage], f"`{value.name}` is not on stage {stage}", value)
                demand(not value.type.axes, "an entry is a number", value)
                demand(value.layout == everywhere, "an entry counts once if it is parts of a sum on all axes", value)
                number = self._there[stage][value]
                if name in wanted:
                    demand(
                        number == wanted[name],
                        f"`{value.name}` is not the `{name}` of the single-device program",
                        value,
                    )
                else:
                    squares = [square(self.check.meanings, self.gradients[each]) for each in by_stage[stage]]
                    once = sums_up(self.check.meanings, number, squares)
                    demand(once, f"`{value.name}` does not add the square of each gradient once", value)

    def entry(self, name: str) -> tuple[Value, int]:
        """An entry of the statistics."""
        value, stage = next((value, stage) for other, value, stage in self.update.statistics if other == name)
        return value, self._there[stage][value]


def square(meanings: Meanings, gradient: int) -> int:
    """The sum of squares of a gradient, as statistics have it."""
    type = meanings.types[gradient]
    product: Op = Dot(type.names) if type.axes else Pointwise("multiply")
    (number,) = meanings.of(product, (gradient, gradient))
    return meanings.of(Cast(STATISTIC), (number,))[0]


def sums_up(meanings: Meanings, number: int, terms: list[int]) -> bool:
    """Whether a value is the sum of terms, each once, in whatever order they are added."""
    left = Counter(terms)
    stack = [number]
    while stack:
        number = stack.pop()
        if left[number] > 0:
            left[number] -= 1
        elif number != UNKNOWN and meanings.made[number][0] == ADD:
            stack.extend(meanings.made[number][1])
        else:
            return False
        if len(stack) > len(terms):
            return False
    return not left.total()
