"""What the language says for values: text, with the axes that it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from attrs import evolve, frozen

# How tightly text binds: calls and names, signs, products, sums, comparisons, `not`, `and`, `or`.
CALL, SIGN, PRODUCT, SUM, COMPARISON, NOT, AND, OR = range(8)


@frozen
class Said:
    """Text of a value. `dims`: the names of the axes of each dimension, outermost first. `axes`: those that the text
    has, in memory order; fewer than those of `dims` where the value is repeated. `binds`: how tightly.
    """

    text: str
    dims: tuple[tuple[str, ...], ...] = ()
    axes: tuple[str, ...] = ()
    binds: int = CALL
    dtype: str = "f32"

    @property
    def memory_order(self) -> tuple[str, ...]:
        """Its axes, in the order of dimensions."""
        ordered = [name for dim in self.dims for name in dim if name in self.axes]
        return (*ordered, *(name for name in self.axes if name not in ordered))

    def within(self, binds: int) -> str:
        """The text where it must bind at least so tightly."""
        return f"({self.text})" if self.binds > binds else self.text

    def renamed(self, dims: Sequence[Sequence[str]]) -> Said:
        """The value with other names for its axes."""
        names = {
            old: new
            for own, wanted in zip(self.dims, dims, strict=True)
            for old, new in zip(own, wanted, strict=True)
            if old != new
        }
        text, binds = self.text, self.binds
        arrows = [f"{old} -> {new}" for old, new in names.items() if old in self.axes]
        if len(names) == 1 and text == f"iota({next(iter(names))})":
            text = f"iota({next(iter(names.values()))})"
        elif arrows:
            text, binds = call("rename", text, *arrows), CALL
        axes = tuple(names.get(name, name) for name in self.axes)
        return evolve(self, text=text, dims=tuple(map(tuple, dims)), axes=axes, binds=binds)


Saying: TypeAlias = Callable[..., Said]  # of a writer and a value
SAYINGS: dict[str, Saying] = {}


def says(*ops: str) -> Callable[[Saying], Saying]:
    """Register what the language says for operations."""

    def register(saying: Saying) -> Saying:
        SAYINGS.update(dict.fromkeys(ops, saying))
        return saying

    return register


def call(function: str, *args: object, **named: object) -> str:
    """`function(a, b, over = c)`; what is None is left out, and a final underscore of a name."""
    parts = [str(each) for each in args if each is not None]
    parts += [f"{name.rstrip('_')} = {_text(each)}" for name, each in named.items() if each is not None]
    return f"{function}({', '.join(parts)})"


def _text(x: object) -> str:
    return "true" if x is True else "false" if x is False else number_text(x) if isinstance(x, int | float) else str(x)


def listed(names: Sequence[str]) -> str:
    """`a`, or `[a, b]`."""
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def number_text(x: float) -> str:
    """A number as one would write it."""
    if abs(x) == float("inf"):
        return "1e30" if x > 0 else "-1e30"
    if isinstance(x, float) and x == int(x) and abs(x) < 1e15:
        x = int(x)
    if isinstance(x, int):
        return f"{x:_}" if abs(x) >= 10_000 else str(x)
    short = f"{x:.9g}"
    text = short if abs(float(short) - x) <= 4e-16 * abs(x) else repr(x)  # 1 - 0.9 is 0.1
    return re.sub(r"e(-?)\+?0*", r"e\1", text)
