"""Parts of a projection: slices of a product are products with parts of the weight, of which each has a name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from attrs import frozen

from partita.importing.graph import Value, is_op, order, rewritten, users
from partita.importing.normal.products import einsum
from partita.importing.normal.views import permuted, sliced, viewed
from partita.importing.patterns.matching import applied

SLICES = ("slice", "select")


def split_projections(outputs: Sequence[Value]) -> list[Value]:
    """Replace slices of products along the dimension that only the weight has, where all readers are such slices; of
    parts again, which several convolutions behind each other read.
    """
    outputs = rewritten(outputs, [_as_slice])
    before: list[Value] = []
    while len(before) != len(order(outputs)):
        before = order(outputs)
        outputs = _split(outputs)
    return outputs


@frozen
class Piece:
    """A slice along a dimension of a `source`: of each of `within` stretches, the elements from `start` on. `way`: the
    operations between, last first, each with the dimension that is sliced, and that of its operand.
    """

    source: Value
    dim: int
    within: int
    start: int
    size: int
    way: list[tuple[Value, int, int]]


def _split(outputs: list[Value]) -> list[Value]:
    values = order(outputs)
    readers = users(values)
    parts: dict[tuple[object, ...], Value] = {}

    def part(weight: Value, dim: int, piece: Piece, number: int) -> Value:
        key = (weight, dim, piece.start, piece.size)
        if key not in parts:
            shape = (*weight.shape[:dim], piece.within * piece.size, *weight.shape[dim + 1 :])
            first, own = (weight.args["start"], weight.args["number"]) if weight.op == "part" else (0, 0)
            args = {"of": weight.source, "dim": dim, "start": first + piece.start, "number": own + number}
            args["within"] = piece.within
            parts[key] = Value("part", args, shape, weight.dtype, weight.place, weight.position)
        return parts[key]

    def slices_of(value: Value, dim: int) -> list[Value] | None:
        """The slices along a dimension that are all that reads a value, through what `_piece` follows."""
        if value in outputs:
            return None
        found: list[Value] = []
        for reader in readers.get(value, []):
            if is_op(reader, *SLICES):
                inner = [reader] if reader.args["dim"] == dim else None
            else:
                ways = (i for i in range(reader.rank) if (_through(reader, i) or _split_of(reader, i)) == (value, dim))
                inner = next((made for i in ways if (made := slices_of(reader, i)) is not None), None)
            if inner is None:
                return None
            found += inner
        return found

    def pieces_of(value: Value, dim: int) -> list[int]:
        """Where the pieces begin that all that reads a value reads of it; none, if these are not all of it."""
        if _cut(value, dim) is None:
            return []
        pieces = [_piece(each) for each in slices_of(value, dim) or []]
        stretches = {(each.start, each.size, each.within) for each in pieces if each and each.source is value}
        if len({within for _, _, within in stretches}) != 1 or None in pieces:
            return []
        starts, sizes, (within, *_) = map(list, zip(*sorted(stretches), strict=True))
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        if len(starts) == 1 or (within > 1 and _cut(value, dim, "parameter") is None):
            return []
        return starts if [*starts, value.shape[dim] // within] == [0, *ends] else []

    whole = {(value, dim): pieces_of(value, dim) for value in values for dim in range(value.rank)}

    def rule(value: Value) -> Value | None:
        piece = _piece(value)
        starts = whole.get((piece.source, piece.dim)) if piece is not None else None
        cut = _cut(piece.source, piece.dim) if piece is not None and starts else None
        if piece is None or not starts or cut is None:
            return None
        number = starts.index(piece.start)
        made = cut(value, lambda weight, dim: part(weight, dim, piece, number))
        return viewed(value, _again(value, made, piece.way))

    return rewritten(outputs, [rule])


def _piece(value: Value) -> Piece | None:
    """What a slice is of a value that it is made of by views, permutations and elementwise functions."""
    if not is_op(value, *SLICES):
        return None
    x, dim = value.args["x"], value.args["dim"]
    one = value.op == "select"
    start, size = (value.args["index"], 1) if one else (value.args["start"], value.shape[dim])
    (source, own), way = _source(x, dim)
    found = _split_of(source, own)
    if found is None or value.args.get("follows"):
        return Piece(source, own, 1, start, size, way) if found is None else None
    within = math.prod(source.shape[:own]) // math.prod(found[0].shape[: found[1]])
    behind = found[0].shape[found[1]] // (within * source.shape[own])
    (inner, before), rest = _source(*found)
    return Piece(inner, before, within, start * behind, size * behind, [*way, (source, own, found[1]), *rest])


def _split_of(view: Value, dim: int) -> tuple[Value, int] | None:
    """What a view splits into several dimensions, of which this is one, and which dimension of that it is."""
    if not is_op(view, "view") or view.shape[dim] == 1:
        return None
    x, before = view.args["x"], math.prod(view.shape[:dim])
    ends = [math.prod(view.shape[:i]) for i in range(view.rank + 1)]
    for own in range(x.rank):
        first = math.prod(x.shape[:own])
        last = first * x.shape[own]
        if first in ends and last in ends and first <= before and before * view.shape[dim] <= last:
            return (x, own) if (first, last) != (before, before * view.shape[dim]) else None
    return None


def _through(value: Value, dim: int) -> tuple[Value, int] | None:
    """What a value makes of one operand, and which dimension of that a dimension is, where a part of the one is made of
    that part of the other: a view that keeps its last dimension, a permutation, an elementwise function.
    """
    x = value.args.get("x")
    if is_op(value, "view") and dim == value.rank - 1 and isinstance(x, Value) and x.shape[-1:] == value.shape[-1:]:
        return x, x.rank - 1
    if is_op(value, "permute") and isinstance(x, Value):
        return x, value.args["order"][dim]
    if is_op(value, "pointwise") and len(value.args["xs"]) == 1:
        return value.args["xs"][0], dim
    return None


def _source(value: Value, dim: int) -> tuple[tuple[Value, int], list[tuple[Value, int, int]]]:
    """What a value is made of by the operations that `_through` follows, with the dimension; and these, last first:
    each with its dimension, and that of its operand.
    """
    way = []
    while (before := _through(value, dim)) is not None:
        way.append((value, dim, before[1]))
        value, dim = before
    return (value, dim), way


def _again(value: Value, x: Value, way: Sequence[tuple[Value, int, int]]) -> Value:
    """A part, through the operations that the whole went through, at a value's place."""
    for step, dim, before in reversed(way):
        whole = step.args["xs"][0] if "xs" in step.args else step.args["x"]
        size = step.shape[dim] * x.shape[before] // whole.shape[before]
        own = {"xs": [x]} if "xs" in step.args else {"x": x}
        x = value.make(step.op, (*step.shape[:dim], size, *step.shape[dim + 1 :]), step.dtype, **{**step.args, **own})
    return x


