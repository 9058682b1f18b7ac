"""Which dimensions are one axis: union-find over factors of dimensions, by a rule for each operation, never by size.

A dimension is a list of factors, outermost first: none if its size is 1, several where a view merges or splits it. What
operations say of their operands' dimensions is unified; a factor that meets two others splits into parts. These are
principal types: nothing is one axis that the module does not make one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TypeAlias

from attrs import Factory, define

from partita.importing.graph import Value, number, order, users


@define(eq=False)
class Factor:
    """A factor of dimensions: an axis, unless it is split into `parts`. `names`: votes for what it is called."""

    size: int
    parent: Factor | None = None
    parts: list[Factor] | None = None
    names: Counter[str] = Factory(Counter)


Dim: TypeAlias = list[Factor]
Rule: TypeAlias = "Callable[[Solver, Value], list[Dim]]"
RULES: dict[str, Rule] = {}


def factors(*ops: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations: unifies dimensions of operands, and returns those of the result."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, rule))
        return rule

    return register


def found(factor: Factor) -> Factor:
    """What stands for a factor and all that are one with it."""
    while factor.parent is not None:
        factor = factor.parent
    return factor


def leaves(dim: Iterable[Factor]) -> list[Factor]:
    """The axes of a dimension, outermost first."""
    axes: list[Factor] = []
    for each in dim:
        each = found(each)
        axes += leaves(each.parts) if each.parts is not None else [each]
    return axes


# Operations of torch that draw random numbers.
DRAWN = re.compile(r"rand|multinomial|poisson|binomial|cauchy|geometric")


def _refined(factor: Factor, sizes: Sequence[int]) -> None:
    factor.parts = [Factor(size) for size in sizes]


def _groups(before: Sequence[int], behind: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Dimensions of a view, before and behind, that have the same elements: as few as possible together."""
    i = j = 0
    while i < len(before) or j < len(behind):
        first, second = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(behind))
        while (one := prod(before[first:i])) != (other := prod(behind[second:j])):
            i, j = (i + 1, j) if one < other else (i, j + 1)
        yield slice(first, i), slice(second, j)


