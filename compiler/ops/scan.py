"""A loop along an axis: a body of operations that is applied at one position after the other.

States pass from position to position. The body is an attribute, so neither compile time nor source grow with the
positions. The axis itself is whole. Another axis is split where every operation of the body has a sharding rule for it,
one after the other, and states leave a position split as they enter it: ranks exchange nothing within the loop.

The gradient is a loop in the other direction, whose body computes a position again from the states before it. What the
ranks of a tensor's gradient add up for each position would be matrix products: their operands leave the loop instead,
and one product follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from attrs import evolve, field

from partita.compiler.layout import SUM, State
from partita.compiler.ops.body import Body, as_body
from partita.compiler.ops.decoding import LoadState, WriteState
from partita.compiler.ops.op import (
    TORCH_DTYPES,
    Argument,
    Op,
    ShardingRule,
    accumulation,
    agree,
    aligned_rules,
    no_gradient,
    op,
    permuted,
)
from partita.compiler.ops.scan_gradient import scan_gradients
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value

# Up to so many operands and states are tried as partial sums in all combinations.
FEW = 6


@op("scan")
class Scan(Op):
    """A body along `axis`, from the first position, or with `backward` from the last.

    Operands: the first of the `states` (zeros, unless `initial`), then tensors of which the body sees one position
    (`sliced`), with the axis, and tensors that it sees as they are. The body's inputs are in this order. Its results
    are the next states, then `stacked` ones, then ones to be summed. Results: the last states, the stacked ones with
    the axis first, the sums over all positions. If states begin with zeros, it is linear in the operands `linear`
    together.
    """

    axis: Axis
    body: Body = field(converter=as_body)
    states: int
    sliced: int
    stacked: int
    initial: bool = True
    backward: bool = False
    linear: tuple[int, ...] = ()
    fusible = False

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """The last states, the stacked results, and the sums."""
        sums = len(self.body.results) - self.states - self.stacked
        names = [*("last",) * self.states, *("",) * self.stacked, *("sum",) * sums]
        return tuple(names)

    @property
    def microbatch_dependent(self) -> bool:
        """Whether an operation of the body is."""
        return any(step.op.microbatch_dependent for step in self.body.steps)

    @property
    def reads_context(self) -> bool:
        """Whether an operation of the body does; and for the device, for states that begin with zeros and literals."""
        return True

    def _inputs(self, operands: Sequence[Type]) -> tuple[Type, ...]:
        """What the body sees of the operands."""
        types = list(operands)
        states = types[: self.states] if self.initial else list(self.body.inputs[: self.states])
        rest = types[self.states :] if self.initial else types
        sliced = [type.without([self.axis.name]) for type in rest[: self.sliced]]
        assert all(type.axis(self.axis.name) == self.axis for type in rest[: self.sliced]), (self, operands)
        return (*states, *sliced, *rest[self.sliced :])

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """States keep their types."""
        inputs = self._inputs(types)
        assert inputs == self.body.inputs, (inputs, self.body.inputs)
        value_types = self.body.types()
        results = [value_types[i] for i in self.body.results]
        assert results[: self.states] == list(inputs[: self.states]), (self, results)
        last = self.states + self.stacked
        stacked = [Type(type.dtype, (self.axis, *type.axes)) for type in results[self.states : last]]
        sums = [type.with_dtype(accumulation(type.dtype)) for type in results[last:]]
        return (*results[: self.states], *stacked, *sums)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but the scanned one for which every operation of the body has a rule."""
        names = dict.fromkeys(name for type in (*self.body.inputs, *operands) for name in type.names)
        rules: list[ShardingRule] = []
        for name in names:
            if name != self.axis.name:
                rules += self._rules(name)
        if self.linear:
            rules += self._rules("")
        return tuple(rules)

    def _rules(self, axis: str) -> Iterator[ShardingRule]:
        """The rules in which all operands that have the axis are split. Of those that lack it the ones in which it is
        linear, and states that begin with zeros, may be partial sums.
        """
        hidden = 0 if self.initial else self.states
        free = [*range(hidden), *(hidden + i for i in self.linear)]
        unsplit = [i for i in free if not self.body.inputs[i].has(axis)]
        # With many of them all or none.
        several = product((None, SUM), repeat=len(unsplit)) if len(unsplit) <= FEW else product((None, SUM), repeat=1)
        seen: set[ShardingRule] = set()
        for chosen in several:
            inputs: list[State] = [axis if type.has(axis) else None for type in self.body.inputs]
            for k, i in enumerate(unsplit):
                inputs[i] = chosen[k % len(chosen)]
            states = self.body.states(inputs, axis)
            results = [] if states is None else [states[i] for i in self.body.results]
            if results and results[: self.states] == inputs[: self.states]:
                rule = ShardingRule(tuple(inputs[hidden:]), tuple(results))
                if any((*rule.operands, *rule.results)) and rule not in seen:
                    seen.add(rule)
                    yield rule

    def resized(self, axis: str, size: int) -> Op:
        """With the body resized."""
        scanned = Axis(axis, size) if self.axis.name == axis else self.axis
        return evolve(self, axis=scanned, body=self.body.resized(axis, size))  # type: ignore[misc]

    def sharded(self, axis: str, size: int, mesh_axis: str, parts: int) -> Op:
        """With the body's operations told their shards."""
        return evolve(self, body=self.body.sharded(axis, size, mesh_axis, parts))  # type: ignore[misc]

    def unsharded(self, keep: Collection[str | None]) -> Op:
        """With the body's operations without their positions on the mesh."""
        steps = tuple(evolve(step, op=step.op.unsharded(keep)) for step in self.body.steps)
        return evolve(self, body=evolve(self.body, steps=steps))  # type: ignore[misc]

    def decode_step(
        self, build: Builder, operands: Sequence[Value], axis: str, state: Callable[[Type], Value]
    ) -> tuple[Value, ...] | None:
        """The loop goes on from the states that it ended with."""
        sums = len(self.body.results) > self.states + self.stacked
        if axis != self.axis.name or self.backward or sums or not self.sliced:
            return None
        values = list(operands)
        states = [state(type) for type in self.body.inputs[: self.states]]
        size = values[self.states if self.initial else 0].type.axis(axis).size
        begun = (
            [build.apply(LoadState(), one, each) for one, each in zip(values, states, strict=False)]
            if self.initial
            else states
        )
        rest = values[self.states :] if self.initial else values
        op = evolve(self, axis=Axis(axis, size), initial=True)  # type: ignore[misc]
        results = build.apply_all(op, *begun, *rest)
        return build.apply_all(WriteState(len(states), len(results)), *states, *results[: self.states], *results)

    # ------------------------------------------------------------ costs

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Those of the body, at every position."""
        return self.axis.size * sum(op.flops(inputs, outputs) for op, inputs, outputs in self.body.each())

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """Those of the body, at every position."""
        return self.axis.size * sum(op.product_flops(inputs, outputs) for op, inputs, outputs in self.body.each())

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """Products of one position, if it has any."""
        shapes = [op.matrices(inputs, outputs) for op, inputs, outputs in self.body.each()]
        return () if any(each is not None for each in shapes) else None

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """What the body's operations read and write at every position."""
        return self.axis.size * sum(
            op.accessed(inputs, outputs)
            for op, inputs, outputs in self.body.each()
            if not op.is_view and op.literal is None
        )

    def launches(self) -> int:
        """The body's kernels at every position."""
        return self.axis.size * sum(not step.op.is_view and step.op.literal is None for step in self.body.steps)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """What one position makes, with its largest workspace, and the states before it; sums."""
        produced = sum(type.bytes for op, _, types in self.body.each() if op.allocates for type in types)
        inner = max((op.workspace(inputs, types) for op, inputs, types in self.body.each()), default=0)
        return 2 * produced + inner + sum(type.bytes for type in results[self.states + self.stacked :])

    # ------------------------------------------------------------ gradient and source

    def gradients(self, build: Builder, node: Node, d: Sequence[Value | None]) -> tuple[Value | None, ...]:
        """A scan in the other direction. Only the stacked states of the scans of the language have cotangents. Raises
        Refused (E0423) for those that make gradients.
        """
        if not self.initial:
            raise no_gradient(node)
        assert self.stacked == self.states, self
        return scan_gradients(self.axis, self.body, self.states, self.sliced, self.backward, build, node, d)

    def vmapped(self, axis: Axis) -> Op | None:
        """It is not applied to all positions of another loop at once."""
        return None

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with the body as a function."""
        texts = [argument.text for argument in arguments]
        states: list[str] = texts[: self.states] if self.initial else []
        if not self.initial:
            for type in self.body.inputs[: self.states]:
                states.append(f"torch.zeros({type.shape}, dtype={TORCH_DTYPES[type.dtype]}, device=c.device)")
        rest = list(arguments[self.states :] if self.initial else arguments)
        sliced = []
        for each in rest[: self.sliced]:
            order = [self.axis.name, *each.type.without([self.axis.name]).names]
            sliced.append(permuted(each.text, each.type.names, order))
        groups = [states, sliced, [each.text for each in rest[self.sliced :]]]
        listed = ", ".join(f"({', '.join(group)}{',' if len(group) == 1 else ''})" for group in groups)
        options = f"{self.axis.size}, {self.stacked}, {self.backward}"
        text = f"kernels.scan({self.body.source()}, {listed}, {options})"
        return text if len(results) > 1 else f"{text}[0]"


@op("states_before")
class StatesBefore(Op):
    """The states before each position of `over`: the first operand, then those of the second but the last."""

    over: str
    backward: bool = False
    rearranges = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of the second operand."""
        initial, states = types
        assert agree(*types), (self, types)
        assert set(initial.names) == set(states.without([self.over]).names), (self, types)
        return (states,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis; linear in both together."""
        return (*aligned_rules(operands, results, whole=[self.over]), ShardingRule((SUM, SUM), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.cat`."""
        initial, states = arguments
        dim, size = states.type.position(self.over), states.type.axis(self.over).size
        rest = [name for name in states.type.names if name != self.over]
        first = f"{permuted(initial.text, initial.type.names, rest)}.unsqueeze({dim})"
        part = f"{states.text}.narrow({dim}, {1 if self.backward else 0}, {size - 1})"
        pair = f"{part}, {first}" if self.backward else f"{first}, {part}"
        return f"torch.cat(({pair}), {dim})"
