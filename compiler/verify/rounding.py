"""A model in which every function that jumps reads operands whose last digits were changed at random.

Where elements are equal in exact arithmetic, as those of two positions with the same token are, rounding decides which
of them `top_k` chooses, and with that everything after it. Each layout rounds differently, so this is no error of a
layout. Other last digits of the parameters do not show it: equal elements stay equal. Factors of their own do. They
keep zeros, which no rounding changes.
"""

from __future__ import annotations

from attrs import define, evolve, field

from partita.dsl import spec

# Functions whose value or gradient jumps where operands are equal, or where one is zero.
CHOOSING = ("top_k", "arg_max", "max", "min", "maximum", "minimum", "relu", "abs", "sign", "floor", "round")
COMPARING = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
JUMPING = frozenset((*CHOOSING, *COMPARING))


def perturbed(original: spec.Spec, bound: float, trial: int) -> spec.Spec:
    """The same file, in which the operands of functions that jump are multiplied by 1 + u, with u drawn from
    [-most, most) for each element; other ones in each `trial`. Its outputs are left out.
    """
    model, _ = original.trained
    shaker = _Shaker(bound, trial)
    body = shaker.body(model.body)
    places = shaker.places[id(model.body)]
    metrics = tuple((name, places[value]) for name, value in model.metrics)
    model = evolve(model, body=body, loss=places[model.loss], metrics=metrics, outputs=(), answering=body)
    return evolve(original, model=model)


@define(eq=False)
class _Shaker:
    """Rewrites bodies, each once, however often it is called. `places` has the new number of each value of a body, by
    the `id` of the body.
    """

    most: float
    trial: int
    places: dict[int, list[int]] = field(factory=dict)
    _done: dict[int, spec.Body] = field(factory=dict)

    def body(self, body: spec.Body) -> spec.Body:
        """The body rewritten."""
        if id(body) in self._done:
            return self._done[id(body)]
        counts = [spec.result_count(step) for step in body.steps]
        input_count = len(body.types) - sum(counts)
        types = list(body.types[:input_count])
        places = list(range(input_count))
        steps: list[spec.Step] = []

        def placed(operands: tuple[spec.Operand, ...]) -> tuple[spec.Operand, ...]:
            return tuple(places[each] if isinstance(each, int) else each for each in operands)

        def shake(operand: spec.Operand, step: spec.Apply) -> spec.Operand:
            if not isinstance(operand, int) or not types[operand].is_float:
                return operand
            type, first = types[operand], len(types)
            uniform = spec.Call("uniform", {"a": self.most})
            steps.extend(
                (
                    spec.Sample(f"rounding {self.trial} {first}", type, uniform, step.span),
                    spec.Apply("add", (first, spec.Literal(1.0)), {}, type, step.span),
                    spec.Apply("multiply", (operand, first + 1), {}, type, step.span),
                )
            )
            types.extend([type] * 3)
            return first + 2

        position = input_count
        for step, count in zip(body.steps, counts, strict=True):
            if isinstance(step, spec.Apply):
                operands = placed(step.operands)
                if step.function in JUMPING:
                    operands = tuple(shake(each, step) for each in operands)
                step = evolve(step, operands=operands)
            elif isinstance(step, spec.CallBlock):
                step = spec.with_bodies(evolve(step, arguments=placed(step.arguments)), self.body)
            elif isinstance(step, spec.Repeat | spec.Scan):
                captured = tuple(places[each] for each in step.captured)
                step = spec.with_bodies(evolve(step, carried=placed(step.carried), captured=captured), self.body)
            steps.append(step)
            places.extend(range(len(types), len(types) + count))
            types.extend(body.types[position : position + count])
            position += count
        updates = tuple(evolve(each, buffer=places[each.buffer], value=places[each.value]) for each in body.updates)
        rewritten = evolve(body, steps=tuple(steps), results=placed(body.results), types=tuple(types), updates=updates)
        self._done[id(body)], self.places[id(body)] = rewritten, places
        return rewritten
