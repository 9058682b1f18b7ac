"""The graph: values with types, and nodes that apply primitive operations to them, in an order of execution.

A graph is frozen; passes read one and build the next with a `Builder`. It is in single-assignment form: every value
is an input, a parameter or the result of exactly one node, and stands before its uses. Its textual form
(`partita.compiler.text`) parses back.

Scopes are paths such as `gpt.layer.3.attention`: the model, then blocks and repeats with their turn numbers.
Diagnostics, traces and profiles speak in scopes and source spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from partita.compiler.layout import WHOLE, Layout
from partita.dsl.brief import count, outline, shortened
from partita.dsl.source import Span
from partita.dsl.spec import Call
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.ops.op import Op


class Phase(StrEnum):
    """When a node runs.

    PROLOGUE once a step, before its first microbatch; FORWARD, BACKWARD (what a gradient of an activation needs)
    and WEIGHT (the rest of the gradients) once for each microbatch; REDUCE once a step for each stage, after its
    last microbatch; FINISH once a step, on the sums over all microbatches; UPDATE after the sums over all ranks.
    """

    PROLOGUE = "P"
    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    REDUCE = "R"
    FINISH = "E"
    UPDATE = "U"


@frozen(eq=False, repr=False)
class Value:
    """A tensor. `name` is unique in its graph and says where it comes from (`gpt.layer.3.attention.q`).

    Until layouts are chosen it is whole; from then on `type` is what one rank holds, and `layout` says of what. `of` is
    the model's name of the tensor that it is, or of which it is the cotangent or a copy (computed again, moved), where
    that is another: names with a number, `h~2`, are the second of their name.
    """

    name: str
    type: Type
    layout: Layout = WHOLE
    of: str | None = None
    cotangent: bool = False

    @property
    def tensor(self) -> str:
        """The model's name of the tensor that it is, or of which it is the cotangent or a copy."""
        return self.of or self.name

    def derived(self, name: str, type: Type | None = None, layout: Layout | None = None) -> Value:
        """A copy of it under another name."""
        return evolve(self, name=name, type=type or self.type, layout=layout or self.layout, of=self.tensor)

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}" + (f" {{{self.layout}}}" if self.layout.states else "")


@frozen(eq=False)
class Node:
    """An operation applied to values. `stage` is None until placement."""

    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    scope: str
    span: Span | None = field(default=None, repr=False)
    phase: Phase = Phase.FORWARD
    stage: int | None = None

    __repr__ = shortened

    @property
    def home(self) -> int:
        """The stage of a placed node."""
        if self.stage is None:
            raise LookupError(f"{self!r} has no stage")
        return self.stage

    @property
    def output(self) -> Value:
        """The result of a node that has one."""
        (value,) = self.outputs
        return value


@frozen(eq=False)
class Parameter:
    """A trained tensor. `value` is what the model computes with; the master copy has `master` type.

    `initial` says how it begins, `fans` is (fan-in, fan-out) as its `dot` reads it. `decays` tells whether weight
    decay applies (a `dot` or an `embedding` reads it).
    """

    value: Value
    master: Type
    initial: Call
    fans: tuple[int, int]
    decays: bool
    span: Span | None = field(default=None, repr=False)

    __repr__ = shortened

    @property
    def name(self) -> str:
        """The full name, `gpt.layer.3.attention.wq`."""
        return self.value.name


@frozen(eq=False)
class Input:
    """What the data yields for each step under `name`. `limit` is the axis that its integers index.

    `batch` is the axis that microbatches cut, where the value is such a part; None where it is whole.
    """

    name: str
    value: Value
    limit: Axis | None = None
    batch: str | None = None
    span: Span | None = field(default=None, repr=False)


@frozen(eq=False)
class Gradient:
    """One contribution to a parameter's gradient, on the stage that reads the parameter.

    A parameter that is used several times has several contributions; they meet in its accumulators.
    """

    parameter: str
    value: Value
    stage: int | None = None


@frozen(eq=False)
class Accumulator:
    """A sum (or maximum) over the microbatches of a step. `value` is what it holds after the last one.

    `parameter` names the parameter whose gradient it is; None for the loss and the metrics.
    """

    name: str
    value: Value
    parameter: str | None = None
    maximum: bool = False
    stage: int | None = None


@frozen(eq=False)
class Guard:
    """A metric that counts ids outside the axis that they index: none may be. `span` is the lookup's place."""

    name: str
    axis: Axis
    span: Span | None


@frozen
class Scope:
    """One call of a block, or one repeat with its number of turns: its path, and the name that the file gives it."""

    path: str
    name: str
    turns: int | None = None

    @property
    def repeat(self) -> bool:
        """Whether it is a repeat."""
        return self.turns is not None


