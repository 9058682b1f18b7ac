"""Norms, embeddings, attention, convolutions and losses."""

from __future__ import annotations

from functools import partial
from math import exp, prod
from string import ascii_lowercase
from typing import Any

import torch
from torch.nn import functional

from partita.importing.graph import Value, number
from partita.importing.normal.arguments import Arguments, aten, several
from partita.importing.normal.pointwise import broadcasted, pointwise
from partita.importing.normal.products import einsum
from partita.importing.normal.reductions import reduced
from partita.importing.normal.views import broadcast, expanded, permuted, repeated, selected, sliced, viewed
from partita.importing.writing.tree import base


@aten("layer_norm.default", "rms_norm.default")
def _norm(value: Value, a: Arguments) -> Value:
    function, x = value.op.partition(".")[0], a["input"]
    a.ignored("cudnn_enable")
    dims = list(range(x.rank - len(a["normalized_shape"]), x.rank))
    eps = a["eps"]
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    shift = a["bias"] if function == "layer_norm" else None
    return value.make("norm", function=function, x=x, dims=dims, scale=a["weight"], shift=shift, eps=eps)


@aten("group_norm.default", "instance_norm.default")
def _group_norm(value: Value, a: Arguments) -> Value:
    a.ignored("cudnn_enabled")
    x, scale, shift = a["input"], a["weight"], a["bias"]
    groups = int(a["num_groups"]) if value.op.startswith("group") else x.shape[1]
    if value.op.startswith("instance"):
        a.ignored("momentum")
        if a["running_mean"] is not None or not a["use_input_stats"]:
            raise value.refuse("running statistics of an instance norm")
    return value.make("group_norm", x=x, groups=groups, scale=scale, shift=shift, eps=float(a["eps"]))


@several("_native_batch_norm_legit_no_training.default")
def _kept_norm(value: Value, a: Arguments, index: int) -> Value:
    """A batch norm of evaluation, by what it has kept."""
    x, scale, shift, mean, variance = (a[name] for name in ("input", "weight", "bias", "running_mean", "running_var"))
    a.ignored("momentum")
    if index:
        raise value.refuse("the statistics of a norm")

    def by_channel(vector: Value) -> Value:
        return viewed(vector, vector, (*vector.shape, *(1,) * (x.rank - 2)))

    of = partial(broadcasted, value)
    rate = of("rsqrt", of("add", by_channel(variance), float(a["eps"])))
    made = of("multiply", of("subtract", x, by_channel(mean)), rate)
    made = made if scale is None else of("multiply", made, by_channel(scale))
    return made if shift is None else of("add", made, by_channel(shift))


@aten("embedding.default")
def _embedding(value: Value, a: Arguments) -> Value:
    a.ignored("scale_grad_by_freq") if not a["scale_grad_by_freq"] else None
    padding, table, ids = int(a["padding_idx"]), a["weight"], a["indices"]
    if table.shape[0] == 1 and padding < 0:
        return expanded(value, viewed(value, table, (*[1] * ids.rank, *table.shape[1:])), value.shape)
    return value.make("embedding", table=table, ids=ids, padding=padding if padding >= 0 else None)


@aten("index.Tensor", "index_select.default")
def _index(value: Value, a: Arguments) -> Value:
    x = a["self"]
    ids = a["indices"] if value.op == "index.Tensor" else [None] * a.dim() + [a["index"]]
    used = [each for each in ids if each is not None]
    if any(each.dtype == torch.bool for each in used):
        raise value.refuse("an index of booleans: sizes depend on data")
    if len(used) > 1:
        return _several(value, x, ids)
    dim, (index,) = ids.index(used[0]), used
    single = number(index)
    if single is not None:
        chosen = selected(value, x, dim, int(single))
        shape = (*x.shape[:dim], *(1 for _ in index.shape), *x.shape[dim + 1 :])
        return expanded(value, viewed(value, chosen, shape), value.shape)
    if dim == 0:
        return value.make("embedding", table=x, ids=index, padding=None)
    return value.make("take", x=x, ids=index, dim=dim)


def _several(value: Value, x: Value, ids: list[Value | None]) -> Value:
    """An index of several tensors, of which all but one are positions along dimensions of the result."""
    count = len(ids)
    if any(each is None for each in ids):
        return _merged(value, x, ids)
    out = value.shape[: value.rank - (x.rank - count)]
    along: dict[int, int] = {}  # dimension of x → that of the result whose positions it has
    for dim, each in enumerate(ids):
        position = _positions(each, len(out), x.shape[dim])
        if position is not None and position not in along.values():
            along[dim] = position
    free = [dim for dim in range(count) if dim not in along]
    if len(free) > 1:
        return _merged(value, x, ids)
    ordered = sorted(along, key=along.__getitem__)
    moved = permuted(value, x, [*ordered, *free, *range(count, x.rank)])
    spread = [1] * len(out)
    for dim, position in along.items():
        spread[position] = x.shape[dim]
    rest = x.shape[count:]
    if not free:
        return expanded(value, viewed(value, moved, (*spread, *rest)), value.shape)
    index = ids[free[0]]
    assert isinstance(index, Value)
    place = len(out)
    moved = viewed(value, moved, (*spread, x.shape[free[0]], *rest))
    index = viewed(index, index, (*(1,) * (len(out) - index.rank), *index.shape, 1, *(1 for _ in rest)))
    return viewed(value, value.make("pick", (*out, 1, *rest), x=moved, ids=index, dim=place))


