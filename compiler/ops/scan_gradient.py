"""The gradient of a scan: the body of the loop in the other direction, and the products that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.compiler.graph import producers_of
from partita.compiler.ops.body import Body, body_of
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import make
from partita.compiler.ops.pointwise import added, cast, constant, pointwise
from partita.compiler.ops.reduce import total
from partita.compiler.ops.shape import Expand, arranged
from partita.compiler.reverse import Parts, dependent, reverse
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


def _replayed(body: Body, build: Builder) -> tuple[list[Value], list[Value]]:
    """The body's inputs as values, and all its values, made by nodes of `build`."""
    inputs = [build.value(f"input {i}", type) for i, type in enumerate(body.inputs)]
    values = list(inputs)
    for step in body.steps:
        values.extend(build.apply_all(step.op, *(values[i] for i in step.operands)))
    return inputs, values


def scan_gradients(
    axis: Axis,
    body: Body,
    count: int,
    slices: int,
    backward: bool,
    build: Builder,
    node: Node,
    d: Sequence[Value | None],
) -> tuple[Value | None, ...]:
    """The cotangents of the operands of a scan with `count` states, which it begins with and stacks, and as many
    `slices`.
    """
    assert not any(d[:count]), node
    states = [i for i in range(count) if body.inputs[i].is_float]
    inner = build.fresh()
    inputs, values = _replayed(body, inner)
    # The cotangent of a state: of its value at this position, and through the position that follows.
    through = {i: inner.value(f"through {i}", inputs[i].type) for i in states}
    incoming = {i: value for i, value in enumerate(d[count : 2 * count]) if value is not None}
    direct = {i: inner.value(f"direct {i}", inputs[i].type) for i in incoming}
    forward = list(inner.nodes)
    flowing = dependent(forward, inputs)
    contributions: Parts = {}
    for i in states:
        whole = pointwise(inner, "add", through[i], direct[i]) if i in direct else through[i]
        contributions.setdefault(values[body.results[i]], []).append((whole, node))

    def cotangent(value: Value, _: Node | None = None) -> Value | None:
        parts = contributions.get(value)
        return None if parts is None else added(inner, [part for part, _ in parts])

    reverse(inner, forward, contributions, flowing, cotangent)
    producers = producers_of(inner.nodes)

    def settled(value: Value, type: Type) -> Value:
        """The cotangent of an input in its type; zeros if there is none."""
        result = cotangent(value)
        if result is None:
            return inner.apply(Expand(type.axes), constant(inner, 0.0, type))
        return cast(inner, arranged(inner, result, type.names), type.dtype)

    next_states = [settled(inputs[i], inputs[i].type) for i in states]
    first_shared = count + slices
    to_sliced = {
        i: settled(inputs[i], inputs[i].type) for i in range(count, first_shared) if inputs[i] in contributions
    }
    sums: dict[int, Value] = {}
    products: dict[int, list[tuple[Dot, Value, Value]]] = {}
    for i in range(first_shared, len(inputs)):
        rest = []
        for part, reader in contributions.get(inputs[i], []):
            source = producers.get(part)
            fixed = inputs[first_shared:]
            if source is not None and isinstance(source.op, Dot) and any(v not in fixed for v in source.inputs):
                a, b = source.inputs
                products.setdefault(i, []).append((source.op, a, b))
            else:
                rest.append((part, reader))
        if rest:
            contributions[inputs[i]] = rest
            sums[i] = settled(inputs[i], inputs[i].type)
    # Operands of products that are not operands of the scan already.
    sliced = {inputs[i]: node.inputs[i] for i in range(count, first_shared)}
    shared = {inputs[i]: node.inputs[i] for i in range(first_shared, len(inputs))}
    leaving = [
        v for pairs in products.values() for _, *pair in pairs for v in pair if v not in sliced and v not in shared
    ]
    leaving = list(dict.fromkeys(leaving))

    before = [
        build.apply(make("states_before", axis.name, backward), node.inputs[i], node.outputs[count + i])
        for i in range(count)
    ]
    arranged_before = [arranged(build, value, (axis.name, *inputs[i].type.names)) for i, value in enumerate(before)]
    direct_outer = [arranged(build, value, (axis.name, *inputs[i].type.names)) for i, value in incoming.items()]
    slices_in = [*inputs[:count], *direct.values(), *inputs[count:first_shared]]
    slices_out = [*arranged_before, *direct_outer, *node.inputs[count:first_shared]]
    loop_body = body_of(
        inner.nodes,
        [*through.values(), *slices_in, *inputs[first_shared:]],
        [*next_states, *to_sliced.values(), *leaving, *sums.values()],
    )
    first = len(states)
    stacked = len(to_sliced) + len(leaving)
    loop = make(
        "scan",
        axis,
        loop_body,
        first,
        len(slices_in),
        stacked,
        initial=False,
        backward=not backward,
        linear=tuple(range(count, count + len(direct))),
    )
    results = build.apply_all(loop, *slices_out, *node.inputs[first_shared:])
    last, slices_made, summed = results[:first], results[first : first + stacked], results[first + stacked :]
    cotangents: list[Value | None] = [None] * len(node.inputs)
    for i, value in zip(states, last, strict=True):
        cotangents[i] = value
    for i, value in zip(to_sliced, slices_made, strict=False):
        cotangents[i] = arranged(build, value, node.inputs[i].type.names)
    outside = {**sliced, **shared, **dict(zip(leaving, slices_made[len(to_sliced) :], strict=True))}
    for i, value in zip(sums, summed, strict=True):
        cotangents[i] = cast(build, value, inputs[i].type.dtype)
    for i, pairs in products.items():
        for product, a, b in pairs:
            cotangents[i] = _added(
                build, cotangents[i], _product(build, product, axis, outside[a], outside[b]), inputs[i].type
            )
    return tuple(cotangents)


def _product(build: Builder, product: Dot, axis: Axis, a: Value, b: Value) -> Value:
    """The product of all positions, summed over them."""
    if a.type.has(axis.name) and b.type.has(axis.name):
        return build.apply(product.total(axis.name), a, b)
    a, b = (total(build, x, (axis.name,), x.type.dtype) if x.type.has(axis.name) else x for x in (a, b))
    return build.apply(product, a, b)


def _added(build: Builder, sum: Value | None, term: Value, type: Type) -> Value:
    term = cast(build, arranged(build, term, type.names), type.dtype)
    return term if sum is None else pointwise(build, "add", sum, term)
