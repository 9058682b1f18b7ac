"""Lowers the language's functions to primitive operations, where it takes more than the operation of the same name.

Types were checked with the spec. Operands and results have the dtype of the computation (scalars that of accumulation);
reductions, norms, softmax and losses compute in at least f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from attrs import evolve, frozen

from partita.compiler.graph import Builder, Value
from partita.compiler.ops.attend import Attend
from partita.compiler.ops.convolution import Conv
from partita.compiler.ops.delta_rule import DeltaRule, in_chunks
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.experts import TopK
from partita.compiler.ops.inverse import Inverse
from partita.compiler.ops.linear_scan import LinearScan
from partita.compiler.ops.lookup import Gather, OneHot, ScatterAdd, ScatterMax
from partita.compiler.ops.loss import KnownTargets, NegativeLogLikelihood
from partita.compiler.ops.normalize import Normalize
from partita.compiler.ops.op import accumulation, make
from partita.compiler.ops.pointwise import FUNCTIONS, Constant, Detach, Pointwise, cast, constant, pointwise
from partita.compiler.ops.position import Dropout, Iota, Random, Rope, RopeAt
from partita.compiler.ops.reduce import ArgMax, Reduce, scaled, total
from partita.compiler.ops.shape import Arrange, Concat, Expand, Merge, Rename, Rotate, Slice, Split, arranged
from partita.compiler.ops.slots import Collect, Dispatch, Load, SlotIndex
from partita.compiler.ops.windows import Patches
from partita.dsl.types import Type


@frozen(eq=False)
class Site:
    """An application of a function: the builder, operands, options and result type, and the result's name; of axes that
    a layout splits, into how many shards, or None where a sequence goes through the graph part by part.
    """

    build: Builder
    operands: Sequence[Value]
    options: Mapping[str, Any]
    type: Type
    name: str
    training: bool
    shards: Mapping[str, int] | None


Lowering = Callable[[Site], Value]
LOWERINGS: dict[str, Lowering] = {}


def lowering(*names: str) -> Callable[[Lowering], Lowering]:
    """Register the lowering of a language function. Raises ValueError if it has one already."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            if name in LOWERINGS:
                raise ValueError(f"there is a lowering of `{name}` already")
            LOWERINGS[name] = function
        return function

    return register


def unified(build: Builder, values: Sequence[Value]) -> list[Value]:
    """Float operands in one dtype: the widest of the tensors (scalars are kept wider), or of all if none has axes."""
    floats = [value for value in values if value.type.is_float]
    ranked = [value for value in floats if value.type.axes] or floats
    order = ("bf16", "f32", "f64")
    if not ranked:
        return list(values)
    dtype = max((value.type.dtype for value in ranked), key=order.index)
    return [cast(build, value, dtype) if value.type.is_float else value for value in values]


# Scalar functions of the language have the names that they have in `FUNCTIONS`.
LANGUAGE_POINTWISE = tuple(name for name in FUNCTIONS if not name.endswith("_gradient") and name != "multiply_add")


def lower(function: str, site: Site) -> Value:
    """Lower an application of a function. A function that is not registered is the operation of its name, whose fields
    are its options.
    """
    if function in LOWERINGS:
        return LOWERINGS[function](site)
    op = Pointwise(function) if function in LANGUAGE_POINTWISE else make(function, **site.options)
    return site.build.apply_all(op, *unified(site.build, site.operands), name=site.name)[0]


@lowering("attend")
def _attend(site: Site) -> Value:
    build = site.build
    q, k, v, *rest = site.operands
    op = Attend(**site.options)
    if op.dropout and not site.training:
        op = evolve(op, dropout=0.0)
    if op.dropout:
        # Scores are numbered by the axes of the queries as they are declared, then by the position of the key.
        queries = tuple((axis.name, axis.size) for axis in site.type.axes if axis.name != op.wide)
        numbered = (*queries, (op.over, k.type.axis(op.over).size))
        op = evolve(op, key=build.random_key(f"{site.name}.keep"), numbered=numbered)
    return build.apply_all(op, *unified(build, [q, k, v]), *rest, name=site.name)[0]


@lowering("embedding")
def _embedding(site: Site) -> Value:
    return site.build.apply(Gather(site.options["over"]), *site.operands, name=site.name)


@lowering("gather")
def _gather(site: Site) -> Value:
    build = site.build
    x, ids = site.operands
    if x.type.dtype != "bool":
        return build.apply(Gather(site.options["along"]), ids, x, name=site.name)
    # What shards of `along` contribute is added up, which takes numbers.
    gathered = build.apply(Gather(site.options["along"]), ids, cast(build, x, "i32"))
    return cast(build, gathered, "bool", site.name)


