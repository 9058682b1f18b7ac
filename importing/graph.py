"""Values of a module's graph: what makes each, of what, and where in the module.

Operations are those of ATen as they are captured, and those of this package behind `normal`. A value that depends on no
input and no parameter is a constant: it keeps what made it, and its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import copysign, sqrt
from typing import Any, TypeGuard

import torch
from attrs import Factory, define, frozen
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LEAVES = ("input", "parameter", "buffer", "part")


@frozen
class Call:
    """One call of a module: its path, the class, and a number that tells calls of the same module apart."""

    path: str
    kind: str
    number: str = ""


@frozen
class Line:
    """A line of source that a value comes from, and the names that it assigns to; the value is that with this `index`
    of several results. `forward`: whether it is of a module's `forward`, and not of a function that this calls.
    """

    file: str
    number: int
    names: tuple[str, ...] = ()
    text: str = ""
    index: int | None = None
    forward: bool = True

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.number}"


@frozen
class Place:
    """Where a value is computed: calls of modules, outermost first, and lines of source, outermost first."""

    calls: tuple[Call, ...] = ()
    lines: tuple[Line, ...] = ()

    def __str__(self) -> str:
        inside = next((call.path for call in reversed(self.calls) if call.path), "")
        line = next((line for line in reversed(self.lines) if "/torch/" not in line.file), None)
        return f"{inside or 'the module'} ({line})" if line is not None else inside or "the module"


class NotUnderstood(Exception):
    """What the importer refuses, in one line, with its place."""

    def __init__(self, what: str, place: Place = Place()) -> None:
        super().__init__(f"{place}: {what}" if place.calls or place.lines else what)


@define(eq=False, repr=False)
class Value:
    """The result of an operation. `args`: its arguments by name, among them values, also in lists. `position`: its
    place in the order of the program. Dimensions of size 1 are none of an axis.
    """

    op: str
    args: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place = Place()
    position: int = 0
    constant: Tensor | None = None
    twin: tuple[int, ...] | None = None  # its shape where the module is captured at larger sizes
    varies: bool = False  # whether a constant is another number where inputs are larger
    results: Any = None  # of an operation of constants that has several
    defaults: dict[str, Any] = Factory(dict)  # of the arguments of an operation of ATen

    def __repr__(self) -> str:
        return f"{self.op}{list(self.shape)}"

    @property
    def inputs(self) -> list[Value]:
        """The values among the arguments, in order."""
        return list(_values(self.args.values()))

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self.dtype in FLOATS

    def make(
        self, op: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, /, **args: Any
    ) -> Value:
        """Another value at this one's place; of its shape and dtype, if no others are given."""
        made = Value(
            op, args, self.shape if shape is None else tuple(shape), dtype or self.dtype, self.place, self.position
        )
        made.constant = _of_constants(made)
        if made.shape == self.shape:
            made.twin = self.twin
        return made

    def make_constant(self, elements: Tensor) -> Value:
        """A constant at this value's place."""
        made = self.make("constant", elements.shape, elements.dtype, name="")
        made.constant = elements
        return made

    @property
    def source(self) -> Value:
        """The parameter that it is a part of; itself, if it is none."""
        value: Value = self.args["of"] if self.op == "part" else self
        return value

    def refuse(self, what: str) -> NotUnderstood:
        """A refusal at its place."""
        return NotUnderstood(what, self.place)


def number(x: Any) -> float | int | None:
    """The number that an argument is: a number, or a constant all of whose elements are equal."""
    if isinstance(x, bool):
        return None
    if isinstance(x, int | float):
        return x
    if not isinstance(x, Value) or x.varies or x.constant is None:
        return None
    if x.constant.numel() and x.dtype != torch.bool:
        first = x.constant.flatten()[0]
        if bool((x.constant == first).all()):
            return shortest(first)
    return None


SHORT = 5  # digits that one writes, rather than a root


def shortest(element: Tensor) -> float | int:
    """The number that was written, of which a computed element in f32 is the nearest."""
    exact: float | int = element.item()
    if element.dtype != torch.float32 or exact != exact:
        return exact
    texts = [float(f"{exact:.{digits}g}") for digits in range(1, 10)]
    likely = [*texts[:SHORT], root_of(exact), *texts[SHORT:]]
    return next((each for each in likely if torch.tensor(each, dtype=torch.float32) == element), exact)


def root_of(number: float) -> float:
    """The nearest number that is the root of an integer, or one by it."""
    if not 1e-4 < abs(number) < 1e4:
        return number
    square = number * abs(number)
    whole = copysign(1 / round(1 / abs(square)), square) if abs(square) < 1 else float(round(square))
    return copysign(sqrt(abs(whole)), whole)


def is_op(x: Any, *ops: str) -> TypeGuard[Value]:
    """Whether an argument is a value that one of the operations makes."""
    return isinstance(x, Value) and x.op in ops


def _values(args: Iterable[Any]) -> Iterator[Value]:
    for each in args:
        if isinstance(each, Value):
            yield each
        elif isinstance(each, list | tuple):
            yield from _values(each)


def order(outputs: Iterable[Value]) -> list[Value]:
    """All values that outputs are made of, each behind its inputs."""
    found: dict[Value, None] = {}
    for output in outputs:
        waiting = [(output, iter(output.inputs))]
        opened = {output}
        while waiting:
            value, inputs = waiting[-1]
            following = next((each for each in inputs if each not in found and each not in opened), None)
            if following is None:
                found[value] = None
                waiting.pop()
            else:
                opened.add(following)
                waiting.append((following, iter(following.inputs)))
    return list(found)


