"""Operations that end a step: accumulation over microbatches, updates of parameters, and means of these.

Updates work in place on parameter and states, and return them; the learning rates of the optimizer's rules (`c.rates`)
and the number of the update (`c.update`, from 1) are known on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import field, frozen

from partita.compiler.layout import MAX, SUM
from partita.compiler.ops.op import Argument, Op, ShardingRule, agree, op, permuted
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value

# The name of the mean that `ema` keeps of a trained parameter, among its optimizer states.
EMA = "ema"


@op("accumulate")
class Accumulate(Op):
    """Add the operand to the accumulator `target`, of the same axes, in ascending order of microbatches.

    `maximum` takes the maximum instead; `keep` the last value, for what is the same in every microbatch; with
    `stacked`, the accumulator has an axis of microbatches before the operand's, and keeps what each of them gives. The
    accumulator has type `type`, and is zero (or −inf) when the step begins.
    """

    target: str
    type: Type
    maximum: bool = False
    keep: bool = False
    stacked: bool = False
    results = ()
    fusible = False

    @property
    def reads_context(self) -> bool:
        """For the number of the microbatch."""
        return self.stacked

    @property
    def structural_key(self) -> Op:
        """Of any target."""
        return Accumulate("", self.type, self.maximum, self.keep, self.stacked)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """No result."""
        assert sorted(types[0].names) == sorted(self.type.names[self.stacked :]), (self, types)
        return ()

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """The accumulator has the operand's layout."""
        kinds: tuple[str, ...] = (SUM, MAX) if self.keep else (MAX,) if self.maximum else (SUM,)
        if self.stacked and not operands[0].is_float:
            kinds = ()
        return tuple(ShardingRule((state,), ()) for state in (*operands[0].names, *kinds))

    def unflattened(self, flat: Collection[str], axes: tuple[Axis, ...]) -> Op | None:
        """The accumulator has these axes as well."""
        return Accumulate(self.target, Type(self.type.dtype, axes), self.maximum, self.keep)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One addition for each element."""
        return operands[0].elements

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Also reads and writes the accumulator."""
        if self.stacked:
            return 2 * operands[0].bytes
        return operands[0].bytes + 2 * self.type.bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Not an expression: the emitter writes a statement (see `statement`)."""
        raise AssertionError("accumulate is a statement")

    def statement(self, target: str, value: Argument) -> str:
        """`target.add_(value)`; the value may have a narrower dtype."""
        view = permuted(value.text, value.type.names, self.type.names[self.stacked :])
        if self.stacked:
            return f"{target}[c.microbatch].copy_({view})"
        if self.keep:
            return f"{target}.copy_({view})"
        if self.maximum:
            return f"torch.maximum({target}, {view}, out={target})"
        return f"{target}.add_({view})"


@op("store")
class Store(Op):
    """Write the second operand over the first, of the same type: a parameter whose updated shards were gathered, or
    that was updated in the other memory.
    """

    results = ()
    fusible = False
    overwrites = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """No result."""
        assert types[0] == types[1], types
        return ()

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return tuple(ShardingRule((name, name), ()) for name in operands[0].names)

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Yes."""
        return True

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.store({arguments[0].text}, {arguments[1].text})"


