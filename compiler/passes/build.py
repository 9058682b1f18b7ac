"""Spec → graph: blocks and repeats expanded, language functions lowered to primitives; one device, the full batch.

`f32` in the spec stands for the dtype of the computation: `train.precision` for tensors, the dtype of accumulation for
scalars. Values are named by scope and binding, in program order, so that names do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve

from partita.compiler.graph import BufferWrite, Builder, Graph, Input, Node, Parameter, Scope, Value
from partita.compiler.ops.custom import Custom
from partita.compiler.ops.op import accumulation
from partita.compiler.ops.pointwise import Constant, Detach, cast, constant, pointwise
from partita.compiler.ops.position import Random
from partita.compiler.ops.reduce import scaled
from partita.compiler.ops.shape import Expand, arranged
from partita.compiler.passes.adapt import Adapting
from partita.compiler.passes.functions import Site, lower
from partita.compiler.passes.loops import Loop
from partita.compiler.passes.readers import Readers
from partita.compiler.reverse import cotangents, dependent
from partita.dsl import spec
from partita.dsl.diagnostic import refuse
from partita.dsl.types import FLOATS, INTEGERS, Type

COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")

NOT_SPLIT: Mapping[str, int] = {}  # the shards of axes where there are none


def build(
    model: spec.Model,
    precision: str,
    training: bool = True,
    outputs: Sequence[str] = (),
    shards: Mapping[str, int] | None = NOT_SPLIT,
) -> Graph:
    """The forward graph of a model. With `training` false, dropout is the identity. `shards` has the axes that a layout
    splits, with the number of shards; it is None where a sequence goes through the graph part by part.

    What `training()` decides is still open (`partita.compiler.passes.mode`): both kinds of steps have the same stages.
    With `outputs`, the graph computes these, and no loss, metrics and updates.
    """
    builder = _Builder(precision, training, model, shards)
    arguments, values = builder.expanded(model, bool(outputs))
    readers = Readers(builder.nodes, builder.inside)
    if outputs:
        loss = builder.apply(Constant(0.0, accumulation(precision)))
    return Graph(
        name=model.name,
        inside=builder.inside,
        inputs=tuple(
            Input(name, value, readers.limit(value), span=model.span, ignored=readers.ignored(value))
            for name, value in zip(model.body.inputs, arguments, strict=True)
        ),
        parameters=tuple(
            Parameter(
                value,
                value.type.with_dtype(accumulation(value.type.dtype)),
                builder.initial_of(value, step),
                readers.fans(builder.named[builder.copies.get(value.name, value.name)]),
                readers.decays(value),
                step.span,
                step.buffer,
            )
            for value, step in builder.parameters
        ),
        nodes=tuple(builder.nodes),
        loss=loss if outputs else values[model.loss],
        metrics=() if outputs else tuple((name, values[index]) for name, index in model.metrics),
        scopes=tuple(builder.scopes),
        updates=() if outputs else tuple(builder.updates.values()),
        asked=tuple((name, values[index]) for name, index in model.outputs if name in outputs),
    )


def adapters_of(model: spec.Model) -> dict[str, spec.Call]:
    """The matrices of a model that have adapters, by full name, and what these are. Raises Refused (E0409)."""
    builder = _Builder("f32", True, model, NOT_SPLIT)
    builder.expanded(model)
    return {value.name: adapter.call for value, adapter in builder.adapting.made.items()}


class _Builder(Builder):
    """A builder that walks bodies. Recursion is as deep as blocks are nested, which the checker bounds."""

    def __init__(
        self,
        precision: str,
        training: bool,
        model: spec.Model,
        shards: Mapping[str, int] | None,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.training = training
        self.shards = shards
        self.operations = model.operations
        self.parameters: list[tuple[Value, spec.Parameter]] = []
        self.named: dict[str, Value] = {}  # the parameters by full name
        self.copies: dict[str, str] = {}  # of a parameter the one whose initial values it has
        self.following: dict[str, tuple[str, float]] = {}  # of a parameter the one that it follows, and how slowly
        self.scopes: list[Scope] = []
        self.inside: dict[Node, list[Node]] = {}  # the nodes in the body of a scan
        self.updates: dict[str, BufferWrite] = {}  # by what they change
        self.adapting = Adapting(model.adapters, self.scopes, self.declare)
        self.cotangents: dict[tuple[Value, Value], Value | None] = {}  # of what `grad` differentiated, by its operands

    def expanded(self, model: spec.Model, answering: bool = False) -> tuple[list[Value], list[Value]]:
        """The inputs of a model, and all values of its body; or, `answering`, of that of its outputs."""
        self.scope = model.name
        pairs = zip(model.body.inputs, model.body.types, strict=False)
        arguments = [self.value(f"{model.name}.{name}", self.typed(type)) for name, type in pairs]
        self.span = model.span
        values = self.body(model.answering if answering else model.body, model.name, arguments)
        self.adapting.check(each for node in self.nodes for each in (*self.inside.get(node, ()), node))
        return arguments, values

    def typed(self, type: Type) -> Type:
        """A type of the language, with the dtype of the computation."""
        if type.dtype != "f32":
            return type
        return type.with_dtype(self.precision if type.axes else accumulation(self.precision))

    def operand(self, operand: spec.Operand, values: Sequence[Value], dtype: str) -> Value:
        """A value of the body, or a literal as a constant of `dtype`."""
        if not isinstance(operand, spec.Literal):
            return values[operand]
        value = operand.value
        if dtype in FLOATS:
            value = float(value)
        elif dtype in INTEGERS:
            value = int(value)
        return self.apply(Constant(value, dtype))

    def body(
        self, body: spec.Body, scope: str, arguments: Sequence[Value], owners: tuple[str, ...] = ()
    ) -> list[Value]:
        """Expand a body in a scope. Returns all its values, from which `results` selects.

        `owners` are the scopes of the parameters that it shares and of those around it, if not its own.
        """
        values = list(arguments)
        names: dict[int, str] = {}  # of the parameters among the values
        owners = owners or (scope,)
        for position, step in enumerate(body.steps):
            self.scope, self.span = scope, step.span
            if isinstance(step, spec.Apply) and step.function == spec.OPERATION:
                if step.options["result"] == 0:
                    values.extend(self.custom(body.steps[position:], scope, values))
            elif isinstance(step, spec.Apply) and step.function == "grad":
                values.append(self.derivative(step, values, body.steps[position:]))
            elif isinstance(step, spec.Apply):
                values.append(self.application(step, scope, values))
            elif isinstance(step, spec.Parameter):
                value = self.declare(scope, step)
                names[len(values)] = value.name
                values.append(value)
            elif isinstance(step, spec.SharedParameter):
                names[len(values)] = name = f"{owners[0]}.{step.parameter.name}"
                values.append(self.shared(name))
            elif isinstance(step, spec.InstanceParameters):
                self.share(step, scope, owners)
            elif isinstance(step, spec.Sample):
                values.append(self.sample(step, scope))
            elif isinstance(step, spec.CallBlock):
                inner = f"{scope}.{step.scope}"
                levels, name = step.instance or (0, step.scope)
                self.scopes.append(Scope(inner, step.block if step.instance is None else name))
                operands = [
                    self.operand(argument, values, self.typed(type).dtype)
                    for argument, type in zip(step.arguments, step.body.types, strict=False)
                ]
                expanded = self.body(step.body, inner, operands, (f"{owners[levels]}.{name}",))
                values.extend(self.results(step.body, expanded, inner))
            elif isinstance(step, spec.Scan):
                values.extend(self.scanned(step, scope, values, owners))
            else:
                values.extend(self.repeated(step, scope, values, owners))
        for each in body.updates:
            name = names[each.buffer]
            self.updates[name] = BufferWrite(name, values[each.value], each.span, each.after)
        return values

    def declare(self, scope: str, step: spec.Parameter) -> Value:
        """A parameter in a scope."""
        value = self.value(f"{scope}.{step.name}", self.typed(step.type))
        self.parameters.append((value, step))
        self.named[value.name] = value
        if self.adapting.rules and not step.buffer and len(step.type.axes) > 1:
            self.adapting.matrices.add(value)
        return value

    def results(self, body: spec.Body, values: Sequence[Value], scope: str) -> list[Value]:
        """The results of a body that was expanded to `values`."""
        self.scope = scope
        return [self.operand(result, values, accumulation(self.precision)) for result in body.results]

    def initial_of(self, value: Value, step: spec.Parameter) -> spec.Call:
        """The initial values of a parameter; those of a copy are drawn under the name of its source (`like`)."""
        if value.name not in self.copies:
            return step.initial
        return evolve(step.initial, arguments={**step.initial.arguments, "like": self.copies[value.name]})

    def share(self, step: spec.InstanceParameters, scope: str, owners: tuple[str, ...]) -> None:
        """Declare the parameters of an instance."""
        inner, first = f"{scope}.{step.scope}", len(self.parameters)
        self.scopes.append(Scope(inner, step.scope))
        self.body(step.body, inner, (), (f"{owners[0]}.{step.scope}",))
        if step.copies is not None:
            levels, name = step.copies
            for value, _ in self.parameters[first:]:
                source = f"{owners[levels]}.{name}{value.name.removeprefix(inner)}"
                self.copies[value.name] = self.copies.get(source, source)
                if step.decay is not None and value.type.is_float:
                    self.scope, self.span = inner, step.span
                    self.following[value.name] = source, step.decay
                    self.updates[value.name] = BufferWrite(value.name, self.shared(value.name), step.span)

    def shared(self, name: str) -> Value:
        """A parameter of an instance. One that follows another moves towards it before it is read: each reader computes
        that for itself, on its own stage. Of a buffer, training reads what the calls before have made.
        """
        value = self.named[name]
        if name not in self.following:
            if name not in self.updates:
                return value
            updated = cast(self, self.updates[name].value, value.type.dtype)
            updated = self.apply(Detach(), arranged(self, updated, value.type.names))
            return pointwise(self, "where", self.apply(Constant(self.training, "bool")), updated, value)
        source, decay = self.following[name]
        followed = self.shared(source) if source in self.following else self.named[source]
        kept, new = scaled(self, value, decay), scaled(self, self.apply(Detach(), followed), 1 - decay)
        return pointwise(self, "add", kept, new, name=f"{self.scope}.{name.rpartition('.')[2]}")

    def repeated(self, step: spec.Repeat, scope: str, values: Sequence[Value], owners: tuple[str, ...]) -> list[Value]:
        """Expand the iterations of a repeat; returns the carried values after the last, and what each has kept."""
        self.scopes.append(Scope(f"{scope}.{step.scope}", step.name, step.count))
        carried = [
            self.operand(operand, values, self.typed(type).dtype)
            for operand, type in zip(step.carried, step.body.types, strict=False)
        ]
        captured = [values[index] for index in step.captured]
        kept: list[list[Value]] = [[] for _ in step.kept]
        for iteration in range(step.count):
            inner = f"{scope}.{step.scope}.{iteration}"
            own = f"{owners[0]}.{step.scope}.{iteration}"
            body = step.iteration(iteration)
            everything = self.body(body, inner, [*carried, *captured], (own, *owners))
            results = self.results(body, everything, inner)
            carried = results[: len(step.carried)]
            for values_of, value in zip(kept, results[len(carried) :], strict=True):
                values_of.append(value)
        return [*carried, *(value for values_of in kept for value in values_of)]

    def _as_carried(self, values: Sequence[Value], types: Sequence[Type]) -> list[Value]:
        """Values as a scan carries them: what is summed up may be in the dtype of accumulation."""
        pairs = zip(values, types, strict=True)
        return [arranged(self, cast(self, value, type.dtype), type.names) for value, type in pairs]

    def scanned(self, step: spec.Scan, scope: str, values: Sequence[Value], owners: tuple[str, ...]) -> list[Value]:
        """Expand the body of a scan once; returns the carried values at all positions."""
        types = [self.typed(type) for type in step.body.types[: len(step.carried)]]
        pairs = zip(step.carried, types, strict=True)
        initial = [self.operand(operand, values, type.dtype) for operand, type in pairs]
        initial = self._as_carried(initial, types)
        loop = Loop(step.axis, step.backward)
        states = [self.value(f"{scope}.{name}", type) for name, type in zip(step.names, types, strict=True)]
        before, scopes = self.nodes, len(self.scopes)
        self.nodes = []
        inputs = [*states, *(loop.seen(self, values[i]) for i in step.captured)]
        everything = self.body(step.body, scope, inputs, (owners[0], *owners))
        carried = self.results(step.body, everything, scope)
        carried = self._as_carried(carried, types)
        nodes, self.nodes = self.nodes, before
        del self.scopes[scopes:]
        self.scope, self.span = scope, step.span
        results, inside = loop.closed(self, nodes, states, initial, carried, [f"{scope}.{name}" for name in step.names])
        self.inside[self.nodes[-1]] = inside
        return results

    def application(self, step: spec.Apply, scope: str, values: Sequence[Value]) -> Value:
        """Lower one function."""
        dtype = self.typed(step.type).dtype
        if step.function in COMPARISONS:
            tensors = [values[o] for o in step.operands if not isinstance(o, spec.Literal)]
            dtype = tensors[0].type.dtype if tensors else accumulation(self.precision)
        name = f"{scope}.{step.name or step.function}"
        if step.function == "where" and isinstance(step.operands[0], spec.Literal):
            # A condition that is known, as of the number of an iteration, has one branch.
            branch = self.operand(step.operands[1 if step.operands[0].value else 2], values, dtype)
            type = self.typed(step.type)
            missing = tuple(axis for axis in type.axes if not branch.type.has(axis.name))
            return arranged(self, self.apply(Expand(missing), branch) if missing else branch, type.names)
        operands = [self.operand(operand, values, dtype) for operand in step.operands]
        site = Site(self, operands, step.options, self.typed(step.type), name, self.training, self.shards)
        if step.function == "dot":
            return self.adapting.product(site)
        return lower(step.function, site)

    def derivative(self, step: spec.Apply, values: Sequence[Value], steps: Sequence[spec.Step]) -> Value:
        """The gradient of the sum of a value's elements by another that it was computed from; at once by all values by
        which these `steps` ask for it. Raises Refused (E0423) if none flows there.
        """
        y, x = (self.operand(each, values, accumulation(self.precision)) for each in step.operands)
        if (y, x) not in self.cotangents:
            asked = [each.operands for each in steps if isinstance(each, spec.Apply) and each.function == "grad"]
            by = [values[b] for a, b in asked if a == step.operands[0] and isinstance(b, int) and b < len(values)]
            seed = self.apply(Expand(y.type.axes), constant(self, 1.0, y))
            self.cotangents.update(
                zip(((y, each) for each in by), cotangents(self, self.nodes, {y: seed}, by), strict=True)
            )
        result = self.cotangents[y, x]
        if result is None:
            asked_for = f" in `{step.span.text}`" if step.span else ""
            message = f"no gradient flows from the first value to the second{asked_for}"
            help = "compute the first from that very value: bound by `let` before, not bound anew since, in the same "
            help += "`scan` if in any, and without `stop_gradient` between"
            if x in dependent(self.nodes, [y]):
                help = "arguments swapped? `grad(y, x)` is the gradient of the first by the second"
            raise refuse("E0423", message, step.span, help=help)
        return cast(self, arranged(self, result, x.type.names), x.type.dtype)

    def custom(self, steps: Sequence[spec.Step], scope: str, values: Sequence[Value]) -> tuple[Value, ...]:
        """Lower an operation of the file's own, of which the first steps are the results. Its operands have the dtypes
        that it declares.
        """
        step = steps[0]
        assert isinstance(step, spec.Apply)
        declared = self.operations[step.options["name"]]
        renamed = dict(step.options["renamed"])
        results = [each.type for each in steps[: len(declared.results)] if isinstance(each, spec.Apply)]

        def over(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(renamed.get(name, name) for name in names)

        operands = [
            cast(self, self.operand(operand, values, type.dtype), self.typed(type).dtype)
            for operand, (_, type) in zip(step.operands, declared.operands, strict=True)
        ]
        sizes = {axis.name: axis.size for value in operands for axis in value.type.axes}
        sizes |= {axis.name: axis.size for type in results for axis in type.axes}
        op = Custom(
            declared.name,
            tuple(over(type.names) for _, type in declared.operands),
            tuple(self.typed(type) for type in results),
            over(declared.split),
            declared.linear,
            float(declared.flops.at({name: sizes[new] for name, new in renamed.items() if new in sizes} | sizes)),
            declared.backward is not None,
        )
        return self.apply_all(op, *operands, name=f"{scope}.{step.name or declared.name}")

    def sample(self, step: spec.Sample, scope: str) -> Value:
        """A tensor drawn again at each step; its random key is its full name."""
        type = self.typed(step.type)
        name = f"{scope}.{step.name}"
        whole = tuple((axis.name, axis.size) for axis in type.axes)
        distribution, scale = step.distribution.name, 1.0
        for value in step.distribution.arguments.values():
            scale = float(value)
        if distribution in ("zeros", "ones", "constant"):
            number = {"zeros": 0.0, "ones": 1.0}.get(distribution, scale)
            scalar = self.apply(Constant(number, type.dtype))
            return self.apply(Expand(type.axes), scalar, name=name)
        return self.apply(Random(distribution, scale, name, type.axes, whole, type.dtype), name=name)