def _merged(value: Value, x: Value, ids: list[Value | None]) -> Value:
    """An index of several tensors, as one of the dimensions that they index, merged."""
    dims, index, flat = _flat_index(value, x, ids)
    if dims[0] == 0:
        return value.make("embedding", table=flat, ids=index, padding=None)
    return value.make("take", x=flat, ids=index, dim=dims[0])


def _flat_index(value: Value, x: Value, ids: list[Value | None]) -> tuple[list[int], Value, Value]:
    """The dimensions that are indexed, one index of them merged, and x with these merged."""
    used = [(dim, each) for dim, each in enumerate(ids) if each is not None]
    dims = [dim for dim, _ in used]
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise value.refuse("an index of tensors with whole dimensions between them")
    index = used[0][1]
    for dim, own in used[1:]:
        shape = broadcast(index.shape, own.shape)
        if index.constant is not None and own.constant is not None:
            index = value.make_constant(index.constant * x.shape[dim] + own.constant)
        else:
            wider = value.make("pointwise", index.shape, torch.int64, function="multiply", xs=[index, x.shape[dim]])
            index = value.make("pointwise", shape, torch.int64, function="add", xs=[wider, own])
    count = prod(x.shape[dims[0] : dims[-1] + 1])
    flat = viewed(value, x, (*x.shape[: dims[0]], count, *x.shape[dims[-1] + 1 :]))
    return dims, index, flat


@aten("searchsorted.Tensor", "bucketize.Tensor")
def _searched(value: Value, a: Arguments) -> Value:
    """How many of the numbers of a sorted list are below others, or not above them."""
    bounds, x = (
        a[name] for name in (("sorted_sequence", "self") if "sorted_sequence" in value.args else ("boundaries", "self"))
    )
    right = bool(a["right"]) or a["side"] == "right"
    a.ignored("out_int32", "side")
    one = viewed(value, x, (*x.shape, 1))
    every = viewed(value, bounds, (*bounds.shape[:-1], 1, bounds.shape[-1])) if bounds.rank > 1 else bounds
    shape = (*x.shape, bounds.shape[-1])
    before = value.make("pointwise", shape, torch.bool, function="less_equal" if right else "less", xs=[every, one])
    return reduced(value, "sum", value.make("cast", shape, torch.int64, x=before), [len(shape) - 1], False)


@aten("index_put.default", "index_put_.default")
def _index_put(value: Value, a: Arguments) -> Value:
    """What booleans say, or ids at the places that they index, is written or added."""
    x, ids, new, added = a["self"], list(a["indices"]), a["values"], bool(a["accumulate"])
    if len(ids) == 1 and ids[0].dtype == torch.bool:
        rest = x.rank - ids[0].rank
        if added or (new.rank > rest and new.shape[0] != 1):  # one of each place that is written
            raise value.refuse("an index of booleans: sizes depend on data")
        mask = viewed(value, ids[0], (*ids[0].shape, *(1,) * rest))
        each = number(new) if number(new) is not None else viewed(value, new, new.shape[max(0, new.rank - rest) :])
        return pointwise(value, "where", mask, each, x)
    if any(each is not None and each.dtype == torch.bool for each in ids):
        raise value.refuse("an index of booleans: sizes depend on data")
    dims, index, flat = _flat_index(value, x, ids)
    if dims[0]:
        raise value.refuse("writing at ids of dimensions that are not the first")
    count, rest = flat.shape[0], flat.shape[1:]
    index = viewed(value, index, (prod(index.shape),))
    fill = number(new)
    if fill is not None and added:
        raise value.refuse("adding a number at ids")
    if fill is None:
        wide = expanded(new, new, (*ids[0].shape, *rest))
        source = viewed(value, wide, (index.shape[0], *rest))
        new = value.make("sum_by", flat.shape, x=source, ids=index, dim=0)
    if added:
        return viewed(value, pointwise(flat, "add", flat, new))
    hot = value.make("one_hot", (index.shape[0], count), torch.float32, ids=index)
    there = viewed(value, reduced(value, "max", hot, [0], False), (count, *(1,) * len(rest)))
    return viewed(value, _written(flat, there, new if fill is None else fill, flat))


@aten("diagonal.default", "diag.default")
def _diagonal(value: Value, a: Arguments) -> Value:
    """Of a square matrix: sums of its rows, where all else is zero; or a matrix that has a vector there."""
    x = a["self"]
    if x.rank == 1 and not a["diagonal"]:
        eye = value.make_constant(torch.eye(x.shape[0], dtype=torch.bool))
        return pointwise(value, "where", eye, x, 0)
    offset = int(a["offset" if "offset" in value.defaults else "diagonal"])
    one, two = (a.dim("dim1"), a.dim("dim2")) if "dim1" in value.defaults else (0, 1)
    if offset or x.rank < 2 or x.shape[one] != x.shape[two]:
        raise value.refuse("a diagonal that is not the main one of a square matrix")
    shape = tuple(size if i in (one, two) else 1 for i, size in enumerate(x.shape))
    eye = value.make_constant(torch.eye(x.shape[one], dtype=torch.bool).view(shape))
    kept = x.make("pointwise", x.shape, function="where", xs=[eye, x, 0])
    summed = reduced(value, "sum", kept, [two], False)
    moved = one - (two < one)
    return permuted(value, summed, [*(i for i in range(summed.rank) if i != moved), moved])


