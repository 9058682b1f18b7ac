"""Validates what follows the all-reduce of the statistics: the clipping coefficient and the parameter updates.

The norms are the all-reduced entries, replicated on every rank. An update works in place on this rank's shard of the
parameter. If the rank stores more than that shard, the shards are gathered and stored. The mean that `ema` keeps is
updated in place with the updated shard. Nothing else may read a parameter or an optimizer state after it has been
written. What lies in the host's memory is what the layout says, and an operation has all its operands and results in
one memory, except for copies and what stores a new value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import define

from partita.compiler.graph import Builder, Node, Phase, Value
from partita.compiler.layout import REPLICATED, Layout, within_axes
from partita.compiler.ops.op import Op
from partita.compiler.ops.optimizer import EMA, Ema, Store, Update
from partita.compiler.ops.pointwise import Cast, Constant, Pointwise
from partita.compiler.passes.stacked import Stacked
from partita.compiler.passes.update import CLIP_EPSILON, STATISTIC, ParameterUpdate
from partita.compiler.verify.copies import memories
from partita.compiler.verify.ending import Ending, Values, sums_up
from partita.compiler.verify.rules import require
from partita.compiler.verify.value_numbering import UNKNOWN
from partita.dsl.types import Type


@define(eq=False)
class Updates:
    """Checks the updates: `declared` are the optimizer's operations by parameter. An evaluation has none. `ema` is the
    decay of means of parameters, if they are kept. The states of the parameters `offloaded` lie in the host's memory,
    and so do the masters of those `on_host`.
    """

    ending: Ending
    declared: Mapping[str, Update]
    clip: float | None
    ema: float | None
    offloaded: Collection[str] = ()
    on_host: Collection[str] = ()

    def run(self) -> None:
        """Check the clipping coefficient and all updates."""
        ending, check = self.ending, self.ending.check
        with check.at():
            trained = [name for name, (each, _) in ending.whole.parameters.items() if each.trained]
            expected = trained if self.declared else []
            updated = [each.name for each in ending.update.parameters]
            require(sorted(updated) == sorted(expected), "not every trained parameter is updated once")
            require(not self.declared or sorted(self.declared) == sorted(expected), "what is frozen is not as declared")
        values: Values = {}
        with check.at(where="clipping"):
            self._clipping(values)
        own: dict[str, Values] = {}
        for each in ending.update.parameters:
            with check.at(ending.declared(each.name).span, f"the update of `{each.name}`"):
                own[each.name] = self._prepared(each, self.declared[each.name], values)
        for stacked in ending.update.stacked:
            with check.at(stacked.nodes[0].span, f"what the updates of {', '.join(stacked.parameters)} share"):
                self._stacked(stacked, own)
        for each in ending.update.parameters:
            with check.at(ending.declared(each.name).span, f"the update of `{each.name}`"):
                self._update(each, self.declared[each.name], own[each.name])

    def _of(self, op: Op, *operands: int) -> int:
        """The value number of an operation's result; UNKNOWN if an operand is."""
        return UNKNOWN if UNKNOWN in operands else self.ending.check.numbering.of(op, operands)[0]

    # ------------------------------------------------------------ clipping

    def _clipping(self, values: Values) -> None:
        """Fills `values` with the norms and what is computed from them; the last one is the coefficient."""
        ending, update = self.ending, self.ending.update
        squares = ending.squares
        require(len(squares) == len(update.norms), "the norms are not the last entries of the statistics")
        for name, value in zip(squares, update.norms, strict=True):
            require(value.layout == REPLICATED, "a norm is replicated once it is added over all ranks", value)
            source, number = ending.entry(name)
            require(value.type == source.type, f"`{value.name}` has not the type of its entry", value, source)
            values[value] = number
        numbers = list(values.values())
        ending.nodes(update.clip, values, Phase.UPDATE, "clipping", new=True)
        if self.clip is None or not squares:
            require(not update.clip, "gradients are clipped although clipping is off")
            return
        coefficient = update.clip[-1].output
        clips = self._clips(values[coefficient], numbers)
        require(clips, "the coefficient is not min(1, clip / (norm + ε))", coefficient)

    def _clips(self, coefficient: int, squares: list[int]) -> bool:
        """Whether a value is min(1, clip / (norm + ε)), where norm is the root of the sum of all squares."""
        numbering = self.ending.check.numbering
        if coefficient == UNKNOWN:
            return True  # reported already
        one, clip, epsilon = (
            numbering.of(Constant(x, STATISTIC), ())[0] for x in (1.0, float(self.clip or 0), CLIP_EPSILON)
        )
        # From the outside in: each operation, the operand to descend into, and the other operand.
        path = (("minimum", 0, one), ("divide", 1, clip), ("add", 0, epsilon), ("sqrt", 0, None))
        total = coefficient
        for function, position, other in path:
            op, operands = numbering.made[total]
            if op != Pointwise(function) or (other is not None and operands[1 - position] != other):
                return False
            total = operands[position]
        return sums_up(numbering, total, squares)

    # ------------------------------------------------------------ one parameter

    def _prepared(self, each: ParameterUpdate, op: Update, clipping: Values) -> Values:
        """What the update reads: the clipping, what is stored, and what is made before parameters share work."""
        ending = self.ending
        declared = ending.declared(each.name)
        require(each.decays == declared.decays, f"weight decay of `{each.name}` is not as declared")
        values = dict(clipping)
        values[each.gradient] = ending.gradients.get(each.name, UNKNOWN)
        if each.touched is not None:
            values[each.touched] = ending.touched.get(each.name, UNKNOWN)
        if each.in_flight is not None:
            values[each.in_flight] = ending.in_flight.get(each.in_flight, UNKNOWN)
            same = len(each.stages) == 1 and values[each.in_flight] == values[each.gradient]
            require(same, f"`{each.in_flight.name}` is not the gradient of a stage's own parameter", each.in_flight)
        values[each.master] = self._given("master", each.name, each.master, declared.master, each.layouts.param)
        names, types = op.states, op.state_types(declared.master)
        if self.ema is not None:
            names, types = (*names, EMA), (*types, declared.master)
        require(len(each.states) == len(names), f"`{each.name}` has states {', '.join(names)}")
        for name, state, type in zip(names, each.states, types, strict=True):
            require(state.name == f"{name}({each.name})", f"`{state.name}` is no `{name}` of `{each.name}`", state)
            values[state] = self._given(name, each.name, state, type, within_axes(each.layouts.state, type))
            require(state.host == (each.name in self.offloaded), f"`{state.name}` lies in the wrong memory", state)
        on_host = each.name in self.on_host
        require(each.master.host == on_host, f"`{each.master.name}` lies in the wrong memory", each.master)
        require(not each.gradient.host, "a gradient lies in the device's memory", each.gradient)
        for node in (*each.prepare, *each.update):
            memories(node)
        self._pure(each.prepare, values, f"the update of `{each.name}`")
        return values

    def _stacked(self, stacked: Stacked, own: Mapping[str, Values]) -> None:
        """Nodes that several updates share read what these have prepared, and each update can read their results."""
        sharing = [each for each in self.ending.update.parameters if each.name in stacked.parameters]
        names = [each.name for each in sharing]
        require(sorted(names) == sorted(stacked.parameters), "other parameters share nodes than are updated")
        for each in sharing:
            alike = each.stages == stacked.stages
            require(alike, f"`{each.name}` is not updated on the same stages as what it shares nodes with")
        values = {value: own[each.name][value] for each in sharing for node in each.prepare for value in node.outputs}
        self._pure(stacked.nodes, values, "shared nodes")
        for node in stacked.nodes:
            memories(node)
        for name in names:
            own[name].update(values)

    def _pure(self, nodes: tuple[Node, ...], values: Values, where: str) -> None:
        """Add the results of nodes that write to nothing."""
        writing = [value for node in nodes if node.op.overwrites for value in node.inputs]
        require(not writing, "something is overwritten before the updates", *writing)
        self.ending.nodes(nodes, values, Phase.UPDATE, where, new=True)

    def _update(self, each: ParameterUpdate, op: Update, values: Values) -> None:
        ending = self.ending
        declared = ending.declared(each.name)
        own = {value: values[value] for value in (each.gradient, each.master, *each.states)}
        ending.nodes(each.update, values, Phase.UPDATE, f"the update of `{each.name}`", new=True)
        updates = [node for node in each.update if isinstance(node.op, Update)]
        require(len(updates) == 1, f"`{each.name}` is updated {len(updates)} times")
        (node,) = updates
        gradient = self._clipped(own[each.gradient], ending.update.clip, values, declared.master.dtype)
        its = each.states[: len(op.states)]
        expected = [own[each.master], gradient, *(own[state] for state in its)]
        needed = self._operands(op, declared.master, expected)
        expected += [*([] if each.touched is None else [values[each.touched]]), *needed]
        actual = [values[value] for value in node.inputs]
        require(node.op == op, f"`{each.name}` is not updated as the optimizer is declared", *node.inputs)
        require(
            actual == expected, f"`{each.name}` is updated from something else than itself and its own", *node.inputs
        )
        # States are updated in place: the update of a copy would be lost.
        states = node.inputs[2 : 2 + len(its)]
        require(states == its, f"states of `{each.name}` are updated in a copy", *states)
        self._stored(each, node, values)
        self._mean(each, values[node.outputs[0]], values)

    def _mean(self, each: ParameterUpdate, new: int, values: Values) -> None:
        """The parameter's mean, if one is kept, is updated once, in place, with the parameter's new value."""
        if self.ema is None:
            return
        mean = each.states[-1]
        readers = [node for node in each.update if mean in node.inputs]
        require(len(readers) == 1, f"the mean of `{each.name}` is updated {len(readers)} times", mean)
        (node,) = readers
        require(node.op == Ema(self.ema), f"the mean of `{each.name}` is not updated as declared", *node.inputs)
        _, value = node.inputs
        require(mean is not value, f"the mean of `{each.name}` is updated in a copy", mean)
        require(values[value] == new, f"`{value.name}` is not the updated `{each.name}`", value)
        again = [other for other in each.update if node.outputs[0] in other.inputs]
        require(not again, f"the mean of `{each.name}` is read after it is updated", mean)

    def _operands(self, op: Update, type: Type, own_numbers: list[int]) -> list[int]:
        """The value numbers of what an update needs besides its parameter, gradient and states."""
        types = [type, self.ending.check.numbering.types[own_numbers[1]], *op.state_types(type)]
        values = [Value(f"{i}", each) for i, each in enumerate(types)]
        numbers = dict(zip(values, own_numbers, strict=True))
        build = Builder()
        others = op.operands(build, type, values[0], values[1], values[2:])
        for node in build.nodes:
            operands = tuple(numbers[value] for value in node.inputs)
            unknown = UNKNOWN in operands
            outputs = [UNKNOWN] * len(node.outputs) if unknown else self.ending.check.numbering.of(node.op, operands)
            numbers.update(zip(node.outputs, outputs, strict=True))
        return [numbers[value] for value in others]

    def _given(self, what: str, name: str, value: Value, type: Type, layout: Layout) -> int:
        number = self.ending.check.numbering.given(what, name, type=type)
        require(value.layout == layout, f"`{value.name}` is not stored as {layout}", value)
        return self.ending.check.given(number, value)

    def _clipped(self, gradient: int, clip: tuple[Node, ...], values: Values, dtype: str) -> int:
        """The value number of a gradient after clipping."""
        if self.clip is None:
            return gradient
        factor = values[clip[-1].output]
        if dtype != STATISTIC:
            factor = self._of(Cast(dtype), factor)
        return self._of(Pointwise("multiply"), gradient, factor)

    def _stored(self, each: ParameterUpdate, update: Node, values: Values) -> None:
        """The updated parameter is stored, in place or once, and nothing reads what the update has overwritten."""
        new = values[update.outputs[0]]
        written = set(update.inputs)
        stores: list[Value] = []
        for node in each.update[each.update.index(update) + 1 :]:
            read = node.inputs
            if isinstance(node.op, Store):
                target, *read_ = node.inputs
                read = tuple(read_)
                require(target is each.master, f"`{target.name}` is overwritten", target)
                stores += read
            late = [value for value in read if value in written]
            require(not late, "what an update wrote to is read after it", *late)
        if update.inputs[0] is each.master:
            require(not stores, f"`{each.name}` is stored twice", *stores)
        else:
            require(len(stores) == 1, f"`{each.name}` is stored {len(stores)} times")
            require(values[stores[0]] == new, f"`{stores[0].name}` is not the updated `{each.name}`", stores[0])
