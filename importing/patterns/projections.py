"""Parts of a projection: slices of a product are products with parts of the weight, of which each has a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from partita.importing.graph import Value, is_op, order, rewritten, users
from partita.importing.normal.products import einsum
from partita.importing.normal.views import permuted, sliced, viewed
from partita.importing.patterns.matching import applied


def split_projections(outputs: Sequence[Value]) -> list[Value]:
    """Replace slices of products along the dimension that only the weight has, where all readers are such slices."""
    outputs = rewritten(outputs, [_as_slice])
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
        if _cut(value) is not None:
            slices = slices_of(value)
            if slices is not None and len({each.args["start"] for each in slices}) > 1:
                whole[value] = sorted({each.args["start"] for each in slices})

    def rule(value: Value) -> Value | None:
        if not is_op(value, "slice") or value.args["dim"] != value.rank - 1:
            return None
        source = value.args["x"]
        while is_op(source, "view") and source.shape[-1] == source.args["x"].shape[-1]:
            source = source.args["x"]
        cut = _cut(source)
        if source not in whole or cut is None:
            return None
        start, size = value.args["start"], value.shape[-1]
        number = whole[source].index(start)
        return viewed(value, cut(value, lambda weight, dim: part(weight, dim, start, size, number)))

    return rewritten(outputs, [rule])


def _as_slice(value: Value) -> Value | None:
    """One of the parts that a view of a projection counts, `reshape(batch, seq, 3, heads, key)`, is a slice of it."""
    if not is_op(value, "select"):
        return None
    x, dim = value.args["x"], value.args["dim"]
    order = x.args["order"] if is_op(x, "permute") else list(range(x.rank))
    view, counted = (x.args["x"] if is_op(x, "permute") else x), order[dim]
    if not is_op(view, "view"):
        return None
    source = view.args["x"]
    last = source.rank - 1
    if counted != last or view.shape[:last] != source.shape[:-1] or _cut(source) is None:
        return None
    size = source.shape[-1] // view.shape[last]
    part = sliced(value, source, last, value.args["index"] * size, size)
    rest = viewed(value, part, (*view.shape[:last], *view.shape[last + 1 :]))
    return permuted(value, rest, [i - (i > counted) for i in order if i != counted])


# Makes a product at a value's place, of parts of weights along a dimension.
Cutting: TypeAlias = Callable[[Value, Callable[[Value, int], Value]], Value]


def _cut(value: Value) -> Cutting | None:
    """What makes a part of a projection, whose output is last: of a product, of experts, or of these with a bias."""
    xs = applied(value, "add")
    if xs is not None and isinstance(xs[0], Value):
        product, bias = _cut(xs[0]), _bias(xs[1])
        if product is None or bias is None:
            return None

        def added(place: Value, part: Callable[[Value, int], Value]) -> Value:
            made = product(place, part)
            return place.make("pointwise", made.shape, function="add", xs=[made, bias(place, part)])

        return added
    if is_op(value, "einsum") and len(value.args["xs"]) == 2 and is_op(value.args["xs"][1], "parameter"):
        (x, weight), letters, out = value.args["xs"], value.args["letters"], value.args["out"]
        if not out or out[-1] not in letters[1] or out[-1] in letters[0]:
            return None
        return lambda place, part: einsum(place, letters, out, x, part(weight, letters[1].index(out[-1])))
    if (
        is_op(value, "routed")
        and is_op(value.args["w"], "parameter")
        and value.args["out"][-1] in value.args["letters"]
    ):
        args = value.args
        dim = args["letters"].index(args["out"][-1])

        def chosen(place: Value, part: Callable[[Value, int], Value]) -> Value:
            weight = part(args["w"], dim)
            return place.make("routed", (*value.shape[:-1], weight.shape[dim]), **{**args, "w": weight})

        return chosen
    return None


def _bias(bias: Any) -> Cutting | None:
    if is_op(bias, "parameter") and bias.rank == 1:
        return lambda place, part: part(bias, 0)
    if is_op(bias, "embedding") and is_op(bias.args["table"], "parameter") and bias.args["table"].rank == 2:

        def chosen(place: Value, part: Callable[[Value, int], Value]) -> Value:
            table = part(bias.args["table"], 1)
            return place.make("embedding", (*bias.shape[:-1], table.shape[1]), **{**bias.args, "table": table})

        return chosen
    return None
