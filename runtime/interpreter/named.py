"""Tensors with named axes, as plainly as torch allows, and the language's functions of them.

Every float is float64, every integer int64, and gradients are torch's autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log, prod
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

NOTHING = -1e300  # a score that takes no part in a softmax: its exponential is zero


@frozen(eq=False)
class Named:
    """A tensor and the names of its axes. `source` is the parameter that it is, as it is or otherwise shaped; then
    `origins` are the parameter's axes that each axis is made of.
    """

    data: Tensor
    axes: tuple[str, ...] = ()
    source: str | None = None
    origins: Mapping[str, frozenset[str]] = field(factory=dict)

    def size(self, axis: str) -> int:
        """The size of an axis."""
        return self.data.shape[self.axes.index(axis)]

    def to(self, axes: Sequence[str]) -> Tensor:
        """The data with axes in this order; those that it lacks of size 1."""
        if self.axes == tuple(axes):
            return self.data
        assert set(self.axes) <= set(axes), (self.axes, axes)
        data = self.data.permute([self.axes.index(name) for name in axes if name in self.axes])
        return data[tuple(slice(None) if name in self.axes else None for name in axes)]

    def at(self, axis: str, position: int) -> Named:
        """One position of an axis; ids are still those of the input."""
        source = None if self.data.is_floating_point() else self.source
        data = self.data.select(self.axes.index(axis), position)
        return Named(data, tuple(name for name in self.axes if name != axis), source)

    def ordered(self, axes: Sequence[str]) -> Named:
        """The same with its axes in another order."""
        if self.axes == tuple(axes):
            return self
        assert sorted(axes) == sorted(self.axes), (axes, self.axes)
        return evolve(self, data=self.to(axes), axes=tuple(axes))


def union(*tensors: Named) -> tuple[str, ...]:
    """The axes of all, in the order in which they come."""
    return tuple(dict.fromkeys(name for tensor in tensors for name in tensor.axes))


def elementwise(function: Callable[..., Tensor], *tensors: Named) -> Named:
    """A function of elements that lie at equal coordinates."""
    axes = union(*tensors)
    return Named(function(*(tensor.to(axes) for tensor in tensors)), axes)


def einsum(a: Named, b: Named, over: Sequence[str]) -> Named:
    """Products summed over some axes."""
    letters = {name: chr(ord("a") + i) for i, name in enumerate(union(a, b))}
    kept = tuple(name for name in union(a, b) if name not in over)
    left, right, result = ("".join(letters[name] for name in axes) for axes in (a.axes, b.axes, kept))
    return Named(torch.einsum(f"{left},{right}->{result}", a.data, b.data), kept)


def reduced(function: Callable[..., Tensor], x: Named, over: Sequence[str]) -> Named:
    """One axis after the other."""
    for name in over:
        position = x.axes.index(name)
        x = Named(function(x.data, position), x.axes[:position] + x.axes[position + 1 :])
    return x


def total(x: Named, over: Sequence[str]) -> Named:
    """The sum over some axes."""
    return reduced(lambda data, position: data.sum(position), x, over)


def mean(x: Named, over: Sequence[str]) -> Named:
    """The mean over some axes."""
    summed = total(x, over)
    return evolve(summed, data=summed.data / prod(x.size(name) for name in over))


def greatest(x: Named, over: Sequence[str]) -> Named:
    """The maximum; its gradient is shared equally by all elements that attain it."""
    if not over:
        return x
    positions = [x.axes.index(name) for name in over]
    return Named(x.data.amax(positions), tuple(name for name in x.axes if name not in over))


def one_hot(ids: Named, axis: str, size: int) -> Named:
    """1 where the coordinate along `axis` is the id."""
    here = ids.data.unsqueeze(-1) == torch.arange(size)
    return Named(here.double(), (*ids.axes, axis))


def cumulative(x: Named, over: str) -> Named:
    """Each position's sum is one of all positions, of which the later ones count zero."""
    size = x.size(over)
    upto = Named(torch.ones(size, size, dtype=x.data.dtype).tril(), ("position", over))
    # A position beyond is left out, not multiplied by zero.
    wide = torch.where(upto.to(("position", *x.axes)) != 0, x.data, 0)
    summed = total(Named(wide, ("position", *x.axes)), [over])
    return evolve(summed, axes=tuple(over if name == "position" else name for name in summed.axes))


