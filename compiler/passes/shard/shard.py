"""Placed graph → sharded graph: every value gets a layout, and every change of layout is a node.

Takes the graph of one microbatch, with placed nodes and global tensors. Returns the same nodes on one rank's shards,
with collectives between them, and accumulators with layouts of their own. Decisions are local, one node at a time in
graph order (`partita.compiler.passes.shard.choice`), with these invariants:

- a value is made once in each layout (`partita.compiler.passes.shard.copies`), and a partial sum reduced once, to its
  default layout;
- what a gradient or the loss needs stays partial until the step ends;
- masters of parameters whose states are split are stored as these are, and what computes is gathered from them once a
  step; other stored parameters are gathered once a step, or before each use if `hoist` is false.

An op that cannot split an axis that is split is replaced by primitives that can, if it has any (`Op.split`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType

from attrs import evolve, frozen

from partita.compiler.graph import LAST, Accumulator, BufferWrite, Builder, Graph, Master, Node, Parameter, Phase, Value
from partita.compiler.layout import REPLICATED, SUM, Layout, State, is_split, layout_of, local_type, within_axes
from partita.compiler.mesh import Mesh
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.op import Op
from partita.compiler.ops.optimizer import Accumulate, Store, Update, target_of
from partita.compiler.ops.sparse import BLOCK, SOURCE, SparseAllToAll
from partita.compiler.ops.traits import LooksUp, WritesState
from partita.compiler.passes.microbatch import OUTPUT
from partita.compiler.passes.shard.choice import Choice, Operand, Result, chooser, local_op
from partita.compiler.passes.shard.copies import Copies, Lazy, Materialized
from partita.compiler.passes.shard.defaults import DefaultLayouts
from partita.compiler.passes.shard.resharding import Resharding
from partita.dsl.check.layouts import RING
from partita.dsl.reprs import Shortened, count, outline
from partita.dsl.types import Type


@frozen(eq=False, repr=False)
class ParameterLayouts(Shortened):
    """A parameter's layouts: for compute, and for storing its master, gradient and optimizer state."""

    compute: Layout
    param: Layout
    grad: Layout
    state: Layout


@frozen(eq=False)
class ShardedGraph:
    """The sharded graph, the parameters' layouts, and the choice made for each node."""

    graph: Graph
    parameters: dict[str, ParameterLayouts]
    choices: dict[Node, Choice]

    def __repr__(self) -> str:
        return outline("Sharded graph of", self.graph.name, (count(len(self.graph.nodes), "operation"),))


def shard(
    graph: Graph,
    defaults: DefaultLayouts,
    resharding: Resharding,
    portable: set[Value],
    hoist: bool = True,
    updates: Mapping[str, Update] = MappingProxyType({}),
    means: bool = False,
    parts: frozenset[str] = frozenset(),
    max_bytes: float = float("inf"),
    prefetched: Collection[str] = (),
) -> ShardedGraph:
    """Shard a placed graph. `portable` values are computed on every stage that reads them; `updates` are those of the
    trained parameters, which say along which axes their states can be split. So are masters, where no rule says more of
    parameters; with `means`, what is read of these parameters are states. Axes of which the graph has `parts` are split
    in parameters alone. An operation that gathers more than `max_bytes`, their gradients included, is divided into
    blocks if it can be. With `hoist`, parameters are gathered once a step, except for those that are `prefetched`
    before each use. Raises Refused (E0411).
    """
    options = hoist, updates, means, parts, max_bytes, prefetched
    return _Sharder(graph, defaults, resharding, portable, *options).sharded()


def gathered_bytes(
    graph: Graph,
    defaults: DefaultLayouts,
    kind: str = "param",
    updates: Mapping[str, Update] = MappingProxyType({}),
) -> list[int]:
    """For each stage, the bytes of the parameters that it reads and that are stored, as a `kind` of tensor, in another
    layout than used.
    """
    sizes = defaults.mesh.sizes
    bytes: dict[Value, int] = {}
    for parameter in graph.parameters:
        if parameter.buffer:
            continue
        compute = defaults.default(parameter.name, parameter.master, parameter.span)
        update = updates.get(parameter.name)
        flat = update is None or update.elementwise
        if defaults.stored(kind, parameter.name, parameter.master, compute, flat) != compute:
            bytes[parameter.value] = local_type(parameter.value.type, compute, sizes).bytes
    read: dict[int | None, set[Value]] = {}
    for node in graph.nodes:
        read.setdefault(node.stage, set()).update(value for value in node.inputs if value in bytes)
    return [sum(bytes[value] for value in values) for values in read.values()]


