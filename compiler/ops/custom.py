"""Operations that a file defines by Python functions (`op`), and their gradients.

The compiler knows of them what is declared, which `verify` holds them to; it never imports their functions, which the
emitted source calls by the operation's name through the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from partita.compiler.layout import SUM, State
from partita.compiler.ops.op import (
    TORCH_DTYPES,
    Argument,
    Op,
    ShardingRule,
    agree,
    aligned_rules,
    make,
    mentions,
    op,
    permuted,
    shape_text,
)
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value

# FLOPs of a gradient, relative to those of the operation: as for a matrix product; autograd runs the forward again.
BACKWARD, AUTOGRAD = 2.0, 3.0


def _in_order(arguments: Sequence[Argument], orders: Sequence[Sequence[str]]) -> str:
    """The operands with their axes as declared, as the text of a tuple."""
    texts = [permuted(each.text, each.type.names, order) for each, order in zip(arguments, orders, strict=True)]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


class _Function(Op):
    """What an operation and its gradient share: they run the user's functions, of which only bounds are known."""

    fusible = False

    def vmapped(self, axis: Axis) -> Op | None:
        """It is applied at one position of a loop after the other."""
        return None

    def capture_blocker(self, operands: Sequence[Type], results: Sequence[Type]) -> str:
        """Nobody knows."""
        return "is an operation of the file's own"

    @property
    def reads_context(self) -> bool:
        """For the functions."""
        return True

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """An estimate: copies of the operands, in the order in which they are declared, and as much as the results."""
        return sum(type.bytes for type in (*operands, *results))


@op("custom")
class Custom(_Function):
    """`function` of the file. `operands` has the axes of each operand, in the order in which the function takes them.

    It may be split along the axes `split`, and is linear in the operands at the positions `linear`, in each by itself.
    An element of the result takes `each` FLOPs. `backward`: the gradient is a function too, not autograd's.
    """

    function: str
    operands: tuple[tuple[str, ...], ...]
    made: tuple[Type, ...]
    split_along: tuple[str, ...] = ()
    linear: tuple[int, ...] = ()
    each: float = 1.0
    backward: bool = False

    @property
    def label(self) -> str:
        """The function's name."""
        return self.function

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """Numbers, from the second on."""
        return ("", *(str(i) for i in range(1, len(self.made))))

    def in_zigzag(self, axis: str, ranks: int) -> Op | None:
        """What may be split along the axis does the same everywhere."""
        return self if axis in self.split_along or not mentions(self, axis) else None

    def resized(self, axis: str, size: int) -> Op:
        """With other results."""
        types = tuple(type.resized(axis, size) for type in self.made)
        return evolve(self, made=types)  # type: ignore[misc]

    @property
    def is_finite(self) -> bool:
        """It may be anything."""
        return False

    def splitting_help(self, axis: str) -> str | None:
        """To declare it, or to reduce outside."""
        if all(type.has(axis) for type in self.made):
            return f"if op `{self.function}` can be computed in parts along `{axis}`, declare it: `split = [{axis}]`"
        return f"let op `{self.function}` keep the axis `{axis}`, and reduce its result by `sum` or `mean`"

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The declared results."""
        assert [set(type.names) for type in types] == [set(names) for names in self.operands], (self, types)
        assert agree(*types, *self.made), (self, types)
        return self.made

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """As declared."""
        whole = [name for name in results[0].names if name not in self.split_along]
        linear = []
        for position in self.linear:
            states: list[State] = [SUM if i == position else None for i in range(len(operands))]
            linear.append(ShardingRule(tuple(states), (SUM,) * len(results)))
        return (*aligned_rules(operands, results, whole=whole), *linear)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """As declared."""
        return round(self.each * results[0].elements)

    def gradients(self, build: Builder, node: Node, d: Sequence[Value | None]) -> tuple[Value | None, ...]:
        """`custom_gradient`, for all float operands at once; a result without a cotangent has one of zeros."""
        floats = [i for i, value in enumerate(node.inputs) if value.type.is_float]
        if not floats or not any(d):
            return (None,) * len(node.inputs)
        pairs = [(each, x.type) for each, x in zip(d, node.outputs, strict=True) if x.type.is_float]
        cotangents = [_zeros(build, type) if each is None else each for each, type in pairs]
        each = self.each * (BACKWARD if self.backward else AUTOGRAD) * node.outputs[0].type.elements
        orders = tuple(type.names for type in self.made if type.is_float)
        each /= cotangents[0].type.elements
        gradient = CustomGradient(self.function, self.operands, orders, self.split_along, each)
        gradients = dict(zip(floats, build.apply_all(gradient, *cotangents, *node.inputs), strict=True))
        return tuple(gradients.get(i) for i in range(len(node.inputs)))

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A call through the context, with what the function must return."""
        expected = ", ".join(f"({shape_text(type.shape)}, {TORCH_DTYPES[type.dtype]})" for type in results)
        text = f"c.custom({self.function!r}, {_in_order(arguments, self.operands)}, ({expected},))"
        return text if len(results) > 1 else f"{text}[0]"


def _zeros(build: Builder, type: Type) -> Value:
    """Zeros of a type."""
    zero = build.apply(make("constant", 0.0, type.dtype))
    return build.apply(make("expand", type.axes), zero) if type.axes else zero


@op("custom_gradient")
class CustomGradient(_Function):
    """Gradients of a `custom` operation for its float operands, from cotangents of its float results and its operands.

    `cotangents` has the axes of each cotangent in the order in which the function takes them.
    """

    function: str
    operands: tuple[tuple[str, ...], ...]
    cotangents: tuple[tuple[str, ...], ...]
    split_along: tuple[str, ...] = ()
    each: float = 1.0

    @property
    def label(self) -> str:
        """The function's name."""
        return f"{self.function}_gradient"

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """Numbers of operands."""
        return ("", *(str(i) for i in range(1, len(self.operands))))

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The types of the float operands, with their axes as declared."""
        assert agree(*types), (self, types)
        operands = types[len(self.cotangents) :]
        return tuple(
            Type(type.dtype, tuple(type.axis(name) for name in names))
            for type, names in zip(operands, self.operands, strict=True)
            if type.is_float
        )

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """As the operation; gradients of operands that are replicated then are partial. Linear in the cotangents."""
        split = tuple(
            ShardingRule(
                tuple(name if type.has(name) else None for type in operands),
                tuple(name if type.has(name) else SUM for type in results),
            )
            for name in self.cotangents[0]
            if name in self.split_along
        )
        count = len(self.cotangents)
        linear = ShardingRule(((SUM,) * count + (None,) * (len(operands) - count)), (SUM,) * len(results))
        return (*split, linear)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """In proportion to the operation's."""
        return round(self.each * operands[0].elements)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A call through the context."""
        count = len(self.cotangents)
        texts = _in_order(arguments[:count], self.cotangents), _in_order(arguments[count:], self.operands)
        text = f"c.custom_gradient({self.function!r}, {texts[0]}, {texts[1]})"
        return text if len(results) > 1 else f"{text}[0]"
