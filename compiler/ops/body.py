"""The body of a loop: operations as an attribute of one, numbered instead of named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from partita.compiler.layout import SUM, State
from partita.compiler.ops.op import OPS, Argument, Op, ShardingRule, accumulation, as_tensor, attributes
from partita.compiler.ops.traits import legalized
from partita.dsl.reprs import Shortened
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Node, Value


@frozen(cache_hash=True)
class Step:
    """An operation of a body, and its operands by their numbers."""

    op: Op
    operands: tuple[int, ...]


@frozen(cache_hash=True, repr=False)
class Body(Shortened):
    """The operations at one position. Values are numbered: the inputs, then the results of each step."""

    inputs: tuple[Type, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def literal(self) -> tuple[Any, ...]:
        """The body as nested tuples of axes, types and Python literals, of which the field of an operation makes it."""
        steps = []
        for step in self.steps:
            fields = [(each.name, getattr(step.op, each.name)) for each in attributes(type(step.op))]
            options = tuple((name, value.literal() if isinstance(value, Body) else value) for name, value in fields)
            steps.append((step.op.name, step.operands, options))
        return (self.inputs, tuple(steps), self.results)

    def types(self) -> list[Type]:
        """The types of all values."""
        types = list(self.inputs)
        for step in self.steps:
            types.extend(step.op.infer(*(types[i] for i in step.operands)))
        return types

    def each(self) -> Iterator[tuple[Op, list[Type], list[Type]]]:
        """Every operation, with the types of its operands and results."""
        types, first = self.types(), len(self.inputs)
        for step in self.steps:
            operands = [types[i] for i in step.operands]
            count = len(step.op.infer(*operands))
            yield step.op, operands, types[first : first + count]
            first += count

    def states(self, inputs: Sequence[State], axis: str) -> list[State] | None:
        """The states of all values along a mesh axis, from those of the inputs; None if some operation has no rule for
        its operands. Where an operation makes `axis`, it makes it split. A zero is a partial sum as it is.
        """
        states = list(inputs)
        zeros: set[int] = set()
        for (each, operands, results), step in zip(self.each(), self.steps, strict=True):
            have = tuple(states[i] for i in step.operands)
            summed = tuple(SUM if i in zeros else states[i] for i in step.operands)
            known = each.sharding_rules(operands, results)
            rules = [rule for want in (have, summed) for rule in known if rule.operands == want]
            if each.literal == 0:
                zeros.add(len(states))
            if not any(have):
                rules = [rule for rule in rules if axis in rule.results]
                rules = rules or [ShardingRule(have, (None,) * len(results))]
            if not rules:
                return None
            for state, type in zip(rules[0].results, results, strict=True):
                if state not in (None, SUM, axis) or (type.has(axis) and state != axis):
                    return None
                states.append(state)
        return states

    def resized(self, axis: str, size: int) -> Body:
        """The body after an axis has been cut."""
        inputs = tuple(type.resized(axis, size) if type.has(axis) else type for type in self.inputs)
        steps = tuple(evolve(step, op=step.op.resized(axis, size)) for step in self.steps)
        return evolve(self, inputs=inputs, steps=steps)

    def widened(self) -> Body:
        """The body in the dtype of accumulation."""
        inputs = tuple(type.with_dtype(accumulation(type.dtype)) for type in self.inputs)
        steps = tuple(evolve(step, op=widened(step.op)) for step in self.steps)
        return evolve(self, inputs=inputs, steps=steps)

    def sharded(self, axis: str, size: int, mesh_axis: str, parts: int) -> Body:
        """The body on a shard; only operations that see the axis are told."""
        steps = []
        for (each, operands, results), step in zip(self.each(), self.steps, strict=True):
            affected = any(type.has(axis) for type in (*operands, *results))
            steps.append(evolve(step, op=each.sharded(axis, size, mesh_axis, parts)) if affected else step)
        return evolve(self.resized(axis, size), steps=tuple(steps))

    def source(self) -> str:
        """A Python function of the inputs that returns a tuple of the results."""
        names = [f"v{i}" for i in range(len(self.inputs))]
        arguments = [Argument(*pair) for pair in zip(names, self.inputs, strict=True)]
        lines: list[str] = []
        for each, _, results in self.each():
            operands = [arguments[i] for i in self.steps[len(lines)].operands]
            text = each.emit(legalized(each, operands, results), results)
            name = f"v{len(arguments)}"
            if each.literal is not None:
                arguments.append(Argument(text, results[0], literal=True))
                lines.append("")
                continue
            lines.append(f"{name} := {text}")
            if len(results) == 1:
                arguments.append(Argument(name, results[0]))
            else:
                arguments.extend(Argument(f"{name}[{i}]", type) for i, type in enumerate(results))
        parameters = ", ".join(names)
        outputs = ", ".join(_tensor(arguments[i]) for i in self.results)
        inner = ", ".join([*(f"({line})" for line in lines if line), f"({outputs},)"])
        return f"lambda {parameters}: ({inner},)[-1]"


def as_body(value: Body | tuple[Any, ...]) -> Body:
    """A body from nested tuples (`Body.literal`)."""
    if isinstance(value, Body):
        return value
    inputs, steps, results = value
    return Body(inputs, tuple(Step(OPS[name](**dict(options)), operands) for name, operands, options in steps), results)


def _tensor(argument: Argument) -> str:
    return as_tensor(argument).text


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


def widened(op: Op) -> Op:
    """The same operation in the dtype of accumulation."""
    changes: dict[str, object] = {}
    for each in attributes(type(op)):
        value = getattr(op, each.name)
        if isinstance(value, Body):
            changes[each.name] = value.widened()
        elif each.name == "dtype" and isinstance(value, str) and accumulation(value) != value:
            changes[each.name] = accumulation(value)
    return evolve(op, **changes) if changes else op  # type: ignore[misc]