@lowering("sum_by")
def _sum_by(site: Site) -> Value:
    (x, ids), dtype = site.operands, site.type.dtype
    return cast(site.build, _added_by(site, cast(site.build, x, accumulation(dtype)), ids), dtype, site.name)


def _added_by(site: Site, x: Value, ids: Value) -> Value:
    """What has an id, added up where the id points."""
    table = tuple(axis for axis in site.type.axes if x.type.has(axis.name) or axis.name == site.options["into"])
    return site.build.apply(ScatterAdd(site.options["into"], table), ids, x)


@lowering("mean_by")
def _mean_by(site: Site) -> Value:
    build, (x, ids) = site.build, site.operands
    dtype = accumulation(x.type.dtype)
    one = constant(build, 1.0, x.type.with_dtype(dtype))
    count = _added_by(site, build.apply(Expand(ids.type.axes), one), ids)
    count = pointwise(build, "maximum", count, constant(build, 1.0, count))
    mean = pointwise(build, "divide", _added_by(site, cast(build, x, dtype), ids), count)
    return cast(build, mean, x.type.dtype, site.name)


@lowering("max_by")
def _max_by(site: Site) -> Value:
    """Zero where no element is."""
    build, (x, ids) = site.build, site.operands
    peak = build.apply(ScatterMax(site.options["into"], site.type.axes), ids, x)
    empty = pointwise(build, "equal", peak, constant(build, -inf, peak))
    return pointwise(build, "where", empty, constant(build, 0.0, peak), peak, name=site.name)


@lowering("one_hot")
def _one_hot(site: Site) -> Value:
    return site.build.apply(OneHot(site.type.axes[-1], site.type.dtype), *site.operands, name=site.name)


@lowering("arg_max")
def _arg_max(site: Site) -> Value:
    return site.build.apply(ArgMax(site.options["over"]), *site.operands, name=site.name)


@lowering("cross_entropy")
def _cross_entropy(site: Site) -> Value:
    return _of_targets(site, lambda logits, targets: _nll(site, logits, targets))


@lowering("token_nll")
def _token_nll(site: Site) -> Value:
    logits, targets = site.operands
    counts, targets = _counting(site, logits, targets)
    nll = _nll(site, logits, targets)
    if counts is None:
        return nll
    return pointwise(site.build, "where", counts, nll, constant(site.build, 0.0, nll))


def _nll(site: Site, logits: Value, targets: Value) -> Value:
    """Of each target. With a `smoothing`, that is the weight of the mean over all classes, and the target has the rest
    (Szegedy et al., arXiv 1512.00567).
    """
    build, over = site.build, site.options["over"]
    nll, denominator = build.apply_all(NegativeLogLikelihood(over), logits, targets)
    smoothing = site.options.get("smoothing", 0.0)
    if not smoothing:
        return nll
    mean = arranged(build, _mean(build, cast(build, logits, nll.type.dtype), (over,)), nll.type.names)
    of_all = scaled(build, pointwise(build, "subtract", denominator, mean), smoothing)
    return pointwise(build, "add", scaled(build, nll, 1 - smoothing), of_all)


@lowering("accuracy")
def _accuracy(site: Site) -> Value:
    logits, targets, *weights = site.operands
    # No gradient flows through it, and none through what it is weighted by.
    fixed = (site.build.apply(Detach(), weight) for weight in weights)
    site = evolve(site, operands=(logits, targets, *fixed))
    return _of_targets(site, lambda logits, targets: _right(site, logits, targets))


def _right(site: Site, logits: Value, targets: Value) -> Value:
    """1 where a target has the largest logit, and 0 elsewhere."""
    best = site.build.apply(ArgMax(site.options["over"]), logits)
    right = pointwise(site.build, "equal", best, targets)
    return cast(site.build, right, accumulation(logits.type.dtype))


