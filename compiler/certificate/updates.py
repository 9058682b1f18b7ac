"""The updates of parameters, and the coefficient that clips them: what follows the sum over all ranks.

The norms are the entries of the statistics after that sum, whole on every rank. An update works in place on this
rank's part of the parameter. Where that is not all that the rank stores, the parts come together again and are
stored; nothing else may read a parameter or a state that has been written to.
"""

from __future__ import annotations

from attrs import define

from partita.compiler.certificate.ending import Ending, Values, sums_up
from partita.compiler.certificate.meanings import UNKNOWN
from partita.compiler.certificate.rules import demand
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import WHOLE, Layout
from partita.compiler.ops.op import Op
from partita.compiler.ops.optimizer import Store, Update
from partita.compiler.ops.pointwise import Cast, Constant, Pointwise
from partita.compiler.optimizers.registry import update_of
from partita.compiler.partition.update import CLIP_EPSILON, SQUARE, STATISTIC, ParameterUpdate
from partita.dsl.spec import Call
from partita.dsl.types import Type


@define(eq=False)
class Updates:
    """The updates after an ending. Without an optimizer (evaluation) there are none."""

    ending: Ending
    call: Call | None
    clip: float | None

    def run(self) -> None:
        """Check the coefficient and all updates."""
        ending, check = self.ending, self.ending.check
        with check.at():
            wanted = list(ending.whole.parameters) if self.call else []
            updated = [each.name for each in ending.update.parameters]
            demand(sorted(updated) == sorted(wanted), "not every parameter is updated once")
        values: Values = {}
        with check.at(where="clipping"):
            self._clipping(values)
        if self.call is None:
            return
        for each in ending.update.parameters:
            with check.at(ending.declared(each.name).span, f"the update of `{each.name}`"):
                self._update(each, self.call, values)

    def _of(self, op: Op, *operands: int) -> int:
        """The meaning of an operation's result; unknown where an operand is."""
        return UNKNOWN if UNKNOWN in operands else self.ending.check.meanings.of(op, operands)[0]

    # ------------------------------------------------------------ clipping

    def _clipping(self, values: Values) -> None:
        """`values` become the norms and what is made of them; the last is the coefficient."""
        ending, update = self.ending, self.ending.update
        squares = [name for name, _, _ in update.statistics if name.startswith(SQUARE)]
        demand(len(squares) == len(update.norms), "the norms are not the last entries of the statistics")
        for name, value in zip(squares, update.norms, strict=True):
            demand(value.layout == WHOLE, "a norm is replicated once it is added over all ranks", value)
            source, number = ending.entry(name)
            demand(value.type == source.type, f"`{value.name}` has not the type of its entry", value, source)
            values[value] = number
        numbers = list(values.values())
        ending.nodes(update.clip, values, Phase.UPDATE, "clipping", new=True)
        if self.clip is None or not squares:
            demand(not update.clip, "gradients are clipped although clipping is off")
            return
        coefficient = update.clip[-1].output
        clips = self._clips(values[coefficient], numbers)
        demand(clips, "the coefficient is not min(1, clip / (norm + ε))", coefficient)

    def _clips(self, coefficient: int, squares: list[int]) -> bool:
        """Whether a value is min(1, clip / (norm + ε)) with the root of the sum of all squares for the norm."""
        meanings = self.ending.check.meanings
        if coefficient == UNKNOWN:
            return True  # reported already
        one, clip, epsilon = (
            meanings.of(Constant(x, STATISTIC), ())[0] for x in (1.0, float(self.clip or 0), CLIP_EPSILON)
        )
        # From the outside in: each operation, the operand that leads on, and the other one.
        path = (("minimum", 0, one), ("divide", 1, clip), ("add", 0, epsilon), ("sqrt", 0, None))
        total = coefficient
        for function, position, other in path:
            op, operands = meanings.made[total]
            if op != Pointwise(function) or (other is not None and operands[1 - position] != other):
                return False
            total = operands[position]
        return sums_up(meanings, total, squares)

    # ------------------------------------------------------------ one parameter

    def _update(self, each: ParameterUpdate, call: Call, clipping: Values) -> None:
        ending = self.ending
        declared = ending.declared(each.name)
        op = update_of(call, declared.decays)
        demand(each.decays == declared.decays, f"weight decay of `{each.name}` is not as declared")
        values = dict(clipping)
        own = {each.gradient: ending.gradients.get(each.name, UNKNOWN)}
        own[each.master] = self._given("master", each.name, each.master, declared.master, each.layouts.param)
        demand(len(each.states) == len(op.states), f"`{op.name}` has states {', '.join(op.states)}")
        for name, state in zip(op.states, each.states, strict=True):
            demand(state.name == f"{name}({each.name})", f"`{state.name}` is no `{name}` of `{each.name}`", state)
            own[state] = self._given(name, each.name, state, declared.master, each.layouts.state)
        values |= own
        ending.nodes(each.update, values, Phase.UPDATE, f"the update of `{each.name}`", new=True)
        updates = [node for node in each.update if isinstance(node.op, Update)]
        demand(len(updates) == 1, f"`{each.name}` is updated {len(updates)} times")
        (node,) = updates
        gradient = self._clipped(own[each.gradient], ending.update.clip, values, declared.master.dtype)
        wanted = [own[each.master], gradient, *(own[state] for state in each.states)]
        found = [values[value] for value in node.inputs]
        demand(node.op == op, f"`{each.name}` is not updated as the optimizer is declared", *node.inputs)
        demand(found == wanted, f"`{each.name}` is updated from something else than itself and its own", *node.inputs)
        # States are updated where they are stored: a copy would be lost.
        demand(node.inputs[2:] == each.states, f"states of `{each.name}` are updated in a copy", *node.inputs[2:])
        self._stored(each, node, values)

    def _given(self, what: str, name: str, value: Value, type: Type, layout: Layout) -> int:
        number = self.ending.check.meanings.given(what, name, type=type)
        demand(value.layout == layout, f"`{value.name}` is not stored as {layout}", value)
        return self.ending.check.given(number, value)

    def _clipped(self, gradient: int, clip: tuple[Node, ...], values: Values, dtype: str) -> int:
        """What a gradient means after clipping."""
        if self.clip is None:
            return gradient
        factor = values[clip[-1].output]
        if dtype != STATISTIC:
            factor = self._of(Cast(dtype), factor)
        return self._of(Pointwise("multiply"), gradient, factor)

    def _stored(self, each: ParameterUpdate, update: Node, values: Values) -> None:
        """What the update has made becomes what the rank stores, and nothing reads what it wrote to."""
        new = values[update.outputs[0]]
        written = set(update.inputs)
        stores: list[Value] = []
        for node in each.update[each.update.index(update) + 1 :]:
            read = node.inputs
            if isinstance(node.op, Store):
                target, *read_ = node.inputs
                read = tuple(read_)
                demand(target is each.master, f"`{target.name}` is overwritten", target)
                stores += read
            late = [value for value in read if value in written]
            demand(not late, "what an update wrote to is read after it", *late)
        if update.inputs[0] is each.master:
            demand(not stores, f"`{each.name}` is stored twice", *stores)
        else:
            demand(len(stores) == 1, f"`{each.name}` is stored {len(stores)} times")
            demand(values[stores[0]] == new, f"`{stores[0].name}` is not the updated `{each.name}`", stores[0])
