"""Where a value got an axis, or lost one: a note for errors that show only further on.

A value is followed back through the steps that made it, into blocks and loops and out of them. A product of two values
that both have an axis, and that does not sum over it, is the likeliest mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias

from attrs import frozen

from partita.dsl import spec
from partita.dsl.advice.corrected_calls import named
from partita.dsl.functions.signatures import Origin
from partita.dsl.names.scope import Scope
from partita.dsl.types import Type

# Says whether a step is the one that is looked for, of an axis; `has` are its operands that have the axis, `lack` those
# that do not.
Look: TypeAlias = Callable[[spec.Apply, Collection[int], Collection[int]], Origin | None]

Known: TypeAlias = dict[tuple[int, int], tuple[Origin | None, set[int]]]


@frozen(eq=False)
class Values:
    """The values of a body that is checked, or is being checked: its steps, the types of its values, how many come
    before those of the steps, and the scope if it is still open.
    """

    steps: Sequence[spec.Step]
    types: Sequence[Type]
    inputs: int
    scope: Scope | None = None

    def type(self, number: int) -> Type:
        """The type of a value, also of one that an open scope captures."""
        scope = self.scope
        while number < 0 and scope is not None and scope.outer is not None:
            number, scope = scope.captured[-1 - number], scope.outer
        return scope.types[number] if scope is not None else self.types[number]

    def made(self) -> list[tuple[spec.Step, int, int]]:
        """Each step with one of its results and the position of that among them; the last ones first."""
        results: list[tuple[spec.Step, int, int]] = []
        for step in self.steps:
            for position in range(spec.result_count(step)):
                results.append((step, self.inputs + len(results), position))
        return results[::-1]


def origin(scope: Scope, value: int, axis: str) -> Origin | None:
    """Why a value of a body that is being checked has an axis, or no longer has it; None if that is how it begins."""
    values = Values(scope.steps, scope.types, scope.inputs, scope)
    if not values.type(value).has(axis):
        return _followed(values, {value}, axis, False, partial(_lost, axis), {})[0]
    kept = _followed(values, {value}, axis, True, partial(_kept, axis), {})[0]
    return kept or _followed(values, {value}, axis, True, partial(_joined, axis), {})[0]


def _kept(axis: str, step: spec.Apply, has: Collection[int], lack: Collection[int]) -> Origin | None:
    if step.function != "dot" or len(has) < 2:
        return None
    note = f"`{axis}` is kept by `{step.span.text}`: both operands have it, and it is not summed over"
    over = named((*step.options["over"], axis))
    return Origin(note, step.span, f"sum over `{axis}` there as well: `over = {over}`")


def _joined(axis: str, step: spec.Apply, has: Collection[int], lack: Collection[int]) -> Origin | None:
    return Origin(f"`{axis}` comes from `{step.span.text}`", step.span) if lack or not has else None


def _lost(axis: str, step: spec.Apply, has: Collection[int], lack: Collection[int]) -> Origin | None:
    return Origin(f"`{axis}` ends in `{step.span.text}`", step.span) if has else None


def _followed(
    values: Values, numbers: set[int], axis: str, having: bool, look: Look, known: Known
) -> tuple[Origin | None, set[int]]:
    """The last step that `look` finds among those that some values are made of, through values that all have the axis,
    or all lack it; or the inputs that are reached. Each result of a body is followed once: `known` are these.
    """
    for step, number, position in values.made():
        if number not in numbers:
            continue
        if isinstance(step, spec.Apply):
            operands = [each for each in step.operands if isinstance(each, int)]
            has = [each for each in operands if values.type(each).has(axis)]
            lack = [each for each in operands if each not in has]
            axis_origin = look(step, has, lack)
            if axis_origin is not None:
                return axis_origin, set()
            numbers.update(has if having else lack)
        elif isinstance(step, spec.CallBlock | spec.Repeat | spec.Scan):
            body, result = step.body, step.body.results[position]
            if not isinstance(result, int):
                continue
            if (id(body), result) not in known:
                inner = Values(body.steps, body.types, len(body.inputs))
                known[id(body), result] = _followed(inner, {result}, axis, having, look, known)
            axis_origin, reached = known[id(body), result]
            if axis_origin is not None:
                return axis_origin, set()
            outside = {spec.operands_of(step)[each] for each in reached}
            numbers.update(each for each in outside if isinstance(each, int) and values.type(each).has(axis) == having)
    scope = values.scope
    captured = {scope.captured[-1 - each] for each in numbers if each < 0} if scope is not None else set()
    if scope is not None and scope.outer is not None and captured:
        outer = Values(scope.outer.steps, scope.outer.types, scope.outer.inputs, scope.outer)
        return _followed(outer, captured, axis, having, look, known)[0], set()
    return None, {each for each in numbers if 0 <= each < values.inputs}
