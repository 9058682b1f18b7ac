"""Parts of a projection: slices of a product are products with parts of the weight, of which each has a name."""

from __future__ import annotations

from collections.abc import Sequence

from partita.importing.graph import Value, is_op, order, rewritten, users
from partita.importing.normal.products import einsum
from partita.importing.normal.views import viewed
from partita.importing.patterns.matching import applied


def split_projections(outputs: Sequence[Value]) -> list[Value]:
    """Replace slices of products along the dimension that only the weight has, where all readers are such slices."""
    values = order(outputs)
    readers = users(values)
    parts: dict[tuple[Value, int, int, int], Value] = {}

    def part(weight: Value, dim: int, start: int, size: int, number: int) -> Value:
        key = (weight, dim, start, size)
        if key not in parts:
            shape = (*weight.shape[:dim], size, *weight.shape[dim + 1 :])
            args = {"of": weight, "dim": dim, "start": start, "number": number}
            parts[key] = Value("part", args, shape, weight.dtype, weight.place, weight.position)
        return parts[key]

    def slices_of(value: Value) -> list[Value] | None:
        """The slices that are all that reads a value, through views that keep its last dimension."""
        found: list[Value] = []
        for reader in readers.get(value, []):
            if is_op(reader, "slice") and reader.args["dim"] == reader.rank - 1:
                found.append(reader)
            elif is_op(reader, "view") and reader.shape and reader.shape[-1] == value.shape[-1]:
                inner = slices_of(reader)
                if inner is None:
                    return None
                found += inner
            else:
                return None
        return found

    whole: dict[Value, list[int]] = {}
    for value in values:
        found = _projection(value)
        if found is not None:
            slices = slices_of(value)
            if slices is not None and len({each.args["start"] for each in slices}) > 1:
                whole[value] = sorted({each.args["start"] for each in slices})

    def rule(value: Value) -> Value | None:
        if not is_op(value, "slice") or value.args["dim"] != value.rank - 1:
            return None
        source = value.args["x"]
        while is_op(source, "view") and source.shape[-1] == source.args["x"].shape[-1]:
            source = source.args["x"]
        found = _projection(source)
        if source not in whole or found is None:
            return None
        product, bias = found
        start, size = value.args["start"], value.shape[-1]
        number = whole[source].index(start)
        x, weight = product.args["xs"]
        letters, out = product.args["letters"], product.args["out"]
        dim = letters[1].index(out[-1])
        made = einsum(value, letters, out, x, part(weight, dim, start, size, number))
        if bias is not None:
            made = value.make("pointwise", made.shape, function="add", xs=[made, part(bias, 0, start, size, number)])
        return viewed(value, made)

    return rewritten(outputs, [rule])


def _projection(value: Value) -> tuple[Value, Value | None] | None:
    """The product of a weight, whose output is last, and a bias that is added to it."""
    bias = None
    xs = applied(value, "add")
    if xs is not None:
        value, bias = xs
        if not is_op(bias, "parameter") or bias.rank != 1:
            return None
    if not is_op(value, "einsum") or len(value.args["xs"]) != 2 or not is_op(value.args["xs"][1], "parameter"):
        return None
    letter = value.args["out"][-1] if value.args["out"] else ""
    only = letter in value.args["letters"][1] and letter not in value.args["letters"][0]
    return (value, bias) if only else None