def _as_slice(value: Value) -> Value | None:
    """Parts that a view of a projection counts, one of `reshape(batch, seq, 3, heads, key)`, are a slice of it."""
    if not is_op(value, "select", "slice") or value.args.get("follows"):
        return None
    x, dim = value.args["x"], value.args["dim"]
    one = value.op == "select"
    first, count = (value.args["index"], 1) if one else (value.args["start"], value.shape[dim])
    if is_op(x, "view") and _wide(x.shape) == _wide(x.args["x"].shape) and x.shape[dim] > 1:
        x, own = x.args["x"], len(_wide(x.shape[:dim]))
        own = [i for i, size in enumerate(x.shape) if size > 1][own]
        shape = (*x.shape[:own], *([] if one else [count]), *x.shape[own + 1 :])
        return viewed(value, value.make(value.op, shape, x.dtype, **{**value.args, "x": x, "dim": own}))
    order = x.args["order"] if is_op(x, "permute") else list(range(x.rank))
    view, counted = (x.args["x"] if is_op(x, "permute") else x), order[dim]
    if not is_op(view, "view") or view.shape[counted] == 1:
        return None
    source, before = view.args["x"], _wide(view.shape[:counted])
    at = next((i for i in range(source.rank) if _wide(source.shape[:i]) == before and source.shape[i] > 1), None)
    if at is None or source.shape[at] % view.shape[counted] or _cut(source, at) is None:
        return None
    size = source.shape[at] // view.shape[counted]
    part = sliced(value, source, at, first * size, count * size)
    rest = (*view.shape[:counted], *([] if one else [count]), *view.shape[counted + 1 :])
    order = [i - (one and i > counted) for i in order if not one or i != counted]
    return permuted(value, viewed(value, part, rest), order)


