"""What a checked model means: a walk over its body with torch's autograd, on one device, over the whole batch.

Comes in: `spec.Model`, inputs, parameters by full name, a seed and a step. Goes out: the loss and the metrics. It is
`docs/reference` written once more, as plainly as torch allows, and shares nothing with the compiler and what it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from partita.dsl import spec
from partita.dsl.names.paths import DOWN, MAGNITUDE, UP
from partita.dsl.types import Type
from partita.runtime.interpreter import drawn, named
from partita.runtime.interpreter.named import Named

RANK = "the rank of an adapter"
LOWEST = {"i8": -128, "u8": 0}  # of integers that wrap around after eight bits


@frozen
class At:
    """What is applied in a body, and the sizes of the result's axes."""

    step: spec.Apply
    path: str
    sizes: Mapping[str, int]

    @property
    def options(self) -> Mapping[str, Any]:
        """Its options."""
        return self.step.options


@define(eq=False)
class Walk:
    """One run of a model. `parameters` are float64 or int64 tensors, with axes as they are declared, buffers included.

    `sizes` are those of axes that differ from what the file says. With `training` false dropout is the identity.
    `adapters` are those of matrices, by full name, whose own parameters are among the others; `functions` are
    operations of the file's own. After `run`, `updates` and `after` are what becomes of buffers, and of parameters
    after theirs.
    """

    model: spec.Model
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    seed: int = 0
    step: int = 1
    training: bool = True
    sizes: Mapping[str, int] = field(factory=dict)
    adapters: Mapping[str, spec.Call] = field(factory=dict)
    functions: Mapping[str, Callable[..., Any]] = field(factory=dict)
    shared: dict[str, Named] = field(factory=dict)  # the parameters by path
    drawn: dict[str, int] = field(factory=dict)
    position: tuple[tuple[str, int, int], ...] = ()  # in scans: axis, position, size
    updates: dict[str, Tensor] = field(factory=dict)  # of buffers: what they are after the step
    after: dict[str, Tensor] = field(factory=dict)  # of parameters: what becomes of them after their update
    losses: dict[str, Tensor] = field(factory=dict)  # those with names

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics."""
        values = self.body(self.model.body, self.model.name, self.given())
        self.losses = {name: values[index].data for name, index in self.model.metrics if name in self.model.losses}
        metrics = {name: values[index].data.detach().double().clone() for name, index in self.model.metrics}
        return values[self.model.loss].data, metrics

    def given(self) -> list[Named]:
        """The inputs."""
        types = zip(self.model.body.inputs, self.model.body.types, strict=False)
        return [Named(self.inputs[name], type.names, name) for name, type in types]

    # ------------------------------------------------------------ bodies

    def body(self, body: spec.Body, path: str, given: Sequence[Named], homes: Sequence[str] = ()) -> list[Named]:
        """The values of a body, given its inputs. Its parameters are found in the first of `homes`, or else in itself;
        the others are those of the bodies around it.
        """
        values: list[Named] = []
        homes = homes or (path,)

        def add(made: Sequence[Named]) -> None:
            """More values, each with its axes in the order of its type."""
            for value in made:
                ordered = value.ordered(body.types[len(values)].names)
                values.append(evolve(ordered, data=_source(ordered.data)))

        add(given)
        for step in body.steps:
            match step:
                case spec.Apply():
                    add([self.apply(step, path, values)])
                case spec.Parameter():
                    self.shared[f"{path}.{step.name}"] = value = self.parameter(step, f"{path}.{step.name}")
                    add([value])
                case spec.SharedParameter():
                    add([self.shared[f"{homes[0]}.{step.parameter.name}"]])
                case spec.Sample():
                    add([self.sample(step, f"{path}.{step.name}")])
                case spec.CallBlock():
                    arguments = [self.operand(each, values) for each in step.arguments]
                    up, name = step.instance or (0, step.scope)
                    before = set(self.shared)
                    made = self.body(step.body, f"{path}.{step.scope}", arguments, (f"{homes[up]}.{name}",))
                    add(self.results(step.body, made))
                    if isinstance(step, spec.InstanceParameters) and step.copies is not None:
                        up, name = step.copies
                        for own in self.shared.keys() - before:
                            source = f"{homes[up]}.{name}{own.removeprefix(f'{path}.{step.scope}')}"
                            self.copy(own, source, step.decay)
                case spec.Repeat():
                    carried = [self.operand(each, values) for each in step.carried]
                    captured, kept = [values[index] for index in step.captured], []
                    for iteration in range(step.count):
                        inner = f"{step.scope}.{iteration}"
                        around = f"{homes[0]}.{inner}", *homes
                        body_here = step.iteration(iteration)
                        made = self.body(body_here, f"{path}.{inner}", [*carried, *captured], around)
                        results = self.results(body_here, made)
                        carried = results[: len(carried)]
                        kept.append(results[len(carried) :])
                    add([*carried, *(value for of_name in zip(*kept, strict=True) for value in of_name)])
                case spec.Scan():
                    add(self.scanned(step, path, values, homes))
        for each in body.updates:
            found, buffer = self.after if each.after else self.updates, values[each.buffer]
            new = found[str(buffer.source)] = values[each.value].ordered(buffer.axes).data.detach().clone()
            if self.training and not each.after:  # what is shared is read by later calls
                self.shared[str(buffer.source)] = evolve(buffer, data=new)
        return values

    def copy(self, path: str, source: str, decay: float | None) -> None:
        """A copy moves towards its source before it is read, and stays there."""
        if decay is None or not self.shared[path].data.is_floating_point():
            return
        kept, followed = self.shared[path], self.shared[source]
        mean = decay * kept.data + (1 - decay) * followed.ordered(kept.axes).data.detach()
        self.shared[path], self.updates[path] = evolve(kept, data=mean), mean.detach().clone()

    def scanned(self, step: spec.Scan, path: str, values: Sequence[Named], homes: Sequence[str]) -> list[Named]:
        """One position after the other; what is drawn is drawn for all positions, and each takes its own."""
        axis = step.axis.name
        count = self.sizes.get(axis, step.axis.size)
        carried = [self.operand(each, values) for each in step.carried]
        captured = [values[index] for index in step.captured]
        found: list[list[Named]] = []
        outer, drawn_before = self.position, dict(self.drawn)
        for t in reversed(range(count)) if step.backward else range(count):
            self.position = (*outer, (axis, t, count))
            self.drawn = dict(drawn_before)
            seen = [x.at(axis, t) if axis in x.axes else x for x in captured]
            given = [x.ordered(type.names) for x, type in zip([*carried, *seen], step.body.types, strict=False)]
            carried = self.results(step.body, self.body(step.body, path, given, (homes[0], *homes)))
            found.append(carried)
        self.position = outer
        columns = zip(*(found[::-1] if step.backward else found), strict=True)
        return [
            Named(torch.stack([x.ordered(column[0].axes).data for x in column]), (axis, *column[0].axes))
            for column in columns
        ]

    def results(self, body: spec.Body, values: Sequence[Named]) -> list[Named]:
        """What a body returns."""
        return [self.operand(each, values) for each in body.results]

    def operand(self, operand: spec.Operand, values: Sequence[Named], integer: bool = False) -> Named:
        """A value, or a number."""
        if not isinstance(operand, spec.Literal):
            return values[operand]
        value = operand.at(self.sizes)
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if integer else torch.float64
        return Named(torch.tensor(value, dtype=dtype))

    def shape(self, type: Type) -> tuple[int, ...]:
        """The sizes of a type's axes."""
        return tuple(self.sizes.get(axis.name, axis.size) for axis in type.axes)

    # ------------------------------------------------------------ leaves

    def parameter(self, step: spec.Parameter, path: str) -> Named:
        """A parameter or a buffer."""
        data = self.parameters[path]
        return Named(data.double() if step.type.is_float else data.long(), step.type.names, path)

    def sample(self, step: spec.Sample, path: str) -> Named:
        """A sample, as `docs/random.md` defines it."""
        (argument,) = step.distribution.arguments.values() or (1.0,)
        shape = (*self.positions(), *self.shape(step.type))
        data = drawn.sample(step.distribution.name, argument, self.seed, self.step, path, shape)
        return Named(self.here(data), step.type.names)

    def positions(self) -> tuple[int, ...]:
        """The sizes of the axes that are scanned around, the outermost first."""
        return tuple(size for _, _, size in self.position)

    def here(self, data: Tensor) -> Tensor:
        """What was drawn for all positions, at this one."""
        return data[tuple(t for _, t, _ in self.position)]

    # ------------------------------------------------------------ functions

    def apply(self, step: spec.Apply, path: str, values: Sequence[Named]) -> Named:
        """A function of the language."""
        integer = any(not values[o].data.is_floating_point() for o in step.operands if isinstance(o, int))
        integer = (integer and step.function not in ("where",)) or step.type.dtype in ("i64", "i32", *LOWEST)
        operands = [self.operand(each, values, integer) for each in step.operands]
        result = evolve(self.applied(step, path, operands), source=None)
        lowest = LOWEST.get(step.type.dtype)
        if lowest is not None:
            result = evolve(result, data=(result.data - lowest) % 256 + lowest)
        return result

    def applied(self, step: spec.Apply, path: str, operands: Sequence[Named]) -> Named:
        """A function of these operands."""
        name = step.function
        if name in named.POINTWISE:
            return named.elementwise(named.POINTWISE[name], *operands)
        sizes = dict(zip(step.type.names, self.shape(step.type), strict=True))
        made: Named = getattr(self, f"_{name}")(At(step, path, sizes), *operands)
        return made

    def _training(self, at: At) -> Named:
        return Named(torch.tensor(self.training))

    def _op(self, at: At, *operands: Named) -> Named:
        """An operation of one's own: its forward, of tensors with their axes as they are declared."""
        declared, renamed = self.model.operations[at.options["name"]], dict(at.options["renamed"])
        given = [
            x.ordered([renamed.get(name, name) for name in type.names]).data.clone()
            for x, (_, type) in zip(operands, declared.operands, strict=True)
        ]
        made = self.functions[at.options["name"]](*given)
        return Named(made[at.options["result"]] if isinstance(made, tuple) else made, at.step.type.names)

    def _dropout(self, at: At, x: Named) -> Named:
        if not self.training or not at.options["rate"]:
            return x
        keep = self.kept(f"{at.path}.{at.step.name or 'dropout'}", at.options["rate"], x.data.shape)
        return Named(x.data * keep / (1 - at.options["rate"]), x.axes)

    def kept(self, name: str, rate: float, shape: Sequence[int]) -> Tensor:
        """What a dropout keeps."""
        key = f"{name}.keep"
        count = self.drawn[key] = self.drawn.get(key, 0) + 1
        whole = (*self.positions(), *shape)
        return self.here(drawn.kept(rate, self.seed, self.step, key if count == 1 else f"{key}~{count}", whole))

    def _cast(self, at: At, x: Named) -> Named:
        dtype = at.step.type.dtype
        target = torch.float64 if at.step.type.is_float else torch.bool if dtype == "bool" else torch.int64
        return evolve(x, data=x.data.to(target))

    def _stop_gradient(self, at: At, x: Named) -> Named:
        return evolve(x, data=x.data.detach())

    def _grad(self, at: At, y: Named, x: Named) -> Named:
        (gradient,) = torch.autograd.grad(y.data.sum(), x.data, create_graph=True)
        return Named(gradient, x.axes)

    def _dot(self, at: At, a: Named, b: Named) -> Named:
        x, matrix = (b, a) if a.source in self.adapters else (a, b)
        product = named.einsum(x, matrix, at.options["over"])
        return self.adapted(at, product, x, matrix) if matrix.source in self.adapters else product

    def adapted(self, at: At, product: Named, x: Named, matrix: Named) -> Named:
        """A product with a matrix, and beside it that with the matrix's adapter (`docs/lora.md`)."""
        o, over = self.adapters[str(matrix.source)].arguments, at.options["over"]
        stacked = [name for name in matrix.axes if name in x.axes and name not in over]
        outer = [name for name in matrix.axes if name not in (*over, *stacked)]
        inner = [name for name in matrix.axes if name in over]
        axes = {DOWN: (*stacked, *inner, RANK), UP: (*stacked, RANK, *outer), MAGNITUDE: (*stacked, *outer)}
        down, up, *length = (
            Named(self.parameters[f"{matrix.source}.{each}"].double(), own)
            for each, own in axes.items()
            if f"{matrix.source}.{each}" in self.parameters
        )
        factor = (o["alpha"] or o["rank"]) / o["rank"]
        if self.training and o["dropout"]:
            keep = self.kept(f"{at.path}.{at.step.name or 'dot'}.kept", o["dropout"], x.data.shape)
            x = Named(x.data * keep / (1 - o["dropout"]), x.axes)
        low = named.einsum(named.einsum(x, down, over), up, [RANK])
        result = named.elementwise(lambda a, b: a + factor * b, product, low)
        if not length:
            return result
        both = named.elementwise(lambda a, b: a + factor * b, matrix, named.einsum(down, up, [RANK]))
        whole, own = (named.total(evolve(each, data=each.data**2), over) for each in (both, matrix))
        ratio = named.elementwise(lambda a, b, c: (a.sqrt() + b) / c.sqrt().detach(), own, length[0], whole)
        return named.elementwise(lambda a, b: a * b, result, ratio)

    def _patches(self, at: At, x: Named) -> Named:
        return named.patches(x, at.options, at.sizes)

    def _conv(self, at: At, image: Named, kernel: Named) -> Named:
        o = at.options
        sizes = {**at.sizes, **{name: kernel.size(name) for name in o["size"]}}
        return named.einsum(named.patches(image, o, sizes), kernel, [*o["over"], *o["size"]])

    def _attend(self, at: At, q: Named, k: Named, v: Named, *rest: Named) -> Named:
        keep = None
        if self.training and at.options.get("dropout"):
            over, last = at.options["over"], at.options.get("values") or at.options["along"]
            axes = [name for name in at.step.type.names if name != last]
            shape = [*(q.size(name) for name in axes), k.size(over)]
            names = (*("queries" if name == over else name for name in axes), over)
            keep = Named(self.kept(f"{at.path}.{at.step.name or 'attend'}", at.options["dropout"], shape), names)
        return named.attend(q, k, v, rest, at.options, keep)

    def _embedding(self, at: At, ids: Named, table: Named) -> Named:
        over = at.options["over"]
        return named.einsum(named.one_hot(ids, over, table.size(over)), table, [over])

    def _top_k(self, at: At, x: Named) -> Named:
        return named.chosen(x, at.options["over"], at.options["into"], at.sizes[at.options["into"]])

    def _routed_dot(self, at: At, x: Named, w: Named, ids: Named) -> Named:
        return named.routed_dot(x, w, ids, at.options)

    def _slot_index(self, at: At, ids: Named) -> Named:
        return named.slot_index(ids, at.options["order"])

    def _dispatch(self, at: At, x: Named, ids: Named) -> Named:
        sizes = at.sizes[at.options["experts"]], at.sizes[at.options["slots"]]
        places = named.places(ids, at.options, sizes)
        return named.einsum(x, places, at.options["order"])

    def _combine(self, at: At, y: Named, ids: Named, weight: Named) -> Named:
        places = named.places(ids, at.options, (y.size(at.options["experts"]), y.size(at.options["slots"])))
        weighted = named.elementwise(lambda a, b: a * b, places, weight)
        return named.einsum(y, weighted, (*at.options["order"][:-1], at.options["experts"], at.options["slots"]))

    def _load(self, at: At, ids: Named) -> Named:
        into = at.step.type.names[-1]
        return named.total(named.one_hot(ids, into, at.sizes[into]), at.options["over"])

    def _gather(self, at: At, x: Named, ids: Named) -> Named:
        return named.picked(x, ids, at.options["along"])

    def _sum_by(self, at: At, x: Named, ids: Named) -> Named:
        return named.total(self._there(at, x, ids, 0), at.options["along"])

    def _mean_by(self, at: At, x: Named, ids: Named) -> Named:
        ones = evolve(ids, data=torch.ones_like(ids.data, dtype=torch.float64))
        count = named.total(self._there(at, ones, ids, 0), at.options["along"])
        summed = named.total(self._there(at, x, ids, 0), at.options["along"])
        return named.elementwise(lambda a, b: a / b.clamp(min=1), summed, count)

    def _max_by(self, at: At, x: Named, ids: Named) -> Named:
        peak = named.greatest(self._there(at, x, ids, -inf), at.options["along"])
        return evolve(peak, data=torch.where(peak.data == -inf, 0.0, peak.data))

    def _there(self, at: At, x: Named, ids: Named, other: float) -> Named:
        """x where the id is the position of a new axis, and a number elsewhere."""
        size = at.sizes[at.options["into"]]
        hot = named.one_hot(ids, at.options["into"], size)
        return named.elementwise(lambda a, b: torch.where(b != 0, a, other), x, hot)

    def _one_hot(self, at: At, ids: Named) -> Named:
        return named.one_hot(ids, at.options["axis"], self.shape(at.step.type)[-1])

    def _arg_max(self, at: At, x: Named) -> Named:
        return named.first_greatest(x, at.options["over"])

    def _cumsum(self, at: At, x: Named) -> Named:
        return named.cumulative(x, at.options["over"])

    def _rope(self, at: At, x: Named, *positions: Named) -> Named:
        return named.rope(x, at.options, *positions)

    def _zeros(self, at: At, *like: Named) -> Named:
        return Named(torch.zeros(self.shape(at.step.type), dtype=torch.float64), at.step.type.names)

    _zeros_like = _zeros

    def _iota(self, at: At) -> Named:
        (size,) = self.shape(at.step.type)
        return Named(torch.arange(size), at.step.type.names)

    def _sum(self, at: At, x: Named) -> Named:
        return named.total(x, at.options["over"])

    def _mean(self, at: At, x: Named) -> Named:
        return named.mean(x, at.options["over"])

    def _max(self, at: At, x: Named) -> Named:
        return named.greatest(x, at.options["over"])

    def _min(self, at: At, x: Named) -> Named:
        least = named.greatest(evolve(x, data=-x.data), at.options["over"])
        return evolve(least, data=-least.data)

    def _softmax(self, at: At, x: Named) -> Named:
        return named.softmax(x, at.options["over"])

    def _log_softmax(self, at: At, x: Named) -> Named:
        return named.log_softmax(x, at.options["over"])

    def _layer_norm(self, at: At, x: Named, *rest: Named) -> Named:
        return named.normalized(x, rest, at.options, center=True)

    def _rms_norm(self, at: At, x: Named, *rest: Named) -> Named:
        return named.normalized(x, rest, at.options, center=False)

    def _cross_entropy(self, at: At, logits: Named, targets: Named, *rest: Named) -> Named:
        return named.cross_entropy(logits, targets, rest, at.options)

    def _token_nll(self, at: At, logits: Named, targets: Named) -> Named:
        return named.token_nll(logits, targets, at.options)

    def _gelu(self, at: At, x: Named) -> Named:
        if at.options.get("exact"):
            return evolve(x, data=x.data / 2 * (1 + torch.erf(x.data / 2**0.5)))
        return named.elementwise(named.POINTWISE["gelu_tanh"], x)

    def _logsumexp(self, at: At, x: Named) -> Named:
        x = x.ordered([*(name for name in x.axes if name not in at.options["over"]), *at.options["over"]])
        rest = x.axes[: len(x.axes) - len(at.options["over"])]
        return Named(x.data.flatten(len(rest)).logsumexp(-1), rest)

    def _binary_cross_entropy(self, at: At, logits: Named, targets: Named) -> Named:
        def loss(x: Tensor, t: Tensor) -> Tensor:
            return -t * torch.sigmoid(x).log() - (1 - t) * torch.sigmoid(-x).log()

        found = named.elementwise(loss, logits, targets)
        return named.mean(found, found.axes)

    def _linear_scan(self, at: At, a: Named, b: Named) -> Named:
        return named.linear_scan(a, b, at.options)

    def _delta_rule(self, at: At, q: Named, k: Named, v: Named, beta: Named, *decay: Named) -> Named:
        return named.delta_rule(q, k, v, beta, decay, at.options)

    def _inverse(self, at: At, x: Named) -> Named:
        return named.inverse(x, at.options["rows"], at.options["columns"])

    def _flip(self, at: At, x: Named) -> Named:
        x = x.ordered([at.options["over"], *(name for name in x.axes if name != at.options["over"])])
        return evolve(x, data=torch.stack(list(x.data)[::-1]))

    def _roll(self, at: At, x: Named) -> Named:
        x = x.ordered([at.options["over"], *(name for name in x.axes if name != at.options["over"])])
        return evolve(x, data=torch.stack([x.data[(t - at.options["by"]) % len(x.data)] for t in range(len(x.data))]))

    def _shift(self, at: At, x: Named) -> Named:
        return named.shift(x, at.options["over"], at.options["by"])

    def _mse(self, at: At, a: Named, b: Named) -> Named:
        square = named.elementwise(lambda x, y: (x - y) ** 2, a, b)
        return named.mean(square, square.axes)

    def _accuracy(self, at: At, logits: Named, targets: Named, *rest: Named) -> Named:
        return named.accuracy(logits, targets, rest, at.options)

    def _expand(self, at: At, x: Named) -> Named:
        wide = Named(torch.ones(self.shape(at.step.type), dtype=x.data.dtype), at.step.type.names)
        return Named(x.to(wide.axes).expand(wide.data.shape), wide.axes)

    def _rename(self, at: At, x: Named) -> Named:
        pairs = dict(at.options["pairs"])
        return evolve(x, axes=tuple(pairs.get(name, name) for name in x.axes))

    def _split(self, at: At, x: Named) -> Named:
        return named.split(x, at.options["axis"], [(name, at.sizes[name]) for name in at.options["into"]])

    def _merge(self, at: At, x: Named) -> Named:
        return named.merge(x, at.options["axes"], at.options["into"])

    def _concat(self, at: At, *tensors: Named) -> Named:
        return named.concat(tensors, at.options["axes"], at.options["into"])

    def _slice(self, at: At, x: Named) -> Named:
        return named.cut(x, at.options, at.sizes[at.options["into"]])


def _source(data: Tensor) -> Tensor:
    """A tensor by which `grad` may differentiate."""
    return data if data.requires_grad or not data.is_floating_point() else data.detach().requires_grad_()
