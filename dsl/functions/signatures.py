"""The tensor functions of the language: their parameters and typing rules.

A rule reads the arguments of one call (`Use`) and returns the result type and the `options` of the `Apply` that the
call becomes, or the `Decomposition` that it stands for; it raises `Refused` if the arguments do not fit. The rules are
in `rules` (arithmetic), `reshaping` (renaming and resizing axes), `convolution` (sliding windows) and `routing`
(mixtures of experts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from attrs import frozen

from partita.dsl import spec
from partita.dsl.check.arguments import REQUIRED
from partita.dsl.config.builtins import OneOf
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.units import Quantity
from partita.dsl.types import FLOATS, INDICES, INTEGERS, Axis, Type, integers

# Kinds of slots. TENSORS takes all positional arguments, OPERAND a tensor or a number, NUMBERS a number or a list of
# numbers and lists.
TENSOR, TENSORS, OPERAND, AXIS, AXES = "tensor", "tensors", "operand", "axis", "axes"
NUMBER, NUMBERS, FLAG, DTYPE = "number", "numbers", "flag", "dtype"
# Functions that take logits, and compute the logarithm of their softmax at the targets.
LIKELIHOODS = ("cross_entropy", "token_nll")


@frozen
class Slot:
    """A parameter of a function; `default` is REQUIRED if it has none. OneOf takes a call of one of its signatures."""

    name: str
    kind: str | OneOf = TENSOR
    default: Any = REQUIRED

    @property
    def is_value(self) -> bool:
        """Whether it takes a tensor."""
        return self.kind in (TENSOR, OPERAND)


@frozen(eq=False)
class Tensor:
    """A tensor argument: `value` is its number in the body being checked, `text` what the user wrote."""

    value: int
    type: Type
    text: str
    span: Span

    def __str__(self) -> str:
        return f"{self.text}: {self.type}"


@frozen(eq=False)
class Constant:
    """A number or boolean argument, known at check time."""

    value: Quantity | bool
    text: str
    span: Span

    def literal(self, dtype: str) -> spec.Literal:
        """The constant as an operand next to tensors of `dtype`. Raises Refused (E0205, E0214) if it is invalid."""
        value = self.value
        if isinstance(value, bool):
            if dtype != "bool":
                raise refuse("E0205", f"`{self.text}` is no {dtype}", self.span)
            return spec.Literal(value)
        number = value.value
        if dtype == "bool":
            raise refuse("E0205", f"`{self.text}` is a number, not a boolean", self.span)
        if number == int(number):
            if dtype in INTEGERS and int(number) not in integers(dtype):
                raise refuse("E0214", f"`{self.text}` is out of range for {dtype}", self.span)
            return spec.Literal(int(number), value.formula)
        if dtype in INTEGERS:
            help = "cast the tensor: `cast(x, f32)`"
            raise refuse("E0205", f"`{self.text}` is no integer, and the tensor is {dtype}", self.span, help=help)
        return spec.Literal(float(number), value.formula)


@frozen(eq=False)
class Arrow:
    """`left -> right` among the arguments, with one or more axes on each side."""

    left: tuple[Axis, ...]
    right: tuple[Axis, ...]
    span: Span


Bound: TypeAlias = Any  # Tensor | Constant | Axis | tuple[Axis, ...] | float | int | bool | str | None, by kind
Typed: TypeAlias = tuple[Type, Mapping[str, Any]]


@frozen
class PrimitiveResult:
    """The result of an earlier part, by its position."""

    part: int


@frozen(eq=False)
class PrimitiveCall:
    """One of several functions that a call stands for. Operands are values' numbers, literals, or `PrimitiveResult`."""

    function: str
    operands: tuple[spec.Operand | PrimitiveResult, ...]
    type: Type
    options: Mapping[str, Any]


@frozen(eq=False)
class Decomposition:
    """A call that stands for several functions in order, some of which give its `results`."""

    parts: tuple[PrimitiveCall, ...]
    results: tuple[int, ...]


@frozen
class Origin:
    """The step to which a value owes that it has an axis, or has it no longer: a note, its place, and what to do."""

    note: str
    span: Span
    help: str | None = None

    def __str__(self) -> str:
        return f"{self.note}   ({self.span.place})"