@aten("diagonal_scatter.default")
def _diagonal_scatter(value: Value, a: Arguments) -> Value:
    """A square matrix with other elements on its main diagonal: where a view of that is changed."""
    x, new = a["self"], a["src"]
    if a["offset"] or x.rank != 2 or x.shape[0] != x.shape[1]:
        raise value.refuse("a diagonal that is not the main one of a square matrix")
    eye = value.make_constant(torch.eye(x.shape[0], dtype=torch.bool))
    return pointwise(value, "where", eye, viewed(new, new, (new.shape[0], 1)), x)


def _positions(index: Value | None, rank: int, size: int) -> int | None:
    """The dimension of the result along which an index counts all positions of a dimension."""
    if index is None or index.constant is None:
        return None
    long = [i for i, each in enumerate(index.shape) if each > 1]
    if len(long) != 1 or not torch.equal(index.constant.flatten(), torch.arange(size)):
        return None
    return long[0] + rank - index.rank


@aten("gather.default")
def _gather(value: Value, a: Arguments) -> Value:
    a.ignored("sparse_grad")
    x, ids, dim = a["self"], a["index"], a.dim()
    uniform = number(x)
    if uniform is not None:
        return value.make_constant(torch.full(value.shape, uniform, dtype=value.dtype))
    return value.make("pick", x=x, ids=ids, dim=dim)


@aten("scatter.value", "scatter.src", "scatter_add.default", "index_add.default", "scatter.value_reduce")
@aten("scatter.reduce")
def _scatter(value: Value, a: Arguments) -> Value:
    """What ids say is written, or added, at the places that they say along a dimension."""
    x, ids, dim = a["self"], a["index"], a.dim()
    name, _, overload = value.op.partition(".")
    source = a["source" if name == "index_add" else "value" if overload.startswith("value") else "src"]
    added = name != "scatter" or (overload.endswith("reduce") and a["reduce"] == "add")
    if name == "index_add":
        if a["alpha"] not in (None, 1):
            source = pointwise(source, "multiply", source, a["alpha"])
        return _plus(value, x, value.make("sum_by", x=source, ids=ids, dim=dim))
    if isinstance(source, Value) and source.shape != ids.shape:
        for i, size in enumerate(ids.shape):
            source = sliced(value, source, i, 0, size)
    whole = all(size in (1, value.shape[i]) for i, size in enumerate(ids.shape) if i != dim)
    if not whole or (overload.endswith("reduce") and not added):
        raise value.refuse("`scatter` into a part of other dimensions, or with another reduction than a sum")
    along = _along_one(ids, dim)
    if added and along is not None and isinstance(source, Value):
        return _plus(value, x, value.make("sum_by", x=source, ids=along, dim=dim))
    hot = value.make("one_hot", (*ids.shape, value.shape[dim]), torch.float32, ids=ids)
    order = [*range(dim), value.rank - 1, *range(dim, value.rank - 1)]
    fill = number(source)

    def of_each(function: str, each: Value) -> Value:
        return permuted(value, reduced(value, function, each, [dim], False), order)

    if isinstance(source, bool):
        there = pointwise(value, "greater", of_each("max", hot), 0)
        flags = there if source else pointwise(value, "not", there)
        other = x.constant is not None and not bool((x.constant == source).any())
        return flags if other else pointwise(value, "or" if source else "and", x, flags)
    if fill is None:
        wide = viewed(value, source, (*source.shape, 1))
        new = of_each("sum", value.make("pointwise", hot.shape, torch.float32, function="multiply", xs=[hot, wide]))
        return _plus(value, x, new) if added else _written(value, of_each("max", hot), new, x)
    if added or number(x) == 0:
        there = of_each("sum" if added else "max", hot)
        return _plus(value, x, there if fill == 1 else pointwise(value, "multiply", there, fill))
    return _written(value, of_each("max", hot), fill, x)


