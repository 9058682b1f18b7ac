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
            places = self.places(body)
            types = {place: self.type(type) for place, type in zip(places, body.types, strict=True)}
            rewritten = evolve(
                body,
                steps=tuple(self.step(step, body, places) for step in body.steps),
                types=tuple(types[place] for place in sorted(types)),
                results=self.operands(body.results, places),
                updates=tuple(
                    evolve(each, buffer=places[each.buffer], value=places[each.value]) for each in body.updates
                ),
            )
            self._done[id(body)] = rewritten
        return rewritten

    def model(self, model: spec.Model) -> spec.Model:
        """The model rewritten, with its outputs."""
        places, answers = self.places(model.body), self.places(model.answering)
        return evolve(
            model,
            body=self.body(model.body),
            loss=places[model.loss],
            metrics=tuple((name, places[value]) for name, value in model.metrics),
            outputs=tuple((name, answers[value]) for name, value in model.outputs),
            answering=self.body(model.answering),
        )

    def places(self, body: spec.Body) -> list[int]:
        """The new number of each value of a body. What an iteration that is left out keeps is what the nearest one does
        that is left.
        """
        places = list(range(len(body.inputs)))
        first = len(places)
        for step in body.steps:
            count, width = spec.result_count(step), len(step.carried) if isinstance(step, spec.Repeat) else 0
            if isinstance(step, spec.Repeat) and step.kept:
                left = self.kept.get(id(step), range(step.count))
                nearest = [
                    min(range(len(left)), key=lambda place: abs(left[place] - number)) for number in range(step.count)
                ]
                places += range(first, first + width)
                for name in range(len(step.kept)):
                    places += (first + width + name * len(left) + place for place in nearest)
                count = width + len(step.kept) * len(left)
            else:
                places += range(first, first + count)
            first += count
        return places

    def size(self, axis: Axis) -> int:
        """The new size of an axis."""
        return self.sizes.get(axis.name, axis.size)

    def type(self, type: Type) -> Type:
        """The type with the new sizes."""
        return evolve(type, axes=tuple(Axis(axis.name, self.size(axis)) for axis in type.axes))

    def operands(self, operands: tuple[spec.Operand, ...], places: Sequence[int]) -> tuple[spec.Operand, ...]:
        """The operands with their new numbers, and literals evaluated at the new sizes."""
        return tuple(each.resized(self.sizes) if isinstance(each, spec.Literal) else places[each] for each in operands)

    def initial_of(self, step: spec.Parameter) -> spec.Call:
        """The new initializer. Buffers are often counts and variances: they begin as declared, but not with zeros, nor
        with what a file has for other sizes.
        """
        if step.initial.name == "file" and self.initial is not as_declared:
            return of_order_one(step.initial) if step.type.is_float else spec.Call("zeros", {})
        if not step.buffer:
            return self.initial(step.initial)
        return step.initial if self.initial is as_declared or not step.type.is_float else unless_zero(step.initial)

    @staticmethod
    def window(window: int, before: int, after: int | None) -> int:
        """A window that is as large a part of the axis as it was; one that is smaller than the axis stays smaller."""
        if after is None or window >= before:
            return window
        return max(1, min(after - 1, round(window * after / before)))

    def step(self, step: spec.Step, body: spec.Body, places: Sequence[int]) -> spec.Step:
        """A step of a body, rewritten."""
        if isinstance(step, spec.CallBlock):
            return evolve(step, body=self.body(step.body), arguments=self.operands(step.arguments, places))
        if isinstance(step, spec.Repeat):
            kept = self.kept.get(id(step), range(step.count))
            own = step.bodies if len(step.bodies) == 1 else [step.iteration(number) for number in kept]
            bodies = tuple(map(self.body, own))
            carried, captured = self.operands(step.carried, places), tuple(places[each] for each in step.captured)
            return evolve(step, bodies=bodies, count=len(kept), carried=carried, captured=captured)
        if isinstance(step, spec.Scan):
            axis = Axis(step.axis.name, self.size(step.axis))
            carried, captured = self.operands(step.carried, places), tuple(places[each] for each in step.captured)
            return evolve(step, axis=axis, body=self.body(step.body), carried=carried, captured=captured)
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
        return evolve(step, type=self.type(step.type), options=options, operands=self.operands(step.operands, places))