class _Sharder:
    def __init__(
        self,
        graph: Graph,
        defaults: DefaultLayouts,
        resharding: Resharding,
        portable: set[Value],
        hoist: bool,
        updates: Mapping[str, Update],
        means: bool,
        parts: frozenset[str],
        max_bytes: float,
        prefetched: Collection[str],
    ) -> None:
        self.source = graph
        self.prefetched = prefetched
        self.most = max_bytes
        self.hoist = hoist
        self.updates = updates
        self.means = means
        self.stored = defaults
        self.defaults = defaults.without(parts) if parts else defaults
        self.resharding = resharding
        self.mesh: Mesh = resharding.mesh
        self.sizes = self.mesh.sizes
        self.chooser = chooser(self.mesh, tuple(defaults.exchanges.items()))
        self.build = Builder(graph.names)
        self.copies = Copies(self.build, resharding, portable, {each.value: each for each in graph.inputs})
        self.known: dict[Value, Materialized | Lazy] = {}
        self.layouts: dict[str, ParameterLayouts] = {}
        self.parameters: list[Parameter] = []
        self.choices: dict[Node, Choice] = {}
        # What is decided once for equal nodes: an axis that they cannot split, and what each is on one rank.
        # Equal operands and results are the same objects, which are compared faster.
        self.operands: dict[Operand, Operand] = {}
        self.results: dict[Result, Result] = {}
        self.unsupported: dict[tuple[Op, tuple[Operand, ...]], str | None] = {}
        self.local: dict[tuple[Op, tuple[Operand, ...], tuple[Result, ...]], tuple[Op, tuple[Type, ...]]] = {}
        self.deferred = _deferred(graph)
        # Operands that are already split as the replacement in progress needs them.
        self.staying: set[Value] = set()
        self.accumulators: list[Accumulator] = []
        # Accumulations, with the indices of their nodes.
        self.contributions: dict[tuple[str, int | None], list[tuple[int, Accumulate]]] = {}
        # Layouts in which operations read parameters, other than their own.
        self.moved: dict[Value, list[Layout]] = {}
        # Parameters that the forward pass reads so: their gradients are made in such a layout.
        self.made_elsewhere: set[str] = set()
        late = {value for node in graph.nodes if node.phase is Phase.UPDATE for value in node.inputs}
        self.statistics = late | {each.value for each in graph.updates}
        parameters = {parameter.name for parameter in graph.parameters}
        self.gradients = {
            node.inputs[0]: target
            for node in graph.nodes
            if (target := target_of(node.op)) is not None and target in parameters
        }

    def sharded(self) -> ShardedGraph:
        """Walk the nodes once; accumulators get their layouts before their readers at the end of the step."""
        for each in self.source.inputs:
            default = self.defaults.default(each.name, each.value.type, each.span)
            self.known[each.value] = Lazy(each.value, default)
        for parameter in self.source.parameters:
            self._parameter(parameter)
        for node in self.source.nodes:
            if node.phase not in LAST:
                self._node(node)
        self._settle_accumulators()
        masters = tuple(map(self._master, self.source.masters))
        for phase in LAST:
            for node in self.source.nodes:
                if node.phase is phase:
                    self._node(node)
        updates = tuple(map(self._stored, self.source.updates))
        graph = evolve(
            self.source,
            inputs=tuple(self.copies.inputs),
            parameters=tuple(self.parameters),
            nodes=tuple(self.build.nodes),
            loss=self._primary(self.source.loss),
            metrics=tuple((name, self._primary(value)) for name, value in self.source.metrics),
            accumulators=tuple(self.accumulators),
            updates=updates,
            masters=masters,
        )
        return ShardedGraph(graph, self.layouts, self.choices)

    def _primary(self, value: Value) -> Value:
        known = self.known[value]
        return self.copies.free(known, REPLICATED) if isinstance(known, Lazy) else known.primary

    # ------------------------------------------------------------ parameters

    def _parameter(self, parameter: Parameter) -> None:
        defaults = self.defaults if parameter.is_state else self.stored
        compute = defaults.default(parameter.name, parameter.master, parameter.span)
        stored = dict.fromkeys(("param", "grad", "state"), compute)
        if not parameter.buffer:  # rules for classes are for what is trained
            update = self.updates.get(parameter.name)
            flat = update is None or update.elementwise
            for kind in stored:
                stored[kind] = defaults.stored(kind, parameter.name, parameter.master, compute, flat)
        prefetched = parameter.name in self.prefetched
        hoisted = self.hoist and not prefetched
        if parameter.name in self.updates:
            stored["state"] = self._splittable(parameter, stored["state"])
            if self.means:
                stored = dict.fromkeys(stored, stored["state"])
            elif stored["param"] == compute:
                stored["param"], hoisted = stored["state"], not prefetched
        self.layouts[parameter.name] = ParameterLayouts(compute, **stored)
        type = local_type(parameter.value.type, stored["param"], self.sizes)
        value = evolve(parameter.value, type=type, layout=stored["param"])
        self.parameters.append(evolve(parameter, value=value))
        self.known[parameter.value] = Materialized(
            parameter.value, compute, value, weight=True, hoisted=hoisted, phase=Phase.PROLOGUE
        )

    def _splittable(self, parameter: Parameter, layout: Layout) -> Layout:
        """The part of a layout that the parameter's update can work in: states may not divide as the parameter does."""
        if layout.flat is not None:
            return layout
        op = self.updates[parameter.name]
        states: dict[str, State] = {}
        for over, state in layout.states:
            parts = prod(self.sizes[other] for other, axis in (*states.items(), (over, state)) if axis == state)
            if not is_split(state) or op.splits(parameter.master, state, parts):
                states[over] = state
        return layout_of((over, states.get(over)) for over in self.mesh.sharding)

    # ------------------------------------------------------------ updates of buffers

    def _master(self, each: Master) -> Master:
        """A master as it is stored. Every stage that keeps it reads it there."""
        layouts = self.layouts[each.parameter]
        type = local_type(each.value.type, layouts.param, self.sizes)
        value = evolve(each.value, type=type, layout=layouts.param)
        self.known[each.value] = Materialized(each.value, layouts.compute, value, weight=True, phase=Phase.UPDATE)
        return evolve(each, value=value)

    def _stored(self, each: BufferWrite) -> BufferWrite:
        """A buffer's new value in the layout in which it is stored."""
        reader = Node(Store(), (), (), each.buffer, each.span, Phase.UPDATE)
        return evolve(each, value=self.copies.read(self.known[each.value], self.layouts[each.buffer].param, reader))

    # ------------------------------------------------------------ one node

    def _node(self, node: Node) -> None:
        if isinstance(node.op, Accumulate):
            self._accumulate(node, node.op)
            return
        if node.op.duplicable and not node.inputs:
            default = self.defaults.default(node.output.tensor, node.output.type)
            self.known[node.output] = Lazy(node.output, default, node)
            return
        if self._exchange(node):
            return
        stored = node.op.writes if isinstance(node.op, WritesState) else 0
        raw_operands = (self._operand(value, node, i < stored) for i, value in enumerate(node.inputs))
        operands = tuple(self.operands.setdefault(each, each) for each in raw_operands)
        if (node.op, operands) not in self.unsupported:
            self.unsupported[node.op, operands] = self._unsupported_axis(node, operands)
        axis = self.unsupported[node.op, operands]
        if axis is not None and self._replace(node, axis):
            return
        raw_results = (self._result(value, node) for value in node.outputs)
        results = tuple(self.results.setdefault(each, each) for each in raw_results)
        choice = self.chooser.choose(node.op, operands, results)
        inputs = tuple(
            self.copies.read(self.known[value], layout, node)
            for value, layout in zip(node.inputs, choice.operands, strict=True)
        )
        for value, operand, layout in zip(node.inputs, operands, choice.operands, strict=True):
            if value.name in self.layouts and layout not in operand.available:
                self._move(value, layout, node.phase)
        same = node.op, operands, results
        if same not in self.local:
            op = local_op(node, choice.operands, choice.results, self.mesh)
            self.local[same] = op, op.infer(*(value.type for value in inputs))
        op, types = self.local[same]
        outputs = tuple(
            value.laid_out(type, layout)
            for value, type, layout in zip(node.outputs, types, choice.results, strict=True)
        )
        local = node.changed(op=op, inputs=inputs, outputs=outputs)
        self.build.nodes.append(local)
        self.choices[local] = choice
        for value, output, result in zip(node.outputs, outputs, results, strict=True):
            assert output.type == local_type(value.type, output.layout, self.sizes), (node, output)
            self._made(value, output, node, result)

    # ------------------------------------------------------------ lookups in sparse parameters

    def _exchange(self, node: Node) -> bool:
        """Make a lookup in a sparse parameter by an exchange of ids and rows, if its rows and the ids are split over
        the same mesh axis; whether it has been made.
        """
        op = node.op
        if not isinstance(op, LooksUp):
            return False
        table, rows = node.inputs[-1], op.over
        update = self.updates.get(table.name)
        if update is None or update.table != rows or table.name not in self.layouts:
            return False
        ids, result = node.inputs[0], self._result(node.output, node)
        stored = self._default(table)
        (over, *others) = stored.over(rows) or ("",)
        along = result.default.state(over) if over else None
        if others or not is_split(along) or not ids.type.has(along) or result.default.over(along) != (over,):
            return False
        build = self.build.fresh().at(node)
        decomposed = op.decompose(build, node, along, self.sizes[over])
        if decomposed is None:
            return False
        # Other mesh axes split what they split of the table, or else what only the ids have.
        alone = within_axes(result.default, ids.type.without(table.type.names))
        states = {each: stored.state(each) or alone.state(each) for each in self.mesh.sharding}
        split = layout_of((each, along if each == over else state) for each, state in states.items())
        by_source = layout_of((each, SOURCE if each == over else state) for each, state in split.states)
        by_block = layout_of((each, BLOCK if each == over else state) for each, state in split.states)
        whole = layout_of((each, None if each == over else state) for each, state in split.states)
        distinct, look_up, take = build.nodes
        if any(is_split(state) and not look_up.output.type.has(state) for _, state in whole.states):
            return False
        here = self.copies.read(self.known[ids], within_axes(split, ids.type), node)
        own = self.copies.read(self.known[table], stored, node)
        entries, places = self._laid_out(distinct, (here,), (by_source, split), node)
        (received,) = self._swapped(
            SparseAllToAll(over, self.sizes[over], SOURCE, BLOCK, 1), (entries,), by_block, node
        )
        (fetched,) = self._laid_out(look_up, (received, own), (by_block,), node)
        back = SparseAllToAll(over, self.sizes[over], BLOCK, SOURCE, 2)
        _, fetched = self._swapped(back, (received, fetched), by_source, node)
        named = evolve(take, outputs=node.outputs)
        (output,) = self._laid_out(named, (fetched, places), (split,), node)
        self._made(node.output, output, node, result)
        return True

    def _laid_out(
        self, node: Node, inputs: tuple[Value, ...], layouts: Sequence[Layout], reader: Node
    ) -> tuple[Value, ...]:
        """The results of a node on shards, split so as far as they have the axes."""
        layouts = [within_axes(layout, value.type) for layout, value in zip(layouts, node.outputs, strict=True)]
        op = local_op(node, [value.layout for value in inputs], layouts, self.mesh)
        types = op.infer(*(value.type for value in inputs))
        placed = zip(node.outputs, types, layouts, strict=True)
        outputs = tuple(evolve(value, type=type, layout=layout) for value, type, layout in placed)
        self.build.nodes.append(evolve(node, op=op, inputs=inputs, outputs=outputs, phase=reader.phase))
        return outputs

    def _swapped(
        self, op: SparseAllToAll, inputs: tuple[Value, ...], layout: Layout, reader: Node
    ) -> tuple[Value, ...]:
        """What arrives in an exchange of rows."""
        outputs = tuple(
            value.derived(self.build.unique(f"{value.name}.{op.made}"), type, within_axes(layout, type))
            for value, type in zip(inputs, op.infer(*(value.type for value in inputs)), strict=True)
        )
        self.build.nodes.append(evolve(reader, op=op, inputs=inputs, outputs=outputs))
        return outputs

    def _made(self, value: Value, output: Value, node: Node, result: Result) -> None:
        default = self.layouts[self.gradients[value]].grad if value in self.gradients else result.default
        self.known[value] = Materialized(
            value, default, output, result.deferred, stage=node.stage, phase=node.phase, scope=node.scope
        )

    def _operand(self, value: Value, node: Node, written: bool) -> Operand:
        known = self.known[value]
        if isinstance(known, Lazy):
            return Operand(value.type, (), known.default, free=True)
        if written:
            return Operand(value.type, (known.default,), known.default, written=True)
        if known.weight:
            return Operand(value.type, (known.default, *self.moved.get(value, ())), known.default, stays=True)
        available = self.copies.available(known, node)
        return Operand(value.type, available, known.default, stays=value in self.staying)

    def _result(self, value: Value, node: Node) -> Result:
        if value in self.gradients:
            parameter = self.gradients[value]
            return Result(value.type, self.layouts[parameter].compute, True, not self._moves(parameter))
        return Result(value.type, self.defaults.default(value.tensor, value.type, node.span), value in self.deferred)

    def _move(self, parameter: Value, layout: Layout, phase: Phase) -> None:
        """An operation reads a parameter in another layout than its own. If that is one of the forward pass, its
        gradient is accumulated as it is made there, and reduced to its own layout at the end of the step.
        """
        self.moved.setdefault(parameter, []).append(layout)
        if phase is not Phase.FORWARD:
            return
        self.made_elsewhere.add(parameter.name)
        known = self.layouts[parameter.name]
        own = known.compute
        stored = known.grad.states if known.grad.flat is None else own.states
        grad_states = ((over, state) for over, state in stored if own.state(over) in (None, layout.state(over)))
        self.layouts[parameter.name] = evolve(known, grad=layout_of(grad_states))

    def _moves(self, parameter: str) -> bool:
        """Whether a parameter's gradient is made in another layout than its own."""
        return parameter in self.made_elsewhere

    def _unsupported_axis(self, node: Node, operands: Sequence[Operand]) -> str | None:
        """An axis along which an operand is split, and which the op itself cannot split."""
        rules = None
        for i, x in enumerate(operands):
            for axis in dict.fromkeys(state for layout in x.available for _, state in layout.states):
                if not is_split(axis):
                    continue
                if rules is None:
                    rules = node.op.sharding_rules([v.type for v in node.inputs], [v.type for v in node.outputs])
                if not any(rule.operands[i] == axis for rule in rules):
                    return axis
        return None

    def _replace(self, node: Node, axis: str) -> bool:
        """Replace a node by primitives, if its op has some that can be split along the axis; whether it has."""
        build = self.build.fresh().at(node)
        build.phase = node.phase
        results = node.op.split(build, node, axis)
        if results is None and self._divides(node, axis):
            results = node.op.decompose(build, node, axis, self._parts(node, axis))
        if results is None:
            return False
        before = self.staying
        self.staying = {
            value
            for value in node.inputs
            if any(axis == state for layout in self.known[value].kept for _, state in layout.states)
        }
        for new in build.nodes:
            self._node(new)
        self.staying = before
        for value, result in zip(node.outputs, results, strict=True):
            self.known[value] = self.known[result]
        return True

    def _divides(self, node: Node, axis: str) -> bool:
        """Whether an operation is to be divided into blocks along an axis: one that can be exchanged in other ways only
        if the layout says so, or else if what it would gather and make of it were too large.
        """
        if not isinstance(node.op, Attention) or node.op.over != axis:
            return True
        own = {over for value in node.inputs for over in self._default(value).over(axis)}
        exchanges = {over: self.chooser.exchanges.get((axis, over)) for over in own}
        if len(own) > 1 or any(each.how != RING for each in exchanges.values() if each is not None):
            return False
        read = node.inputs[1:3]
        whole = sum(local_type(value.type, self._default(value), self.sizes).bytes for value in read)
        if not any(exchanges.values()) and 2 * whole * self._parts(node, axis) <= self.most:
            return False
        return all(own == set(self._default(value).over(axis)) for value in (node.inputs[0], *read))

    def _default(self, value: Value) -> Layout:
        return self.known[value].default

    def _parts(self, node: Node, axis: str) -> int:
        """Into how many parts an operand's axis is split; the most, if there are several."""
        layouts = [
            layout
            for value in node.inputs
            if isinstance(known := self.known[value], Materialized)
            for layout in self.copies.available(known, node)
        ]
        return max(prod(self.sizes[over] for over in layout.over(axis)) for layout in layouts)

    # ------------------------------------------------------------ accumulation

    def _accumulate(self, node: Node, op: Accumulate) -> None:
        """Accumulate in the contribution's layout: partial sums stay partial, unless gradients are stored split."""
        (value,) = node.inputs
        known = self.known[value]
        layout = self._accumulated_layout(op.target, known)
        local = self.copies.read(known, layout, node)
        key = (op.target, node.stage)
        self.contributions.setdefault(key, []).append((len(self.build.nodes), op))
        self.build.nodes.append(evolve(node, inputs=(local,)))

    def _accumulated_layout(self, target: str, known: Materialized | Lazy) -> Layout:
        if isinstance(known, Lazy):
            return REPLICATED
        primary = known.primary.layout
        if target.startswith(OUTPUT):
            return self.copies.reduced_layout(known, REPLICATED) if primary.partial else primary
        if target not in self.layouts:
            return primary
        compute, stored = self.layouts[target].compute, self.layouts[target].grad
        if self._moves(target):
            compute = stored
        states: dict[str, State] = {}
        for over in self.mesh.sharding:
            state = stored.state(over) or compute.state(over)
            states[over] = state or (SUM if primary.state(over) == SUM else None)
        return layout_of(states.items(), stored.flat)

    def _settle_accumulators(self) -> None:
        """One accumulator per target and stage: partial if any contribution is; replicated ones count once."""
        declared = {each.name: each for each in self.source.accumulators}
        joined: dict[int, tuple[Value, Layout]] = {}
        for (target, stage), contributions in self.contributions.items():
            values = [self.build.nodes[i].inputs[0] for i, _ in contributions]
            layouts = list(dict.fromkeys(value.layout for value in values))
            layout = layouts[0]
            if len(layouts) > 1:
                layout = _joined(layouts, self.mesh.sharding)
                placed = zip(contributions, values, strict=True)
                joined.update({i: (value, layout) for (i, _), value in placed if value.layout != layout})
            each = declared[target]
            name = each.value.name if each.parameter is None else f"{each.value.name}@{stage}"
            type = local_type(each.value.type, layout, self.sizes)
            total = evolve(each.value, name=name, type=type, layout=layout)
            self.accumulators.append(evolve(each, value=total, stage=stage))
            for i, op in contributions:
                self.build.nodes[i] = evolve(self.build.nodes[i], op=evolve(op, type=type))  # type: ignore[misc]
            if each.parameter is None:
                default = self.defaults.default(name, each.value.type)
                # A statistic is reduced by every stage that updates a buffer with it.
                late = each.value in self.statistics
                known = (None, Phase.UPDATE) if late else (stage, Phase.FINISH)
                self.known[each.value] = Materialized(each.value, default, total, stage=known[0], phase=known[1])
        if joined:
            nodes, self.build.nodes = self.build.nodes, []
            for i, node in enumerate(nodes):
                if i in joined:
                    value, layout = joined[i]
                    moved = self.copies.reshard(value, layout, node.stage, node.phase, node.scope, node)
                    node = evolve(node, inputs=(moved,))
                self.build.nodes.append(node)


