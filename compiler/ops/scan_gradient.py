"""The gradient of a scan: the body of the loop in the other direction, and the products that follow it."""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.graph import Builder, Node, Value
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.pointwise import cast, constant, pointwise
from partita.compiler.ops.reduce import total
from partita.compiler.ops.scan import Body, Scan, StatesBefore, Step
from partita.compiler.ops.shape import Expand, arranged
from partita.dsl.types import Axis, Type


def body_of(nodes: Sequence[Node], inputs: Sequence[Value], results: Sequence[Value]) -> Body:
    """A body of nodes, in order; those that no result needs are left out."""
    alive, kept = set(results), []
    for node in reversed(nodes):
        if any(value in alive for value in node.outputs):
            kept.append(node)
            alive.update(node.inputs)
    numbers = {value: i for i, value in enumerate(inputs)}
    steps = []
    for node in reversed(kept):
        steps.append(Step(node.op, tuple(numbers[value] for value in node.inputs)))
        for value in node.outputs:
            numbers[value] = len(numbers)
    return Body(tuple(value.type for value in inputs), tuple(steps), tuple(numbers[value] for value in results))


def _replayed(body: Body, build: Builder) -> tuple[list[Value], list[Value]]:
    """The body's inputs as values, and all its values, made by nodes of `build`."""
    inputs = [build.value(f"input {i}", type) for i, type in enumerate(body.inputs)]
    values = list(inputs)
    for step in body.steps:
        values.extend(build.apply_all(step.op, *(values[i] for i in step.operands)))
    return inputs, values


