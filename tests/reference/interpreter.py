"""What a checked model means: a walk over its body with torch's autograd, on one device, over the whole batch.

Comes in: `spec.Model`, inputs, parameters by full name, a seed and a step. Goes out: the loss and the metrics. A walk
also notes what the language says of parameters and inputs by how they are read: fans, decay, and the limits of
integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, prod
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor

from partita.dsl import spec
from tests.reference import drawn, named
from tests.reference.named import Named

# Functions through which a parameter or an input is still itself.
LOWEST = {"i8": -128, "u8": 0}  # of integers that wrap around after eight bits
SHAPING = ("rename", "split", "merge", "slice", "cast")


@define
class Reading:
    """How the model reads a parameter or an input."""

    type: spec.Type
    initial: spec.Call | None = None
    fans: tuple[int, int] | None = None
    decays: bool = False
    matrix: tuple[frozenset[str], frozenset[str]] | None = None  # the axes that a `dot` sums, and those it shares
    rows: frozenset[str] = frozenset()  # of a table
    limits: list[int] = field(factory=list)
    buffer: bool = False
    copied: str | None = None  # of a copy, what it has the initial values of


@define(eq=False)
class Walk:
    """One run of a model. Without `parameters` these are zero: then it only notes how things are read.

    `sizes` are those of axes that differ from what the file says. With `training` false dropout is the identity.
    """

    model: spec.Model
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] | None = None
    seed: int = 0
    step: int = 1
    training: bool = True
    sizes: Mapping[str, int] = field(factory=dict)
    readings: dict[str, Reading] = field(factory=dict)
    shared: dict[str, Named] = field(factory=dict)  # the parameters by path
    largest: float = 0.0  # of all finite values computed
    drawn: dict[str, int] = field(factory=dict)
    scopes: dict[str, str] = field(factory=dict)  # names of blocks and repeats in the file, by path without iterations
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

    def outputs(self) -> dict[str, Tensor]:
        """The model's outputs, with axes in the order of their types."""
        values = self.body(self.model.answering, self.model.name, self.given())
        return {name: values[index].data.detach() for name, index in self.model.outputs}

    def given(self) -> list[Named]:
        """The inputs."""
        given = []
        for name, type in zip(self.model.body.inputs, self.model.body.types, strict=False):
            self.readings[name] = Reading(type)
            given.append(Named(self.inputs[name], type.names, name, _own(type)))
        return given

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
                    instance = isinstance(step, spec.InstanceParameters)
                    self.scope(f"{path}.{step.scope}", step.scope if instance else step.block)
                    arguments = [self.operand(each, values) for each in step.arguments]
                    up, name = step.instance or (0, step.scope)
                    before = set(self.readings)
                    inner = self.body(step.body, f"{path}.{step.scope}", arguments, (f"{homes[up]}.{name}",))
                    add(self.results(step.body, inner))
                    if instance and step.copies is not None:
                        up, name = step.copies
                        for each in self.readings.keys() - before:
                            source = f"{homes[up]}.{name}{each.removeprefix(f'{path}.{step.scope}')}"
                            self.readings[each].copied = self.readings[source].copied or source
                            if step.decay is not None and self.shared[each].data.is_floating_point():
                                self.follow(each, source, step.decay)
                case spec.Repeat():
                    self.scope(f"{path}.{step.scope}", step.name)
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
            found = self.after if each.after else self.updates
            name, axes = values[each.buffer].source, values[each.buffer].axes
            found[name] = values[each.value].ordered(axes).data.detach().clone()
            if self.training and not each.after:  # what is shared is read by later calls
                self.shared[name] = evolve(values[each.buffer], data=found[name])
        return values

    def follow(self, path: str, source: str, decay: float) -> None:
        """A copy that moves towards its source before it is read, and stays there."""
        kept, followed = self.shared[path], self.shared[source]
        mean = decay * kept.data + (1 - decay) * followed.ordered(kept.axes).data.detach()
        self.shared[path], self.updates[path] = evolve(kept, data=mean), mean.detach().clone()

    def scope(self, path: str, name: str) -> None:
        self.scopes[".".join(part for part in path.split(".") if not part.isdigit())] = name

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
        return [self.operand(each, values) for each in body.results]

    def operand(self, operand: spec.Operand, values: Sequence[Named], integer: bool = False) -> Named:
        """A value, or a number."""
        if not isinstance(operand, spec.Literal):
            return values[operand]
        value = operand.at(self.sizes)
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if integer else torch.float64
        return Named(torch.tensor(value, dtype=dtype))

    def shape(self, type: spec.Type) -> tuple[int, ...]:
        return tuple(self.sizes.get(axis.name, axis.size) for axis in type.axes)

    # ------------------------------------------------------------ leaves

    def parameter(self, step: spec.Parameter, path: str) -> Named:
        self.readings[path] = Reading(step.type, step.initial, buffer=step.buffer)
        data = torch.zeros(self.shape(step.type)) if self.parameters is None else self.parameters[path]
        data = data.double() if step.type.is_float else data.long()
        return Named(data, step.type.names, path, _own(step.type))

    def sample(self, step: spec.Sample, path: str) -> Named:
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

    def read(self, x: Named) -> Reading | None:
        return self.readings.get(x.source) if x.source else None

    # ------------------------------------------------------------ functions

    def apply(self, step: spec.Apply, path: str, values: Sequence[Named]) -> Named:
        """A function of the language."""
        integer = any(not values[o].data.is_floating_point() for o in step.operands if isinstance(o, int))
        integer = (integer and step.function not in ("where",)) or step.type.dtype in ("i64", "i32", *LOWEST)
        operands = [self.operand(each, values, integer) for each in step.operands]
        self.note(step, operands)
        result = self.applied(step, path, operands)
        lowest = LOWEST.get(step.type.dtype)
        if lowest is not None:
            result = evolve(result, data=(result.data - lowest) % 256 + lowest)
        if result.data.is_floating_point() and result.data.numel():
            finite = result.data.detach().nan_to_num(0.0, 0.0, 0.0)
            self.largest = max(self.largest, float(finite.abs().max()))
        if step.function not in SHAPING or operands[0].source is None:
            return evolve(result, source=None)
        return evolve(result, source=operands[0].source, origins=_origins(step, operands[0].origins, result.axes))

    def note(self, step: spec.Apply, operands: Sequence[Named]) -> None:
        """Note how parameters and inputs are read."""
        o = step.options
        over = o.get("over")
        if step.function == "conv":
            for x in operands:
                reading = self.read(x)
                if reading is not None:
                    reading.decays = True
            kernel = self.read(operands[1])
            if kernel is not None:
                summed = prod(operands[1].size(name) for name in (*over, *o["size"]))
                kernel.fans = kernel.fans or (summed, operands[1].data.numel() // summed)
                if kernel.matrix is None:
                    x = operands[1]
                    groups = [name for name in x.axes if name in operands[0].axes and name not in over]
                    names = (*over, *step.options["size"])
                    inner, stacked = (frozenset().union(*(x.origins[n] for n in each)) for each in (names, groups))
                    kernel.matrix = inner, stacked - inner
        elif step.function == "dot":
            for x in operands:
                reading = self.read(x)
                if reading is not None:
                    summed = prod(x.size(name) for name in over)
                    reading.fans = reading.fans or (summed, x.data.numel() // summed)
                    reading.decays = True
                    if reading.matrix is None:
                        (other,) = [y for y in operands if y is not x] or [x]
                        shared = [name for name in x.axes if name in other.axes and name not in over]
                        inner, stacked = (frozenset().union(*(x.origins[n] for n in names)) for names in (over, shared))
                        reading.matrix = inner, stacked - inner
        elif step.function == "embedding":
            ids, table = map(self.read, operands)
            if table is not None:
                table.decays = True
                table.rows = table.rows or looked_up(operands[1], operands[0], over)
            if ids is not None:
                ids.limits.append(operands[1].size(over))
        elif step.function == "routed_dot":
            x, w, ids = map(self.read, operands)
            count = operands[1].size(step.options["along"])
            for reading, value, each in ((x, operands[0], 1), (w, operands[1], count)):
                if reading is not None:
                    summed = prod(value.size(name) for name in over)
                    reading.fans = reading.fans or (summed, value.data.numel() // summed // each)
                    reading.decays = True
                    if reading.matrix is None:
                        (other,) = [each for each in operands[:2] if each is not value]
                        along = [step.options["along"]]
                        stack = [n for n in value.axes if n in (*other.axes, *along) and n not in over]
                        inner, stacked = (frozenset().union(*(value.origins[n] for n in m)) for m in (over, stack))
                        reading.matrix = inner, stacked - inner
            if ids is not None:
                ids.limits.append(count)
        elif step.function in ("dispatch", "combine", "load"):
            ids = self.read(operands[0 if step.function == "load" else 1])
            if ids is not None:
                sizes = dict(zip(step.type.names, self.shape(step.type), strict=True))
                axis = step.options.get("experts", step.type.names[-1])
                ids.limits.append(sizes[axis] if axis in sizes else operands[0].size(axis))
        elif step.function in ("sum_by", "mean_by", "max_by"):
            ids = self.read(operands[1])
            if ids is not None:
                ids.limits.append(self.shape(step.type)[step.type.names.index(o["into"])])
        elif step.function in ("gather", "one_hot"):
            table = self.read(operands[0]) if step.function == "gather" else None
            if table is not None:
                table.decays = True
                table.rows = table.rows or looked_up(operands[0], operands[-1], o["along"])
            ids = self.read(operands[-1])
            if ids is not None:
                ids.limits.append(
                    operands[0].size(o["along"]) if step.function == "gather" else self.shape(step.type)[-1]
                )
        elif step.function in ("cross_entropy", "token_nll", "accuracy"):
            targets = self.read(operands[1])
            if targets is not None:
                targets.limits.append(operands[0].size(over))

    def applied(self, step: spec.Apply, path: str, operands: Sequence[Named]) -> Named:
        name, o = step.function, step.options
        if name in named.POINTWISE:
            return named.elementwise(named.POINTWISE[name], *operands)
        return getattr(self, f"_{name}")(step, path, o, *operands)

    def _training(self, step, path, o) -> Named:
        return Named(torch.tensor(self.training))

    def _op(self, step, path, o, *operands: Named) -> Named:
        """An operation of one's own: its forward, of tensors with their axes as they are declared."""
        declared, renamed = self.model.operations[o["name"]], dict(o["renamed"])
        scope: dict[str, Any] = {}
        exec(declared.forward.source.text, scope)
        given = [
            x.ordered([renamed.get(name, name) for name in type.names]).data.clone()
            for x, (_, type) in zip(operands, declared.operands, strict=True)
        ]
        made = scope[declared.forward.name](*given)
        return Named(made[o["result"]] if isinstance(made, tuple) else made, step.type.names)

    def _dropout(self, step, path, o, x: Named) -> Named:
        if not self.training or not o["rate"]:
            return x
        keep = self.kept(f"{path}.{step.name or 'dropout'}", o["rate"], x.data.shape)
        return Named(x.data * keep / (1 - o["rate"]), x.axes)

    def kept(self, name: str, rate: float, shape: Sequence[int]) -> Tensor:
        """What a dropout keeps."""
        key = f"{name}.keep"
        count = self.drawn[key] = self.drawn.get(key, 0) + 1
        whole = (*self.positions(), *shape)
        return self.here(drawn.kept(rate, self.seed, self.step, key if count == 1 else f"{key}~{count}", whole))

    def _cast(self, step, path, o, x: Named) -> Named:
        dtype = step.type.dtype
        target = torch.float64 if step.type.is_float else torch.bool if dtype == "bool" else torch.int64
        return evolve(x, data=x.data.to(target))

    def _stop_gradient(self, step, path, o, x: Named) -> Named:
        return evolve(x, data=x.data.detach())

    def _grad(self, step, path, o, y: Named, x: Named) -> Named:
        (gradient,) = torch.autograd.grad(y.data.sum(), x.data, create_graph=True)
        return Named(gradient, x.axes)

    def _dot(self, step, path, o, a: Named, b: Named) -> Named:
        return named.einsum(a, b, o["over"])

    def _patches(self, step, path, o, x: Named) -> Named:
        return named.patches(x, o, dict(zip(step.type.names, self.shape(step.type), strict=True)))

    def _conv(self, step, path, o, image: Named, kernel: Named) -> Named:
        sizes = dict(zip(step.type.names, self.shape(step.type), strict=True))
        sizes |= {name: kernel.size(name) for name in o["size"]}
        return named.einsum(named.patches(image, o, sizes), kernel, [*o["over"], *o["size"]])

    def _attend(self, step, path, o, q: Named, k: Named, v: Named, *rest: Named) -> Named:
        keep = None
        if self.training and o.get("dropout"):
            last = o.get("values") or o["along"]
            axes = [name for name in step.type.names if name != last]
            shape = [*(q.size(name) for name in axes), k.size(o["over"])]
            names = (*("queries" if name == o["over"] else name for name in axes), o["over"])
            keep = Named(self.kept(f"{path}.{step.name or 'attend'}", o["dropout"], shape), names)
        return named.attend(q, k, v, rest, o, keep)

    def _embedding(self, step, path, o, ids: Named, table: Named) -> Named:
        return named.einsum(named.one_hot(ids, o["over"], table.size(o["over"])), table, [o["over"]])

    def _top_k(self, step, path, o, x: Named) -> Named:
        count = self.shape(step.type)[step.type.names.index(o["into"])]
        found, close = named.chosen(x, o["over"], o["into"], count)
        if close:
            self.largest = inf  # rounding decides what is computed
        return found

    def _routed_dot(self, step, path, o, x: Named, w: Named, ids: Named) -> Named:
        return named.routed_dot(x, w, ids, o)

    def _slot_index(self, step, path, o, ids: Named) -> Named:
        return named.slot_index(ids, o["order"])

    def _dispatch(self, step, path, o, x: Named, ids: Named) -> Named:
        sizes = dict(zip(step.type.names, self.shape(step.type), strict=True))
        places = named.places(ids, o, (sizes[o["experts"]], sizes[o["slots"]]))
        return named.einsum(x, places, o["order"])

    def _combine(self, step, path, o, y: Named, ids: Named, weight: Named) -> Named:
        places = named.places(ids, o, (y.size(o["experts"]), y.size(o["slots"])))
        weighted = named.elementwise(lambda a, b: a * b, places, weight)
        return named.einsum(y, weighted, (*o["order"][:-1], o["experts"], o["slots"]))

    def _load(self, step, path, o, ids: Named) -> Named:
        into, size = step.type.names[-1], self.shape(step.type)[-1]
        return named.total(named.one_hot(ids, into, size), o["over"])

    def _gather(self, step, path, o, x: Named, ids: Named) -> Named:
        return named.picked(x, ids, o["along"])

    def _sum_by(self, step, path, o, x: Named, ids: Named) -> Named:
        return named.total(self._there(step, o, x, ids, 0), o["along"])

    def _mean_by(self, step, path, o, x: Named, ids: Named) -> Named:
        ones = evolve(ids, data=torch.ones_like(ids.data, dtype=torch.float64))
        count = named.total(self._there(step, o, ones, ids, 0), o["along"])
        summed = named.total(self._there(step, o, x, ids, 0), o["along"])
        return named.elementwise(lambda a, b: a / b.clamp(min=1), summed, count)

    def _max_by(self, step, path, o, x: Named, ids: Named) -> Named:
        peak = named.greatest(self._there(step, o, x, ids, -inf), o["along"])
        return evolve(peak, data=torch.where(peak.data == -inf, 0.0, peak.data))

    def _there(self, step, o, x: Named, ids: Named, other: float) -> Named:
        """x where the id is the position of a new axis, and a number elsewhere."""
        size = self.shape(step.type)[step.type.names.index(o["into"])]
        hot = named.one_hot(ids, o["into"], size)
        return named.elementwise(lambda a, b: torch.where(b != 0, a, other), x, hot)

    def _one_hot(self, step, path, o, ids: Named) -> Named:
        return named.one_hot(ids, o["axis"], self.shape(step.type)[-1])

    def _arg_max(self, step, path, o, x: Named) -> Named:
        return named.first_greatest(x, o["over"])

    def _cumsum(self, step, path, o, x: Named) -> Named:
        return named.cumulative(x, o["over"])

    def _rope(self, step, path, o, x: Named, *positions: Named) -> Named:
        return named.rope(x, o, *positions)

    def _zeros(self, step, path, o, *like: Named) -> Named:
        return Named(torch.zeros(self.shape(step.type), dtype=torch.float64), step.type.names)

    _zeros_like = _zeros

    def _iota(self, step, path, o) -> Named:
        (size,) = self.shape(step.type)
        return Named(torch.arange(size), step.type.names)

    def _sum(self, step, path, o, x: Named) -> Named:
        return named.total(x, o["over"])

    def _mean(self, step, path, o, x: Named) -> Named:
        return named.mean(x, o["over"])

    def _max(self, step, path, o, x: Named) -> Named:
        return named.greatest(x, o["over"])

    def _min(self, step, path, o, x: Named) -> Named:
        least = named.greatest(evolve(x, data=-x.data), o["over"])
        return evolve(least, data=-least.data)

    def _softmax(self, step, path, o, x: Named) -> Named:
        return named.softmax(x, o["over"])

    def _log_softmax(self, step, path, o, x: Named) -> Named:
        return named.log_softmax(x, o["over"])

    def _layer_norm(self, step, path, o, x: Named, *rest: Named) -> Named:
        return named.normalized(x, rest, o, center=True)

    def _rms_norm(self, step, path, o, x: Named, *rest: Named) -> Named:
        return named.normalized(x, rest, o, center=False)

    def _cross_entropy(self, step, path, o, logits: Named, targets: Named, *rest: Named) -> Named:
        return named.cross_entropy(logits, targets, rest, o)

    def _token_nll(self, step, path, o, logits: Named, targets: Named) -> Named:
        return named.token_nll(logits, targets, o)

    def _gelu(self, step, path, o, x: Named) -> Named:
        if o.get("exact"):
            return evolve(x, data=x.data / 2 * (1 + torch.erf(x.data / 2**0.5)))
        return named.elementwise(named.POINTWISE["gelu_tanh"], x)

    def _logsumexp(self, step, path, o, x: Named) -> Named:
        x = x.ordered([*(name for name in x.axes if name not in o["over"]), *o["over"]])
        rest = x.axes[: len(x.axes) - len(o["over"])]
        return Named(x.data.flatten(len(rest)).logsumexp(-1), rest)

    def _binary_cross_entropy(self, step, path, o, logits: Named, targets: Named) -> Named:
        def loss(x, t):
            return -t * torch.sigmoid(x).log() - (1 - t) * torch.sigmoid(-x).log()

        found = named.elementwise(loss, logits, targets)
        return named.mean(found, found.axes)

    def _linear_scan(self, step, path, o, a: Named, b: Named) -> Named:
        return named.linear_scan(a, b, o)

    def _delta_rule(self, step, path, o, q: Named, k: Named, v: Named, beta: Named, *decay: Named) -> Named:
        return named.delta_rule(q, k, v, beta, decay, o)

    def _inverse(self, step, path, o, x: Named) -> Named:
        return named.inverse(x, o["rows"], o["columns"])

    def _flip(self, step, path, o, x: Named) -> Named:
        x = x.ordered([o["over"], *(name for name in x.axes if name != o["over"])])
        return evolve(x, data=torch.stack(list(x.data)[::-1]))

    def _roll(self, step, path, o, x: Named) -> Named:
        x = x.ordered([o["over"], *(name for name in x.axes if name != o["over"])])
        return evolve(x, data=torch.stack([x.data[(t - o["by"]) % len(x.data)] for t in range(len(x.data))]))

    def _shift(self, step, path, o, x: Named) -> Named:
        return named.shift(x, o["over"], o["by"])

    def _mse(self, step, path, o, a: Named, b: Named) -> Named:
        square = named.elementwise(lambda x, y: (x - y) ** 2, a, b)
        return named.mean(square, square.axes)

    def _accuracy(self, step, path, o, logits: Named, targets: Named, *rest: Named) -> Named:
        return named.accuracy(logits, targets, rest, o)

    def _expand(self, step, path, o, x: Named) -> Named:
        wide = Named(torch.ones(self.shape(step.type), dtype=x.data.dtype), step.type.names)
        return Named(x.to(wide.axes).expand(wide.data.shape), wide.axes)

    def _rename(self, step, path, o, x: Named) -> Named:
        pairs = dict(o["pairs"])
        return evolve(x, axes=tuple(pairs.get(name, name) for name in x.axes))

    def _split(self, step, path, o, x: Named) -> Named:
        sizes = dict(zip(step.type.names, self.shape(step.type), strict=True))
        return named.split(x, o["axis"], [(name, sizes[name]) for name in o["into"]])

    def _merge(self, step, path, o, x: Named) -> Named:
        return named.merge(x, o["axes"], o["into"])

    def _concat(self, step, path, o, *tensors: Named) -> Named:
        return named.concat(tensors, o["axes"], o["into"])

    def _slice(self, step, path, o, x: Named) -> Named:
        sizes = dict(zip(step.type.names, self.shape(step.type), strict=True))
        return named.cut(x, o, sizes[o["into"]])


def looked_up(table: Named, ids: Named, along: str) -> frozenset[str]:
    """The axes of a parameter that tell its rows apart: those of the ids too, if it is a stack of tables."""
    return frozenset().union(*(table.origins[name] for name in table.axes if name == along or name in ids.axes))


def _source(data: Tensor) -> Tensor:
    """A tensor by which `grad` may differentiate."""
    return data if data.requires_grad or not data.is_floating_point() else data.detach().requires_grad_()


def _own(type: spec.Type) -> Mapping[str, frozenset[str]]:
    """The origins of the axes of a parameter or an input as it is."""
    return {name: frozenset((name,)) for name in type.names}


def _origins(
    step: spec.Apply, origins: Mapping[str, frozenset[str]], axes: Sequence[str]
) -> Mapping[str, frozenset[str]]:
    """The origins of the axes of a parameter in another shape."""
    o = step.options
    match step.function:
        case "rename":
            names = {new: old for old, new in dict(o["pairs"]).items()}
            return {name: origins[names.get(name, name)] for name in axes}
        case "split":
            return {name: origins[o["axis"]] if name in o["into"] else origins[name] for name in axes}
        case "merge":
            merged = frozenset().union(*(origins[name] for name in o["axes"]))
            return {name: merged if name == o["into"] else origins[name] for name in axes}
        case "slice":
            return {name: origins[o["axis"]] if name == o["into"] else origins[name] for name in axes}
    return origins


Function = Callable[..., Any]