def _joined(layouts: Sequence[Layout], axes: Iterable[str]) -> Layout:
    """The layout in which contributions in several are added up: the first, but partial where any is, and flat only if
    all are.
    """
    first = layouts[0]
    flat = first.flat if all(each.flat == first.flat for each in layouts) else None
    dropped = None if first.flat == flat else first.flat

    def state(over: str) -> State:
        if any(each.state(over) == SUM for each in layouts):
            return SUM
        own = first.state(over)
        return None if dropped is not None and own == dropped.axis else own

    return layout_of(((over, state(over)) for over in axes), flat)


def _deferred(graph: Graph) -> set[Value]:
    """Values that only reach accumulations, by operations that are linear in them."""
    readers: dict[Value, list[tuple[Node, int]]] = {}
    for node in graph.nodes:
        for i, value in enumerate(node.inputs):
            readers.setdefault(value, []).append((node, i))
    deferred: set[Value] = set()

    def waits(node: Node, i: int) -> bool:
        if not all(value in deferred for value in node.outputs):
            return False
        rules = node.op.sharding_rules([v.type for v in node.inputs], [v.type for v in node.outputs])
        return any(rule.operands[i] == SUM and all(state == SUM for state in rule.results) for rule in rules)

    for node in reversed(graph.nodes):
        for value in node.outputs:
            uses = readers.get(value)
            if uses and all(waits(reader, i) for reader, i in uses):
                deferred.add(value)
    return deferred
