"""A model with other axis sizes, repeat counts and parameter initializers.

The steps stay as they are, and no type is inferred again: an axis has one size in the whole model, so that types, and
numbers computed from sizes, follow from the sizes. Only the start of a `slice` is known just as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, field, frozen

from partita.dsl import spec
from partita.dsl.types import Axis, Type

Initial = Callable[[spec.Call], spec.Call]


def as_declared(declared: spec.Call) -> spec.Call:
    """The declared initializer."""
    return declared


def of_order_one(_: spec.Call) -> spec.Call:
    """Random values that keep activations of order 1, whatever the declared initializer is."""
    return spec.Call("kaiming", {})


def unless_zero(declared: spec.Call) -> spec.Call:
    """The declared initializer; random values instead of zeros."""
    return of_order_one(declared) if declared.name == "zeros" else declared


@frozen(eq=False)
class Resized:
    """Rewrites bodies with other sizes, some iterations of repeats (by `id` of the step, their numbers) and
    initializers; what is not listed stays. Each body is rewritten once, however often it is called.
    """

    sizes: Mapping[str, int]
    kept: Mapping[int, Sequence[int]] = field(factory=dict)
    initial: Initial = as_declared
    _done: dict[int, spec.Body] = field(factory=dict)

    def body(self, body: spec.Body) -> spec.Body:
        """The body rewritten. Recursion is as deep as blocks are nested, which the checker bounds."""
        rewritten = self._done.get(id(body))
        if rewritten is None:
            steps = tuple(self.step(step, body) for step in body.steps)
            rewritten = evolve(
                body, steps=steps, types=tuple(map(self.type, body.types)), results=self.operands(body.results)
            )
            self._done[id(body)] = rewritten
        return rewritten

    def model(self, model: spec.Model) -> spec.Model:
        """The model rewritten, with its outputs."""
        return evolve(model, body=self.body(model.body), answering=self.body(model.answering))

    def size(self, axis: Axis) -> int:
        """The new size of an axis."""
        return self.sizes.get(axis.name, axis.size)

    def type(self, type: Type) -> Type:
        """The type with the new sizes."""
        return evolve(type, axes=tuple(Axis(axis.name, self.size(axis)) for axis in type.axes))

    def operands(self, operands: tuple[spec.Operand, ...]) -> tuple[spec.Operand, ...]:
        """The operands, with literals evaluated at the new sizes."""
        return tuple(each.resized(self.sizes) if isinstance(each, spec.Literal) else each for each in operands)

    def initial_of(self, step: spec.Parameter) -> spec.Call:
        """The new initializer. Buffers are often counts and variances: they begin as declared, but not with zeros."""
        if not step.buffer:
            return self.initial(step.initial)
        return step.initial if self.initial is as_declared or not step.type.is_float else unless_zero(step.initial)

    @staticmethod
    def window(window: int, before: int, after: int | None) -> int:
        """A window that is as large a part of the axis as it was; one that is smaller than the axis stays smaller."""
        if after is None or window >= before:
            return window
        return max(1, min(after - 1, round(window * after / before)))

    def step(self, step: spec.Step, body: spec.Body) -> spec.Step:
        """A step of a body, rewritten."""
        if isinstance(step, spec.CallBlock):
            return evolve(step, body=self.body(step.body), arguments=self.operands(step.arguments))
        if isinstance(step, spec.Repeat):
            kept = self.kept.get(id(step), range(step.count))
            own = step.bodies if len(step.bodies) == 1 else [step.iteration(number) for number in kept]
            bodies = tuple(map(self.body, own))
            return evolve(step, bodies=bodies, count=len(kept), carried=self.operands(step.carried))
        if isinstance(step, spec.Scan):
            axis = Axis(step.axis.name, self.size(step.axis))
            return evolve(step, axis=axis, body=self.body(step.body), carried=self.operands(step.carried))
        if isinstance(step, spec.Parameter):
            return evolve(step, type=self.type(step.type), initial=self.initial_of(step))
        if isinstance(step, spec.SharedParameter):
            return evolve(step, parameter=evolve(step.parameter, type=self.type(step.parameter.type)))
        if isinstance(step, spec.Sample):
            return evolve(step, type=self.type(step.type))
        options = step.options
        if step.function == "slice":
            (operand,) = step.operands
            assert isinstance(operand, int)
            whole, part = body.types[operand].axis(options["axis"]), step.type.axis(options["into"])
            last_start = self.size(whole) - self.size(part)
            start = last_start if options["start"] == whole.size - part.size else min(options["start"], last_start)
            options = {**options, "start": start}
        if "window" in options and step.function == "attend":
            keys = step.operands[1]
            assert isinstance(keys, int)
            length = body.types[keys].axis(options["over"]).size
            options = {**options, "window": self.window(options["window"], length, self.sizes.get(options["over"]))}
        return evolve(step, type=self.type(step.type), options=options, operands=self.operands(step.operands))