def _of_targets(site: Site, measured: Callable[[Value, Value], Value]) -> Value:
    """The mean of what is `measured` of logits and each target, weighted, over the targets that are not ignored."""
    build = site.build
    logits, targets, *weights = site.operands
    counts, targets = _counting(site, logits, targets)
    each = measured(logits, targets)
    weights = [cast(build, weight, each.type.dtype) for weight in weights]
    if counts is not None:
        # Those that are ignored have weight 0.
        counted = cast(build, counts, each.type.dtype)
        weights = [pointwise(build, "multiply", counted, *weights) if weights else counted]
    if not weights:
        return _mean(build, each, each.type.names, site.name)
    (weight,) = weights
    weighted = total(build, pointwise(build, "multiply", each, weight), each.type.names, each.type.dtype)
    # The sum of weights over all positions: a weight without an axis counts for each position along it.
    whole = total(build, weight, weight.type.names, weight.type.dtype)
    if len(weight.type.axes) < len(each.type.axes):
        whole = scaled(build, whole, each.type.elements / weight.type.elements)
    if counts is not None:
        # If all are ignored, the sum is zero, and so is the mean.
        none = pointwise(build, "equal", whole, constant(build, 0.0, whole))
        whole = pointwise(build, "where", none, constant(build, 1.0, whole), whole)
    return pointwise(build, "divide", weighted, whole, name=site.name)


def _counting(site: Site, logits: Value, targets: Value) -> tuple[Value | None, Value]:
    """Which targets are not ignored, if any may be; and the targets with an index for those."""
    ignore = site.options.get("ignore")
    if ignore is None:
        return None, targets
    counts = pointwise(site.build, "not_equal", targets, constant(site.build, ignore, targets))
    return counts, site.build.apply(KnownTargets(logits.type.axis(site.options["over"]), ignore), targets)


def _mean(build: Builder, value: Value, over: Sequence[str], name: str | None = None) -> Value:
    """The sum over `over`, divided by the number of elements summed: linear, so that it may be partial."""
    count = 1
    for axis in over:
        count *= value.type.axis(axis).size
    rest = value.type.without(over)
    dtype = accumulation(value.type.dtype)
    result = scaled(build, total(build, value, over, dtype), 1 / count, name=name)
    return result if not rest.axes else cast(build, result, value.type.dtype)


@lowering("mse")
def _mse(site: Site) -> Value:
    a, b = unified(site.build, site.operands)
    wide = [cast(site.build, value, accumulation(value.type.dtype)) for value in (a, b)]
    difference = pointwise(site.build, "subtract", *wide)
    square = pointwise(site.build, "multiply", difference, difference)
    return _mean(site.build, square, square.type.names, site.name)


@lowering("gelu")
def _gelu(site: Site) -> Value:
    function = "gelu_exact" if site.options.get("exact") else "gelu"
    return pointwise(site.build, function, *site.operands, name=site.name)


@lowering("binary_cross_entropy")
def _binary_cross_entropy(site: Site) -> Value:
    """The mean of softplus(x) − x·t, which is −t·log(sigmoid(x)) − (1 − t)·log(1 − sigmoid(x))."""
    build = site.build
    x, t = (cast(build, value, accumulation(value.type.dtype)) for value in unified(build, site.operands))
    loss = pointwise(build, "subtract", pointwise(build, "softplus", x), pointwise(build, "multiply", x, t))
    return _mean(build, loss, loss.type.names, site.name)


@lowering("sum")
def _sum(site: Site) -> Value:
    (x,) = site.operands
    if not x.type.is_float:
        return site.build.apply(Reduce("sum", site.options["over"], x.type.dtype), x, name=site.name)
    result = total(site.build, x, site.options["over"], accumulation(x.type.dtype), site.name)
    return result if not result.type.axes else cast(site.build, result, x.type.dtype)


@lowering("mean")
def _mean_function(site: Site) -> Value:
    (x,) = site.operands
    return _mean(site.build, x, site.options["over"], site.name)


@lowering("max")
def _max(site: Site) -> Value:
    (x,) = site.operands
    return site.build.apply(Reduce("max", site.options["over"], site.type.dtype), x, name=site.name)


@lowering("min")
def _min(site: Site) -> Value:
    (x,) = site.operands
    negated = pointwise(site.build, "negate", x)
    largest = site.build.apply(Reduce("max", site.options["over"], site.type.dtype), negated)
    return pointwise(site.build, "negate", largest, name=site.name)


def _shifted(site: Site) -> tuple[Value, Value, Value, Value]:
    """`x` minus its maximum (detached, since softmax is shift-invariant), the exponentials, their sum, the maximum."""
    (x,) = site.operands
    over = site.options["over"]
    x = cast(site.build, x, accumulation(x.type.dtype))
    peak = site.build.apply(Detach(), site.build.apply(Reduce("max", over, x.type.dtype), x))
    shifted = pointwise(site.build, "subtract", x, peak)
    exponentials = pointwise(site.build, "exp", shifted)
    return shifted, exponentials, total(site.build, exponentials, over, x.type.dtype), peak


