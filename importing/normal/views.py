"""Views, casts, and parts of dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from partita.importing.graph import FLOATS, Value
from partita.importing.normal.arguments import SEVERAL, Arguments, aten, several


@aten("alias.default", "clone.default", "contiguous.default", "lift_fresh_copy.default", "positive.default")
def _same(value: Value, a: Arguments) -> Value:
    x: Value = a["self"]
    return x


@aten("detach.default", "detach_.default")
def _detach(value: Value, a: Arguments) -> Value:
    x: Value = a["self"]
    return value.make("stop_gradient", x=x) if x.is_float and x.constant is None else x


@aten("to.dtype", "to.dtype_layout", "to.device", "_to_copy.default", "to.other", "type_as.default")
def _cast(value: Value, a: Arguments) -> Value:
    a.ignored("dtype", "other")
    x: Value = a["self"]
    same = value.dtype == x.dtype or (value.dtype in FLOATS and x.dtype in FLOATS)
    return x if same else value.make("cast", x=x)


@aten("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int")
@aten("unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default", "view_as.default")
def _view(value: Value, a: Arguments) -> Value:
    a.ignored("size", "shape", "start_dim", "end_dim", "dim", "sizes", "other")
    x: Value = a["self"]
    return viewed(value, x)


def viewed(value: Value, x: Value, shape: tuple[int, ...] | None = None) -> Value:
    """The elements of x in other dimensions; a view of a view is one."""
    shape = value.shape if shape is None else shape
    if x.shape == shape:
        return x
    if x.op == "view":
        return viewed(value, x.args["x"], shape)
    return value.make("view", shape, x.dtype, x=x)


@aten("transpose.int", "t.default", "permute.default", "numpy_T.default", "mT.default", "swapaxes.default")
@aten("movedim.int")
def _permute(value: Value, a: Arguments) -> Value:
    x: Value = a["self"]
    order = list(range(x.rank))
    if value.op == "permute.default":
        order = [int(dim) % x.rank for dim in a["dims"]]
    elif value.op in ("t.default", "numpy_T.default"):
        order.reverse()
    elif value.op == "movedim.int":
        source, to = a.dim("source"), a.dim("destination")
        order.insert(to, order.pop(source))
    else:
        first, second = (-2, -1) if value.op == "mT.default" else _two(value, a)
        order[first], order[second] = order[second], order[first]
    return permuted(value, x, order)


def _two(value: Value, a: Arguments) -> tuple[int, int]:
    names = ("axis0", "axis1") if value.op == "swapaxes.default" else ("dim0", "dim1")
    return a.dim(names[0]), a.dim(names[1])


def permuted(value: Value, x: Value, order: list[int]) -> Value:
    """The dimensions of x in another order."""
    if x.op == "permute":
        return permuted(value, x.args["x"], [x.args["order"][dim] for dim in order])
    if order == sorted(order):
        return x
    return value.make("permute", [x.shape[dim] for dim in order], x.dtype, x=x, order=order)


@aten("expand.default", "expand_as.default", "broadcast_to.default", "expand_copy.default")
def _expand(value: Value, a: Arguments) -> Value:
    a.ignored("size", "other")
    x: Value = a["self"]
    return expanded(value, x, value.shape)


def expanded(value: Value, x: Value, shape: tuple[int, ...]) -> Value:
    """x, repeated along dimensions that it lacks."""
    return x if x.shape == shape else value.make("expand", shape, x.dtype, x=x)


@aten("repeat.default", "tile.default")
def _repeat(value: Value, a: Arguments) -> Value:
    x: Value = a["self"]
    times = list(a["repeats" if value.op == "repeat.default" else "dims"])
    shape = (1,) * (len(times) - x.rank) + x.shape
    if any(size != 1 and count != 1 for size, count in zip(shape, times, strict=True)):
        # Each dimension becomes two, the copies and what is copied.
        pairs = [each for size, count in zip(shape, times, strict=True) for each in (count, size)]
        one = [each for size in shape for each in (1, size)]
        return viewed(value, expanded(value, viewed(value, x, tuple(one)), tuple(pairs)))
    return expanded(value, viewed(value, x, shape), value.shape)


@aten("repeat_interleave.self_int")
def _interleave(value: Value, a: Arguments) -> Value:
    x: Value = a["self"]
    count = int(a["repeats"])
    a.ignored("output_size")
    if a["dim"] is None:
        x, dim = viewed(value, x, (prod(x.shape),)), 0
    else:
        dim = a.dim()
    return repeated(value, x, dim, count)


def repeated(value: Value, x: Value, dim: int, count: int) -> Value:
    """Each element of a dimension several times, one behind the other."""
    before, size, rest = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    inserted = viewed(value, x, (*before, size, 1, *rest))
    return viewed(value, expanded(value, inserted, (*before, size, count, *rest)), (*before, size * count, *rest))


@aten("slice.Tensor")
def _slice(value: Value, a: Arguments) -> Value:
    x, dim, step = a["self"], a.dim(), int(a["step"])
    a.ignored("end")
    start, size = a["start"] or 0, x.shape[dim]
    back = start if -size < start < 0 else 0
    start = max(0, start + size) if start < 0 else min(start, size)
    if step != 1:
        return _every(value, x, dim, start, step)
    return sliced(value, x, dim, start, value.shape[dim], back)


def sliced(value: Value, x: Value, dim: int, start: int, size: int, back: int = 0) -> Value:
    """A part of a dimension; `back` is where it begins, if that is counted from the end."""
    if size == x.shape[dim]:
        return x
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    if x.op == "concat" and x.args["dim"] == dim:  # one of what was put together
        before = 0
        for each in x.args["xs"]:
            if before <= start and start + size <= before + each.shape[dim]:
                return sliced(value, each, dim, start - before, size)
            before += each.shape[dim]
    made = value.make("slice", shape, x.dtype, x=x, dim=dim, start=start, back=back)
    if x.constant is not None:
        made.constant = x.constant.narrow(dim, start, size)
    return made


def _every(value: Value, x: Value, dim: int, start: int, step: int) -> Value:
    """Every so many elements of a dimension: one of the second dimension that it splits into."""
    if x.shape[dim] % step or start >= step or value.shape[dim] != x.shape[dim] // step:
        ids = value.make_constant(torch.arange(value.shape[dim]) * step + start)
        return value.make("take", x=x, dim=dim, ids=ids)
    split = viewed(value, x, (*x.shape[:dim], x.shape[dim] // step, step, *x.shape[dim + 1 :]))
    return selected(value, split, dim + 1, start)


@aten("select.int")
def _select(value: Value, a: Arguments) -> Value:
    dim = a.dim()
    return selected(value, a["self"], dim, int(a["index"]))


def selected(value: Value, x: Value, dim: int, index: int) -> Value:
    """One element of a dimension, which is gone; before the first are those from the end."""
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    back = min(index, 0)
    index %= x.shape[dim]
    if x.shape[dim] == 1:
        return viewed(value, x, shape)
    if x.op == "concat" and x.args["dim"] == dim:  # of one of what was put together
        for each in x.args["xs"]:
            if index < each.shape[dim]:
                return selected(value, each, dim, index)
            index -= each.shape[dim]
    made = value.make("select", shape, x.dtype, x=x, dim=dim, index=index, back=back)
    if x.constant is not None:
        made.constant = x.constant.select(dim, index)
    return made


@aten("cat.default", "concat.default", "concatenate.default")
def _concat(value: Value, a: Arguments) -> Value:
    given = [each for each in a["tensors"] if 0 not in each.shape]  # a part may be empty
    dim = a.dim(rank=value.rank)
    return given[0] if len(given) == 1 else value.make("concat", xs=given, dim=dim)


@aten("stack.default")
def _stack(value: Value, a: Arguments) -> Value:
    dim = a.dim(rank=value.rank)
    xs = [viewed(value, each, (*each.shape[:dim], 1, *each.shape[dim:])) for each in a["tensors"]]
    return value.make("concat", xs=xs, dim=dim)


@aten("getitem")
def _getitem(value: Value, a: Arguments) -> Value:
    """One of several results. Operations that have several are normalized here, from all of their arguments."""
    source, index = a["x"], a["index"]
    several = Arguments(source)
    several.ignored("device")
    function = SEVERAL.get(source.op)
    if function is None:
        raise source.refuse(f"`aten.{source.op}`")
    made = function(value, several, index)
    several.settle()
    if value.constant is not None and made.constant is None:
        made.constant = value.constant
    return made


@several("split.Tensor", "split_with_sizes.default", "chunk.default", "split.sizes")
def _split(value: Value, a: Arguments, index: int) -> Value:
    x, dim = a["self"], a.dim()
    size = x.shape[dim]
    op = a.value.op
    if op in ("split.Tensor", "chunk.default"):
        step = int(a["split_size"]) if op == "split.Tensor" else -(-size // int(a["chunks"]))
        sizes = [min(step, size - start) for start in range(0, size, step)]
    else:
        sizes = list(a["split_sizes"])
    return sliced(value, x, dim, sum(sizes[:index]), sizes[index])


@several("unbind.int")
def _unbind(value: Value, a: Arguments, index: int) -> Value:
    dim = a.dim()
    return selected(value, a["self"], dim, index)


@several("broadcast_tensors.default")
def _broadcast(value: Value, a: Arguments, index: int) -> Value:
    return expanded(value, a["tensors"][index], value.shape)


@several("topk.default", "sort.default", "sort.stable")
def _top(value: Value, a: Arguments, index: int) -> Value:
    """The largest elements along a dimension, or the smallest, and where they are; of a sort all."""
    x, dim = a["self"], a.dim()
    if a.value.op == "topk.default":
        a.ignored("sorted")
        count, largest = int(a["k"]), bool(a["largest"])
    else:
        a.ignored("stable")
        count, largest = x.shape[dim], bool(a["descending"])
    whole = integer(x.dtype)
    if a.value.results is None:  # values and ids are of one operation
        x = x.make("cast", x.shape, torch.float32, x=x) if whole else x
        a.value.results = x if largest else x.make("pointwise", function="negate", xs=[x])
    x = a.value.results
    if index:
        kind = {"x": x, "dim": dim}
        return value.make("arg_max", **kind) if count == 1 else value.make("top", **kind, count=count, index=1)
    dtype = torch.float32 if whole else value.dtype
    if count == 1:
        made = value.make("reduce", value.shape, dtype, function="max", x=x, dims=[dim])
    else:
        made = value.make("top", value.shape, dtype, x=x, dim=dim, count=count, index=0)
    made = made if largest else value.make("pointwise", value.shape, dtype, function="negate", xs=[made])
    return value.make("cast", x=made) if whole else made


@several("max.dim", "min.dim")
def _largest(value: Value, a: Arguments, index: int) -> Value:
    dim, keep = a.dim(), bool(a["keepdim"])
    x = a["self"]
    if index != 0:
        x = x if a.value.op.startswith("max") else x.make("pointwise", function="negate", xs=[x])
    shape = tuple(1 if i == dim else size for i, size in enumerate(x.shape))
    function = "max" if a.value.op.startswith("max") else "min"
    if index == 0:
        made = value.make("reduce", shape, x.dtype, function=function, x=x, dims=[dim])
    else:
        made = value.make("arg_max", shape, x=x, dim=dim)
    return made if keep else viewed(value, made)


@several("native_dropout.default")
def _native_dropout(value: Value, a: Arguments, index: int) -> Value:
    x, rate, training = a["input"], float(a["p"]), a["train"]
    if index != 0:
        raise value.refuse("the mask of a dropout")
    dropped: Value = x if not rate or training is False else value.make("dropout", x=x, rate=rate)
    return dropped


@several("native_layer_norm.default")
def _layer_norm(value: Value, a: Arguments, index: int) -> Value:
    x, dims = a["input"], len(a["normalized_shape"])
    if index != 0:
        raise value.refuse("the statistics of a norm")
    options = {"scale": a["weight"], "shift": a["bias"], "eps": float(a["eps"])}
    return value.make("norm", function="layer_norm", x=x, dims=list(range(x.rank - dims, x.rank)), **options)


@several("_native_batch_norm_legit_functional.default")
def _batch_norm(value: Value, a: Arguments, index: int) -> Value:
    x, scale, shift, mean, variance = (a[name] for name in ("input", "weight", "bias", "running_mean", "running_var"))
    # A second call begins with what the first has made of them: as its own, which the file shares.
    if isinstance(mean, Value) and mean.op == "batch_statistic":
        mean, variance = mean.args["mean"], variance.args["variance"]
    options = {"momentum": float(a["momentum"]), "eps": float(a["eps"]), "training": bool(a["training"])}
    op = "batch_norm" if index == 0 else "batch_statistic"
    return value.make(op, x=x, scale=scale, shift=shift, mean=mean, variance=variance, index=index, **options)


@aten("unfold.default")
def _unfold(value: Value, a: Arguments) -> Value:
    x, dim, size, step = a["self"], a.dim("dimension"), int(a["size"]), int(a["step"])
    if size != step or x.shape[dim] % size:
        last = [i for i in range(x.rank) if i != dim] + [dim]
        moved, count = permuted(value, x, last), value.shape[dim]
        shape = (*moved.shape[:-1], count, size)
        options = {"size": [size], "stride": [step], "padding": [(0, 0)], "dilation": 1, "fill": 0.0}
        windows = value.make("patches", shape, x=moved, **options)
        return permuted(value, windows, [*range(dim), x.rank - 1, *range(dim, x.rank - 1), x.rank])
    split = viewed(value, x, (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :]))
    order = [i for i in range(split.rank) if i != dim + 1] + [dim + 1]
    return permuted(value, split, order)


@aten("flip.default")
def _flip(value: Value, a: Arguments) -> Value:
    x: Value = a["self"]
    for dim in a["dims"]:
        x = value.make("along", x.shape, x.dtype, function="flip", x=x, dim=int(dim) % x.rank)
    return x


@aten("roll.default")
def _roll(value: Value, a: Arguments) -> Value:
    x: Value = a["self"]
    dims = a["dims"] or list(range(x.rank))
    if not a["dims"] and x.rank != 1:
        raise value.refuse("`roll` of elements over all dimensions")
    for dim, by in zip(dims, a["shifts"], strict=True):
        x = value.make("roll", x.shape, x.dtype, x=x, dim=int(dim) % x.rank, by=by)
    return x


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of operands of these shapes together."""
    rank = max(map(len, shapes), default=0)
    wide = [(*(1,) * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*wide, strict=True))


def integer(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of integers."""
    return dtype not in FLOATS and dtype != torch.bool
