"""The update graph: what happens once a step, after the last microbatch.

REDUCE nodes reshard a stage's accumulators to the layout that the update needs: one reduction of gradients per step, in
the order in which the accumulators get their last contributions (`partita.compiler.passes.early_collectives`).
FINISH nodes run on these totals: the sum of a tied parameter's totals in stage order, each stage's share of the squared
norm, metrics that are functions of sums. Their results for all ranks (loss, metrics, squares) form one small vector of
partial sums, in which a replicated value counts only on the first rank of each mesh axis, and every gradient's square
once. It is summed over all ranks. UPDATE nodes then run on every rank: they compute the new values of the buffers that
it keeps, from masters as they were during the step, and then update the shard of each parameter whose optimizer state
it stores, and gather parameters stored replicated. What several stages keep is updated identically on all of them.
Work on whole matrices, parts of which are stored on several ranks, is shared (`partita.compiler.passes.stacked`).

States in the host's memory (`offload state`) are updated there: gradients are copied to the host, and new values back.
A gradient that an update reads unchanged starts copying to the host among the reductions: this needs a parameter of one
stage only, and no clipping, for which all gradients must be known. Other gradients are copied to the host while earlier
parameters are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from types import MappingProxyType

from attrs import define, evolve, field, frozen

from partita.compiler.graph import (
    Accumulator,
    BufferWrite,
    Master,
    Node,
    Parameter,
    Phase,
    SparseGradientPart,
    Value,
    inputs_of,
)
from partita.compiler.layout import (
    REPLICATED,
    SUM,
    Layout,
    global_type,
    is_split,
    layout_of,
    local_type,
    tensor_type,
    within_axes,
)
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.host import ToDevice, ToHost
from partita.compiler.ops.op import Op
from partita.compiler.ops.optimizer import EMA, Ema, Store, Update, target_of
from partita.compiler.ops.pointwise import Cast, Pointwise, constant, pointwise
from partita.compiler.ops.sparse import BLOCK, ENTRY, SOURCE, Coalesce, MergeRows, SparseAllToAll, entries
from partita.compiler.passes.buckets import BUCKET_BYTES, bucket_limits, bucketed, by_depth
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.passes.early_collectives import copied_ahead
from partita.compiler.passes.shard.choice import local_op
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.passes.stacked import Stacked, StackingBuilder
from partita.dsl.reprs import Shortened, count
from partita.dsl.syntax.source import Span
from partita.dsl.types import Axis

# What is averaged over groups at a time. That follows many steps, so that latency hardly matters, and memory does.
AVERAGED_BYTES = 8 * 2**20
# As in torch.nn.utils.clip_grad_norm_.
CLIP_EPSILON = 1e-6
STATISTIC = "f64"
SQUARE = "square "  # prefix of the entries for stages' shares of the squared gradient norm


@frozen(eq=False, repr=False)
class ParameterUpdate(Shortened):
    """The update of one parameter.

    `stages` are those that read it; `totals` the reduced totals to sum, each with its accumulator and the stage that
    makes it; `states` the optimizer's tensors, which it calls `state_names`, and the mean that `ema` keeps, if any.
    `finish` and `update` are the nodes of these phases; `prepare` those of the update that come before what several
    parameters share. If it is sparse, `touched` are the ids of the rows that its gradient has. `in_flight` is the
    gradient being copied to the host, if the stage's reductions start this copy.
    """

    name: str
    stages: tuple[int, ...]
    layouts: ParameterLayouts
    totals: tuple[tuple[int, str, Value], ...]
    master: Value
    gradient: Value
    states: tuple[Value, ...]
    finish: tuple[Node, ...]
    update: tuple[Node, ...]
    decays: bool
    state_names: tuple[str, ...] = ()
    prepare: tuple[Node, ...] = ()
    touched: Value | None = None
    in_flight: Value | None = None


@frozen(eq=False, repr=False)
class BufferUpdate(Shortened):
    """The update of one buffer: `new`, in the layout in which it is stored, is written over `master`.

    `stages` are those that keep it. `totals` are the statistics that the update is made of, each with its accumulator
    and the stage that makes it; they are partial sums. With `after`, it is that of a parameter, once all are updated.
    """

    name: str
    stages: tuple[int, ...]
    totals: tuple[tuple[int, str, Value], ...]
    master: Value
    new: Value
    after: bool = False

    @property
    def store(self) -> Node:
        """The node that writes the new value."""
        return Node(Store(), (self.master, self.new), (), self.name, None, Phase.UPDATE)


@frozen(eq=False, repr=False)
class OuterUpdate(Shortened):
    """The average of one parameter or buffer over replica groups (`partita.compiler.passes.outer`).

    `masters` are the copies of this rank's groups, which are overwritten. `states` are kept besides, by `state_names`:
    the anchor first, from which all groups go on. `stages` are those that keep it.
    """

    name: str
    stages: tuple[int, ...]
    masters: tuple[Value, ...]
    states: tuple[Value, ...]
    state_names: tuple[str, ...]
    nodes: tuple[Node, ...]


@frozen(eq=False)
class UpdateGraph:
    """The end of a step. `step_metrics` are the entries of the vector, each with the stage that makes it.

    `reduce` has the nodes that reduce a stage's accumulators, by stage, and `totals` their results, for each
    accumulator in order. `sums` are the accumulators that are not gradients, each with its stage, and `metrics` the
    nodes that compute statistics from them. `finish` has the nodes that compute a stage's share of the squared norm, by
    stage. `norms` are these shares summed over all ranks, the last entries of the vector, and `clip` the nodes that
    compute the coefficient from them (empty without clipping). `buffers` are updated before the parameters, by
    `buffer_nodes`, which read `masters` of both. `stacked` are nodes that several parameters' updates share. `outer`
    are the averages over groups that follow some steps, if groups train apart.
    """

    parameters: tuple[ParameterUpdate, ...]
    reduce: tuple[tuple[int, tuple[Node, ...]], ...]
    totals: tuple[tuple[Value, ...], ...]
    step_metrics: tuple[tuple[str, Value, int], ...]
    sums: tuple[tuple[Accumulator, int], ...]
    metrics: tuple[Node, ...]
    finish: tuple[tuple[int, tuple[Node, ...]], ...]
    norms: tuple[Value, ...]
    clip: tuple[Node, ...]
    buffers: tuple[BufferUpdate, ...] = ()
    masters: tuple[Master, ...] = ()
    buffer_nodes: tuple[Node, ...] = ()
    stacked: tuple[Stacked, ...] = ()
    outer: tuple[OuterUpdate, ...] = ()

    def __repr__(self) -> str:
        return f"<UpdateGraph: {count(len(self.parameters), 'parameter')}>"

    def nodes_of(self, buffers: Sequence[BufferUpdate]) -> list[Node]:
        """The nodes that compute the new values of some buffers, in order."""
        needed = {each.new for each in buffers}
        nodes = []
        for node in reversed(self.buffer_nodes):
            if any(value in needed for value in node.outputs):
                nodes.append(node)
                needed.update(node.inputs)
        return nodes[::-1]

    def buffer_updates(self, names: Collection[str]) -> list[Node]:
        """What updates the buffers among `names`. All new values are made before the first is stored: updates read what
        the step has computed with.
        """
        return self._stored([each for each in self.buffers if each.name in names and not each.after])

    def after_updates(self, names: Collection[str]) -> list[Node]:
        """What becomes of the parameters among `names` once all are updated, in the same manner."""
        return self._stored([each for each in self.buffers if each.name in names and each.after])

    def _stored(self, buffers: Sequence[BufferUpdate]) -> list[Node]:
        return [*bucketed(by_depth(self.nodes_of(buffers)), BUCKET_BYTES), *(each.store for each in buffers)]

    def parameter_updates(self, names: Sequence[str]) -> list[Node]:
        """What updates the parameters `names`, which are all that some stages update: in this order; first those whose
        gradients are coming to the host, as they come.
        """
        order = {name: i - len(names) for i, name in enumerate(names)}
        own = [each for each in self.parameters if each.name in order]
        copies = {value: each.name for each in own if (value := each.in_flight) is not None}
        begun = [value for _, nodes in reversed(self.reduce) for node in nodes for value in node.outputs]
        first = [copies[value] for value in begun if value in copies]
        order.update({name: i - len(names) - len(first) for i, name in enumerate(first)})
        own.sort(key=lambda each: order[each.name])
        nodes = [node for each in own for node in (*each.finish, *each.prepare)]
        nodes += [node for each in self.stacked if each.parameters[0] in order for node in each.nodes]
        nodes += [node for each in own for node in each.update]
        return copied_ahead(bucketed(by_depth(nodes), BUCKET_BYTES))

    def in_flight(self, stages: Collection[int]) -> list[tuple[str, Value]]:
        """The gradients that the reductions of these stages start to copy to the host, with their parameters' names."""
        return [
            (each.name, each.in_flight)
            for each in self.parameters
            if each.in_flight is not None and each.stages[0] in stages
        ]

    def outer_updates(self, names: Collection[str]) -> list[Node]:
        """What averages the parameters and buffers among `names` over groups, so many bytes at a time: while one part
        is in flight, the one before it is finished, and no third begins.
        """
        parts: list[list[Node]] = []
        size = AVERAGED_BYTES
        for each in self.outer:
            if each.name not in names:
                continue
            if size >= AVERAGED_BYTES:
                parts.append([])
                size = 0
            parts[-1] += each.nodes
            size += each.masters[0].type.bytes
        ordered: list[Node] = []
        before: list[Node] = []
        for part in parts:
            nodes = copied_ahead(bucketed(by_depth(part), AVERAGED_BYTES))
            under_way: set[Value] = set()
            count = 0  # of nodes that need no collective
            for node in nodes:
                if not under_way.isdisjoint(node.inputs):
                    break
                count += 1
                if isinstance(node.op, Collective):
                    under_way.update(node.outputs)
            ordered += nodes[:count] + before
            before = nodes[count:]
        return ordered + before

    def statistic_nodes(self, stages: Collection[int]) -> list[Node]:
        """The nodes that compute the statistics of these stages, in order."""
        nodes = [node for node in self.metrics if node.stage in stages]
        for each in self.parameters:
            if each.stages[0] in stages:
                nodes += each.finish
        for stage, squares in self.finish:
            if stage in stages:
                nodes += squares
        return nodes


