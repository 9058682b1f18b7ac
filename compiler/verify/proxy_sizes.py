"""Searches small axis sizes for a proxy that satisfy the model's relations and the layout's divisibility.

Inputs are the declared sizes, the relations that `split`, `merge`, `concat`, `slice`, `rename`, `rope`, `patches` and
`conv` impose, and what each axis must be a multiple of. The sizes found are as small as possible, ordered as the
declared ones (so that an id within one axis stays within a longer one, and the largest axis of a tensor stays the
largest), and distinct where possible: confusing two axes of the same size would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm, prod
from typing import Any

from attrs import field, frozen

from partita.dsl import spec
from partita.dsl.check.formulas import Formula, Size, sizes_in, value_of
from partita.dsl.functions.signatures import LIKELIHOODS

# The extent of the ranges of sizes tried for an axis, and the steps before the search gives up.
TRIED, TIMEOUT = 24, 20_000


@frozen
class Relation:
    """`whole` is the product or the sum of `parts`, or at least each of them; or `stride` times its part, and `more`
    than that; or what a `formula` makes of them.
    """

    kind: str
    whole: str
    parts: tuple[str, ...]
    stride: int = 1
    more: int = 0
    formula: Formula | Size | None = None

    def implied(self, axis: str, sizes: Mapping[str, int]) -> int | None:
        """The size of `axis` that the other sizes determine (0: none is valid); None if they leave a choice."""
        if self.kind == LEAST or any(name not in sizes for name in (self.whole, *self.parts) if name != axis):
            return None
        if self.formula is not None:
            return evaluated(self.formula, sizes) if axis == self.whole else None
        if self.kind == STRIDE:
            (part,) = self.parts
            if axis == self.whole:
                return max(0, self.stride * sizes[part] + self.more)
            size, rest = divmod(sizes[self.whole] - self.more, self.stride)
            return 0 if rest else max(0, size)
        others = [sizes[name] for name in self.parts if name != axis]
        if axis == self.whole:
            return prod(others) if self.kind == PRODUCT else sum(others)
        if self.kind == SUM:
            return max(0, sizes[self.whole] - sum(others))
        size, rest = divmod(sizes[self.whole], prod(others))
        return 0 if rest else size

    def allows(self, axis: str, size: int, sizes: Mapping[str, int]) -> bool:
        """Whether `size` of `axis` satisfies the relation, if that is an inequality or a formula."""
        if self.formula is not None:
            known = {**sizes, axis: size}
            complete = all(name in known for name in (self.whole, *self.parts))
            return not complete or evaluated(self.formula, known) == known[self.whole]
        if self.kind != LEAST:
            return True
        if axis == self.whole:
            return all(sizes.get(part, 0) <= size for part in self.parts)
        return size <= sizes.get(self.whole, size)


PRODUCT, SUM, LEAST, STRIDE, FORMULA = "product", "sum", "least", "stride", "formula"


def evaluated(formula: Formula | Size, sizes: Mapping[str, int]) -> int:
    """The size that a formula gives; 0 if it gives none."""
    try:
        number = value_of(formula, sizes)
    except (ArithmeticError, ValueError):
        return 0
    return int(number) if number == int(number) and number > 0 else 0


def _windows(o: Mapping[str, Any], declared: Mapping[str, int]) -> list[Relation]:
    """An axis along which a window slides has as many more elements than declared as its positions need."""
    each = zip(o["axes"], o["into"], o["stride"], strict=True)
    return [Relation(STRIDE, axis, (to,), step, declared[axis] - step * declared[to]) for axis, to, step in each]


# The relations that a call of a built-in function imposes, from its options and the declared sizes.
STATED: dict[str, Callable[[Mapping[str, Any], Mapping[str, int]], list[Relation]]] = {
    "rename": lambda o, _: [Relation(PRODUCT, right, (left,)) for left, right in o["pairs"]],
    "split": lambda o, _: [Relation(PRODUCT, o["axis"], tuple(o["into"]))],
    "merge": lambda o, _: [Relation(PRODUCT, o["into"], tuple(o["axes"]))],
    "concat": lambda o, _: [Relation(SUM, o["into"], tuple(o["axes"]))],
    "slice": lambda o, _: [Relation(LEAST, o["axis"], (o["into"],))],
    "top_k": lambda o, _: [Relation(LEAST, o["over"], (o["into"],))],
    "patches": _windows,
    "conv": _windows,
}
# The option that names the axis that a function's ids index.
INDEXED = {
    **dict.fromkeys(("embedding", "accuracy", *LIKELIHOODS), "over"),
    "routed_dot": "along",
    **dict.fromkeys(("dispatch", "combine"), "experts"),
}


def relations_of(step: spec.Apply, declared: Mapping[str, int]) -> list[Relation]:
    """The relations that an application of a built-in function imposes."""
    return STATED[step.function](step.options, declared) if step.function in STATED else []


def ties(operation: spec.Operation) -> Iterator[Relation]:
    """The relations between the axes of an operation of the file's own, by the declarations of the axes: its functions
    may rely on them.
    """
    for axis, formula in operation.ties.items():
        yield Relation(FORMULA, axis, tuple(sizes_in(formula)), formula=formula)


@frozen
class Axes:
    """A model's axes: those that ids index (`tables`), `rope` rotates in pairs (`even`, with what
    their sizes are multiples of), parameters have, inputs have; and those that keep their sizes, of windows (`kept`).
    """

    declared: Mapping[str, int]
    relations: tuple[Relation, ...]
    tables: frozenset[str]
    even: Mapping[str, int]
    parameters: frozenset[str]
    inputs: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


def axes_of(model: spec.Model) -> Axes:
    """The axes of a model's values, and the relations between them."""
    declared: dict[str, int] = {}
    relations: dict[Relation, None] = {}
    tables: set[str] = set()
    even: dict[str, int] = {}
    fixed: set[str] = set()
    parameters: set[str] = set()
    for operation in model.operations.values():
        relations.update(dict.fromkeys(ties(operation)))
    for body in spec.bodies(model.body):
        for type in body.types:
            declared.update((axis.name, axis.size) for axis in type.axes)
        for step in body.steps:
            if isinstance(step, spec.Parameter):
                parameters.update(step.type.names)
            if not isinstance(step, spec.Apply):
                continue
            if step.function in STATED:
                relations.update(dict.fromkeys(relations_of(step, declared)))
                fixed.update(step.options["size"] if STATED[step.function] is _windows else ())
            elif step.function in INDEXED:
                tables.add(step.options[INDEXED[step.function]])
            elif step.function == "rope":
                part = Fraction(step.options.get("part", 1.0)).limit_denominator(1 << 16)
                name = step.options["pairs"]
                even[name] = lcm(even.get(name, 1), 2 * part.denominator // gcd(2, part.numerator))
                if "sections" in step.options:  # one for each place of the positions, together all pairs
                    turned, positions = ({*body.types[each].names} for each in step.operands if isinstance(each, int))
                    fixed |= {name} | positions - turned
    fixed.update(r.whole for r in relations if r.parts == (r.whole,) and r.stride > 1)
    stated = tuple(r for r in relations if r.parts != (r.whole,) and {r.whole, *r.parts} <= set(declared))
    inputs = frozenset(name for type in model.body.types[: len(model.body.inputs)] for name in type.names)
    return Axes(declared, stated, frozenset(tables), even, frozenset(parameters), inputs, frozenset(fixed))


@frozen(eq=False)
class Search:
    """A backtracking search for sizes that are multiples of `multiples` and preferably not of `avoided`, by axis."""

    axes: Axes
    multiples: Mapping[str, int]
    avoided: Mapping[str, int] = field(factory=dict)

    def run(self) -> dict[str, int] | None:
        """The first sizes that fit; None if there are none, or none are found within PATIENCE steps."""
        declared = self.axes.declared
        order = sorted(declared, key=lambda name: (declared[name], name in self.axes.tables))
        chosen: dict[str, int] = {}
        choices: list[Iterator[int]] = []
        for _ in range(TIMEOUT):
            if len(chosen) == len(order):
                return {name: chosen[name] for name in declared}
            if len(choices) == len(chosen):
                choices.append(iter(self.candidates(order[len(chosen)], chosen)))
            size = next(choices[-1], None)
            if size is not None:
                chosen[order[len(chosen)]] = size
                continue
            choices.pop()
            if not choices:
                return None
            del chosen[order[len(choices) - 1]]
        return None

    def candidates(self, axis: str, chosen: Mapping[str, int]) -> Sequence[int]:
        """Sizes for an axis, given those `chosen` for shorter ones; best first."""
        declared, multiple = self.axes.declared[axis], self.multiples.get(axis, 1)
        relations = [r for r in self.axes.relations if axis == r.whole or axis in r.parts]
        implied = {size for r in relations if (size := r.implied(axis, chosen)) is not None}
        implied |= {declared} if axis in self.axes.kept else set()
        if implied:
            agreed = implied if len(implied) == 1 else ()
            return [s for s in agreed if s and s % multiple == 0 and all(r.allows(axis, s, chosen) for r in relations)]
        limit = max(declared, multiple)
        used = set(chosen.values())
        floor = max(used, default=0)
        options = range(multiple, limit + 1, multiple)
        near = max(0, floor // multiple - TRIED)
        sizes = dict.fromkeys([*options[:TRIED], *options[near : near + 2 * TRIED], *options[-1:]])
        fitting = [s for s in sizes if self._fits(axis, s)] or list(sizes)
        # Prefer more than one element per rank, so that a wrong offset shows.
        roomy = min(2 * multiple, limit)
        if relations:
            fitting.sort(key=lambda s: (s < roomy, s in used, s))
            return [s for s in fitting if all(r.allows(axis, s, chosen) for r in relations)]
        fitting.sort(key=lambda s: (s < floor, s in used, s < roomy, abs(s - floor)))
        return fitting[:1]

    def _fits(self, axis: str, size: int) -> bool:
        avoided = self.avoided.get(axis)
        return avoided is None or size % avoided != 0