def first_greatest(x: Named, over: str) -> Named:
    """The first position along `over` of the greatest element."""
    rest = tuple(name for name in x.axes if name != over)
    data = x.ordered((*rest, over)).data
    index = torch.arange(data.shape[-1]).expand(data.shape)
    return Named(index.masked_fill(data != data.amax(-1, keepdim=True), data.shape[-1]).amin(-1), rest)


def picked(x: Named, ids: Named, along: str) -> Named:
    """The elements at the ids, as a sum over all positions that the others do not enter."""
    here = evolve(one_hot(ids, along, x.size(along)), data=one_hot(ids, along, x.size(along)).data != 0)
    axes = (*ids.axes, *(name for name in x.axes if name not in ids.axes and name != along))
    wide = torch.where(here.to((*axes, along)), x.to((*axes, along)), torch.zeros((), dtype=x.data.dtype))
    summed = wide.any(-1) if x.data.dtype == torch.bool else wide.sum(-1)
    return Named(summed, axes)


def softmax(x: Named, over: Sequence[str]) -> Named:
    """Exponentials, divided by their sum over some axes."""
    e = elementwise(lambda a, b: (a - b).exp(), x, evolve(greatest(x, over), data=greatest(x, over).data.detach()))
    return elementwise(lambda a, b: a / b, e, total(e, over))


def log_softmax(x: Named, over: Sequence[str]) -> Named:
    """The logarithm of `softmax`."""
    shifted = elementwise(lambda a, b: a - b.detach(), x, greatest(x, over))
    e = evolve(shifted, data=shifted.data.exp())
    return elementwise(lambda a, b: a - b.log(), shifted, total(e, over))


def attend(
    q: Named, k: Named, v: Named, rest: Sequence[Named], o: Mapping[str, Any], keep: Named | None = None
) -> Named:
    """Scores with an axis of their own for the queries' positions, where queries have the keys' axis. `keep` has the
    weights that are not dropped.
    """
    over, along = o["over"], o["along"]
    renamed = {over: "queries"}
    queries = evolve(q, axes=tuple(renamed.get(name, name) for name in q.axes))
    scores = einsum(queries, k, [along])
    scores = evolve(scores, data=scores.data * o["scale"])
    if o.get("softcap"):
        scores = evolve(scores, data=o["softcap"] * torch.tanh(scores.data / o["softcap"]))
    allowed = torch.ones((), dtype=torch.bool)
    rest = list(rest)
    if o["mask"]:
        allowed = rest.pop(0).to(scores.axes)
    if o["bias"]:
        scores = elementwise(lambda a, b: a + b, scores, rest.pop(0))
    if q.axes.count(over):
        i, j = (torch.arange(scores.size(name)) for name in ("queries", over))
        distance = Named(i[:, None] - j[None, :], ("queries", over)).to(scores.axes)
        if o["causal"]:
            allowed = allowed & (distance >= 0)
        if o.get("window"):
            allowed = allowed & (distance.abs() < o["window"])
    if o.get("segments"):
        ids = rest.pop(0)
        own = evolve(ids, axes=tuple(renamed.get(name, name) for name in ids.axes))
        allowed = allowed & (own.to(scores.axes) == ids.to(scores.axes))
    masked = evolve(scores, data=scores.data.masked_fill(~allowed, NOTHING))
    if o.get("sink"):
        # One more score, and a value of zeros.
        sink = rest.pop(0).to(masked.axes).expand([1 if n == over else masked.size(n) for n in masked.axes])
        masked = evolve(masked, data=torch.cat([masked.data, sink], masked.axes.index(over)))
    weights = softmax(masked, [over]).ordered(masked.axes)
    count = scores.size(over)
    weights = evolve(weights, data=weights.data.narrow(weights.axes.index(over), 0, count) * allowed)
    if keep is not None:
        weights = elementwise(lambda a, b: a * b / (1 - o["dropout"]), weights, keep)
    result = einsum(weights, v, [over])
    back = {"queries": over}
    return evolve(result, axes=tuple(back.get(name, name) for name in result.axes))


