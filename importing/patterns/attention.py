"""Attention that is written out, and what its masks say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from attrs import define

from partita.importing.graph import Value, is_op, number
from partita.importing.normal.pointwise import pointwise
from partita.importing.normal.views import expanded, permuted, viewed
from partita.importing.patterns.constants import MASKED, mask_of
from partita.importing.patterns.matching import applied, either

Rule: TypeAlias = Callable[[Value], Value | None]


@define
class Scores:
    """What scores are, from the outside to the product of queries and keys."""

    product: Any
    scale: float = 1.0
    softcap: float | None = None
    mask: Value | None = None
    bias: Value | None = None

    def forbid(self, forbidden: Value) -> None:
        """Scores do not count where this is true."""
        allowed = pointwise(forbidden, "not", forbidden)
        if forbidden.constant is not None:
            allowed.constant = ~forbidden.constant
        self.allow(allowed)

    def allow(self, allowed: Value) -> None:
        """Scores count where this is true."""
        if allowed.constant is None and applied(allowed, "not") is not None:
            inner = applied(allowed, "not")
            if inner is not None and inner[0].constant is not None:
                allowed.constant = ~inner[0].constant
        if self.mask is None:
            self.mask = allowed
            return
        both = self.mask.make("pointwise", _joined(self.mask, allowed), function="and", xs=[self.mask, allowed])
        if self.mask.constant is not None and allowed.constant is not None:
            both.constant = self.mask.constant & allowed.constant
        self.mask = both

    def add(self, bias: Value) -> None:
        """Something is added to the scores."""
        if self.softcap is not None or self.scale != 1:
            bias = pointwise(bias, "multiply", bias, self.scale)
        whole = bias if self.bias is None else None
        self.bias = whole or bias.make("pointwise", _joined(bias, self.bias), function="add", xs=[self.bias, bias])


def _joined(one: Value, other: Any) -> tuple[int, ...]:
    ranks = max(one.rank, other.rank)
    shapes = [(1,) * (ranks - len(shape)) + tuple(shape) for shape in (one.shape, other.shape)]
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def written_out(value: Value, attended: bool = True) -> Value | None:
    """softmax(q · k · scale + mask) · v."""
    if value.op != "einsum" or len(value.args["xs"]) != 2:
        return None
    weights, v = value.args["xs"]
    names, value_names = value.args["letters"]
    rate = 0.0
    if is_op(weights, "dropout"):
        rate, weights = weights.args["rate"], weights.args["x"]
    shape, sink = weights.shape, None
    last = weights.rank - 1
    if is_op(weights, "slice") and weights.args["dim"] == last and weights.args["start"] == 0:
        weights = weights.args["x"]
    if not is_op(weights, "along") or weights.args["function"] != "softmax" or weights.args["dim"] != last:
        return None
    inside = weights.args["x"]
    if weights.shape != shape:  # a score that takes a share of the attention, and has no value
        if not is_op(inside, "concat") or len(inside.args["xs"]) != 2 or inside.args["xs"][1].shape[-1] != 1:
            return None
        inside, sink = inside.args["xs"]
        while is_op(sink, "expand") and sink.args["x"].rank == sink.rank:
            sink = sink.args["x"]
        if sink.shape[-2:] != (1, 1) or inside.shape != shape:
            return None
    scores = _scores(inside)
    if not attended and scores.mask is not None and scores.mask.constant is None:
        return None
    product = scores.product
    if not is_op(product, "einsum") or len(product.args["xs"]) != 2 or product.shape != shape:
        return None
    q, k = product.args["xs"]
    (of_q, of_k), of_scores = product.args["letters"], product.args["out"]
    key, query = of_scores[-1], of_scores[-2]
    if key in of_q:
        q, k, of_q, of_k = k, q, of_k, of_q
    over = [letter for letter in of_q if letter not in of_scores]
    if len(over) != 1 or query in of_k or key not in of_k or query not in of_q or over[0] not in of_k:
        return None
    batch, out = of_scores[:-2], value.args["out"]
    place = dict(zip(names, of_scores, strict=True))  # letters of the second product, as those of the first
    wide = [letter for letter in value_names if letter not in names]
    if len(wide) != 1 or place[names[-1]] != key or names[-1] not in value_names or names[-1] in out:
        return None
    to = {letter: place.get(letter, "*") for letter in {*names, *value_names}}
    v = _as(v, [to[letter] for letter in value_names], [*batch, key, "*"])
    q, k = _as(q, of_q, [*batch, query, over[0]]), _as(k, of_k, [*batch, key, over[0]])
    if q is None or k is None or v is None:
        return None
    usual = q.shape[-1] ** -0.5
    scale = scores.scale * (scores.softcap or 1.0)
    options = {
        "mask": scores.mask,
        "bias": scores.bias,
        "causal": False,
        "window": None,
        "softcap": scores.softcap,
        "sink": sink,
        "scale": None if abs(scale - usual) < 1e-6 * usual else scale,
        "dropout": rate,
    }
    made = value.make("attend", (*shape[:-1], v.shape[-1]), q=q, k=k, v=v, **options)
    order = [*batch, query, "*"]
    return permuted(value, made, [order.index(to[letter]) for letter in out])


def _as(x: Value, letters: Any, wanted: list[str]) -> Value | None:
    """A value with its dimensions in the wanted order; those that it lacks have size 1."""
    if any(letter not in wanted for letter in letters):
        return None
    there = [letter for letter in wanted if letter in letters]
    made = permuted(x, x, [list(letters).index(letter) for letter in there])
    sizes = iter(made.shape)
    return viewed(x, made, tuple(next(sizes) if letter in letters else 1 for letter in wanted))


def _scores(x: Any) -> Scores:
    found = Scores(x)
    while True:
        x = found.product
        if (xs := applied(x, "where")) is not None:
            condition, left, right = xs
            if _low(left) and isinstance(right, Value):
                found.forbid(condition)
                found.product = right
            elif _low(right) and isinstance(left, Value):
                found.allow(condition)
                found.product = left
            else:
                return found
        elif applied(x, "add") is not None:
            inner, other = next(
                ((a, b) for a, b in either(x, "add") if _is_product(a)), (applied(x, "add") or [None, None])[:2]
            )
            if not isinstance(inner, Value) or not isinstance(other, Value) or number(other) is not None:
                return found
            found.add(other)
            found.product = inner
        elif (xs := applied(x, "multiply")) is not None and any(number(each) is not None for each in xs):
            first = number(xs[0])
            factor = number(xs[1]) if first is None else first
            found.scale *= 0.0 if factor is None else float(factor)
            found.product = xs[0] if first is None else xs[1]
        elif (xs := applied(x, "divide")) is not None and number(xs[1]) is not None:
            found.scale /= float(number(xs[1]) or 1.0)
            found.product = xs[0]
        elif (xs := applied(x, "tanh")) is not None and found.softcap is None:
            found.softcap, found.scale, found.product = found.scale, 1.0, xs[0]
        else:
            return found


def _low(x: Any) -> bool:
    found = number(x)
    return found is not None and found <= MASKED


def _is_product(x: Any) -> bool:
    """Whether a term leads to a product of queries and keys."""
    while isinstance(x, Value):
        if x.op == "einsum":
            return len(x.args["xs"]) == 2
        xs = applied(x, "multiply") or applied(x, "divide") or applied(x, "add") or applied(x, "tanh")
        if xs is None:
            return False
        x = next((each for each in xs if isinstance(each, Value) and each.constant is None), None)
    return False


def shifted(value: Value) -> Value | None:
    """softmax(x − max(x)) is softmax(x)."""
    if value.op != "along" or value.args["function"] not in ("softmax", "log_softmax"):
        return None
    xs = applied(value.args["x"], "subtract")
    if xs is None or not is_op(xs[1], "reduce") or xs[1].args["function"] != "max" or xs[1].args["x"] is not xs[0]:
        return None
    return value.make("along", **{**value.args, "x": xs[0]}) if xs[1].args["dims"] == [value.args["dim"]] else None


def masks(value: Value, attended: bool = True) -> Value | None:
    """What the mask of an attention says: constants are causal, windows, or nothing at all."""
    if value.op != "attend":
        return None
    args = dict(value.args)
    bias = args["bias"]
    if attended and (xs := applied(bias, "where")) is not None and _low(xs[2]) and number(xs[1]) is None:
        args["bias"], args["mask"] = xs[1], xs[0] if args["mask"] is None else _both(args["mask"], xs[0])
        return masks(made := value.make("attend", **args)) or made
    if isinstance(bias, Value) and bias.constant is not None and mask_of(bias.constant) is not None:
        args["bias"], known = None, bias
        allowed = known.make("constant", known.shape, torch.bool, name="")
        allowed.constant = known.constant == 0 if known.constant is not None else None
        args["mask"] = allowed if args["mask"] is None else _both(args["mask"], allowed)
    parts = _conjunction(args["mask"])
    left = []
    for part in parts:
        said = mask_of(part.constant) if part.constant is not None else None
        if said is None or (args["window"] is not None and said.window is not None):
            left.append(part)
            continue
        args["causal"] = args["causal"] or said.causal
        args["window"] = args["window"] if said.window is None else said.window
    if len(left) == len(parts) and args["bias"] is bias:
        return None
    args["mask"] = None
    for part in left:
        args["mask"] = part if args["mask"] is None else _both(args["mask"], part)
    return value.make("attend", **args)


def scaled(value: Value) -> Value | None:
    """Queries that are multiplied by a number: so are the scores."""
    if value.op != "attend":
        return None
    q, way = value.args["q"], []
    while is_op(q, "view", "permute"):
        way.append(q)
        q = q.args["x"]
    found = next(((x, number(c)) for x, c in either(q, "multiply") if number(c) and isinstance(x, Value)), None)
    if found is None:
        return None
    made, factor = found
    if made.shape != q.shape:
        return None
    for each in reversed(way):
        made = each.make(each.op, each.shape, made.dtype, **{**each.args, "x": made})
    usual = made.shape[-1] ** -0.5
    scale = (usual if value.args["scale"] is None else value.args["scale"]) * float(factor or 1.0)
    same = abs(scale - usual) < 1e-6 * usual
    return value.make("attend", **{**value.args, "q": made, "scale": None if same else scale})


def _both(one: Value, other: Value) -> Value:
    return one.make("pointwise", _joined(one, other), function="and", xs=[one, other])


def _conjunction(mask: Any) -> list[Value]:
    """The parts of a mask all of which must be true."""
    if mask is None:
        return []
    xs = applied(mask, "and")
    if xs is None or mask.constant is not None:
        return [mask]
    return [*_conjunction(xs[0]), *_conjunction(xs[1])]


def unshuffled(value: Value) -> Value | None:
    """Attention of queries and keys with their elements in the same other order, which products do not depend on."""
    if value.op != "attend":
        return None
    q, k = ([*x.args["xs"]] if _is_joined(x) else [x] for x in (value.args["q"], value.args["k"]))
    changed = False
    for i, (one, other) in enumerate(zip(q, k, strict=False)):
        mine, theirs = _shuffled(one), _shuffled(other)
        if len(q) == len(k) and mine is not None and theirs is not None and mine[1] == theirs[1]:
            q[i], k[i], changed = mine[0], theirs[0], True
    if not changed:
        return None
    named = {"q": q, "k": k}
    joined = {
        name: value.args[name].make("concat", **{**value.args[name].args, "xs": xs}) if len(xs) > 1 else xs[0]
        for name, xs in named.items()
    }
    return value.make("attend", **{**value.args, **joined})


def _is_joined(x: Value) -> bool:
    """Whether a value is others side by side in the last dimension."""
    return x.op == "concat" and bool(x.args["dim"] == x.rank - 1)


def _shuffled(x: Value) -> tuple[Value, tuple[object, ...]] | None:
    """A value whose last dimension was split, transposed and merged, before that; and how this was done."""
    inner = x.args["x"] if x.op == "expand" else x
    if inner.op != "view" or inner.args["x"].op != "permute" or inner.args["x"].args["x"].op != "view":
        return None
    order, split = inner.args["x"].args["order"], inner.args["x"].args["x"]
    before, last = split.args["x"], inner.rank - 1
    if before.shape != inner.shape or split.shape[:last] != inner.shape[:last] or order[:last] != [*range(last)]:
        return None
    found = before if x is inner else expanded(x, before, x.shape)
    return found, (split.shape[last:], tuple(order[last:]))


def rules(attended: bool) -> list[Rule]:
    """The patterns; if queries need not be `attended`, masks that vary stay the numbers that a module makes of them."""
    known = partial(written_out, attended=attended), partial(masks, attended=attended)
    return [shifted, known[0], scaled, known[1], unshuffled]
