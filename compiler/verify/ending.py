"""Validates the end of a step: reductions, gradients, statistics.

Each gradient accumulator is reduced to the layout that the update needs; the result is called a total. Totals may be
copied to the host's memory. A parameter's gradient is the sum of its totals in stage order. Totals of a sparse
parameter are ids and rows, combined by distinct id in as many blocks as the parameter has shards, with room for as many
as there can be. The statistics vector is all-reduced over all ranks, so each entry must be partial (sum) along every
mesh axis to count once. The entries are the loss, the metrics, and per stage the squared gradient norm of the
parameters whose first stage it is: together, every parameter once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from attrs import define, field

from partita.compiler.graph import Accumulator, Node, Parameter, Phase, Value
from partita.compiler.layout import SUM, Layout, layout_of, within_axes
from partita.compiler.ops.collective import is_reshard
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.host import ASYNC_COPIES
from partita.compiler.ops.op import Op
from partita.compiler.ops.pointwise import Cast, Pointwise
from partita.compiler.ops.sparse import BLOCK, ENTRY, SOURCE, Coalesce, MergeRows
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.passes.update import SQUARE, STATISTIC, ParameterUpdate, UpdateGraph
from partita.compiler.verify.checker import Checker, quoted
from partita.compiler.verify.copies import memories
from partita.compiler.verify.reference import Reference
from partita.compiler.verify.rules import require
from partita.compiler.verify.value_numbering import UNKNOWN, ValueNumbering
from partita.dsl.types import Axis, Type

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
    touched: dict[str, int] = field(factory=dict)  # ids of the rows that a sparse one has
    squares: list[str] = field(factory=list)  # the entries of the squared norms
    in_flight: Values = field(factory=dict)  # what the reductions start to copy to the host
    _totals: dict[str, list[tuple[int, str, Value, int]]] = field(factory=dict)
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
                combines, copies = isinstance(node.op, (Coalesce, MergeRows)), isinstance(node.op, ASYNC_COPIES)
                with self.check.at(node.span, where):
                    require(is_reshard(node.op) or combines or copies, f"{quoted(node)} is not a resharding")
                    memories(node)
                self.nodes([node], values, Phase.REDUCE, where, new=combines or copies)
                if copies:
                    self.in_flight[node.output] = values[node.output]
            numbers = {each.name: values[each.value] for each in stage.accumulators}
            combined = self._combined(stage.accumulators, totals, numbers, values, reduce.get(stage.index, ()))
            for each, total in zip(stage.accumulators, totals, strict=True):
                with self.check.at(where=where):
                    meant = values.get(total) == combined.get(each.name, values[each.value])
                    require(meant, f"`{total.name}` is no total of `{each.name}`", total)
                    if each.parameter is None:
                        require(total is each.value, f"`{each.name}` is not reduced here", total)
                        require(sums.pop(total, None) == stage.index, f"`{each.name}` is not among the sums", total)
                        self._there[stage.index][total] = values[total]
                    else:
                        layout = self._wanted(each.parameter, total)
                        require(total.layout == layout, f"a gradient is not reduced to {layout}", total)
                        entry = stage.index, each.name, total, values[total]
                        self._totals.setdefault(each.parameter, []).append(entry)
        require(not sums, "there are sums that are no accumulators of a stage", *sums)

    def _combined(
        self,
        accumulators: Iterable[Accumulator],
        totals: Iterable[Value],
        numbers: Mapping[str, int],
        values: Values,
        reduce: Sequence[Node],
    ) -> dict[str, int]:
        """By accumulator of a lookup, the value number of what it is combined to: ids and rows by distinct id, of all
        or first of equal parts along some axis.
        """
        numbering, combined = self.check.numbering, dict[str, int]()
        by_source = {
            tuple(values.get(value, UNKNOWN) for value in node.inputs): node.op.by_source
            for node in reduce
            if isinstance(node.op, Coalesce) and node.op.by_source is not None
        }
        terms = {
            (each.parameter, each.term.number, each.term.ids): (each.name, total)
            for each, total in zip(accumulators, totals, strict=True)
            if each.term is not None
        }
        for (parameter, number, of_ids), (ids, total) in terms.items():
            if of_ids:
                rows, _ = terms[parameter, number, False]
                types = [numbering.types[numbers[name]] for name in (ids, rows)]
                shared, in_block, blocks = self._blocks(str(parameter), *types)
                entry = self.check.rules.whole(total).axis(ENTRY)
                block, operands = Axis(BLOCK, blocks), (numbers[ids], numbers[rows])
                apart = by_source.get(operands)
                if apart is None:
                    merged = numbering.of(Coalesce(shared, in_block, block, entry), operands)
                else:
                    own, _, along = apart
                    parts = Coalesce(shared, in_block, block, own, Axis(SOURCE, blocks), along)
                    merge = MergeRows(shared, in_block, entry, SOURCE)
                    merged = numbering.of(merge, numbering.of(parts, operands))
                combined[ids], combined[rows] = merged
        return combined

    def _blocks(self, parameter: str, ids: Type, rows: Type) -> tuple[tuple[str, ...], int, int]:
        """The axes that a sparse parameter shares with ids; the rows of a block, and the number of blocks: one for each
        shard.
        """
        table = self.declared(parameter).master
        (over,) = (name for name in table.names if not rows.has(name))
        sizes = self.check.rules.mesh.sizes
        blocks = prod(sizes[each] for each in self.layouts[parameter].state.over(over))
        return tuple(name for name in table.names if ids.has(name)), table.axis(over).size // blocks, blocks

    def _wanted(self, parameter: str, value: Value) -> Layout:
        """The layout in which the update needs a gradient, or a part of one that is sparse."""
        state = self.layouts[parameter].state
        if not value.type.has(BLOCK):
            return state
        split = layout_of((over, BLOCK if name == self._rows(parameter) else name) for over, name in state.states)
        return within_axes(split, value.type)

    def _rows(self, parameter: str) -> str | None:
        """The axis along which a sparse parameter is looked up in."""
        rows = next(
            each.value.type
            for each, _ in self.whole.accumulators.values()
            if each.parameter == parameter and each.term is not None and not each.term.ids
        )
        return next(name for name in self.declared(parameter).master.names if not rows.has(name))

    def _type(self, accumulator: str) -> Type:
        return self.whole.accumulators[accumulator][0].value.type

    def _gradient(self, each: ParameterUpdate, stages: tuple[int, ...]) -> None:
        """A gradient is the sum of its totals in stage order. It is available on the first stage, which squares it."""
        require(each.stages == stages, f"`{each.name}` is not updated on the stages that have it, {stages}")
        require(each.layouts is self.layouts[each.name], "its layouts are other ones")
        own = sorted(self._totals[each.name], key=lambda total: total[0])
        require(
            list(each.totals) == [total[:3] for total in own], "the totals are not those of all stages that make any"
        )
        values = {value: number for _, _, value, number in own}
        self.nodes(each.finish, values, Phase.FINISH, f"the gradient of `{each.name}`", new=True)
        number = self._summed(each, values)
        gradient = each.gradient
        require(values.get(gradient) == number, f"`{gradient.name}` is not the sum of all totals", gradient)
        layout = self._wanted(each.name, gradient)
        require(
            gradient.layout == layout,
            f"the gradient does not have the layout of the optimizer's state, {layout}",
            gradient,
        )
        self.gradients[each.name] = number
        self._there[stages[0]] |= values

    def _summed(self, each: ParameterUpdate, values: Values) -> int:
        """The value number of the sum of a parameter's totals; if it is sparse, also of the ids that it has rows of."""
        numbering = self.check.numbering
        numbers = [values[value] for *_, value in each.totals]
        rows = [number for number in numbers if numbering.types[number].is_float]
        if len(rows) == len(numbers):
            number = numbers[0]
            for other in numbers[1:]:
                (number,) = numbering.of(ADD, (number, other))
            require(each.touched is None, f"only some rows of `{each.name}` are updated", each.gradient)
            return number
        ids = [number for number in numbers if number not in rows]
        touched, number = ids[0], rows[0]
        if len(ids) > 1:
            shared = tuple(name for name in numbering.types[ids[0]].names if name not in (BLOCK, ENTRY))
            blocks = numbering.types[ids[0]].axis(BLOCK).size
            in_block = self.declared(each.name).master.axis(str(self._rows(each.name))).size // blocks
            entry = self.check.rules.whole(each.gradient).axis(ENTRY)
            touched, number = numbering.of(MergeRows(shared, in_block, entry), (*ids, *rows))
        actual = UNKNOWN if each.touched is None else values.get(each.touched)
        self.touched[each.name] = touched
        require(actual == touched, f"`{each.name}` is updated in other rows than its gradient has", each.gradient)
        return number

    # ------------------------------------------------------------ statistics

    def _statistics(self) -> None:
        """The loss and the metrics, then the squares by stage; each partial (sum) along every mesh axis."""
        everywhere = layout_of((over, SUM) for over in self.check.rules.mesh.sharding)
        expected = dict(self.whole.step_metrics)
        by_stage: dict[int, list[str]] = {}
        for each in self.update.parameters:
            by_stage.setdefault(each.stages[0], []).append(each.name)
        self.squares = [f"{SQUARE}{stage}" for stage in sorted(by_stage)]
        names = [*expected, *self.squares]
        require([name for name, _, _ in self.update.step_metrics] == names, f"the entries are not {', '.join(names)}")
        for name, value, stage in self.update.step_metrics:
            with self.check.at(where=f"the statistic `{name}`"):
                require(value in self._there[stage], f"`{value.name}` is not on stage {stage}", value)
                require(not value.type.axes, "an entry is a number", value)
                require(value.layout == everywhere, "an entry counts once if it is parts of a sum on all axes", value)
                number = self._there[stage][value]
                if name in expected:
                    require(
                        number == expected[name],
                        f"`{value.name}` is not the `{name}` of the single-device program",
                        value,
                    )
                else:
                    squares = [square(self.check.numbering, self.gradients[each]) for each in by_stage[stage]]
                    once = sums_up(self.check.numbering, number, squares)
                    require(once, f"`{value.name}` does not add the square of each gradient once", value)

    def entry(self, name: str) -> tuple[Value, int]:
        """The value of a statistics entry, and its value number."""
        value, stage = next((value, stage) for other, value, stage in self.update.step_metrics if other == name)
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