def users(values: Iterable[Value]) -> dict[Value, list[Value]]:
    """The values that are made of each."""
    found: dict[Value, list[Value]] = {}
    for value in values:
        for each in dict.fromkeys(value.inputs):
            found.setdefault(each, []).append(value)
    return found


def rewritten(outputs: Sequence[Value], rules: Sequence[Callable[[Value], Value | None]]) -> list[Value]:
    """The outputs, where each value is replaced by what the first rule that fits makes of it, until none fits.

    Values are replaced in order, so that a rule sees inputs to which no rule applies any more.
    """
    done: dict[Value, Value] = {}

    def settled(value: Value) -> Value:
        for each in order([value]):
            if each not in done:
                done[each] = once(each)
        return done[value]

    def once(value: Value) -> Value:
        if any(done[each] is not each for each in value.inputs):
            value.args = replaced_in(value.args, done)
        done[value] = value
        for rule in rules:
            made = rule(value)
            if made is not None and made is not value:
                result = settled(made)
                done[value] = result
                return result
        return value

    return [settled(each) for each in outputs]


def with_gradients(value: Value) -> set[Value]:
    """A value, and all of what it is made that a gradient of it reaches."""
    met, waiting = set[Value](), [value]
    while waiting:
        each = waiting.pop()
        if each not in met and each.op not in ("stop_gradient", "detach.default"):
            met.add(each)
            waiting += each.inputs
    return met


def _is_trained(value: Value) -> bool:
    """Whether a value has a gradient with respect to a parameter."""
    return any(each.op == "parameter" and each.args["trained"] for each in with_gradients(value))


def replaced_in(args: Mapping[str, Any], by: Mapping[Value, Value]) -> dict[str, Any]:
    """Arguments, with other values in the places of some."""

    def of(x: Any) -> Any:
        if isinstance(x, Value):
            return by.get(x, x)
        return type(x)(of(each) for each in x) if isinstance(x, list | tuple) else x

    return {name: of(x) for name, x in args.items()}


def _of_constants(value: Value) -> Tensor | None:
    """The elements of a value that rearranges a constant; other constants keep those with which they were captured."""
    x = value.args.get("x")
    if not isinstance(x, Value) or x.constant is None or len(value.inputs) != 1:
        return None
    if value.op == "view":
        return x.constant.reshape(value.shape)
    if value.op == "permute":
        return x.constant.permute(value.args["order"])
    if value.op == "expand":
        return x.constant.expand(value.shape)
    if value.op == "cast":
        return x.constant.to(value.dtype)
    return None


@define
class Captured:
    """A module as a graph: its inputs, parameters and buffers, what it returns, and the buffers that a call updates."""

    inputs: list[Value] = Factory(list)
    outputs: list[Value] = Factory(list)
    names: list[str] = Factory(list)  # of the outputs
    depths: list[int] = Factory(list)  # in how many lists and dictionaries these are
    updates: dict[str, Value] = Factory(dict)  # of buffers, by their names
    changes: list[Value] = Factory(list)  # those of them that no operation of the language implies, as an `update`
    loss_alone: bool = False  # whether no output is shown beside it
    rolled: bool = False  # whether it has loops over a dimension
    evaluated: bool = False  # whether it computes otherwise in evaluation, but for dropouts and buffers
    lengths_fixed: bool = False  # whether numbers follow other sizes than that of the batch, by no formula

    @property
    def loss(self) -> int:
        """Which of the outputs is the loss: the number that is called so, or else the first of those that are returned
        beside others, and not inside one; with a gradient, if any has one. Raises NotUnderstood.
        """
        numbers = [i for i, value in enumerate(self.outputs) if not value.shape and value.is_float]
        if not numbers:
            raise NotUnderstood('the module returns no loss: `--loss "cross_entropy(logits, targets)"`')
        numbers = [i for i in numbers if _is_trained(self.outputs[i])] or numbers
        outer = min(numbers, key=lambda i: self.depths[i])
        return next((i for i in numbers if self.names[i] == "loss"), outer)

    @property
    def shown(self) -> list[int]:
        """Which of the outputs are outputs of the file: tensors, or the loss if there is none."""
        tensors = [i for i, value in enumerate(self.outputs) if value.shape and value.is_float]
        return [self.loss] if self.loss_alone else tensors or [self.loss]

    @property
    def returned(self) -> list[Value]:
        """What the file computes of what the module returns: the loss, and what is shown."""
        return [self.outputs[i] for i in self._written]

    @property
    def written(self) -> list[Value]:
        """All that the file computes."""
        return self.returned + self.changes

    def rewrite(self, values: Sequence[Value]) -> None:
        """Put these in the place of what is written."""
        for i, value in zip(self._written, values, strict=False):
            self.outputs[i] = value
        self.changes = list(values[len(self._written) :])

    def change(self, buffer: Value, new: Value) -> None:
        """Let a call of the module in training change a buffer, and read what it makes of it from then on; in
        evaluation it reads the buffer. Nothing is said of a number that only counts calls.
        """
        everything = order([*self.outputs, new])
        made = set(order([new]))
        readers = [each for each in users(everything).get(new, []) if each not in made]
        if not new.is_float and not readers:
            return
        if readers:
            read = new.make("pointwise", function="where", xs=[new.make("training", (), torch.bool), new, buffer])
            for each in readers:
                each.args = replaced_in(each.args, {new: read})
        self.changes.append(new.make("update", buffer=buffer, x=new))

    @property
    def _written(self) -> list[int]:
        return list(dict.fromkeys([self.loss, *self.shown]))
