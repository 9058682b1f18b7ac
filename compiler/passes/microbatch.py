"""Splits the batch into microbatches: time is one more mesh axis, with the same sharding rules as any other.

Takes a graph over the full batch (joint, or forward only) and the number of microbatches. Returns the graph of one
microbatch, with `accumulate` nodes for what is summed over the step, a prologue and a finish.

Along time, every value is split along one of its axes, partial (SUM or MAX), or replicated. A node needs a
`ShardingRule` of its op that fits its operands' states. Where none fits:

- values computed from inputs and samples alone (the number of unmasked tokens, a softmax over the batch) are computed
  over the full batch in the prologue, and each microbatch takes its part;
- a replicated value that meets a partial one counts once: each microbatch takes 1/M of it;
- nodes that only metrics need are deferred to the end of the step, where they read the accumulators;
- anything else is an error that names the operation (E0407).

In a forward-only graph, the loss is one of the metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from fractions import Fraction
from math import ceil

from attrs import evolve

from partita.compiler.graph import Accumulator, Builder, Gradient, Graph, Input, Node, Phase, SparseGradientPart, Value
from partita.compiler.layout import MAX, SUM, State, is_split, split_axes
from partita.compiler.ops.body import widened
from partita.compiler.ops.custom import Custom
from partita.compiler.ops.op import Op, ShardingRule, accumulation
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Constant, Detach, Pointwise, cast, pointwise
from partita.compiler.ops.position import SLICE, TIME, Microbatch
from partita.compiler.ops.slices import KeepInFirstPart
from partita.compiler.ops.sparse import MICROBATCH
from partita.compiler.passes.ancestors import ancestors
from partita.compiler.passes.batch_rules import BatchRules, from_inputs_alone
from partita.compiler.passes.buffers import Endings, ends_of
from partita.compiler.passes.differentiate import without_dead
from partita.compiler.passes.slices import Sliced, sliced
from partita.dsl.check.divisibility import unequal
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax.source import Span
from partita.dsl.types import Axis, Type

LOSS = "loss"
OUTPUT = "output "  # prefix of the accumulators of the model's outputs
STATISTIC = "statistic "  # and of those that updates of buffers read


def split_batch(
    graph: Graph,
    batch: str,
    microbatches: int | Fraction,
    schedule: Span | None = None,
    sequence: tuple[str, int] | None = None,
    sparse: Collection[str] = (),
) -> Graph:
    """The graph of one of `microbatches` parts of the axis `batch`; `schedule` is the place that asks for them. With a
    `sequence`, an axis and a number, each is cut into so many slices of that axis (`partita.compiler.passes.slices`).

    A fraction: the step runs over more rows than the axis has, of which those that fill up the last batch are taken out
    of the sums again (`StepPlan.padding`). Then nothing may depend on where a row stands in the whole batch.

    Gradients of parameters that are `sparse` are not summed: ids and rows of all microbatches are kept.

    Raises Refused: E0406, E0407.
    """
    if graph.gradients:
        slices = sliced(graph, *sequence, schedule) if sequence is not None else None
        return _Splitter(
            slices.graph if slices else graph, batch, microbatches, schedule, slices=slices, sparse=sparse
        ).graph()
    try:
        # Defer to the end of the step rather than compute over the full batch: an evaluation may read much data.
        return _Splitter(graph, batch, microbatches, schedule, early=False).graph()
    except Refused:
        return _Splitter(graph, batch, microbatches, schedule).graph()


class _Splitter:
    def __init__(
        self,
        graph: Graph,
        batch: str,
        count: int | Fraction,
        schedule: Span | None,
        early: bool = True,
        slices: Sliced | None = None,
        sparse: Collection[str] = (),
    ) -> None:
        self.source = graph
        self.sparse = sparse
        self.terms: Counter[str] = Counter()
        self.slices = slices
        self.schedule = schedule
        self.batch = batch
        self.count = int(count) if count == int(count) else count
        names = [value.name for node in graph.nodes for value in node.outputs]
        inputs = [each.value.name for each in graph.inputs]
        self.build = Builder([*names, *inputs, *(p.name for p in graph.parameters)])
        self.state: dict[Value, State] = {}
        self.cut: dict[tuple[Op, str, int], Op] = {}  # operations on parts of an axis of such a size
        self.local: dict[Value, Value] = {}
        self.whole: dict[Value, Value] = {}
        self.portions: dict[tuple[Value, int | None], Value] = {}
        self.parts: dict[tuple[Value, str], Value] = {}
        self.totals: dict[tuple[Value, int | None], Value] = {}
        self.prologue: list[Node] = []
        self.deferred: list[Node] = []
        self.finish: list[Node] = []
        self.accumulators: list[Accumulator] = []
        self.inputs: list[Input] = []
        self.producers = graph.producers()
        # `early`: whether the prologue may compute over the full batch.
        self.rules = BatchRules(batch, self.count, from_inputs_alone(graph), early)
        ends = ends_of(graph, batch)
        self.endings = Endings(graph, ends, self.build, self._statistic)
        gradients = [gradient.value for gradient in graph.gradients]
        self.essential = ancestors(graph, [graph.loss, *gradients]) if gradients else set[Value]()
        self.statistics = ancestors(graph, ends.statistics, self.producers)

    def graph(self) -> Graph:
        """Walk the nodes once, then accumulate the results of the microbatch."""
        for each in self.source.inputs:
            self._input(each)
        for parameter in self.source.parameters:
            self.state[parameter.value] = None
            self.local[parameter.value] = parameter.value
        for node in self.source.nodes:
            self._node(node)
        loss = self._metric(LOSS, self.source.loss)
        self._gradients()
        metrics = tuple((name, self._metric(name, value)) for name, value in self.source.metrics)
        updates = tuple(map(self.endings.update, self.source.updates))
        for name, value in self.source.asked:
            self._accumulated(f"{OUTPUT}{name}", value)
        result = evolve(
            self.source,
            inputs=tuple(self.inputs),
            nodes=(*self.prologue, *self.build.nodes, *self.finish, *self.endings.nodes),
            loss=loss,
            metrics=metrics,
            gradients=(),
            accumulators=tuple(self.accumulators),
            updates=updates,
            masters=tuple(self.endings.masters.values()),
            asked=(),
        )
        return without_dead(result)

    def _input(self, each: Input) -> None:
        type = each.value.type
        if self.count == 1 or not type.has(self.batch):
            self.state[each.value] = None
            self.local[each.value] = each.value
            self.inputs.append(each)
            return
        self.state[each.value] = self.batch
        part = evolve(each.value, type=type.resized(self.batch, self._divided(self.batch, each.value, each)))
        self.local[each.value] = part
        self.inputs.append(evolve(each, value=part, batch=self.batch))

    # ------------------------------------------------------------ one node

    def _node(self, node: Node) -> None:
        self.build.at(node).phase = node.phase
        if any(value not in self.state for value in node.inputs) or (self.slices and node in self.slices.deferred):
            # It, or an operand, was deferred to the end of the step.
            self.deferred.append(node)
            return
        states = [self.state[value] for value in node.inputs]
        if self.rules.at_once(node, states):
            self._emit(node, [self.local[value] for value in node.inputs], None)
            return
        fit = self.rules.fit(node, states)
        if fit is None:
            if any(value in self.essential or value in self.statistics for value in node.outputs):
                raise self._cannot(node, states)
            self.deferred.append(node)
        elif not any((*fit.operands, *fit.results)) and self.rules.alone(node):
            for value in node.outputs:
                self.state[value], self.local[value] = None, self._over_whole_batch(value)
        else:
            operands = [
                self._converted(value, have, want)
                for value, have, want in zip(node.inputs, states, fit.operands, strict=True)
            ]
            self._emit(node, operands, fit)

    def _converted(self, value: Value, have: State, want: State) -> Value:
        if want in (have, MAX):
            return self.local[value]
        if want == SUM:
            return self._portion(value)
        if want is not None:
            return self._part_of(value, self.local[value] if have is None else self._over_whole_batch(value), want)
        return self._over_whole_batch(value)

    def _part_of(self, value: Value, whole: Value, axis: str) -> Value:
        """This microbatch's part of a full-batch value."""
        if isinstance(self.count, Fraction):
            raise self._incomplete(value)
        if (value, axis) not in self.parts:
            size = self._divided(axis, whole, self.producers.get(value))
            op = Microbatch(axis, size, ((axis, TIME, self.count),))
            self.parts[value, axis] = self.build.derive(op, value, whole, ending="of_microbatch")
        return self.parts[value, axis]

    def _portion(self, value: Value) -> Value:
        """1/M of a replicated value, which counts once in the sum over the microbatches. Each stage makes its own."""
        key = value, self.build.stage
        if key not in self.portions:
            local = self.local[value]
            share = self.build.apply(Constant(float(1 / self.count), local.type.dtype))
            self.portions[key] = self.build.derive(Pointwise("multiply"), value, local, share, ending="portion")
        return self.portions[key]

    def _incomplete(self, value: Value) -> Refused:
        node = self.producers.get(value)
        what = f"`{node.span.text}`" if node is not None and node.span is not None else f"`{value.name}`"
        return refuse("E0407", f"{what} needs all rows of `{self.batch}` at once", node.span if node else None)

    def _over_whole_batch(self, value: Value) -> Value:
        """The value computed once, in the prologue, over the full batch."""
        if isinstance(self.count, Fraction) and value.type.has(self.batch):
            raise self._incomplete(value)
        needed = ancestors(self.source, [value], self.producers)
        for each in self.source.inputs:
            if each.value in needed and each.value not in self.whole:
                if self.state[each.value] is None:
                    self.whole[each.value] = self.local[each.value]
                elif isinstance(self.count, Fraction):
                    raise self._incomplete(each.value)
                else:
                    whole = self.build.part(each.value, "whole")
                    self.whole[each.value] = whole
                    self.inputs.append(evolve(each, value=whole, batch=None))
        for node in self.source.nodes:
            if any(result in needed and result not in self.whole for result in node.outputs):
                outputs = tuple(self.build.part(v, "whole") for v in node.outputs)
                self.whole.update(zip(node.outputs, outputs, strict=True))
                inputs = tuple(self.whole[operand] for operand in node.inputs)
                self.prologue.append(evolve(node, inputs=inputs, outputs=outputs, phase=Phase.PROLOGUE))
        return self.whole[value]

    def _emit(self, node: Node, operands: list[Value], rule: ShardingRule | None) -> None:
        results: Iterable[State] = rule.results if rule else (None,) * len(node.outputs)
        op = node.op
        if rule is not None:
            for axis in split_axes((*rule.operands, *rule.results)):
                key = op, axis, self._part(node, axis)
                if key not in self.cut:
                    self.cut[key] = op.sharded(axis, key[2], TIME, ceil(self.count))
                op = self.cut[key]
        if isinstance(self.count, Fraction) and op.microbatch_dependent and op.reads_context:
            what = f"`{node.span.text}`" if node.span else f"`{op.label}`"
            message = f"{what} differs with the place of a row in `{self.batch}`"
            raise refuse("E0407", message, node.span)
        outputs = []
        for value, state in zip(node.outputs, results, strict=True):
            self.state[value] = state
            type = value.type
            if is_split(state):
                type = type.resized(state, self._part(node, state))
            local = value if type == value.type else value.laid_out(type)
            self.local[value] = local
            outputs.append(local)
        self.build.nodes.append(node.changed(op=op, inputs=tuple(operands), outputs=tuple(outputs)))

    def _part(self, node: Node, axis: str) -> int:
        """The size of a microbatch's part of an axis."""
        value = next(value for value in (*node.inputs, *node.outputs) if value.type.has(axis))
        return self._divided(axis, value, node)

    def _divided(self, name: str, value: Value, place: Node | Input | None) -> int:
        """The size of a microbatch's part of an axis of a value. Raises Refused (E0406)."""
        axis = value.type.axis(name)
        if axis.size % self.count:
            raise Refused(
                [
                    unequal(
                        axis,
                        ceil(self.count),
                        self.schedule,
                        f"{value.name}: {value.type}",
                        place.span if place else None,
                    )
                ]
            )
        return int(axis.size // self.count)

    def _cannot(self, node: Node, states: list[State]) -> Exception:
        partial = any(state in (SUM, MAX) for state in states)
        what = f"`{node.span.text}`" if node.span else f"`{node.op.label}`"
        if partial:
            message = f"{what} is applied to a sum over `{self.batch}`, which is partial within a microbatch"
            help = "after the reduction over the batch the loss may only be scaled or added to"
            if not any(value in self.essential for value in node.outputs):
                help = "an update may apply any function to sums over the batch, but not sum the result again"
        else:
            message = f"{what} needs the whole axis `{self.batch}`, which is split into microbatches"
            help = f"keep `{self.batch}` as it is until the loss is averaged over it"
            if isinstance(self.count, Fraction):
                message = f"{what} needs all rows of `{self.batch}` at once"
        notes = [
            f"{value.name}: {value.type}, {_described(state, self.batch)}"
            for value, state in zip(node.inputs, states, strict=True)
        ]
        if isinstance(node.op, Custom):
            help = node.op.splitting_help(self.batch) or help
        help = f"{help}; or set microbatches = 1"
        return refuse("E0407", message, node.span, notes=notes, help=help)

    # ------------------------------------------------------------ what leaves the microbatch

    def _accumulated(self, name: str, value: Value, reader: Node | None = None, local: Value | None = None) -> Value:
        """The sum of a value, usually a scalar, over the microbatches, for the end of the step.

        It is accumulated on the stage of `reader`, or of the node that makes it; `local` is what is accumulated there.
        """
        state = self.state[value]
        node = self.producers.get(value)
        readers = (each for each in self.source.nodes if value in each.inputs)
        self.build.at(reader or node or next(readers, self.source.nodes[0]))
        if is_split(state):
            raise refuse(
                "E0407",
                f"`{name}` still has the axis `{state}`, which is split into microbatches",
                node.span if node else None,
                help="reduce over it",
            )
        self.build.phase = Phase.FORWARD
        local = local or self.local[value]
        type = local.type.with_dtype(accumulation(local.type.dtype))
        if self.slices is not None:
            along = self.slices.states[value]
            if is_split(along):
                raise self._still_cut(value, along, reader or node)
            if SUM in (state, along) and None in (state, along):
                # It is summed over the batch or over the sequence, and the same in all parts of the other.
                local = self.build.derive(
                    KeepInFirstPart(TIME if state is None else SLICE), value, local, ending="once"
                )
            state = state or along
        return self._accumulate(name, local, type, state == MAX, keep=state is None)

    def _still_cut(self, value: Value, axis: str, node: Node | None) -> Exception:
        """What is summed over the microbatches keeps the axis of the slices, each of which has other positions."""
        what = f"`{node.span.text}`" if node and node.span else f"`{value.name}`"
        cut = f"still has the axis `{axis}`, which is cut into slices"
        return refuse(
            "E0407",
            f"{what} is applied to a sum over `{self.batch}` that {cut}",
            node.span if node else None,
            notes=[f"{value.name}: {value.type}, a slice of it"],
            help=f"reduce over `{axis}` as well before; or cut the batch alone: `over = {self.batch}`",
        )

    def _accumulate(self, name: str, local: Value, type: Type, maximum: bool = False, keep: bool = False) -> Value:
        if isinstance(self.count, Fraction) and not (maximum or keep or type.is_float):
            return self._accumulate_integers(name, local, type)
        total = self.build.value(f"total({name})", type)
        self.accumulators.append(Accumulator(name, total, None, maximum))
        self.build.apply_all(Accumulate(name, total.type, maximum, keep), local)
        return total

    def _accumulate_integers(self, name: str, local: Value, type: Type) -> Value:
        """A sum of integers over rows of which some are taken out again. Of those, a rank's part is a fraction."""
        total = self._accumulate(name, cast(self.build, local, "f64"), type.with_dtype("f64"))
        nodes, self.build.nodes = self.build.nodes, self.finish
        self.build.phase = Phase.FINISH
        whole = cast(self.build, pointwise(self.build, "round", total), type.dtype)
        self.build.nodes = nodes
        return whole

    def _gradients(self) -> None:
        """One accumulation for each contribution, right behind the node that makes it, on the parameter's stage."""
        masters = {parameter.name: parameter.master for parameter in self.source.parameters}
        totals: dict[str, Value] = {}
        after: dict[Value, list[Gradient]] = {}
        for gradient in self.source.gradients:
            after.setdefault(gradient.value, []).append(gradient)
        nodes, self.build.nodes = self.build.nodes, []
        originals = {self.local[value]: value for value in after}
        for node in nodes:
            self.build.nodes.append(node)
            for local in node.outputs:
                if local not in originals:
                    continue
                value = originals[local]
                state = self.state[value]
                self.build.at(node).phase = node.phase
                if node.phase is Phase.BACKWARD:
                    self.build.phase = Phase.WEIGHT
                for each in after[value]:
                    parameter, self.build.stage = each.parameter, each.stage
                    if parameter in self.sparse:
                        self._term(parameter, node)
                        continue
                    if state not in (None, SUM):
                        raise self._cannot(node, [self.state.get(v) for v in node.inputs])
                    part = local
                    if state is None and self.count != 1:
                        part = self._portion(value)
                    master = masters[parameter]
                    if parameter not in totals:
                        totals[parameter] = self.build.value(f"total(d({parameter}))", master)
                        self.accumulators.append(Accumulator(parameter, totals[parameter], parameter))
                    self.build.apply_all(Accumulate(parameter, master), part)

    def _term(self, parameter: str, node: Node) -> None:
        """Keep the ids and rows of a lookup, of which `node` would make the gradient of all rows."""
        number = self.terms[parameter]
        self.terms[parameter] += 1
        for value, term in zip(
            node.inputs, (SparseGradientPart(number, True), SparseGradientPart(number, False)), strict=True
        ):
            name = f"{parameter} {term}"
            dtype = accumulation(value.type.dtype)
            assert isinstance(self.count, int), "training has no parts of a batch"
            type = Type(dtype, (Axis(MICROBATCH, self.count), *value.type.axes))
            total = self.build.value(f"total({name})", type)
            self.accumulators.append(Accumulator(name, total, parameter, term=term))
            self.build.apply_all(Accumulate(name, type, stacked=True), value)

    def _metric(self, name: str, value: Value) -> Value:
        """The loss or a metric at the end of the step: accumulated, or computed from accumulators."""
        if value in self.state:
            return self._accumulated(name if name == LOSS else f"metric {name}", value)
        totals: dict[Value, Value] = {}
        needed = ancestors(self.source, [value], self.producers)
        last = self.producers[value].stage
        for original in self.deferred:
            node = evolve(original, stage=last)
            if not any(result in needed for result in node.outputs):
                continue
            for operand in node.inputs:
                if operand in self.state and operand not in totals:
                    totals[operand] = self._at_the_end(node, operand, original)
            inputs = tuple(totals[operand] for operand in node.inputs)
            op = widened(node.op)  # what it reads has been summed in the dtype of accumulation
            types = op.infer(*(value.type for value in inputs))
            outputs = tuple(self.build.part(v, "total", type) for v, type in zip(node.outputs, types, strict=True))
            totals.update(zip(node.outputs, outputs, strict=True))
            self.finish.append(evolve(node, op=op, inputs=inputs, outputs=outputs, phase=Phase.FINISH))
        return totals[value]

    def _at_the_end(self, node: Node, value: Value, original: Node) -> Value:
        """An operand of a deferred node. `original` is the node on its own stage."""
        producer = self.producers.get(value)
        if self.state[value] is None and producer is not None and producer.op.literal is not None:
            op = widened(producer.op)
            constant = self.build.part(value, "total", *op.infer())
            self.finish.append(evolve(producer, op=op, outputs=(constant,), phase=Phase.FINISH, stage=node.stage))
            return constant
        if is_split(self.state[value]):
            raise self._cannot(node, [self.state.get(operand) for operand in node.inputs])
        if (value, node.stage) not in self.totals:
            name = f"sum {value.name} on {node.stage}"
            if producer is None and original.stage != node.stage:
                # A parameter is only on the stages that read it, and is sent from there.
                self.build.at(original).phase = Phase.FORWARD
                sent = self.build.derive(Detach(), value, self.local[value], ending="sent")
            else:
                sent = self.local[value]
            self.totals[value, node.stage] = self._accumulated(name, value, node, sent)
        return self.totals[value, node.stage]

    def _statistic(self, value: Value, reader: Node | None) -> Value:
        """A statistic for the ends of updates, one of which is `reader`."""
        return self._accumulated(f"{STATISTIC}{value.name}", value, None if value in self.producers else reader)


def _described(state: State, batch: str) -> str:
    if state is None:
        return "whole"
    if state in (SUM, MAX):
        return f"partial over `{batch}`"
    return f"cut along `{state}`"