def _wide(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size > 1]


# Makes a product at a value's place, of parts of weights along a dimension.
Cutting: TypeAlias = Callable[[Value, Callable[[Value, int], Value]], Value]


def _cut(value: Value, dim: int, *weights: str) -> Cutting | None:
    """What makes a part of a value along a dimension that is one of weights: of a product, of experts, of a convolution
    of each channel, or of these with a bias. `weights` are these only, or parts already.
    """
    weights, xs = weights or ("parameter", "part"), applied(value, "add")
    if xs is not None and isinstance(xs[0], Value) and isinstance(xs[1], Value):
        product, bias = _cut(xs[0], dim, *weights), _bias(xs[1], xs[1].rank - (value.rank - dim))
        if product is None or bias is None:
            return None

        def added(place: Value, part: Callable[[Value, int], Value]) -> Value:
            made = product(place, part)
            return place.make("pointwise", made.shape, function="add", xs=[made, bias(place, part)])

        return added
    if is_op(value, "einsum") and len(value.args["xs"]) == 2:
        (x, whole), letters, out = value.args["xs"], value.args["letters"], value.args["out"]
        flat = is_op(whole, "view") and _wide(whole.shape) == _wide(whole.args["x"].shape)  # of a kernel of one place
        weight = whole.args["x"] if flat else whole
        if not is_op(weight, *weights) or not out or out[dim] not in letters[1] or out[dim] in letters[0]:
            return None
        at = letters[1].index(out[dim])
        own = at if not flat else [i for i, size in enumerate(weight.shape) if size > 1][len(_wide(whole.shape[:at]))]
        if weight.op == "part" and (weight.args["dim"] != own or weight.args["within"] > 1):
            return None

        def of_product(place: Value, part: Callable[[Value, int], Value]) -> Value:
            made = part(weight, own)
            shape = (*whole.shape[:at], made.shape[own], *whole.shape[at + 1 :])
            return einsum(place, letters, out, x, viewed(place, made, shape) if flat else made)

        return of_product if whole.shape[at] > 1 else None
    args = value.args
    if is_op(value, "routed") and is_op(args["w"], "parameter") and args["out"][dim] in args["letters"]:
        along = args["letters"].index(args["out"][dim])

        def chosen(place: Value, part: Callable[[Value, int], Value]) -> Value:
            weight = part(args["w"], along)
            return place.make("routed", (*value.shape[:-1], weight.shape[along]), **{**args, "w": weight})

        return chosen if dim == value.rank - 1 else None
    if is_op(value, "conv") and dim == 1 and args["groups"] == value.shape[1] and is_op(args["kernel"], "parameter"):
        source, way = _source(args["x"], 1)
        inner = _cut(*source, *weights)
        if inner is None or args["x"].shape[1] != value.shape[1]:
            return None

        def each(place: Value, part: Callable[[Value, int], Value]) -> Value:
            x, kernel = _again(place, inner(place, part), way), part(args["kernel"], 0)
            shape = (value.shape[0], x.shape[1], *value.shape[2:])
            return place.make("conv", shape, x.dtype, **{**args, "x": x, "kernel": kernel, "groups": x.shape[1]})

        return each
    return None


def _bias(bias: Value, dim: int) -> Cutting | None:
    """What makes a part of a bias, which may have further dimensions of size 1."""
    if (
        is_op(bias, "view")
        and is_op(bias.args["x"], "parameter", "part")
        and bias.args["x"].shape == (bias.shape[dim],)
    ):
        inner, shape = bias.args["x"], list(bias.shape)

        def shaped(place: Value, part: Callable[[Value, int], Value]) -> Value:
            own = part(inner, 0)
            return viewed(place, own, (*shape[:dim], own.shape[0], *shape[dim + 1 :]))

        return shaped
    if is_op(bias, "parameter", "part") and bias.rank == 1:
        return lambda place, part: part(bias, 0)
    if is_op(bias, "embedding") and is_op(bias.args["table"], "parameter") and bias.args["table"].rank == 2:

        def chosen(place: Value, part: Callable[[Value, int], Value]) -> Value:
            table = part(bias.args["table"], 1)
            return place.make("embedding", (*bias.shape[:-1], table.shape[1]), **{**bias.args, "table": table})

        return chosen
    return None