def update_graph(
    partitioned: PartitionedGraph,
    layouts: dict[str, ParameterLayouts],
    resharding: Resharding,
    updates: Mapping[str, Update],
    clip: float | None,
    seconds: Callable[[Node], float],
    ema: float | None = None,
    spans: Mapping[str, Span | None] = MappingProxyType({}),
    offloaded: Collection[str] = (),
    masters_on_host: Collection[str] = (),
    delayed: bool = False,
) -> UpdateGraph:
    """The end of a step for a partitioned graph; `updates` are those of the trained parameters, and `spans` the places
    of the rules that say so. Without any, only loss and metrics. With `ema`, it keeps means of the parameters that
    decay so. `seconds` is the time of a node on the device. The states of the parameters `offloaded` lie in the host's
    memory, and so do some masters. If `delayed`, updates have gradients of an earlier step.
    """
    options = clip, seconds, ema, spans, offloaded, masters_on_host, delayed
    return _UpdateBuilder(partitioned, layouts, resharding, updates, *options).graph()


@define(eq=False)
class _UpdateBuilder:
    partitioned: PartitionedGraph
    layouts: dict[str, ParameterLayouts]
    resharding: Resharding
    updates: Mapping[str, Update]
    clip: float | None
    seconds: Callable[[Node], float]
    ema: float | None
    spans: Mapping[str, Span | None]
    offloaded: Collection[str]
    masters_on_host: Collection[str]
    delayed: bool
    build: StackingBuilder = field(init=False)
    stage_sets: Mapping[str, tuple[int, ...]] = field(init=False)
    in_flight: dict[str, Value] = field(factory=dict, init=False)  # gradients that reductions start to copy to the host

    def __attrs_post_init__(self) -> None:
        names = [each.name for each in self.partitioned.graph.parameters]
        self.build = StackingBuilder(self.resharding, names, self.seconds)
        self.stage_sets = self.partitioned.stage_sets()

    def graph(self) -> UpdateGraph:
        """Reductions, then statistics, then updates."""
        reduce, totals = self._reductions()
        graph = self.partitioned.graph
        by_stage: dict[int, list[Node]] = {}
        squares: dict[int, list[Value]] = {}
        parameters = []
        reduced: dict[str, list[tuple[int, str, Value]]] = {}
        for stage_graph, stage_totals in zip(self.partitioned.stages, totals, strict=True):
            for accumulator, total in zip(stage_graph.accumulators, stage_totals, strict=True):
                if accumulator.parameter:
                    reduced.setdefault(accumulator.parameter, []).append((stage_graph.index, accumulator.name, total))
        for parameter in graph.parameters:
            if parameter.name not in self.updates:
                continue
            stages = self.stage_sets[parameter.name]
            own = sorted(reduced[parameter.name], key=lambda total: total[0])
            each = self._gradient(parameter, stages, tuple(own))
            self.build.nodes = []
            squares.setdefault(stages[0], []).append(self._square(each.gradient))
            by_stage.setdefault(stages[0], []).extend(self.build.nodes)
            parameters.append(each)
        norms: dict[int, Value] = {}
        for stage, values in squares.items():
            self._stand(f"stage {stage}", Phase.FINISH, stage)
            norms[stage] = self._added(values)
            by_stage[stage].extend(self.build.nodes)
        metrics, step_metrics, sums = self._metrics()
        ordered = sorted(norms)
        step_metrics += [(f"{SQUARE}{stage}", norms[stage], stage) for stage in ordered]
        self._stand("clip", Phase.UPDATE, None)
        # After the sum over all ranks, they are replicated.
        whole = [Value(f"norm of stage {stage}", norms[stage].type) for stage in ordered]
        coefficient = self._coefficient(whole) if norms else None
        clip_nodes = tuple(self.build.nodes)
        updated = tuple(self._updated(each, self.updates[each.name], coefficient) for each in parameters)
        return UpdateGraph(
            updated,
            reduce,
            totals,
            tuple(step_metrics),
            sums,
            metrics,
            tuple((stage, tuple(nodes)) for stage, nodes in sorted(by_stage.items())),
            tuple(whole),
            clip_nodes,
            tuple(self._buffer(each, self.stage_sets[each.buffer]) for each in graph.updates),
            graph.masters,
            tuple(node for node in graph.nodes if node.phase is Phase.UPDATE),
            self.build.stacked({each.name: each.stages for each in updated}, self.spans),
        )

    def _stand(self, scope: str, phase: Phase, stage: int | None) -> None:
        self.build.scope, self.build.span, self.build.phase, self.build.stage = scope, None, phase, stage
        self.build.nodes = []

    def _moved(self, value: Value, target: Layout) -> Value:
        return self.build.moved(value, target)

    # ------------------------------------------------------------ buffers

    def _buffer(self, each: BufferWrite, stages: tuple[int, ...]) -> BufferUpdate:
        graph = self.partitioned.graph
        needed = {each.value}
        for node in reversed(graph.nodes):
            if node.phase is Phase.UPDATE and any(value in needed for value in node.outputs):
                needed.update(node.inputs)
        totals = tuple(
            (stage.index, accumulator.name, accumulator.value)
            for stage in self.partitioned.stages
            for accumulator in stage.accumulators
            if accumulator.value in needed
        )
        layouts = self.layouts[each.buffer]
        known = (each.buffer, each.after)
        own = next((master.value for master in graph.masters if (master.parameter, master.after) == known), None)
        master = own or Value(f"master({each.buffer})", each.value.type, layouts.param)
        return BufferUpdate(each.buffer, stages, totals, master, each.value, each.after)

    # ------------------------------------------------------------ reductions

    def _reductions(self) -> tuple[tuple[tuple[int, tuple[Node, ...]], ...], tuple[tuple[Value, ...], ...]]:
        reduce: list[tuple[int, tuple[Node, ...]]] = []
        totals: list[tuple[Value, ...]] = []
        for stage in self.partitioned.stages:
            self._stand(f"stage {stage.index}", Phase.REDUCE, stage.index)
            reduced = {each.name: each.value for each in stage.accumulators}
            last = {target_of(node.op): i for i, node in enumerate(stage.nodes)}
            for each in sorted(stage.accumulators, key=lambda each: last.get(each.name, -1)):
                if each.parameter and each.term is None:
                    total = self._moved(each.value, self.layouts[each.parameter].state)
                    reduced[each.name] = total
                    if self._copied_early(each.parameter):
                        self.in_flight[each.parameter] = self.build.copied_out(total)
            for rows in stage.accumulators:
                if rows.parameter and rows.term is not None and not rows.term.ids:
                    own = (rows.parameter, SparseGradientPart(rows.term.number, True))
                    ids = next(each for each in stage.accumulators if (each.parameter, each.term) == own)
                    reduced[ids.name], reduced[rows.name] = self._combined(rows.parameter, ids.value, rows.value)
            if self.build.nodes:
                nodes = bucketed(by_depth(self.build.nodes), BUCKET_BYTES, bucket_limits(self.resharding.mesh))
                reduce.append((stage.index, tuple(nodes)))
            totals.append(tuple(reduced.values()))
        return tuple(reduce), tuple(totals)

    def _copied_early(self, parameter: str) -> bool:
        """Whether an update reads, in the host's memory, a gradient as a single stage's reduction makes it."""
        if self.clip is not None or self.delayed or parameter not in self.offloaded:
            return False
        return len(self.stage_sets[parameter]) == 1

    def _combined(self, parameter: str, ids: Value, rows: Value) -> tuple[Value, Value]:
        """The distinct ids of a lookup in a sparse parameter and the sums of their rows, in blocks as the parameter's
        state is split.

        Where ranks have parts of the ids along the mesh axis that also splits the table by rows, each combines its own
        and they exchange the results; otherwise all of them get all ids and rows.
        """
        state, sizes = self.layouts[parameter].state, self.resharding.mesh.sizes
        table = next(each for each in self.partitioned.graph.parameters if each.name == parameter).master
        (over,) = (name for name in table.names if not rows.type.has(name))
        shared = tuple(name for name in table.names if ids.type.has(name))
        split = layout_of((axis, BLOCK if name == over else name) for axis, name in state.states)
        blocks = prod(sizes[each] for each in state.over(over))
        in_block = table.axis(over).size // blocks
        exchanged = self._exchanged(state.over(over), ids, rows, shared)
        exchange_layout = layout_of((axis, along) for axis, along in exchanged)
        places = [
            _joined(within_axes(state, each.type), exchange_layout, self.resharding.mesh.sharding)
            for each in (ids, rows)
        ]
        ids, rows = (self._moved(each, place) for each, place in zip((ids, rows), places, strict=True))
        count = global_type(ids.type, ids.layout, sizes).without(shared).elements
        if not exchanged:
            entry = Axis(ENTRY, entries(count, in_block))
            return self._laid_out(Coalesce(shared, in_block, Axis(BLOCK, blocks), entry), (ids, rows), split)
        ((over, along),) = exchanged
        own = entries(count // blocks, in_block)
        op = Coalesce(shared, in_block, Axis(BLOCK, blocks), Axis(ENTRY, own), Axis(SOURCE, blocks), along)
        by_source = layout_of((axis, SOURCE if axis == over else name) for axis, name in split.states)
        ids, rows = self._laid_out(op, (ids, rows), by_source)
        exchange = SparseAllToAll(over, blocks, SOURCE, BLOCK)
        layouts = [within_axes(split, each.type) for each in (ids, rows)]
        received = self.build.laid_out(exchange, (ids, rows), layouts)
        merge = MergeRows(shared, in_block, Axis(ENTRY, entries(blocks * own, in_block)), SOURCE)
        return self._laid_out(merge, received, split)

    def _exchanged(
        self, over: Sequence[str], ids: Value, rows: Value, shared: Sequence[str]
    ) -> tuple[tuple[str, str], ...]:
        """The mesh axis over which ids and rows of a lookup are exchanged, and the axis of the ids that it splits; none
        if they are gathered. The table's rows are split `over` these mesh axes.
        """
        if len(over) != 1:
            return ()
        along = rows.layout.state(over[0])
        if not is_split(along) or along in shared or not ids.type.has(along) or rows.layout.over(along) != tuple(over):
            return ()
        return ((over[0], along),)

    def _laid_out(self, op: Op, operands: Sequence[Value], split: Layout) -> tuple[Value, Value]:
        """The results of an operation that makes ids and rows, which are split so as far as they have the axes."""
        sizes = self.resharding.mesh.sizes
        wholes = [global_type(each.type, each.layout, sizes) for each in operands]
        types = op.infer(*wholes)
        layouts = [within_axes(split, type) for type in types]
        inputs, outputs = (tuple(Value("", type) for type in each) for each in (wholes, types))
        local = local_op(
            Node(op, inputs, outputs, ""), [each.layout for each in operands], layouts, self.resharding.mesh
        )
        ids, rows = self.build.laid_out(local, operands, layouts)
        return ids, rows

    def _merged(self, parameter: str, totals: Sequence[tuple[int, str, Value]]) -> tuple[Value, Value]:
        """The ids and rows of a sparse parameter's gradient: those of all its lookups, in stage order."""
        ids, rows = ([value for *_, value in totals if value.type.is_float == floats] for floats in (False, True))
        if len(ids) == 1:
            return ids[0], rows[0]
        over, state = self.updates[parameter].table, self.layouts[parameter].state
        whole = [global_type(each.type, each.layout, self.resharding.mesh.sizes) for each in ids]
        table = next(each for each in self.partitioned.graph.parameters if each.name == parameter).master
        in_block = table.axis(str(over)).size // whole[0].axis(BLOCK).size
        count = entries(sum(each.axis(ENTRY).size for each in whole), in_block)
        shared = tuple(name for name in whole[0].names if name not in (BLOCK, ENTRY))
        split = layout_of((axis, BLOCK if name == over else name) for axis, name in state.states)
        return self._laid_out(MergeRows(shared, in_block, Axis(ENTRY, count)), (*ids, *rows), split)

    def _gradient(
        self, parameter: Parameter, stages: tuple[int, ...], totals: tuple[tuple[int, str, Value], ...]
    ) -> ParameterUpdate:
        """A parameter's gradient: the sum of its totals in stage order."""
        self._stand(parameter.name, Phase.FINISH, stages[0])
        self.build.span = parameter.span
        layouts = self.layouts[parameter.name]
        gradient, touched = totals[0][2], None
        if self.updates[parameter.name].table is not None:
            touched, gradient = self._merged(parameter.name, totals)
        else:
            for *_, value in totals[1:]:
                name = f"gradient({parameter.name})"
                gradient = self._apply(Pointwise("add"), gradient, value, layout=layouts.state, name=name)
        type = local_type(parameter.master, layouts.param, self.resharding.mesh.sizes)
        on_host = parameter.name in self.masters_on_host
        master = Value(f"master({parameter.name})", type, layouts.param, host=on_host)
        finish = tuple(self.build.nodes)
        return ParameterUpdate(
            parameter.name,
            stages,
            layouts,
            totals,
            master,
            gradient,
            (),
            finish,
            (),
            parameter.decays,
            touched=touched,
            in_flight=self.in_flight.get(parameter.name),
        )

    # ------------------------------------------------------------ statistics

    @property
    def _everywhere(self) -> Layout:
        """Partial along every mesh axis: the layout of statistics."""
        return layout_of((over, SUM) for over in self.resharding.mesh.sharding)

    def _square(self, gradient: Value) -> Value:
        """The sum of squares of a gradient: partial wherever the gradient is split."""
        layout = layout_of((over, SUM if is_split(state) else None) for over, state in gradient.layout.states)
        op = Dot(gradient.type.names) if gradient.type.axes else Pointwise("multiply")
        return self._apply(op, gradient, gradient, layout=layout)

    def _added(self, squares: Sequence[Value]) -> Value:
        """The sum of a stage's squares, partial along every mesh axis. Those with equal layouts are added first."""
        alike: dict[Layout, Value] = {}
        for value in squares:
            value = self._apply(Cast(STATISTIC), value, layout=value.layout)
            if value.layout in alike:
                value = self._apply(Pointwise("add"), alike[value.layout], value, layout=value.layout)
            alike[value.layout] = value
        parts = [self._moved(value, self._everywhere) for value in alike.values()]
        total = parts[0]
        for value in parts[1:]:
            total = self._apply(Pointwise("add"), total, value, layout=self._everywhere)
        return total

    def _metrics(
        self,
    ) -> tuple[tuple[Node, ...], list[tuple[str, Value, int]], tuple[tuple[Accumulator, int], ...]]:
        """The nodes that compute loss and metrics, their entries in the vector, and the accumulators they read."""
        graph = self.partitioned.graph
        nodes = [node for node in graph.nodes if node.phase is Phase.FINISH]
        sums = tuple(
            (accumulator, stage.index)
            for stage in self.partitioned.stages
            for accumulator in stage.accumulators
            if accumulator.parameter is None
        )
        stage_of = {value: node.placed_on for node in nodes for value in node.outputs}
        stage_of |= {accumulator.value: stage for accumulator, stage in sums}
        step_metrics = []
        for name, value in (("loss", graph.loss), *graph.metrics):
            self._stand(name, Phase.FINISH, stage_of[value])
            step_metrics.append((name, self._moved(value, self._everywhere), stage_of[value]))
            nodes.extend(self.build.nodes)
        return tuple(nodes), step_metrics, sums

    def _coefficient(self, squares: Sequence[Value]) -> Value | None:
        """min(1, clip / (norm + ε)), with squared norms added in stage order; None without clipping."""
        if self.clip is None:
            return None
        build = self.build
        total = squares[0]
        for square in squares[1:]:
            total = pointwise(build, "add", total, square)
        norm = pointwise(build, "sqrt", total, name="norm")
        safe = pointwise(build, "add", norm, constant(build, CLIP_EPSILON, norm))
        ratio = pointwise(build, "divide", constant(build, float(self.clip), norm), safe)
        return pointwise(build, "minimum", ratio, constant(build, 1.0, norm), name="clip")

    # ------------------------------------------------------------ updates

    def _updated(self, each: ParameterUpdate, op: Update, coefficient: Value | None) -> ParameterUpdate:
        type, layout, own = each.gradient.type, each.layouts.state, each.gradient.layout
        sizes = self.resharding.mesh.sizes
        whole = tensor_type(each.master.type, each.layouts.param, sizes)
        states, on_host = [], each.name in self.offloaded
        for name, stored in zip(op.states, op.state_types(whole), strict=True):
            at = within_axes(layout, stored)
            states.append(Value(f"{name}({each.name})", local_type(stored, at, sizes), at, host=on_host))
        names = op.states
        self._stand(each.name, Phase.UPDATE, None)
        gradient = each.gradient
        if coefficient is not None:
            factor = coefficient
            if type.dtype != STATISTIC:
                factor = self._apply(Cast(type.dtype), coefficient, layout=REPLICATED)
            gradient = self._apply(Pointwise("multiply"), gradient, factor, layout=own)
        part = self._moved(each.master, layout)
        # What is computed of whole tensors is computed on the device.
        on_device = [self.build.copied(value, False) for value in (part, *states)]
        made_of = [gradient, *on_device[1:]]
        if layout.flat is not None and op.whole:
            made_of = [self._moved(value, each.layouts.compute) for value in made_of]
        others = op.operands(self.build, whole, on_device[0], made_of[0], made_of[1:])
        read = inputs_of(self.build.nodes)
        self.build.nodes = [
            node
            for node in self.build.nodes
            if not isinstance(node.op, (ToHost, ToDevice)) or read.issuperset(node.outputs)
        ]
        prepare: tuple[Node, ...] = ()
        if self.build.deferred(self.build.nodes):
            prepare, self.build.nodes = tuple(self.build.nodes), []
        others = tuple(self._moved(other, within_axes(own, other.type)) for other in others)
        if each.touched is not None:
            others = (each.touched, *others)
        written, *operands = (
            self.build.landed(each.in_flight, value)
            if value is each.gradient and each.in_flight
            else self.build.copied(value, on_host)
            for value in (part, gradient, *others)
        )
        layouts = (layout, *(state.layout for state in states))
        new = self.build.laid_out(op, (written, operands[0], *states, *operands[1:]), layouts, f"new({each.name})")[0]
        if self.ema is not None:
            mean = Value(f"{EMA}({each.name})", new.type, layout, host=on_host)
            self._apply(Ema(self.ema), mean, new, layout=layout, name=f"new({mean.name})")
            states, names = [*states, mean], (*names, EMA)
        if written is not each.master:
            # The update wrote this rank's shard of the parameter, or a copy of it; now the shards are gathered.
            gathered = self._moved(new, each.layouts.param)
            if each.master.host:
                gathered = self.build.copied(gathered, True)
            self.build.nodes.append(Node(Store(), (each.master, gathered), (), each.name, None, Phase.UPDATE))
        update = tuple(self.build.nodes)
        return evolve(each, states=tuple(states), state_names=tuple(names), prepare=prepare, update=update)

    def _apply(self, op: Op, *inputs: Value, layout: Layout, name: str | None = None) -> Value:
        """Append a node whose results have this layout; returns the first."""
        return self.build.laid_out(op, inputs, (layout,) * len(op.results), name)[0]


def _joined(layout: Layout, other: Layout, order: Sequence[str]) -> Layout:
    """A layout with what another one splits besides."""
    return layout_of((over, other.state(over) or layout.state(over)) for over in order)
