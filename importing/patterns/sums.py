"""Sums of products, which are products: of what experts make with their weights, for instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from string import ascii_lowercase

from partita.importing.graph import Value, order, users
from partita.importing.normal.products import einsum
from partita.importing.normal.views import viewed
from partita.importing.patterns.matching import applied


def sums_of_products(outputs: Sequence[Value]) -> Callable[[Value], Value | None]:
    """The rule that a sum of a product of two values, which nothing else reads, is a product."""
    readers = users(order(outputs))

    def rule(value: Value) -> Value | None:
        if value.op != "reduce" or value.args["function"] != "sum":
            return None
        whole, dims = value.args["x"], value.args["dims"]
        made = whole.args["x"] if whole.op == "view" else whole
        xs = applied(made, "multiply")
        if xs is None or any(len(readers.get(each, ())) > 1 for each in (whole, made)) or xs[0] is xs[1]:
            return None
        if made is not whole:
            xs = [_split_alike(x, made, whole) for x in xs]
        named = [
            "".join(c for c, size in zip(ascii_lowercase[whole.rank - x.rank :], x.shape, strict=False) if size > 1)
            for x in xs
            if isinstance(x, Value) and x.is_float and x.constant is None
        ]
        summed = {ascii_lowercase[dim] for dim in dims}
        if len(named) != 2 or not all(summed <= {*letters} for letters in named):
            return None
        flat = [viewed(value, x, tuple(size for size in x.shape if size > 1)) for x in xs]
        wide = [letter for letter, size in zip(ascii_lowercase, whole.shape, strict=False) if size > 1]
        made = einsum(value, named, "".join(each for each in wide if each not in summed), *flat)
        return viewed(value, made, value.shape)

    return rule


def _split_alike(x: object, made: Value, view: Value) -> Value | None:
    """An operand of what a view splits into more dimensions, split as that is; None if it does more than split."""
    if not isinstance(x, Value) or x.rank != made.rank:
        return None
    shape: list[int] = []
    left = [*view.shape]
    for size, own in zip(made.shape, x.shape, strict=True):
        run = [left.pop(0)] if left else []
        while prod(run) < size and left:
            run.append(left.pop(0))
        if prod(run) != size:
            return None
        shape += [1 if own == 1 else each for each in run]
    return viewed(x, x, (*shape, *left))