def rope(x: Named, o: Mapping[str, Any], positions: Named | None = None) -> Named:
    """The two halves of `pairs` rotated against each other by position · base^(−i / half)."""
    x = x.ordered([*(name for name in x.axes if name not in (o["over"], o["pairs"])), o["over"], o["pairs"]])
    if o.get("part", 1.0) < 1:
        count = round(o["part"] * x.size(o["pairs"]))
        some, rest = x.data[..., :count], x.data[..., count:]
        turned = rope(evolve(x, data=some), {**o, "part": 1.0}, positions)
        return evolve(turned, data=torch.cat((turned.data, rest), -1))
    if o.get("interleaved"):
        even, odd = x.data[..., 0::2], x.data[..., 1::2]
        turned = rope(evolve(x, data=torch.cat((even, odd), -1)), {**o, "interleaved": False}, positions)
        return evolve(turned, data=torch.stack(turned.data.chunk(2, -1), -1).flatten(-2))
    half = x.size(o["pairs"]) // 2
    rate = torch.tensor([o["base"] ** (-i / half) for i in range(half)], dtype=torch.float64)
    factor = 1.0
    if o.get("scaling"):
        name, *numbers = o["scaling"]
        scaled = llama3 if name == "llama3" else yarn
        rate, factor = scaled(rate, o["base"], *numbers)
    angle = torch.arange(x.size(o["over"])).double()[:, None] * rate
    if positions is not None:
        shape = [positions.size(name) if name in positions.axes else 1 for name in x.axes[:-1]]
        first = [name for name in positions.axes if name not in x.axes]
        own = positions.to([*first, *(name for name in x.axes if name in positions.axes)])
        if o.get("sections"):
            section = [i for i, count in enumerate(o["sections"]) for _ in range(count)]
            angle = torch.stack([own[i].reshape(shape).double() for i in section], -1) * rate
        else:
            angle = own.reshape(shape).double()[..., None] * rate
    a, b = x.data[..., :half], x.data[..., half:]
    both = torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
    return evolve(x, data=factor * both)


