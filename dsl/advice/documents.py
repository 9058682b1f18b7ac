"""What keeps the documents of packed rows apart in each operation along the sequence: the help of W0203.

`segments` numbers the documents of a row and `positions` counts within each of them, as `partita.runtime.data.packing`
yields them. What is proposed is the call itself with these in it, to be pasted; a test does that and runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from partita.dsl import spec
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

SEGMENTS, POSITIONS = "segments", "positions"


@frozen(eq=False)
class Mixing:
    """An application along an axis that is the sequence, or made of it. `tokens` are the axes of the ids."""

    step: spec.Apply
    types: Sequence[Type]
    axis: str
    tokens: Sequence[str]

    @property
    def advice(self) -> tuple[str, str]:
        """The input that it needs, and what to do with that."""
        alone = self.axis in self.tokens and self.types[0].has(self.axis)
        advice = (WITHIN if alone else BETWEEN).get(self.step.function)
        specific = advice(self) if advice is not None else None
        return specific or (SEGMENTS, f"hide what is of other documents in `{self.call()}`, by a `where` of `segments`")

    def argument(self, name: str, number: int) -> str:
        """The text of an argument, which may be given by name."""
        texts = _arguments(self.step.span)
        named = (text.removeprefix(f"{name} = ") for text in texts if text.startswith(f"{name} = "))
        return next(named, texts[number])

    def call(self, argument: str = "", instead: str = "") -> str:
        """The call, with another argument for the one of this text."""
        texts = _arguments(self.step.span)
        for number, text in enumerate(texts):
            if argument and (text == argument or text.endswith(f" = {argument}")):
                texts[number] = text.removesuffix(argument) + instead
                break
        return f"{self.step.function}({', '.join(texts)})"

    def widened(self, argument: str, number: int) -> str:
        """An argument with the axes of the ids."""
        type = self.types[number]
        missing = [name for name in self.tokens if type.axes and not type.has(name)]
        return f"expand({argument}, [{', '.join(missing)}])" if missing else argument

    @property
    def zero(self) -> str:
        """Nothing, in the dtype of the result."""
        return "0.0" if self.step.type.is_float else "0"

    @property
    def same(self) -> str:
        """Whether a position and one along another axis are of the same document."""
        return f"expand(segments, {self.axis}) == rename(segments, {self.tokens[-1]} -> {self.axis})"


def beginning(axis: str, backward: bool) -> tuple[str, str]:
    """The input that says where a recurrence over the sequence begins anew, and the condition."""
    return (
        (SEGMENTS, f"segments != shift(segments, over = {axis}, by = -1)")
        if backward
        else (POSITIONS, "positions == 0")
    )


def _attend(mixing: Mixing) -> tuple[str, str]:
    return SEGMENTS, "write `segments = segments` in this call"


def _attend_between(mixing: Mixing) -> tuple[str, str] | None:
    if mixing.step.options["mask"] or not mixing.types[0].has(mixing.tokens[-1]):
        return None
    return SEGMENTS, f"write `mask = {mixing.same}` in this call"


def _softmax_between(mixing: Mixing) -> tuple[str, str] | None:
    if not mixing.types[0].has(mixing.tokens[-1]):
        return None
    scores = mixing.argument("x", 0)
    return SEGMENTS, f"write `{mixing.call(scores, f'where({mixing.same}, {scores}, -1e9)')}`"


def _linear_scan(mixing: Mixing) -> tuple[str, str]:
    takes, begins = beginning(mixing.axis, mixing.step.options["backward"])
    factor = mixing.argument("a", 0)
    return takes, f"write `{mixing.call(factor, f'where({begins}, 0.0, {mixing.widened(factor, 0)})')}`"


def _delta_rule(mixing: Mixing) -> tuple[str, str]:
    if len(mixing.types) < 5:  # nothing fades
        whole = mixing.call().removesuffix(")")
        return POSITIONS, f"write `{whole}, decay = cast(positions != 0, {mixing.step.type.dtype}))`"
    decay = mixing.argument("decay", 4)
    return POSITIONS, f"write `{mixing.call(decay, f'where(positions == 0, 0.0, {mixing.widened(decay, 4)})')}`"


def _cumsum(mixing: Mixing) -> tuple[str, str]:
    x, dtype = mixing.argument("x", 0), mixing.step.type.dtype
    if not mixing.step.type.is_float:
        x, dtype = f"cast({x}, f64)", "f64"
    return POSITIONS, f"write `linear_scan(cast(positions != 0, {dtype}), {x}, over = {mixing.axis})`"


def _shift(mixing: Mixing) -> tuple[str, str]:
    before = mixing.call(mixing.argument("x", 0), SEGMENTS)
    return SEGMENTS, f"write `where({before} == segments, {mixing.call()}, {mixing.zero})`"


def _windows(mixing: Mixing) -> tuple[str, str] | None:
    """Of windows that have a position for each of the sequence."""
    o = mixing.step.options
    if o["axes"] != o["into"] or len(o["axes"]) > 1:
        return None
    (size,), axis = o["size"], mixing.axis
    slides = f"{axis} -> {axis}, size = {size}, padding = {[list(each) for each in o['padding']]}"
    slides += f", dilation = {list(o['dilation'])}" if o["dilation"] != (1,) else ""
    same = f"patches(segments, {slides}, fill = -1) == expand(segments, {size})"
    if mixing.step.function == "patches":
        return SEGMENTS, f"write `where({same}, {mixing.call()}, {o['fill']:g})`"
    masked = f"where({same}, patches({mixing.argument('image', 0)}, {slides}), {mixing.zero})"
    kernel, over = mixing.argument("kernel", 1), ", ".join([*o["over"], size])
    return SEGMENTS, f"write `dot({masked}, {kernel}, over = [{over}])`"


Advice = Callable[[Mixing], tuple[str, str] | None]
# Along the axis of the tokens, and between that and another.
WITHIN: Mapping[str, Advice] = {
    "attend": _attend,
    "linear_scan": _linear_scan,
    "delta_rule": _delta_rule,
    "cumsum": _cumsum,
    "shift": _shift,
    "conv": _windows,
    "patches": _windows,
}
BETWEEN: Mapping[str, Advice] = {
    "attend": _attend_between,
    "softmax": _softmax_between,
    "log_softmax": _softmax_between,
    # A factor may lack the axis that is scanned.
    "linear_scan": lambda mixing: _linear_scan(mixing) if mixing.axis in mixing.tokens else None,
}


def _arguments(span: Span) -> list[str]:
    """The texts of the arguments of a call, on one line."""
    text = " ".join(span.source.text[span.start : span.end].split())
    arguments, depth = [""], 0
    for character in text[text.index("(") + 1 : -1]:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += character
    return [each.strip() for each in arguments]