@frozen(eq=False)
class Use:
    """One call of a function: its arguments and their spans by slot, and its arrows."""

    function: str
    span: Span
    arguments: Mapping[str, Bound]
    spans: Mapping[str, Span]
    arrows: tuple[Arrow, ...] = ()
    sign: str | None = None  # the operator, if it was written as one
    origin: Callable[[int, str], Origin | None] = lambda value, axis: None

    @property
    def called(self) -> str:
        """The operator or the function, as the user wrote it."""
        return self.sign or self.function

    def __getitem__(self, slot: str) -> Bound:
        return self.arguments[slot]

    def refuse(
        self,
        code: str,
        message: str,
        slot: str | None = None,
        help: str | None = None,
        also: Iterable[object] = (),
        axis: tuple[Tensor, str] | None = None,
    ) -> Refused:
        """A `Refused` that points to an argument (or the whole call) and lists the tensors involved; and where one of
        them got an `axis`, or lost it.
        """
        origin = self.origin(axis[0].value, axis[1]) if axis is not None else None
        notes = dict.fromkeys([*map(str, self.tensors), *map(str, also), *([str(origin)] if origin else ())])
        place = self.spans.get(slot, self.span) if slot else self.span
        return refuse(code, message, place, notes=notes, help=help or (origin.help if origin else None))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, in order."""
        tensors: list[Tensor] = []
        for value in self.arguments.values():
            tensors.extend(v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Tensor))
        return tuple(tensors)

    # ------------------------------------------------------------ checks that rules share

    def floating(self, *slots: str) -> str:
        """The common float dtype of the tensors in these slots; absent ones are skipped. Raises Refused (E0205)."""
        dtype = ""
        for slot in slots:
            value = self.arguments[slot]
            if not isinstance(value, Tensor):
                continue
            if value.type.dtype not in FLOATS:
                message = f"`{self.function}` needs floats, and `{value.text}` is {value.type.dtype}"
                raise self.refuse("E0205", message, slot, f"`cast({value.text}, f32)`")
            if dtype and value.type.dtype != dtype:
                message = f"`{value.text}` is {value.type.dtype}, the other {dtype}"
                raise self.refuse("E0205", message, slot, f"`cast({value.text}, {dtype})`")
            dtype = value.type.dtype
        return dtype

    def ids(self, slot: str) -> None:
        """Require integers that can be ids (E0205)."""
        value = self.arguments[slot]
        dtype = value.type.dtype
        if dtype not in INDICES:
            small = dtype in INTEGERS
            message = (
                f"`{self.function}` needs {'ids, i64 or i32' if small else 'integers'}, and `{value.text}` is {dtype}"
            )
            raise self.refuse("E0205", message, slot, f"`cast({value.text}, i32)`" if small else None)

    def summed(self, slot: str) -> None:
        """Require numbers whose sum their dtype holds: not integers of eight bits (E0205)."""
        value = self.arguments[slot]
        dtype = value.type.dtype
        if dtype in INTEGERS and dtype not in INDICES:
            message = (
                f"`{self.function}` of {dtype} would leave its range, {integers(dtype)[0]} to {integers(dtype)[-1]}"
            )
            raise self.refuse("E0205", message, slot, f"`cast({value.text}, i32)`")

    def has(self, slot: str, axes: Iterable[Axis], place: str = "over") -> None:
        """Require that the tensor in a slot has these axes (E0203); `place` is the slot that named them."""
        value = self.arguments[slot]
        for axis in axes:
            if not value.type.has(axis.name):
                raise self.refuse(
                    "E0203",
                    f"`{value.text}` has no axis `{axis.name}`",
                    place,
                    f"axes of `{value.text}`: {', '.join(value.type.names) or 'none'}",
                    axis=(value, axis.name),
                )

    def lacks(self, slot: str, axes: Iterable[Axis], whose: str) -> None:
        """Require that the tensor in a slot has none of these axes (E0204), of which messages say `whose` they are."""
        value = self.arguments[slot]
        for axis in axes:
            if value.type.has(axis.name):
                raise self.refuse("E0204", f"`{value.text}` must not have the axis `{axis.name}` {whose}", slot)

    def apart(self, first: str, second: str) -> None:
        """Require that two slots name different axes (E0204)."""
        if self.arguments[first].name == self.arguments[second].name:
            raise self.refuse("E0204", f"`{first}` and `{second}` name the same axis", second)

    def within(self, slot: str, names: Iterable[str], whose: str) -> None:
        """Require that the tensor in a slot has no axes other than `names` (E0204), which messages call `whose`."""
        value = self.arguments[slot]
        allowed = set(names)
        for name in value.type.names:
            if name not in allowed:
                message = f"axis `{name}` of `{value.text}` is not among {whose}"
                raise self.refuse("E0204", message, slot, axis=(value, name))


Rule: TypeAlias = Callable[[Use], Typed | Decomposition]


@frozen
class Function:
    """A function of the language. `arrows` is the minimum and maximum number of arrows (None: unlimited)."""

    name: str
    slots: tuple[Slot, ...]
    rule: Rule
    arrows: tuple[int, int | None] = (0, 0)


FUNCTIONS: dict[str, Function] = {}


def function(
    *names: str, slots: Iterable[Slot | str], arrows: tuple[int, int | None] = (0, 0)
) -> Callable[[Rule], Rule]:
    """Register a typing rule for functions; a slot given as a string takes a tensor. ValueError if a name is taken."""

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in FUNCTIONS:
                raise ValueError(f"there is a function `{name}` already")
            full = tuple(Slot(slot) if isinstance(slot, str) else slot for slot in slots)
            FUNCTIONS[name] = Function(name, full, rule, arrows)
        return rule

    return register


def names(axes: Iterable[Axis]) -> tuple[str, ...]:
    """Axis names in order."""
    return tuple(axis.name for axis in axes)