@aten("scatter_reduce.two")
def _scatter_reduce(value: Value, a: Arguments) -> Value:
    """The sum, the mean or the extreme of what ids bring together along a dimension, perhaps with what was there."""
    x, source, dim, how, with_self = a["self"], a["src"], a.dim(), a["reduce"], bool(a["include_self"])
    for i, size in enumerate(a["index"].shape):
        source = sliced(value, source, i, 0, size)
    ids = _along_one(a["index"], dim)
    whole = all(size == value.shape[i] for i, size in enumerate(source.shape) if i != dim)
    if ids is None or not whole or how == "prod" or not value.is_float:
        raise value.refuse("`scatter_reduce` by ids that differ along others, or a product")
    if how == "amin":
        source, x = (pointwise(each, "negate", each) for each in (source, x))

    def by_ids(function: str, each: Value) -> Value:
        shape = tuple(value.shape[dim] if i == dim else size for i, size in enumerate(each.shape))
        return value.make("sum_by", shape, x=each, ids=ids, dim=dim, function=function)

    ones = value.make_constant(torch.ones([size if i == dim else 1 for i, size in enumerate(source.shape)]))
    count = by_ids("sum_by", ones)
    there = count.make("pointwise", count.shape, torch.bool, function="greater", xs=[count, 0])
    if how in ("sum", "mean"):
        made = by_ids("sum_by", source)
        made = pointwise(value, "add", x, made) if with_self else made
        if how == "mean":
            over = pointwise(count, "add", count, 1) if with_self else pointwise(count, "maximum", count, 1)
            made = pointwise(value, "divide", made, over)
        return made if with_self else pointwise(value, "where", there, made, x)
    made = by_ids("max_by", source)
    if with_self and number(x) != float("-inf"):
        made = pointwise(value, "maximum", made, x)
    made = pointwise(value, "where", there, made, x)
    return pointwise(value, "negate", made) if how == "amin" else made


def _written(value: Value, there: Value, new: Value | float, x: Value) -> Value:
    """What is new where ids were found, and what was there elsewhere."""
    flags = there.make("pointwise", there.shape, torch.bool, function="greater", xs=[there, 0])
    if isinstance(new, Value) and not value.is_float:  # sums are of floats
        new = value.make("cast", new.shape, value.dtype, x=new)
    return pointwise(value, "where", flags, new, x)


def _plus(value: Value, x: Value, added: Value) -> Value:
    return added if number(x) == 0 else pointwise(value, "add", x, added)


def _along_one(ids: Value, dim: int) -> Value | None:
    """Ids that are the same along all dimensions but one, as of that alone."""
    while ids.op == "expand" and ids.args["x"].rank == ids.rank:
        ids = ids.args["x"]
    if any(size != 1 for i, size in enumerate(ids.shape) if i != dim):
        return None
    return viewed(ids, ids, (ids.shape[dim],))