@lowering("softmax")
def _softmax(site: Site) -> Value:
    _, exponentials, sums, _ = _shifted(site)
    result = pointwise(site.build, "divide", exponentials, sums, name=site.name)
    return cast(site.build, result, site.operands[0].type.dtype)


@lowering("log_softmax")
def _log_softmax(site: Site) -> Value:
    shifted, _, sums, _ = _shifted(site)
    result = pointwise(site.build, "subtract", shifted, pointwise(site.build, "log", sums), name=site.name)
    return cast(site.build, result, site.operands[0].type.dtype)


@lowering("logsumexp")
def _logsumexp(site: Site) -> Value:
    _, _, sums, peak = _shifted(site)
    result = pointwise(site.build, "add", pointwise(site.build, "log", sums), peak, name=site.name)
    return cast(site.build, result, site.type.dtype)


@lowering("linear_scan")
def _linear_scan(site: Site) -> Value:
    build, over = site.build, site.options["over"]
    a, b = unified(build, site.operands)
    missing = tuple(axis for axis in site.type.axes if not b.type.has(axis.name))
    if missing:
        b = arranged(build, build.apply(Expand(missing), b), site.type.names)
    if not a.type.has(over):
        a = build.apply(Expand((site.type.axis(over),)), a)
    return build.apply(LinearScan(over, site.options["backward"]), a, b, name=site.name)


@lowering("delta_rule")
def _delta_rule(site: Site) -> Value:
    build, over = site.build, site.options["over"]
    q, k, v, *gates = site.operands
    axis = site.type.axis(over)
    gates = [gate if gate.type.has(over) else build.apply(Expand((axis,)), gate) for gate in gates]
    op = DeltaRule(over, site.options["along"], gated=len(gates) > 1)
    operands = [*unified(build, [q, k, v, gates[0]]), *gates[1:]]
    if site.shards is None:
        return arranged(build, build.apply(op, *operands, name=site.name), site.type.names)
    return arranged(build, in_chunks(build, op, operands, site.shards.get(over, 1), site.name), site.type.names)


@lowering("inverse")
def _inverse(site: Site) -> Value:
    (x,) = site.operands
    wide = cast(site.build, x, accumulation(x.type.dtype))
    return cast(site.build, site.build.apply(Inverse(**site.options), wide), x.type.dtype, site.name)


@lowering("roll")
def _roll(site: Site) -> Value:
    return site.build.apply(Rotate(**site.options), *site.operands, name=site.name)


@lowering("layer_norm")
def _layer_norm(site: Site) -> Value:
    return _norm(site, center=True)


@lowering("rms_norm")
def _rms_norm(site: Site) -> Value:
    return _norm(site, center=False)


def _norm(site: Site, center: bool) -> Value:
    build, options = site.build, site.options
    x, *rest = site.operands
    scale = rest.pop(0) if options["scale"] else None
    shift = rest.pop(0) if options["shift"] else None
    last = scale is None and shift is None
    op = Normalize(options["over"], options["eps"], center)
    result = build.apply_all(op, x, name=site.name if last else None)[0]
    if scale is not None and shift is not None:
        return pointwise(build, "multiply_add", *unified(build, [result, scale, shift]), name=site.name)
    if scale is not None:
        result = pointwise(build, "multiply", *unified(build, [result, scale]), name=site.name)
    if shift is not None:
        result = pointwise(build, "add", *unified(build, [result, shift]), name=site.name)
    return result


@lowering("training")
def _training(site: Site) -> Value:
    return site.build.apply(Constant(site.training, "bool"), name=site.name)


@lowering("dropout")
def _dropout(site: Site) -> Value:
    (x,) = site.operands
    rate = site.options["rate"]
    if not site.training or not rate:
        # The identity, under the name that layout rules may use.
        return site.build.apply(Arrange(x.type.names), x, name=site.name)
    key = site.build.random_key(f"{site.name}.keep")
    # Elements are numbered in the axis order of the checked type: a block's argument may have another.
    axes = site.type.axes
    whole = tuple((axis.name, axis.size) for axis in axes)
    mask = site.build.apply(Random("keep", rate, key, axes, whole, "bool"))
    return site.build.apply(Dropout(rate), x, mask, name=site.name)


@lowering("iota")
def _iota(site: Site) -> Value:
    (axis,) = site.type.axes
    return site.build.apply(Iota(axis), name=site.name)


@lowering("zeros", "zeros_like")
def _zeros(site: Site) -> Value:
    return site.build.apply(Expand(site.type.axes), constant(site.build, 0, site.type), name=site.name)