@frozen
class Update(Op):
    """Base of the optimizers. Operands: parameter, gradient, a tensor for each name in `states`, and the `operands`.

    `rate` is which of the step's learning rates it takes. A `lazy` one is of a table of which it touches only the rows
    that a step looks up (`partita.compiler.ops.sparse`). It is made in one of `every` updates of the run, from the
    `first` on; in the others nothing changes. An update works on a rank's shards in place. What it needs of a whole
    tensor (a mean over a split axis, an orthogonal matrix) is computed before it, by ordinary operations that are
    resharded like all others.
    """

    rate: int = field(default=0, kw_only=True)
    lazy: bool = field(default=False, kw_only=True)
    every: int = field(default=1, kw_only=True)
    first: int = field(default=1, kw_only=True)
    states: ClassVar[tuple[str, ...]]
    whole: ClassVar[bool] = False  # whether all parts of a parameter must be updated together
    # Whether it updates each element by itself, with states for each, so that a parameter may be flat; what else it
    # needs is made of whole tensors if `whole`.
    # One call makes any number of them that are equal but for their tensors, in place (`emit_each`).
    multi_tensor: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    # Whether it leaves zeros without a gradient as they are, as those that pad an axis.
    leaves_zeros: ClassVar[bool] = True
    fusible = False
    allocates = False  # it works in place
    overwrites = True

    @property
    def reads_context(self) -> bool:
        """For the learning rate and the number of the update."""
        return True

    @property
    def learning_rate(self) -> str:
        """The source of its learning rate."""
        return f"c.rates[{self.rate}]"

    @property
    def rule(self) -> dict[str, Any]:
        """What every update has from its rule."""
        return {"rate": self.rate, "lazy": self.lazy, "every": self.every, "first": self.first}

    @property
    def condition(self) -> str:
        """The source of a number that is zero in steps in which it leaves its tensors as they are, `c.updates(…)`;
        empty if it is made in every update.
        """
        return f"c.updates({self.every}, {self.first})" if self.every > 1 or self.first > 1 else ""

    @property
    def number(self) -> str:
        """The source of how many times it is made, this time included."""
        return self.condition or "c.update"

    def by_rows(self, axis: str) -> bool:
        """Whether it can update some positions of an axis without the others."""
        return True

    @property
    def keeps_rows(self) -> bool:
        """Whether it changes nothing where the gradient is zero, neither the parameter nor its states."""
        return False

    @property
    def may_be_sparse(self) -> bool:
        """Whether it can leave rows of a table as they are that have no gradient."""
        return self.lazy or self.keeps_rows

    @property
    def table(self) -> str | None:
        """If it updates rows of a table, those that have a gradient, the axis along which the table has rows."""
        return None

    def overwritten(self, operands: Sequence[Value]) -> Sequence[Value]:
        """The operands to which it may write: the parameter, the gradient and the states."""
        return operands[: 2 + len(self.states)]

    def in_place(self, operands: Sequence[Value]) -> tuple[Value, ...]:
        """The operands that become its results: the parameter and its states."""
        return (operands[0], *operands[2 : 2 + len(self.states)])

    def emit_each(self, arguments: Sequence[Sequence[Argument]], factor: Argument | None) -> str:
        """A statement that makes several of them, where `multi_tensor` holds; of each, the operands. The second ones,
        which are gradients, are multiplied by a factor in f64 first.
        """
        raise NotImplementedError

    def state_types(self, parameter: Type) -> tuple[Type, ...]:
        """The types of the states of a parameter; by default, its own."""
        return (parameter,) * len(self.states)

    def splits(self, parameter: Type, axis: str, parts: int) -> bool:
        """Whether the parameter and its states can be stored in so many parts along an axis of the parameter."""
        return parameter.axis(axis).size % parts == 0

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Only if it is elementwise."""
        return self.elementwise

    def operands(
        self, build: Builder, parameter: Type, part: Value, gradient: Value, states: Sequence[Value]
    ) -> tuple[Value, ...]:
        """What it needs besides. `parameter` is the type of the whole, `part` the shard that it updates."""
        return ()

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The updated parameter and states."""
        parameter, gradient, *others = types
        assert parameter.axes == gradient.axes, (parameter, gradient)
        assert agree(*types), (self, types)
        return (parameter, *others[: len(self.states)])

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the parameter; states and operands that lack it are replicated."""
        return tuple(
            ShardingRule(
                tuple(name if operand.has(name) else None for operand in operands),
                tuple(name if result.has(name) else None for result in results),
            )
            for name in results[0].names
        )


@op("ema")
class Ema(Op):
    """The exponential moving mean of a parameter, in place. Operands: the mean, and the parameter after an update.

    After n updates, the values after each of them have weights proportional to 1, `decay`, `decay`², … by age, which
    add up to 1: the first value is not the initial one, which Adam's means correct in the same way (Kingma and Ba,
    arXiv 1412.6980 §3).
    """

    decay: float
    fusible = False
    allocates = False  # it works in place
    overwrites = True

    @property
    def reads_context(self) -> bool:
        """For the number of the update."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The mean."""
        mean, parameter = types
        assert mean == parameter, types
        return (mean,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear in both."""
        return tuple(ShardingRule((state, state), (state,)) for state in (*results[0].names, SUM))

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Yes."""
        return True

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """3 operations for each element."""
        return 3 * operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        mean, parameter = (argument.text for argument in arguments)
        return f"kernels.ema({mean}, {parameter}, c.update, {self.decay})"


def target_of(op: Op) -> str | None:
    """The name of the accumulator to which an operation adds its operand; None if it does not."""
    return op.target if isinstance(op, Accumulate) else None


def updated_in_place(node: Node) -> tuple[Value, ...]:
    """The operands of an update that become its results."""
    assert isinstance(node.op, Update), node
    return node.op.in_place(node.inputs)