def _grouped(flat: list[Factor], shape: Sequence[int]) -> list[Dim] | None:
    """Axes in dimensions of these sizes; None if they do not line up."""
    dims: list[Dim] = []
    for size in shape:
        dim: Dim = []
        left = size
        while left > 1:
            first = found(flat[0])
            if first.parts is not None:
                flat[:1] = leaves([first])
            elif left % first.size == 0:
                dim.append(flat.pop(0))
                left //= first.size
            elif first.size % left == 0:
                _refined(first, [left, first.size // left])
                flat[:1] = leaves([first])
            else:
                return None
        dims.append(dim)
    return dims


class Solver:
    """The dimensions of all values that outputs are made of. Raises NotUnderstood where sizes do not line up."""

    def __init__(self, outputs: Sequence[Value]) -> None:
        self.values = order(outputs)
        self.users = users(self.values)
        self.dims: dict[Value, list[Dim]] = {}
        self.chosen: dict[tuple[Value, int, int], Dim] = {}  # what `top_k` chooses, of values and of ids
        self.pieces: dict[Value, list[Dim]] = {}  # of a concatenation, what is put together
        self.regrouped: dict[Value, list[tuple[slice, slice]]] = {}
        for value in self.values:
            self.dims[value] = self._of(value)
        self._indexed()
        self._put_together()
        self._repeated_layers()

    def free_dimensions(self) -> list[list[tuple[str, int]]]:
        """The dimensions of inputs that are an axis which nothing of the module has, those of one together."""
        found: dict[Factor, list[tuple[str, int]]] = {}
        held: set[Factor] = set()
        for value, dims in self.dims.items():
            for dim, axes in enumerate(map(leaves, dims)):
                if value.op == "input" and len(axes) == 1 and "draw" not in value.args:
                    found.setdefault(axes[0], []).append((value.args["name"], dim))
                elif value.op in ("input", "parameter", "buffer") or value.args.get("name"):  # a constant of the module
                    held.update(axes)
        return [places for axis, places in found.items() if axis not in held]

    def _of(self, value: Value) -> list[Dim]:
        if value.op in ("input", "parameter", "buffer", "constant"):
            return self.fresh(value.shape)
        rule = RULES.get(value.op)
        if rule is None and DRAWN.match(value.op):
            raise value.refuse("random numbers are drawn that the language cannot draw: give them to `forward`")
        if value.op == "batch_statistic":
            raise value.refuse("running statistics that are read after a batch norm has changed them")
        if rule is None:
            raise value.refuse(f"`aten.{value.op}`" if "." in value.op else f"`{value.op}`")
        dims = rule(self, value)
        assert [prod(each.size for each in leaves(dim)) for dim in dims] == list(value.shape), (value, value.args)
        return dims

    def fresh(self, shape: Iterable[int]) -> list[Dim]:
        """Dimensions of their own."""
        return [[Factor(size)] if size != 1 else [] for size in shape]

    def axes(self, value: Value) -> list[list[Factor]]:
        """The axes of each dimension of a value."""
        return [leaves(dim) for dim in self.dims[value]]

    def unify(self, one: Iterable[Factor], other: Iterable[Factor], value: Value) -> None:
        """Two dimensions are the same."""
        left, right = leaves(one), leaves(other)
        while left and right:
            a, b = found(left[0]), found(right[0])
            if a.parts is not None or b.parts is not None:
                left[:1], right[:1] = leaves([a]), leaves([b])
                continue
            if a is b or a.size == b.size:
                self._join(a, b)
                left, right = left[1:], right[1:]
            elif max(a.size, b.size) % min(a.size, b.size):
                raise value.refuse(f"dimensions of {a.size} and {b.size} do not line up")
            else:
                large, small = (a, b) if a.size > b.size else (b, a)
                _refined(large, [small.size, large.size // small.size])
        if left or right:
            raise value.refuse("sizes of dimensions differ")

    def unify_letters(self, known: dict[str, Dim], letters: Iterable[str], x: Value, value: Value) -> None:
        """Dimensions of a letter are the same; `known` has those seen so far, and gains those of an operand `x`."""
        for letter, dim, size in zip(letters, self.dims[x], x.shape, strict=True):
            if size != 1:
                self.unify(known.setdefault(letter, dim), dim, value)

    def _join(self, a: Factor, b: Factor) -> None:
        if a is not b:
            a.parent = b
            b.names.update(a.names)

    def broadcast(self, value: Value, xs: Sequence[Value]) -> list[Dim]:
        """The dimensions of the result of an elementwise operation."""
        dims: list[Dim] = []
        for i in range(value.rank):
            there = []
            for x in xs:
                own = i - (value.rank - x.rank)
                if own >= 0 and x.shape[own] != 1 and number(x) is None:
                    there.append(self.dims[x][own])
            for each in there[1:]:
                self.unify(there[0], each, value)
            dims.append(list(there[0]) if there else self.fresh(value.shape[i : i + 1])[0])
        return dims

    def viewed(self, value: Value, x: Value) -> list[Dim]:
        """The dimensions of a view: the axes of x in order, grouped anew. Where they do not line up, elements are those
        of one axis, which is split into others; `regrouped` has the dimensions before and behind.
        """
        dims: list[Dim] = []
        self.regrouped[value] = []
        for before, behind in _groups(x.shape, value.shape):
            flat = leaves(each for dim in self.dims[x][before] for each in dim)
            made = _grouped(flat, value.shape[behind])
            if made is None:
                self.regrouped[value].append((before, behind))
                made = self.fresh(value.shape[behind])
            dims += made
        return dims

    def _indexed(self) -> None:
        """What ids index that were chosen along an axis is that axis."""
        for value in self.values:
            if value.op not in ("routed", "embedding", "one_hot"):
                continue
            ids = value.args["ids"]
            while ids.op in ("view", "permute", "expand"):
                ids = ids.args["x"]
            table = {"routed": "w", "embedding": "table"}.get(value.op)
            own = self.dims[value.args[table]][0] if table is not None else self.dims[value][-1]
            if ids.op in ("top", "arg_max"):
                chosen = self.dims[ids.args["x"]][ids.args["dim"]]
                if prod(each.size for each in leaves(own)) == ids.args["x"].shape[ids.args["dim"]]:
                    self.unify(own, chosen, value)

    def _put_together(self) -> None:
        """One axis that is put together of parts of the same sizes has the same parts: of queries and keys those that
        are rotated, and the others.
        """
        known: dict[object, list[Dim]] = {}
        for value, pieces in self.pieces.items():
            axis, sizes = (
                leaves(self.dims[value][value.args["dim"]]),
                [x.shape[value.args["dim"]] for x in value.args["xs"]],
            )
            first = known.setdefault((*axis, *sizes), pieces)
            for one, other in zip(first, pieces, strict=True):
                self.unify(one, other, value)

    def _repeated_layers(self) -> None:
        """Parameters at the same place of modules that are numbered by a list have the same axes, and so have values of
        those that compute the same.
        """
        places: dict[object, list[list[Value]]] = {}
        calls: dict[str, dict[str, list[Value]]] = {}
        for value in self.values:
            if value.op in ("parameter", "part"):
                places.setdefault(place_of(value), []).append([value])
            elif value.place.calls and value.constant is None:
                path = value.place.calls[-1].path
                calls.setdefault(without_numbers(path), {}).setdefault(path, []).append(value)
        for name, each in calls.items():
            for values in each.values():
                values.sort(key=lambda value: value.position)
                same = tuple((value.op, value.shape) for value in values)
                places.setdefault((name, same), []).append(values)
        for first, *others in places.values():
            for other in others:
                for one, two in zip(first, other, strict=True):
                    for own, dim in zip(self.dims[one], self.dims[two], strict=True):
                        self.unify(own, dim, two)


def without_numbers(path: str) -> str:
    """A path of modules, whatever their numbers in lists."""
    return ".".join("#" if part.isdigit() else part for part in path.split("."))


def place_of(parameter: Value) -> tuple[object, ...]:
    """What parameters of repeated layers have in common: name but for numbers, and shape; of a part, which one."""
    name = without_numbers(parameter.source.args["names"][0])
    part = (parameter.args["dim"], parameter.args["start"]) if parameter.op == "part" else ()
    return (name, parameter.shape, part)
