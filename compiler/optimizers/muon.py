"""Muon: momentum, orthogonalized as whole matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

from partita.compiler.ops.op import Argument, Kernel, Op, ShardingRule, aligned_rules, op
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.stack import OfMatrices
from partita.compiler.optimizers.registry import Matrix, Optimizer, Trained, register, with_larger_eps
from partita.dsl.config.builtins import BETA, DECAY, LR, POSITIVE, WEIGHT_DECAY, Flag, Keyword, Number, Setting
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Value


@op("momentum")
class Momentum(Op):
    """The direction of an update, from the gradient and the momentum before it: the new momentum, or with `nesterov` a
    look ahead of it.
    """

    beta: float
    nesterov: bool
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """That of the gradient."""
        return (types[0],)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return aligned_rules(operands, results)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Three or six for each element."""
        return (6 if self.nesterov else 3) * results[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`lerp`, towards the gradient."""
        gradient, momentum = (each.text for each in arguments)
        # Both steps in one: g + β((m + (1 − β)(g − m)) − g) = g + β²(m − g).
        weight = self.beta**2 if self.nesterov else self.beta
        return f"{gradient}.lerp({momentum}, {weight})"


@op("orthogonalize")
class Orthogonalize(OfMatrices):
    """About the nearest matrix with orthogonal rows or columns, by Newton and Schulz's iteration with the coefficients
    of Jordan et al. (https://kellerjordan.github.io/posts/muon/, 2024).
    """

    steps: int
    eps: float
    fusible = False

    def _sizes(self, x: Type) -> tuple[int, int, int]:
        """The number of matrices, and the shorter and the longer of their sides."""
        count = prod(x.axis(name).size for name in self.stacked)
        rows = prod(x.axis(name).size for name in self.inner)
        columns = x.elements // (count * rows)
        return count, min(rows, columns), max(rows, columns)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Three products a step: of the matrix with itself, of that with itself, and of both."""
        count, short, long = self._sizes(operands[0])
        return count * self.steps * (4 * short * short * long + 2 * short**3)

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """Of several shapes."""
        return ()

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By its sizes, as products."""
        sizes = tuple(map(float, self._sizes(operands[0])))
        return Kernel(self.label, (*sizes, float(self.steps)), float(self.flops(operands, results)))

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One more matrix, and two products of it with itself."""
        count, short, _ = self._sizes(operands[0])
        return operands[0].bytes + 2 * count * short * short * (operands[0].bytes // operands[0].elements)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (x,) = arguments
        stacked = tuple(i for i, name in enumerate(x.type.names) if name in self.stacked)
        inner = tuple(i for i, name in enumerate(x.type.names) if name in self.inner)
        return f"kernels.orthogonalize({x.text}, {stacked}, {inner}, {self.steps}, {self.eps})"


@op("muon")
class Muon(Update):
    """Muon (Jordan et al., 2024) with decoupled weight decay, like torch.optim.Muon, but in the parameter's precision.

    The last operand is the orthogonalized direction, which is scaled by `scale`.
    """

    inner: tuple[str, ...]
    stacked: tuple[str, ...]
    beta: float
    nesterov: bool
    steps: int
    eps: float
    scale: float
    decay: float
    states = ("momentum",)
    whole = True
    elementwise = True
    results = ("", "momentum")

    def operands(
        self, build: Builder, parameter: Type, part: Value, gradient: Value, states: Sequence[Value]
    ) -> tuple[Value, ...]:
        """The orthogonalized direction."""
        direction = build.apply(Momentum(self.beta, self.nesterov), gradient, *states)
        whole = Orthogonalize(self.inner, self.stacked, self.steps, self.eps).normal(direction.type)
        return (build.apply(whole, direction),)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """About 6 operations for each element."""
        return 6 * operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        texts = ", ".join(argument.text for argument in arguments)
        return f"kernels.muon({texts}, {self.learning_rate}, {self.beta}, {self.scale}, {self.decay})"


def _unfit(parameter: Trained) -> str | None:
    matrix = parameter.matrix
    if matrix is None:
        return "it updates matrices, and no `dot` or `conv` reads this as one"
    if not matrix.inner or not matrix.outer:
        read = "takes it for a stack of vectors" if matrix.stacked else "sums over all of its axes"
        return f"it updates matrices, and what reads this {read}"
    return None


def _update(arguments: Mapping[str, Any], parameter: Trained) -> Muon:
    type = parameter.type
    matrix = parameter.matrix or Matrix((), (), type.names)
    rows, columns = (prod(type.axis(name).size for name in names) for names in (matrix.inner, matrix.outer))
    scale = sqrt(max(1.0, columns / rows)) if arguments["adjust"] == "original" else 0.2 * sqrt(max(rows, columns))
    return Muon(
        matrix.inner,
        matrix.stacked,
        float(arguments["momentum"]),
        bool(arguments["nesterov"]),
        int(arguments["steps"]),
        float(arguments["eps"]),
        scale,
        parameter.decay,
    )


register(
    Optimizer(
        "muon",
        (
            LR,
            Setting("momentum", BETA, 0.95),
            Setting("nesterov", Flag(), True),
            WEIGHT_DECAY,
            Setting("steps", Number(integer=True, minimum=1, maximum=20), 5),
            Setting("eps", POSITIVE, 1e-7),
            Setting("adjust", Keyword(("original", "match_rms_adamw")), "original"),
            DECAY,
        ),
        update=_update,
        unfit=_unfit,
        proxy=with_larger_eps,
        scaled=True,
    )
)