@aten("slice_scatter.default")
def _slice_scatter(value: Value, a: Arguments) -> Value:
    """A dimension of which a part is replaced, or every so many of its elements: one of the second dimension that it
    splits into.
    """
    x, part, dim, step = a["self"], a["src"], a.dim(), int(a["step"])
    a.ignored("end")
    size = x.shape[dim]
    start = a["start"] or 0
    start = start + size if start < 0 else start
    if step == 1:
        return _with_part(value, x, part, dim, start)
    if size % step or start >= step or part.shape[dim] != size // step:
        raise value.refuse(f"writing every {step} elements from {start} on, of {size}")
    x = viewed(value, x, (*x.shape[:dim], size // step, step, *x.shape[dim + 1 :]))
    part = viewed(value, part, (*part.shape[: dim + 1], 1, *part.shape[dim + 1 :]))
    return viewed(value, _with_part(x, x, part, dim + 1, start))


def _with_part(value: Value, x: Value, part: Value, dim: int, start: int) -> Value:
    """What is before, the part, and what is behind."""
    end = start + part.shape[dim]
    before = sliced(value, x, dim, 0, start) if start else None
    behind = sliced(value, x, dim, end, x.shape[dim] - end) if end < x.shape[dim] else None
    parts = [each for each in (before, part, behind) if each is not None]
    return part if len(parts) == 1 else value.make("concat", xs=parts, dim=dim)


@aten("copy.default")
def _copy(value: Value, a: Arguments) -> Value:
    a.ignored("self")
    x: Value = a["src"]
    return expanded(value, x, value.shape)


@aten("new_empty.default", "empty_like.default")
def _empty(value: Value, a: Arguments) -> Value:
    """Elements that something else writes."""
    a.ignored("self", "size", "dtype")
    return value.make_constant(torch.zeros(value.shape, dtype=value.dtype))


@aten("one_hot.default")
def _one_hot(value: Value, a: Arguments) -> Value:
    a.ignored("num_classes")
    return value.make("one_hot", ids=a["self"])


@aten("scaled_dot_product_attention.default")
def _attention(value: Value, a: Arguments) -> Value:
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    boolean = isinstance(mask, Value) and mask.dtype == torch.bool
    scale, usual = a["scale"], q.shape[-1] ** -0.5
    options: dict[str, Any] = {
        "mask": mask if boolean else None,
        "bias": None if boolean else mask,
        "causal": bool(a["is_causal"]),
        "window": None,
        "softcap": None,
        "sink": None,
        "scale": None if scale is None or abs(scale - usual) < 1e-9 else float(scale),
        "dropout": float(a["dropout_p"]),
    }
    if a["enable_gqa"]:
        k, v = (repeated(each, each, each.rank - 3, q.shape[-3] // each.shape[-3]) for each in (k, v))
    return value.make("attend", q=q, k=k, v=v, **options)


@aten(*(f"conv{dims}d.{overload}" for dims in (1, 2, 3) for overload in ("default", "padding")))
def _conv(value: Value, a: Arguments) -> Value:
    x, kernel, bias, padding = a["input"], a["weight"], a["bias"], a["padding"]
    stride, dilation, groups = a["stride"], a["dilation"], int(a["groups"])
    if isinstance(padding, str):
        spans = [d * (size - 1) if padding == "same" else 0 for d, size in zip(dilation, kernel.shape[2:], strict=True)]
        around = [(span // 2, span - span // 2) for span in spans]
    else:
        around = [(each, each) for each in padding]
    one = kernel.shape[2:] == (1,) * (x.rank - 2) and set(stride) == {1} and not any(map(any, around))
    if one and groups == 1:
        names = "abcdefg"[: x.rank]
        flat = viewed(kernel, kernel, kernel.shape[:2])
        made = einsum(value, [names, "zb"], f"az{names[2:]}", x, flat)
    else:
        options = {"stride": stride, "padding": around, "dilation": dilation, "groups": groups}
        made = value.make("conv", x=x, kernel=kernel, **options)
    if bias is None:
        return made
    return pointwise(value, "add", made, viewed(bias, bias, (1, bias.shape[0], *(1,) * (x.rank - 2))))


@aten("conv_transpose2d.input", "conv_transpose1d.default")
def _conv_transpose(value: Value, a: Arguments) -> Value:
    """A convolution of the image with zeros between its places, by the kernel turned around."""
    x, kernel, bias = a["input"], a["weight"], a["bias"]
    stride, padding, dilation = (list(a[name]) for name in ("stride", "padding", "dilation"))
    more = list(a["output_padding"])
    count = x.rank - 2
    if int(a["groups"]) != 1 or any(each != 1 for each in dilation):
        raise value.refuse("a transposed convolution in groups, or with holes")
    sizes = kernel.shape[2:]
    if list(sizes) == stride and not any(padding) and not any(more):
        made = _unfolded(value, x, kernel)
    else:
        for i, step in enumerate(stride):
            x = _spread(value, x, 2 + i, step)
        turned = permuted(kernel, kernel, [1, 0, *range(2, kernel.rank)])
        for dim in range(2, kernel.rank):
            turned = kernel.make("along", turned.shape, function="flip", x=turned, dim=dim)
        around = [size - 1 - each for size, each in zip(sizes, padding, strict=True)]
        if any(each < 0 for each in around):
            raise value.refuse("a transposed convolution that cuts off more than its kernel")
        wide = [size + 2 * pad - own + 1 for size, pad, own in zip(x.shape[2:], around, sizes, strict=True)]
        options = {
            "stride": [1] * count,
            "padding": [(each, each) for each in around],
            "dilation": dilation,
            "groups": 1,
        }
        made = value.make("conv", (*value.shape[:2], *wide), x=x, kernel=turned, **options)
        for i in range(count):
            made = sliced(value, made, 2 + i, 0, value.shape[2 + i])
    if bias is None:
        return made
    return pointwise(value, "add", made, viewed(bias, bias, (1, bias.shape[0], *(1,) * count)))


def _unfolded(value: Value, x: Value, kernel: Value) -> Value:
    """A transposed convolution whose windows do not overlap: a product for each place of the kernel."""
    count = x.rank - 2
    places, window = "pqr"[:count], "stu"[:count]
    out = "bo" + "".join(p + w for p, w in zip(places, window, strict=True))
    return viewed(value, einsum(value, [f"bi{places}", f"io{window}"], out, x, kernel))


def _spread(value: Value, x: Value, dim: int, step: int) -> Value:
    """A dimension with zeros behind each element."""
    if step == 1:
        return x
    apart = viewed(value, x, (*x.shape[: dim + 1], 1, *x.shape[dim + 1 :]))
    zeros = value.make_constant(torch.zeros(*x.shape[: dim + 1], step - 1, *x.shape[dim + 1 :], dtype=x.dtype))
    shape = (*x.shape[: dim + 1], step, *x.shape[dim + 1 :])
    spread = value.make("concat", shape, x.dtype, xs=[apart, zeros], dim=dim + 1)
    return viewed(value, spread, (*x.shape[:dim], x.shape[dim] * step, *x.shape[dim + 1 :]))


@aten("pixel_shuffle.default")
def _pixel_shuffle(value: Value, a: Arguments) -> Value:
    x, factor = a["self"], int(a["upscale_factor"])
    batch, channels, height, width = x.shape
    split = viewed(value, x, (batch, channels // factor**2, factor, factor, height, width))
    return viewed(value, permuted(value, split, [0, 1, 4, 2, 5, 3]))


@several("max_pool3d_with_indices.default", "max_pool2d_with_indices.default")
def _max_pool(value: Value, a: Arguments, index: int) -> Value:
    if index:
        raise value.refuse("where the largest of a window is")
    return _pool(value, a)


@aten("max_pool2d.default", "avg_pool2d.default", "max_pool1d.default", "avg_pool1d.default", "avg_pool3d.default")
def _pool(value: Value, a: Arguments) -> Value:
    x: Value = a["self"]
    size, mean = list(a["kernel_size"]), value.op.startswith("avg")
    count = len(size)
    stride, padding, dilation = list(a["stride"] or size), list(a["padding"]) or [0] * count, a["dilation"] or 1
    stride, padding = (each * count if len(each) == 1 else each for each in (stride, padding))
    holes = [dilation] * count if isinstance(dilation, int) else list(dilation) * (count // len(dilation))
    padded = bool(a["count_include_pad"]) if "count_include_pad" in value.defaults else True
    a.ignored("ceil_mode", "count_include_pad")
    wide = [i for i in range(count) if (size[i], stride[i]) != (1, 1)]  # others are each place alone
    if not wide:
        return x
    if len(wide) < count:
        size, stride, padding, holes = ([each[i] for i in wide] for each in (size, stride, padding, holes))
        behind = [value.rank - count + i for i in wide]
        order = [*(dim for dim in range(value.rank) if dim not in behind), *behind]
        moved = value.make("permute", [value.shape[dim] for dim in order], x=x, order=order)
        made = _windows(moved, permuted(value, x, order), mean, padded, size, stride, padding, holes)
        return permuted(value, made, [order.index(dim) for dim in range(value.rank)])
    return _windows(value, x, mean, padded, size, stride, padding, holes)


def _windows(
    value: Value,
    x: Value,
    mean: bool,
    padded: bool,
    size: list[int],
    stride: list[int],
    padding: list[int],
    holes: list[int],
) -> Value:
    """The means or the largest of windows over the last dimensions, as many as `value` has places there."""
    count = len(size)
    around = []  # behind it may be more, where windows begin that are not whole
    for own, made, wide, step, pad, hole in zip(
        x.shape[-count:], value.shape[-count:], size, stride, padding, holes, strict=True
    ):
        around.append((pad, max(pad, (made - 1) * step + hole * (wide - 1) + 1 - own - pad)))
    windows = value.make(
        "patches",
        (*value.shape, *size),
        x=x,
        size=size,
        stride=stride,
        padding=around,
        dilation=holes,
        fill=0.0 if mean else -1e30,
    )
    made = reduced(value, "mean" if mean else "max", windows, list(range(value.rank, windows.rank)), False)
    if not mean:
        return made
    for i in range(count):  # an average is of as many as count: what is padded may, and what is behind that does not
        first, last = (-padding[i], x.shape[i - count] + padding[i]) if padded else (0, x.shape[i - count])
        begins = [place * stride[i] - padding[i] for place in range(value.shape[i - count])]
        counted = [min(begin + size[i], last) - max(begin, first) for begin in begins]
        if any(each != size[i] for each in counted):
            shape = [1] * value.rank
            shape[i - count] = len(counted)
            factors = torch.tensor([size[i] / each for each in counted], dtype=torch.float64)
            made = pointwise(value, "multiply", made, value.make_constant(factors.view(shape)))
    return made


@several("adaptive_max_pool2d.default", "adaptive_max_pool1d.default")
def _adaptive_max(value: Value, a: Arguments, index: int) -> Value:
    if index:
        raise value.refuse("where the largest of a window is")
    return _adapted(value, a, "max")


@aten("adaptive_avg_pool2d.default", "adaptive_avg_pool1d.default", "_adaptive_avg_pool2d.default")
@aten("adaptive_avg_pool3d.default", "_adaptive_avg_pool3d.default")
def _adaptive_mean(value: Value, a: Arguments) -> Value:
    return _adapted(value, a, "mean")


def _adapted(value: Value, a: Arguments, function: str) -> Value:
    x: Value = a["self"]
    size = list(a["output_size"])
    first = x.rank - len(size)
    if all(each == 1 for each in size):
        return reduced(value, function, x, list(range(first, x.rank)), True)
    if any(whole % part for whole, part in zip(x.shape[first:], size, strict=True)):
        for dim, part in enumerate(size, first):
            x = _of_windows(value, x, dim, part, function)
        return x
    split: list[int] = [*x.shape[:first]]
    dims = []
    for whole, part in zip(x.shape[first:], size, strict=True):
        split += [part, whole // part]
        dims.append(len(split) - 1)
    return reduced(value, function, viewed(value, x, tuple(split)), dims, False)


def _of_windows(value: Value, x: Value, dim: int, count: int, function: str) -> Value:
    """The mean or the largest of each of so many windows, which overlap where they do not divide a dimension: a
    product, or of as many elements as the longest has, the last again and again.
    """
    size = x.shape[dim]
    begins, ends = ([i * size // count for i in range(count)], [-(-(i + 1) * size // count) for i in range(count)])
    if function == "mean":
        table = torch.zeros(size, count, dtype=torch.float64)
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            table[begin:end, i] = 1 / (end - begin)
        return along_table(value, x, dim, value.make_constant(table))
    longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
    places = [min(begin + i, end - 1) for begin, end in zip(begins, ends, strict=True) for i in range(longest)]
    shape = [*x.shape[:dim], len(places), *x.shape[dim + 1 :]]
    taken = value.make("take", shape, x.dtype, x=x, dim=dim, ids=value.make_constant(torch.tensor(places)))
    windows = viewed(value, taken, (*x.shape[:dim], count, longest, *x.shape[dim + 1 :]))
    return reduced(value, "max", windows, [dim + 1], False)


def along_table(value: Value, x: Value, dim: int, table: Value) -> Value:
    """The product of a dimension and a table [of its size, of another]."""
    names = ascii_lowercase[: x.rank]
    return einsum(value, [names, f"{names[dim]}z"], names.replace(names[dim], "z"), x, table)


@aten("upsample_nearest2d.vec", "upsample_nearest2d.default", "upsample_nearest1d.vec")
def _upsample(value: Value, a: Arguments) -> Value:
    a.ignored("output_size", "scale_factors", "scales_h", "scales_w")
    x = a["input" if "input" in value.args else "self"]
    split, one = list(x.shape[:2]), list(x.shape[:2])
    for dim, (size, larger) in enumerate(zip(x.shape[2:], value.shape[2:], strict=True), 2):
        if larger % size:
            places = torch.arange(larger) * size // larger
            x = value.make(
                "take",
                (*x.shape[:dim], larger, *x.shape[dim + 1 :]),
                x.dtype,
                x=x,
                dim=dim,
                ids=value.make_constant(places),
            )
            size = larger
        split += [size, larger // size]
        one += [size, 1]
    repeated = value.make("expand", split, x.dtype, x=viewed(value, x, tuple(one)))
    made = value.make("enlarge", value.shape, x.dtype, x=repeated)
    made.constant = value.constant
    return made


@aten("upsample_bilinear2d.vec", "upsample_bilinear2d.default", "upsample_linear1d.vec", "upsample_bicubic2d.vec")
@aten("upsample_bicubic2d.default", "upsample_linear1d.default")
def _resized(value: Value, a: Arguments) -> Value:
    """A product along each dimension, with what resizing makes of each of its places."""
    a.ignored("output_size", "scale_factors", "scales_h", "scales_w", "scales")
    x: Value = a["input" if "input" in value.args else "self"]
    corners = bool(a["align_corners"])
    cubic = "cubic" in value.op
    for dim in range(2, value.rank):
        size, wide = x.shape[dim], value.shape[dim]
        if size == wide:
            continue
        ones = torch.eye(size, dtype=torch.float64)[None]
        ones = ones[..., None] if cubic else ones
        mode = "bicubic" if cubic else "linear"
        places = functional.interpolate(ones, (wide, 1) if cubic else wide, mode=mode, align_corners=corners)
        table = value.make_constant(places.view(size, wide))
        x = along_table(value, x, dim, table)
    return x


@aten("cross_entropy_loss.default")
def _cross_entropy(value: Value, a: Arguments) -> Value:
    x, targets, reduction = a["self"], a["target"], a["reduction"]
    ignore, smoothing = a["ignore_index"], float(a["label_smoothing"])
    return _of_classes(value, x, targets, a["weight"], reduction, ignore, smoothing)


def _of_classes(
    value: Value, x: Value, targets: Value, weight: Value | None, reduction: int, ignore: int, smoothing: float
) -> Value:
    if weight is not None:
        if smoothing or reduction != 1:
            raise value.refuse("class weights with label smoothing, or of a loss that is not a mean")
        return _weighted(value, x, targets, weight, ignore)
    if reduction != 1:
        if smoothing:
            raise value.refuse("label smoothing of a loss that is not a mean")
        return (
            value.make("token_nll", x=x, targets=targets, ignore=ignore)
            if reduction == 0
            else _summed(value, x, targets, ignore)
        )
    return value.make("cross_entropy", x=x, targets=targets, ignore=ignore, smoothing=smoothing)


def _weighted(value: Value, x: Value, targets: Value, weight: Value, ignore: int) -> Value:
    """The mean of losses, weighted by the class of their targets."""
    each = value.make("token_nll", targets.shape, x=x, targets=targets, ignore=ignore)
    counts = None
    if ignore >= 0 or base(targets).args.get("negative", True):
        counts = value.make("pointwise", targets.shape, torch.bool, function="not_equal", xs=[targets, ignore])
        targets = value.make("pointwise", targets.shape, targets.dtype, function="where", xs=[counts, targets, 0])
    own = value.make("embedding", targets.shape, table=weight, ids=targets, padding=None)
    own = own if counts is None else pointwise(own, "where", counts, own, 0)
    dims = list(range(targets.rank))
    total = reduced(value, "sum", pointwise(each, "multiply", each, own), dims, False)
    return pointwise(value, "divide", total, reduced(value, "sum", own, dims, False))


def _summed(value: Value, x: Value, targets: Value, ignore: int) -> Value:
    each = value.make("token_nll", targets.shape, x=x, targets=targets, ignore=ignore)
    return reduced(value, "sum", each, list(range(targets.rank)), False)


@aten("nll_loss.default", "nll_loss_nd.default")
def _nll(value: Value, a: Arguments) -> Value:
    """Of logarithms of probabilities, which are their own softmax."""
    x, targets, ignore = a["self"], a["target"], a["ignore_index"]
    return _of_classes(value, x, targets, a["weight"], a["reduction"], ignore, 0.0)


@aten("mse_loss.default", "l1_loss.default", "smooth_l1_loss.default", "huber_loss.default")
def _distance(value: Value, a: Arguments) -> Value:
    x, y, reduction = a["self"], a["target"], a["reduction"]
    if value.op == "mse_loss.default" and reduction == 1 and x.shape == y.shape and number(x) is None is number(y):
        return value.make("mse", x=x, targets=y)
    off = pointwise(x, "subtract", x, y)
    if value.op == "mse_loss.default":
        each = pointwise(off, "multiply", off, off)
    else:
        each = pointwise(off, "abs", off)
    if value.op in ("smooth_l1_loss.default", "huber_loss.default"):
        # A parabola up to `bend`, and a line behind it; smooth_l1 is a Huber loss divided by it.
        smooth = value.op.startswith("smooth")
        bend = float(a["beta" if smooth else "delta"])
        of = partial(pointwise, off)
        parabola = of("multiply", of("multiply", off, off), 0.5 / (bend if smooth else 1))
        line = of("multiply", of("subtract", each, 0.5 * bend), 1.0 if smooth else bend)
        flags = off.make("pointwise", off.shape, torch.bool, function="less", xs=[each, bend])
        each = of("where", flags, parabola, line)
    return _reduction(value, each, reduction)


@aten("binary_cross_entropy_with_logits.default")
def _binary(value: Value, a: Arguments) -> Value:
    x, y, reduction = a["self"], a["target"], a["reduction"]
    weight, positive = a["weight"], a["pos_weight"]
    if weight is None and positive is None and reduction == 1 and x.shape == y.shape and number(y) is None:
        return value.make("binary_cross_entropy", x=x, targets=y)
    of = partial(pointwise, x)
    each = of("subtract", of("softplus", x), of("multiply", x, y))
    if positive is not None:  # (1 - y) x + (1 + (p - 1) y) softplus(-x)
        share = of("add", of("multiply", of("subtract", positive, 1), y), 1)
        rest = of("multiply", of("subtract", 1, y), x)
        each = of("add", rest, of("multiply", share, of("softplus", of("negate", x))))
    return _reduction(value, each if weight is None else of("multiply", each, weight), reduction)


def _reduction(value: Value, each: Value, reduction: int) -> Value:
    if reduction == 0:
        return each
    return reduced(value, "mean" if reduction == 1 else "sum", each, list(range(each.rank)), False)


@aten("binary_cross_entropy.default")
def _of_probabilities(value: Value, a: Arguments) -> Value:
    """Logarithms are at least -100, as torch has them, and have no slope there."""
    p, y, reduction = a["self"], a["target"], a["reduction"]
    weight, of = a["weight"], partial(pointwise, p)
    one, other = (of("log", of("maximum", each, exp(-100))) for each in (p, of("subtract", 1.0, p)))
    each = of("negate", of("add", of("multiply", y, one), of("multiply", of("subtract", 1.0, y), other)))
    return _reduction(value, each if weight is None else of("multiply", each, weight), reduction)


@aten("_weight_norm.default")
def _weight_norm(value: Value, a: Arguments) -> Value:
    """v · g / |v|, of each row."""
    v, g = a["v"], a["g"]
    dim = a.dim(rank=v.rank)
    squares = pointwise(v, "multiply", v, v)
    total = reduced(v, "sum", squares, [i for i in range(v.rank) if i != dim], True)
    length = pointwise(total, "sqrt", total)
    return pointwise(value, "multiply", v, pointwise(g, "divide", g, length))


@aten("pairwise_distance.default")
def _distance_of_pairs(value: Value, a: Arguments) -> Value:
    x, y, power, eps, keep = a["x1"], a["x2"], a["p"], float(a["eps"]), bool(a["keepdim"])
    if power != 2:
        raise value.refuse(f"a distance of order {power}")
    off = pointwise(x, "subtract", x, y)
    off = pointwise(off, "add", off, eps)
    squares = pointwise(off, "multiply", off, off)
    return pointwise(value, "sqrt", reduced(value, "sum", squares, [x.rank - 1], keep))


@aten("constant_pad_nd.default", "pad.default")
def _pad(value: Value, a: Arguments) -> Value:
    pad, fill = list(a["pad"]), number(a["value"]) or 0
    x: Value = a["self"]
    mode = a["mode"] if value.op == "pad.default" else "constant"
    for i in range(0, len(pad), 2):
        dim, size = x.rank - 1 - i // 2, x.shape[x.rank - 1 - i // 2]
        x = sliced(value, x, dim, max(0, -pad[i]), size - max(0, -pad[i]) - max(0, -pad[i + 1]))
        before, after = (
            _border(value, x, dim, count, end, mode, fill) for count, end in ((pad[i], 0), (pad[i + 1], 1))
        )
        parts = [each for each in (before, x, after) if each is not None]
        if len(parts) > 1:
            shape = (*x.shape[:dim], sum(part.shape[dim] for part in parts), *x.shape[dim + 1 :])
            x = value.make("concat", shape, x.dtype, xs=parts, dim=dim)
    return x


def _border(value: Value, x: Value, dim: int, count: int, end: int, mode: str, fill: float) -> Value | None:
    """What is put before the first place of a dimension, or behind the last, if it is more than nothing."""
    if count <= 0:
        return None
    size = x.shape[dim]
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    if mode == "constant":
        return value.make_constant(torch.full(shape, fill, dtype=x.dtype))
    if mode == "replicate":
        return value.make("expand", shape, x.dtype, x=sliced(value, x, dim, (size - 1) * end, 1, -end))
    if mode == "circular":
        return sliced(value, x, dim, 0 if end else size - count, count, 0 if end else -count)
    near = sliced(value, x, dim, size - 1 - count if end else 1, count, -1 - count if end else 0)
    return value.make("along", shape, x.dtype, function="flip", x=near, dim=dim)