def llama3(rate: Tensor, base: float, factor: float, original: int, low: float, high: float) -> tuple[Tensor, float]:
    """By cases, as Llama 3.1 has it."""
    found = []
    for each in rate.tolist():
        wavelength = 2 * torch.pi / each
        if wavelength < original / high:
            found.append(each)
        elif wavelength > original / low:
            found.append(each / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append((1 - smooth) * each / factor + smooth * each)
    return torch.tensor(found, dtype=torch.float64), 1.0


def yarn(
    rate: Tensor,
    base: float,
    factor: float,
    original: int,
    fast: float,
    slow: float,
    attention: float | None,
    truncate: bool,
) -> tuple[Tensor, float]:
    """Between the pairs that turn `fast` and `slow` times in the original length, from extrapolation to stretching."""
    size = 2 * len(rate)
    first, last = (size / 2 * log(original / (2 * torch.pi * turns), base) for turns in (fast, slow))
    if truncate:
        first, last = float(int(first // 1)), float(-int(-last // 1))
    first, last = max(first, 0), min(last, size - 1)
    last = last + 0.001 if first == last else last
    found = []
    for pair, each in enumerate(rate.tolist()):
        ramp = min(max((pair - first) / (last - first), 0), 1)
        found.append(each / factor * ramp + each * (1 - ramp))
    return torch.tensor(found, dtype=torch.float64), attention or (0.1 * log(factor) + 1 if factor > 1 else 1.0)


def normalized(x: Named, rest: Sequence[Named], o: Mapping[str, Any], center: bool) -> Named:
    """`rms_norm`, or `layer_norm`, which centers; `rest` are the scale and the shift, as far as there are any."""
    if center:
        x = elementwise(lambda a, b: a - b, x, mean(x, o["over"]))
    square = mean(evolve(x, data=x.data * x.data), o["over"])
    result = elementwise(lambda a, b: a / (b + o["eps"]).sqrt(), x, square)
    rest = list(rest)
    if o["scale"]:
        result = elementwise(lambda a, b: a * b, result, rest.pop(0))
    if o["shift"]:
        result = elementwise(lambda a, b: a + b, result, rest.pop(0))
    return result


def linear_scan(a: Named, b: Named, o: Mapping[str, Any]) -> Named:
    """One position after the other, each from the one before it."""
    axes = (o["over"], *(name for name in union(a, b) if name != o["over"]))
    count = max(x.size(o["over"]) for x in (a, b) if o["over"] in x.axes)
    factors, terms = (x.to(axes).expand(count, *[-1] * (len(axes) - 1)) for x in (a, b))
    states: list[Tensor] = []
    for t in reversed(range(count)) if o["backward"] else range(count):
        states.append(factors[t] * states[-1] + terms[t] if states else terms[t] + 0 * factors[t])
    return Named(torch.stack(states[::-1] if o["backward"] else states), axes)


def delta_rule(q: Named, k: Named, v: Named, beta: Named, decay: Sequence[Named], o: Mapping[str, Any]) -> Named:
    """One position after the other; the memory is a matrix for each combination of the other axes."""
    given, over, along = (q, k, v, beta, *decay), o["over"], o["along"]
    rest = [name for name in dict.fromkeys(name for x in given for name in x.axes) if name not in (over, along)]
    count = q.size(over)
    wide = [x.to([over, *rest, along]).expand(count, *[-1] * (len(rest) + 1)) for x in given]
    queries, keys, values, rates, *fading = wide
    memory, results = torch.zeros_like(queries[0] * keys[0] * values[0] * rates[0]), []
    for t in range(count):
        for factor in fading:
            memory = memory * factor[t]
        found = (memory * keys[t]).sum(-1, keepdim=True)
        memory = memory + keys[t] * rates[t] * (values[t] - found)
        results.append((memory * queries[t]).sum(-1))
    return Named(torch.stack(results), (over, *rest))


def inverse(x: Named, rows: str, columns: str) -> Named:
    """Turned: what belongs to a row comes from the inverse's columns."""
    rest = tuple(name for name in x.axes if name not in (rows, columns))
    return Named(torch.linalg.inv(x.to([*rest, columns, rows])), (*rest, rows, columns))


def shift(x: Named, over: str, by: int) -> Named:
    """Zeros come in at one end, and as many entries go out at the other."""
    x = x.ordered([over, *(name for name in x.axes if name != over)])
    size = x.size(over)
    rows = [x.data[t - by] if 0 <= t - by < size else torch.zeros_like(x.data[0]) for t in range(size)]
    return evolve(x, data=torch.stack(rows))


def likelihood(logits: Named, targets: Named, over: str) -> Named:
    """The negative log-likelihood of each target; of one that is out of range, as if it had a score of zero."""
    right = einsum(logits, one_hot(targets, over, logits.size(over)), [over])
    peak = evolve(greatest(logits, [over]), data=greatest(logits, [over]).data.detach())
    summed = total(elementwise(lambda a, b: (a - b).exp(), logits, peak), [over])
    return elementwise(lambda a, b, c: a.log() + b - c, summed, peak, right)


def cross_entropy(logits: Named, targets: Named, rest: Sequence[Named], o: Mapping[str, Any]) -> Named:
    """The mean of the targets' negative log-likelihoods."""
    nll, smoothing = likelihood(logits, targets, o["over"]), o.get("smoothing", 0.0)
    if smoothing:
        uniform = mean(log_softmax(logits, [o["over"]]), [o["over"]])
        nll = elementwise(lambda a, b: (1 - smoothing) * a - smoothing * b, nll, uniform)
    return counted(nll, targets, rest, o)


def token_nll(logits: Named, targets: Named, o: Mapping[str, Any]) -> Named:
    """The negative log-likelihood of each target; 0 where it is ignored."""
    nll = likelihood(logits, targets, o["over"])
    return nll if "ignore" not in o else evolve(nll, data=nll.data.where(targets.to(nll.axes) != o["ignore"], 0.0))


def counted(each: Named, targets: Named, rest: Sequence[Named], o: Mapping[str, Any]) -> Named:
    """The weighted mean of one number a target, over the targets that are not ignored."""
    ignore = o.get("ignore")
    if ignore is not None:
        counts = targets.to(each.axes) != ignore
        share = counts * (rest[0].to(each.axes) if o["weights"] else torch.ones((), dtype=torch.float64))
        if not bool(counts.any()):
            return Named((each.data * 0).sum())
        return Named((each.data * share).sum() / share.sum())
    if not o["weights"]:
        return mean(each, each.axes)
    weight = elementwise(lambda a, b: a + 0 * b, rest[0], each)
    weighted = elementwise(lambda a, b: a * b, weight, each)
    return elementwise(lambda a, b: a / b, total(weighted, weighted.axes), total(weight, weight.axes))


def accuracy(logits: Named, targets: Named, rest: Sequence[Named], o: Mapping[str, Any]) -> Named:
    """The share of targets that are the first of the greatest logits."""
    right = elementwise(lambda a, b: (a == b).double(), targets, first_greatest(logits, o["over"]))
    return counted(right, targets, [evolve(weight, data=weight.data.detach()) for weight in rest], o)


def chosen(x: Named, over: str, into: str, count: int) -> Named:
    """Where the greatest are, the greatest first, and of equal ones the first."""
    rest = [name for name in x.axes if name != over]
    order = x.ordered([*rest, over]).data.detach().argsort(dim=-1, descending=True, stable=True)
    return Named(order[..., :count], (*rest, into))


def routed_dot(x: Named, w: Named, ids: Named, o: Mapping[str, Any]) -> Named:
    """A product with the matrix of each row."""
    matrices = einsum(one_hot(ids, o["along"], w.size(o["along"])), w, [o["along"]])
    return einsum(x, matrices, o["over"])


def slot_index(ids: Named, order: Sequence[str]) -> Named:
    """How many equal ids come before each, in the order of these axes."""
    axes = [*(name for name in ids.axes if name not in order), *order]
    data = ids.ordered(axes).data
    flat = data.flatten(data.dim() - len(order))
    count = flat.shape[-1]
    before = torch.ones(count, count, dtype=torch.bool).tril(-1)
    same = (flat.unsqueeze(-1) == flat.unsqueeze(-2)) & before
    return Named(same.sum(-1).view(data.shape), tuple(axes))


def places(ids: Named, o: Mapping[str, Any], sizes: tuple[int, int]) -> Named:
    """1 where an id has this slot of this expert."""
    experts, slots = (
        one_hot(each, axis, size)
        for each, axis, size in zip((ids, slot_index(ids, o["order"])), (o["experts"], o["slots"]), sizes, strict=True)
    )
    return elementwise(lambda a, b: a * b, experts, slots)


def split(x: Named, axis: str, parts: Sequence[tuple[str, int]]) -> Named:
    """An axis as several, of these names and sizes."""
    position = x.axes.index(axis)
    shape = [*x.data.shape[:position], *(size for _, size in parts), *x.data.shape[position + 1 :]]
    axes = (*x.axes[:position], *(name for name, _ in parts), *x.axes[position + 1 :])
    return evolve(x, data=x.data.reshape(shape), axes=axes)


def merge(x: Named, parts: Sequence[str], into: str) -> Named:
    """Several axes as one."""
    rest = tuple(name for name in x.axes if name not in parts)
    x = x.ordered([*rest, *parts])
    return evolve(x, data=x.data.flatten(len(rest)), axes=(*rest, into))


def concat(tensors: Sequence[Named], axes: Sequence[str], into: str) -> Named:
    """Tensors one behind the other, along an axis of each."""
    renamed = [
        evolve(x, axes=tuple(into if name == axis else name for name in x.axes))
        for x, axis in zip(tensors, axes, strict=True)
    ]
    order = renamed[0].axes
    return Named(torch.cat([x.to(order) for x in renamed], order.index(into)), order)


def cut(x: Named, o: Mapping[str, Any], size: int) -> Named:
    """A part of an axis."""
    axes = tuple(o["into"] if name == o["axis"] else name for name in x.axes)
    return evolve(x, data=x.data.narrow(x.axes.index(o["axis"]), o["start"], size), axes=axes)


def patches(x: Named, o: Mapping[str, Any], sizes: Mapping[str, int]) -> Named:
    """Each window element by element, by its index in the image; one axis after the other."""
    outside = torch.tensor(o.get("fill", 0)).to(x.data.dtype)
    for i, (axis, into, size) in enumerate(zip(o["axes"], o["into"], o["size"], strict=True)):
        here, end = x.axes.index(axis), len(x.axes)
        start = torch.arange(sizes[into]) * o["stride"][i] - o["padding"][i][0]
        index = start[:, None] + torch.arange(sizes[size]) * o["dilation"][i]
        inside = (index >= 0) & (index < x.size(axis))
        taken = x.data.index_select(here, index.clamp(0, x.size(axis) - 1).flatten())
        taken = taken.reshape(*taken.shape[:here], *index.shape, *taken.shape[here + 1 :]).movedim(here + 1, end)
        seen = inside.view([index.shape[0] if j == here else index.shape[1] if j == end else 1 for j in range(end + 1)])
        x = Named(
            torch.where(seen, taken, outside), (*x.axes[:here], f"new {into}", *x.axes[here + 1 :], f"new {size}")
        )
    return evolve(x, axes=tuple(name.removeprefix("new ") for name in x.axes))


POINTWISE: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "negate": lambda a: -a,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
    "logical_and": lambda a, b: a & b,
    "logical_or": lambda a, b: a | b,
    "logical_not": lambda a: ~a,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": torch.where,
    "relu": torch.relu,
    "gelu_tanh": lambda a: a / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3))),
    "silu": lambda a: a * torch.sigmoid(a),
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "softplus": lambda a: torch.logaddexp(a, torch.zeros_like(a)),
    "log_sigmoid": lambda a: -torch.logaddexp(-a, torch.zeros_like(a)),
    "power": lambda a, p: a**p,
    "atan2": torch.atan2,
    "floor_divide": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "sign": torch.sign,
    "floor": torch.floor,
    "round": torch.round,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": torch.log,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
}