@lowering("rope")
def _rope(site: Site) -> Value:
    x, *positions = site.operands
    if not positions:
        return site.build.apply(Rope(**site.options), x, name=site.name)
    options = {name: value for name, value in site.options.items() if name != "over"}
    return site.build.apply(RopeAt(**options), x, *positions, name=site.name)


@lowering("expand")
def _expand(site: Site) -> Value:
    (x,) = site.operands
    axes = tuple(axis for axis in site.type.axes if not x.type.has(axis.name))
    return site.build.apply(Expand(axes), x, name=site.name)


@lowering("cast")
def _cast(site: Site) -> Value:
    (x,) = site.operands
    return cast(site.build, x, site.type.dtype, site.name)


@lowering("stop_gradient")
def _stop_gradient(site: Site) -> Value:
    return site.build.apply(Detach(), *site.operands, name=site.name)


@lowering("rename")
def _rename(site: Site) -> Value:
    return site.build.apply(Rename(tuple(site.options["pairs"])), *site.operands, name=site.name)


@lowering("split")
def _split(site: Site) -> Value:
    axes = tuple(site.type.axis(name) for name in site.options["into"])
    return site.build.apply(Split(site.options["axis"], axes), *site.operands, name=site.name)


@lowering("merge")
def _merge(site: Site) -> Value:
    into = site.type.axis(site.options["into"])
    return site.build.apply(Merge(tuple(site.options["axes"]), into), *site.operands, name=site.name)


@lowering("concat")
def _concat(site: Site) -> Value:
    into = site.type.axis(site.options["into"])
    operands = unified(site.build, site.operands)
    return site.build.apply(Concat(tuple(site.options["axes"]), into), *operands, name=site.name)


@lowering("slice")
def _slice(site: Site) -> Value:
    o = site.options
    into = site.type.axis(o["into"])
    return site.build.apply(Slice(o["axis"], into, o["start"]), *site.operands, name=site.name)


# ---------------------------------------------------------------- mixtures of experts


@lowering("top_k")
def _top_k(site: Site) -> Value:
    into = site.type.axis(site.options["into"])
    return site.build.apply(TopK(site.options["over"], into), *site.operands, name=site.name)


@lowering("dispatch")
def _dispatch(site: Site) -> Value:
    x, ids = site.operands
    order, experts, slots = (site.options[name] for name in ("order", "experts", "slots"))
    op = Dispatch(tuple(reversed(order)), site.type.axis(experts), site.type.axis(slots))
    return site.build.apply(op, x, ids, site.build.apply(SlotIndex(order), ids), name=site.name)


@lowering("combine")
def _combine(site: Site) -> Value:
    """The rows of each choice, weighted and added up."""
    build = site.build
    y, ids, weight = site.operands
    order, experts, slots = (site.options[name] for name in ("order", "experts", "slots"))
    rows = build.apply(Collect(experts, slots), y, ids, build.apply(SlotIndex(order), ids))
    rows, weight = unified(build, [rows, weight])
    if len(order) == 1:
        return pointwise(build, "multiply", rows, weight, name=site.name)
    missing = tuple(axis for axis in ids.type.axes if axis.name in order[:-1] and not weight.type.has(axis.name))
    if missing:
        weight = build.apply(Expand(missing), weight)
    # A product, so that what is partial after the experts is added up after it, not before, where it is larger.
    return build.apply(Dot(order[:-1]), rows, weight, name=site.name)


@lowering("load")
def _load(site: Site) -> Value:
    (ids,) = site.operands
    into = site.type.axes[-1]
    counts = site.build.apply(Load(site.options["over"], into, accumulation(site.type.dtype)), ids, name=site.name)
    return cast(site.build, counts, site.type.dtype)


def _sliding(site: Site, sized: Type) -> dict[str, Any]:
    """The fields of operations with windows, whose axes are those of `sized`."""
    o, image = site.options, site.operands[0].type
    return {
        "axes": tuple(image.axis(name) for name in o["axes"]),
        "into": tuple(site.type.axis(name) for name in o["into"]),
        "size": tuple(sized.axis(name) for name in o["size"]),
        **{name: o[name] for name in ("stride", "padding", "dilation")},
    }


@lowering("patches")
def _patches(site: Site) -> Value:
    outside = any(map(any, site.options["padding"]))
    op = Patches(**_sliding(site, site.type), fill=site.options["fill"] if outside else 0.0)
    return site.build.apply(op, *site.operands, name=site.name)


@lowering("conv")
def _conv(site: Site) -> Value:
    image, kernel = unified(site.build, site.operands)
    op = Conv(**_sliding(site, kernel.type), over=site.options["over"])
    return site.build.apply(op, image, kernel, name=site.name)
