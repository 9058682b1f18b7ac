"""Adafactor: second moments as products of row and column means, and updates relative to the parameter's scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Argument, Op, ShardingRule, aligned_rules, broadcast, op
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.reduce import Reduce
from partita.compiler.optimizers.registry import Optimizer, Trained, register, with_larger_eps
from partita.dsl.builtins import DECAY, LR, POSITIVE, WEIGHT_DECAY, Number, Setting
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Value


@op("running_mean")
class RunningMean(Op):
    """The mean over the updates so far, `old`, moved towards `total / count` by update^-decay_rate of the distance."""

    count: int
    decay_rate: float
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

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`lerp`."""
        old, total = arguments
        other = broadcast(total, old.type.names)
        return f"{old.text}.lerp({other} / {self.count}, c.update ** -{self.decay_rate})"


@op("factored_direction")
class FactoredDirection(Op):
    """The gradient over the root of its second moment: the product of its means over columns and over rows, divided by
    the mean of the former, which is `total / rows`.
    """

    rows: int
    eps: float
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """That of the gradient."""
        return (types[0],)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return aligned_rules(operands, results)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Five for each element."""
        return 5 * results[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The second moment."""
        return results[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        gradient, *others = arguments
        names = gradient.type.names
        texts = ", ".join((gradient.text, *(_spread(each, names) for each in others)))
        return f"kernels.factored_direction({texts}, {self.rows}, {self.eps})"


@op("direction")
class Direction(Op):
    """The gradient over the root of its second moment."""

    eps: float
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """That of the gradient."""
        return (types[0],)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return aligned_rules(operands, results)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Three for each element."""
        return 3 * results[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """One expression."""
        gradient, moment = arguments
        return f"{broadcast(moment, gradient.type.names)}.clamp(min={self.eps**2}).rsqrt_().mul_({gradient.text})"


def _spread(argument: Argument, names: Sequence[str]) -> str:
    """The text of an operand with an axis of size 1 for each that it lacks."""
    if not argument.type.axes:
        return argument.text
    own = [name for name in names if argument.type.has(name)]
    text = broadcast(argument, own)
    index = ", ".join(":" if name in own else "None" for name in names)
    return text if len(own) == len(names) else f"{text}[{index}]"


@op("adafactor")
class Adafactor(Update):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235), like torch.optim.Adafactor.

    The matrix has rows along the axes `inner` and columns along the rest, except `stacked`; without `inner`, the second
    moment is not factored. The other operands are the new means, the direction, and the sums of squares of the
    direction and of the parameter, which has `count` elements.
    """

    inner: tuple[str, ...]
    stacked: tuple[str, ...]
    count: int
    decay_rate: float
    eps: float
    eps_scale: float
    clip_threshold: float
    decay: float

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
        """The new means, the direction, and the sums of squares of the direction and of the parameter."""
        squares, dtype = pointwise(build, "multiply", gradient, gradient), parameter.dtype
        means = []
        over = (self._outer(parameter), self.inner) if self.inner else ((),)
        for state, summed in zip(states, over, strict=True):
            total = build.apply(Reduce("sum", summed, dtype), squares) if summed else squares
            count = parameter.elements // max(1, parameter.without(summed).elements)
            means.append(build.apply(RunningMean(count, self.decay_rate), state, total))
        if self.inner:
            rows = parameter.without(parameter.without(self.inner).names).elements
            total = build.apply(Reduce("sum", self.inner, dtype), means[0])
            direction = build.apply(FactoredDirection(rows, self.eps), gradient, *means, total)
        else:
            direction = build.apply(Direction(self.eps), gradient, *means)
        return (*means, direction, _squared(build, direction), _squared(build, part))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """About 2 operations for each element."""
        return 2 * operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        parameter, _, *others = (argument.text for argument in arguments)
        kept, (*new, direction, squares, size) = others[: len(self.states)], others[len(self.states) :]
        states, means = (f"({', '.join(each)},)" for each in (kept, new))
        constants = f"{self.count}, {self.eps_scale}, {self.clip_threshold}, {self.decay}"
        texts = f"{parameter}, {states}, {means}, {direction}, {squares}, {size}"
        return f"kernels.adafactor({texts}, {self.learning_rate}, c.update, {constants})"


def _squared(build: Builder, value: Value) -> Value:
    """The sum of squares."""
    if not value.type.axes:
        return pointwise(build, "multiply", value, value)
    return build.apply(Dot(value.type.names), value, value)


def _update(given: Mapping[str, Any], parameter: Trained) -> Adafactor:
    type, matrix = parameter.type, parameter.matrix
    inner, stacked = (matrix.inner, matrix.stacked) if matrix else (parameter.rows or type.names[:-1], ())
    if len(inner) + len(stacked) == len(type.axes):
        inner = stacked = ()  # without columns there is nothing to factor
    return Adafactor(
        inner,
        stacked,
        type.elements,
        float(given["decay_rate"]),
        float(given["eps"]),
        float(given["eps_scale"]),
        float(given["clip_threshold"]),
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