def scan_gradients(op: Scan, build: Builder, node: Node, d: Sequence[Value | None]) -> tuple[Value | None, ...]:
    """The cotangents of the operands of a scan of the language, which begins with operands and stacks its states."""
    assert op.initial, op
    assert op.stacked == op.states, op
    assert not any(d[: op.states]), node
    axis = op.axis
    given = list(d[op.states : op.states + op.stacked])
    states = [i for i in range(op.states) if op.body.inputs[i].is_float]
    inner = Builder()
    inputs, values = _replayed(op.body, inner)
    # The cotangent of a state: of its value at this position, and through the position that follows.
    through = {i: inner.value(f"through {i}", inputs[i].type) for i in states}
    direct = {i: inner.value(f"direct {i}", inputs[i].type) for i in states if given[i] is not None}
    contributions: dict[Value, list[Value]] = {}
    for i in states:
        whole = pointwise(inner, "add", through[i], direct[i]) if i in direct else through[i]
        contributions.setdefault(values[op.body.results[i]], []).append(whole)
    forward = {value: each for each in inner.nodes for value in each.outputs}
    flowing = _flowing(inner.nodes, [value for value in inputs if value.type.is_float])

    def cotangent(value: Value) -> Value | None:
        parts = contributions.get(value, [])
        if not parts:
            return None
        result = parts[0]
        for part in parts[1:]:
            result = pointwise(inner, "add", result, part)
        return result

    for each in reversed(list(dict.fromkeys(forward.values()))):
        parts = each.op.gradients(inner, each, [cotangent(value) for value in each.outputs])
        for value, part in zip(each.inputs, parts, strict=True):
            if part is not None and value in flowing:
                contributions.setdefault(value, []).append(part)

    made = {value: each for each in inner.nodes for value in each.outputs}

    def settled(value: Value, type: Type) -> Value:
        """The cotangent of an input in its type; zeros if there is none."""
        found = cotangent(value)
        if found is None:
            return inner.apply(Expand(type.axes), constant(inner, 0.0, type))
        return cast(inner, arranged(inner, found, type.names), type.dtype)

    next_states = [settled(inputs[i], inputs[i].type) for i in states]
    first_shared = op.states + op.sliced
    to_sliced = {
        i: settled(inputs[i], inputs[i].type) for i in range(op.states, first_shared) if inputs[i] in contributions
    }
    sums: dict[int, Value] = {}
    products: dict[int, list[tuple[Dot, Value, Value]]] = {}
    for i in range(first_shared, len(inputs)):
        rest = []
        for part in contributions.get(inputs[i], []):
            source = made.get(part)
            fixed = inputs[first_shared:]
            if source is not None and isinstance(source.op, Dot) and any(v not in fixed for v in source.inputs):
                a, b = source.inputs
                products.setdefault(i, []).append((source.op, a, b))
            else:
                rest.append(part)
        if rest:
            contributions[inputs[i]] = rest
            sums[i] = settled(inputs[i], inputs[i].type)
    # Operands of products that are not operands of the scan already.
    sliced = {inputs[i]: node.inputs[i] for i in range(op.states, first_shared)}
    shared = {inputs[i]: node.inputs[i] for i in range(first_shared, len(inputs))}
    leaving = [
        v for pairs in products.values() for _, *pair in pairs for v in pair if v not in sliced and v not in shared
    ]
    leaving = list(dict.fromkeys(leaving))

    before = [
        build.apply(StatesBefore(axis.name, op.backward), node.inputs[i], node.outputs[op.states + i])
        for i in range(op.states)
    ]
    arranged_before = [arranged(build, value, (axis.name, *inputs[i].type.names)) for i, value in enumerate(before)]
    direct_outer = []
    for i in direct:
        cotangent_of = given[i]
        assert cotangent_of is not None
        direct_outer.append(arranged(build, cotangent_of, (axis.name, *inputs[i].type.names)))
    slices_in = [*inputs[: op.states], *direct.values(), *inputs[op.states : first_shared]]
    slices_out = [*arranged_before, *direct_outer, *node.inputs[op.states : first_shared]]
    body = body_of(
        inner.nodes,
        [*through.values(), *slices_in, *inputs[first_shared:]],
        [*next_states, *to_sliced.values(), *leaving, *sums.values()],
    )
    first = len(states)
    loop = Scan(
        axis,
        body,
        first,
        len(slices_in),
        len(to_sliced) + len(leaving),
        initial=False,
        backward=not op.backward,
        linear=tuple(range(op.states, op.states + len(direct))),
    )
    results = build.apply_all(loop, *slices_out, *node.inputs[first_shared:])
    last, stacked, summed = results[:first], results[first : first + loop.stacked], results[first + loop.stacked :]
    found: list[Value | None] = [None] * len(node.inputs)
    for i, value in zip(states, last, strict=True):
        found[i] = value
    for i, value in zip(to_sliced, stacked, strict=False):
        found[i] = arranged(build, value, node.inputs[i].type.names)
    outside = {**sliced, **shared, **dict(zip(leaving, stacked[len(to_sliced) :], strict=True))}
    for i, value in zip(sums, summed, strict=True):
        found[i] = cast(build, value, inputs[i].type.dtype)
    for i, pairs in products.items():
        for product, a, b in pairs:
            found[i] = _added(build, found[i], _product(build, product, axis, outside[a], outside[b]), inputs[i].type)
    return tuple(found)


def _flowing(nodes: Sequence[Node], wanted: Sequence[Value]) -> set[Value]:
    """Values that depend differentiably on the wanted ones."""
    found = set(wanted)
    for node in nodes:
        if node.op.differentiable and any(value in found for value in node.inputs):
            found.update(value for value in node.outputs if value.type.is_float)
    return found


def _product(build: Builder, product: Dot, axis: Axis, a: Value, b: Value) -> Value:
    """The product of all positions, summed over them."""
    if a.type.has(axis.name) and b.type.has(axis.name):
        return build.apply(Dot((axis.name, *product.over)), a, b)
    a, b = (total(build, x, (axis.name,), x.type.dtype) if x.type.has(axis.name) else x for x in (a, b))
    return build.apply(product, a, b)


def _added(build: Builder, sum: Value | None, term: Value, type: Type) -> Value:
    term = cast(build, arranged(build, term, type.names), type.dtype)
    return term if sum is None else pointwise(build, "add", sum, term)