@frozen(eq=False)
class Graph:
    """A program for one step on one device. `loss` and `metrics` are scalars; some of these are `guards`.

    Differentiation fills `gradients`; the cut into microbatches turns those, the loss and the metrics into
    `accumulators`, and from then on `loss` and `metrics` are values of the end of the step.
    """

    name: str
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    loss: Value
    metrics: tuple[tuple[str, Value], ...] = ()
    gradients: tuple[Gradient, ...] = ()
    accumulators: tuple[Accumulator, ...] = ()
    scopes: tuple[Scope, ...] = ()
    guards: tuple[Guard, ...] = ()

    def __repr__(self) -> str:
        return outline(
            "Graph", self.name, (count(len(self.nodes), "operation"), count(len(self.parameters), "parameter"))
        )

    def producers(self) -> dict[Value, Node]:
        """The node that makes each value; inputs and parameters have none."""
        return {value: node for node in self.nodes for value in node.outputs}

    def outputs(self) -> tuple[Value, ...]:
        """What the graph is computed for: the loss, the metrics, the contributions to gradients."""
        return (
            self.loss,
            *(value for _, value in self.metrics),
            *(gradient.value for gradient in self.gradients),
        )


def without_turns(path: str) -> str:
    """A path with its turn numbers left out: `gpt.layer.3.mlp` is `gpt.layer.mlp`."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def within(path: str, scope: str) -> bool:
    """Whether what has a path stands in a scope."""
    return path.startswith(f"{scope}.")


class Builder:
    """Appends nodes, names values uniquely, and holds the scope, span and phase that new nodes get."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.nodes: list[Node] = []
        self.scope = ""
        self.span: Span | None = None
        self.phase = Phase.FORWARD
        self.stage: int | None = None
        self.literals: dict[Value, float] = {}
        self._taken: dict[str, int] = dict.fromkeys(taken, 1)
        self._keys: dict[str, int] = {}

    def random_key(self, name: str) -> str:
        """A key of random numbers: the name, and from the second of that name on its number (docs/random.md)."""
        count = self._keys[name] = self._keys.get(name, 0) + 1
        return name if count == 1 else f"{name}~{count}"

    def fresh(self) -> Builder:
        """A builder of other nodes that shares this one's names."""
        other = Builder()
        other._taken = self._taken
        return other

    def unique(self, name: str) -> str:
        """`name`, or with a number after `~` where it is taken already."""
        count = self._taken.get(name, 0)
        self._taken[name] = count + 1
        while count:
            candidate = f"{name}~{count + 1}"
            if candidate not in self._taken:
                self._taken[candidate] = 1
                return candidate
            count += 1
        return name

    def at(self, node: Node) -> Builder:
        """Let new nodes stand in the scope and at the source place of `node`."""
        self.scope, self.span, self.stage = node.scope, node.span, node.stage
        return self

    def value(self, name: str, type: Type) -> Value:
        """A new value in the graph, uniquely named."""
        unique = self.unique(name)
        return Value(unique, type, of=None if unique == name else name)

    def apply_all(self, op: Op, *inputs: Value, name: str | None = None) -> tuple[Value, ...]:
        """Append a node and return its results. `name` is the full name of the first result."""
        types = op.infer(*(value.type for value in inputs))
        stem = name or f"{self.scope}.{op.label}"
        outputs = tuple(self.value(stem if not i else f"{stem}.{op.results[i]}", type) for i, type in enumerate(types))
        self.nodes.append(Node(op, inputs, outputs, self.scope, self.span, self.phase, self.stage))
        if op.literal is not None:
            self.literals.update(dict.fromkeys(outputs, op.literal))
        return outputs

    def apply(self, op: Op, *inputs: Value, name: str | None = None) -> Value:
        """Append a node with one result and return that."""
        (value,) = self.apply_all(op, *inputs, name=name)
        return value

    def part(self, source: Value, ending: str, type: Type | None = None) -> Value:
        """A new tensor that is part of `source` or made for it, and called by that and an ending."""
        of = f"{source.tensor}.{ending}"
        return evolve(source, name=self.unique(f"{source.name}.{ending}"), type=type or source.type, of=of)

    def derive(self, op: Op, source: Value, *inputs: Value, ending: str) -> Value:
        """Append a node whose result is such a tensor."""
        (type,) = op.infer(*(value.type for value in inputs))
        value = self.part(source, ending, type)
        self.nodes.append(Node(op, inputs, (value,), self.scope, self.span, self.phase, self.stage))
        return value


def substitute(node: Node, mapping: Mapping[Value, Value]) -> Node:
    """The node with its inputs replaced where `mapping` has them."""
    inputs = tuple(mapping.get(value, value) for value in node.inputs)
    return node if inputs == node.inputs else evolve(node, inputs=inputs)
