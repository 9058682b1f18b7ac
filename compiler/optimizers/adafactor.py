"""Adafactor: second moments as products of row and column means, and updates relative to the parameter's scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Argument, Op, ShardingRule, aligned_rules, broadcast, op, permuted
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.reduce import Reduce
from partita.compiler.optimizers.registry import Optimizer, Trained, register, with_larger_eps
from partita.dsl.config.builtins import DECAY, LR, POSITIVE, WEIGHT_DECAY, Number, Setting
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Value


@op("running_mean")
class RunningMean(Op):
    """The mean over the updates so far, `old`, moved towards `total / count` by number^-decay_rate of the distance."""

    count: int
    decay_rate: float
    number: str = "c.update"
    fusible = False

    @property
    def reads_context(self) -> bool:
        """For the number of the update."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """That of the old mean."""
        old, total = types
        assert sorted(old.names) == sorted(total.names), types
        return (old,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return aligned_rules(operands, results)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Three for each element."""
        return 3 * results[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The mean of this update."""
        return operands[1].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`lerp`."""
        old, total = arguments
        other = broadcast(total, old.type.names)
        return f"{old.text}.lerp({other} / {self.count}, ({self.number} or 1) ** -{self.decay_rate})"


@op("inverse_root")
class InverseRoot(Op):
    """One over the root of second moments, of no less than `eps`."""

    eps: float
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The same type."""
        return types

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return aligned_rules(operands, results)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two for each element."""
        return 2 * results[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`rsqrt`."""
        return f"{arguments[0].text}.clamp(min={self.eps**2}).rsqrt_()"


@op("factored_inverse_root")
class FactoredInverseRoot(Op):
    """The same for a tensor with `axes` whose second moment is the product of its means over columns and over rows,
    divided by the mean of the former, which is `total / rows`.
    """

    axes: tuple[Axis, ...]
    rows: int
    eps: float
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes of both means."""
        row, column, _ = types
        assert all(row.has(axis.name) or column.has(axis.name) for axis in self.axes), (self, types)
        return (Type(row.dtype, self.axes),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return aligned_rules(operands, results)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Four for each element."""
        return 4 * results[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The quotient of rows."""
        return operands[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        texts = ", ".join(_spread(each, results[0].names) for each in arguments)
        return f"kernels.factored_inverse_root({texts}, {self.rows}, {self.eps})"


def _spread(argument: Argument, names: Sequence[str]) -> str:
    """The text of an operand, viewed with all axes: of size 1 where it lacks them."""
    own = [name for name in names if argument.type.has(name)]
    text = permuted(argument.text, argument.type.names, own)
    if not own or len(own) == len(names):
        return text
    return f"{text}[{', '.join(':' if name in own else 'None' for name in names)}]"


@op("adafactor")
class Adafactor(Update):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235), like torch.optim.Adafactor.

    The matrix has rows along the axes `inner` and columns along the rest, except `stacked`; without `inner`, the second
    moment is not factored. The other operands are the new means, the inverse root of the second moment, and the sums of
    squares of its product with the gradient and of the parameter, which has `count` elements. The means are those of
    `counts` elements each, and there are so many `rows`.
    """

    inner: tuple[str, ...]
    stacked: tuple[str, ...]
    count: int
    counts: tuple[int, ...]
    rows: int
    decay_rate: float
    eps: float
    eps_scale: float
    clip_threshold: float
    decay: float

    whole = True

    @property
    def states(self) -> tuple[str, ...]:  # type: ignore[override]
        """The means of squares over columns and over rows, or of each element."""
        return ("row", "column") if self.inner else ("variance",)

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """The updated parameter and means."""
        return ("", *self.states)

    def state_types(self, parameter: Type) -> tuple[Type, ...]:
        """Rows have no columns, and columns no rows."""
        return (
            (parameter.without(self._outer(parameter)), parameter.without(self.inner)) if self.inner else (parameter,)
        )

    def _outer(self, parameter: Type) -> tuple[str, ...]:
        return tuple(name for name in parameter.names if name not in (*self.inner, *self.stacked))

    def operands(
        self, build: Builder, parameter: Type, part: Value, gradient: Value, states: Sequence[Value]
    ) -> tuple[Value, ...]:
        """The new means, the inverse root, and the sums of squares."""
        squares, dtype = pointwise(build, "multiply", gradient, gradient), parameter.dtype
        means = []
        over = (self._outer(parameter), self.inner) if self.inner else ((),)
        for state, summed, count in zip(states, over, self.counts, strict=True):
            total = build.apply(Reduce("sum", summed, dtype), squares) if summed else squares
            means.append(build.apply(RunningMean(count, self.decay_rate, self.number), state, total))
        if self.inner:
            total = build.apply(Reduce("sum", self.inner, dtype), means[0])
            inverse = build.apply(FactoredInverseRoot(parameter.axes, self.rows, self.eps), *means, total)
        else:
            inverse = build.apply(InverseRoot(self.eps), *means)
        direction = pointwise(build, "multiply", gradient, inverse)
        return (*means, inverse, _squared(build, direction), _squared(build, part))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """About 2 operations for each element."""
        return 2 * operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        parameter, gradient, *others = (argument.text for argument in arguments)
        old, (*new, inverse, squares, size) = others[: len(self.states)], others[len(self.states) :]
        states, means = (f"({', '.join(each)},)" for each in (old, new))
        constants = f"{self.count}, {self.eps_scale}, {self.clip_threshold}, {self.decay}"
        texts = f"{parameter}, {gradient}, {states}, {means}, {inverse}, {squares}, {size}"
        return f"kernels.adafactor({texts}, {self.learning_rate}, {self.number}, {constants})"

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The product of gradient and inverse root."""
        return operands[0].bytes


def _squared(build: Builder, value: Value) -> Value:
    """The sum of squares."""
    if not value.type.axes:
        return pointwise(build, "multiply", value, value)
    return build.apply(Dot(value.type.names), value, value)


def _update(arguments: Mapping[str, Any], parameter: Trained) -> Adafactor:
    type, matrix = parameter.type, parameter.matrix
    inner, stacked = (matrix.inner, matrix.stacked) if matrix else (parameter.rows or type.names[:-1], ())
    if len(inner) + len(stacked) == len(type.axes):
        inner = stacked = ()  # without columns there is nothing to factor
    columns = type.without((*inner, *stacked)).elements
    rows = type.without(type.without(inner).names).elements
    return Adafactor(
        inner,
        stacked,
        type.elements,
        (columns, rows) if inner else (1,),
        rows,
        float(arguments["decay_rate"]),
        float(arguments["eps"]),
        float(arguments["eps_scale"]),
        float(arguments["clip_threshold"]),
        parameter.decay,
    )


register(
    Optimizer(
        "adafactor",
        (
            LR,
            Setting("decay_rate", Number(minimum=0, maximum=1), 0.8),
            Setting("eps", POSITIVE, 1e-7),
            Setting("eps_scale", POSITIVE, 1e-3),
            Setting("clip_threshold", POSITIVE, 1.0),
            WEIGHT_DECAY,
            DECAY,
        ),
        update=_update,
        proxy=with_larger_eps,
        scaled=True,
    )
)
