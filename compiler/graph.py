"""The graph IR: typed values, and nodes that apply primitive operations to them, in execution order.

A graph is immutable; a pass reads one and builds the next with a `Builder`. Graphs are in SSA form: every value is an
input, a parameter or the result of exactly one node, and is defined before its uses. The textual form
(`partita.compiler.text.graph`) parses back.

Scopes are paths such as `gpt.layer.3.attention`: the model, then blocks and repeats with their iteration numbers.
Diagnostics, traces and profiles refer to scopes and source spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from partita.compiler.layout import REPLICATED, Layout
from partita.dsl.reprs import Shortened, count, outline
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.ops.op import Op


class Phase(StrEnum):
    """When a node runs.

    PROLOGUE: once a step, before its first microbatch. FORWARD, BACKWARD (what gradients of activations need) and
    WEIGHT (the other gradients): once per microbatch. REDUCE: once a step for each stage, after its last microbatch.
    FINISH: once a step, on the sums over all microbatches. UPDATE: once a step, after the sums over all ranks. OUTER:
    once in several steps, after the update, where groups train apart.
    """

    PROLOGUE = "P"
    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    REDUCE = "R"
    FINISH = "E"
    UPDATE = "U"
    OUTER = "O"


# The phases that follow the last microbatch: no stage runs them, but every rank for its stages.
LAST = (Phase.FINISH, Phase.UPDATE)


@frozen(eq=False, repr=False)
class Value:
    """A tensor. `name` is unique in its graph and says where it comes from (`gpt.layer.3.attention.q`).

    Until layouts are chosen, a value is a global tensor; after that, `type` is the part that one rank holds according
    to `layout`. `of` is the model's name of the tensor if `name` is another one: for a cotangent, a copy (recomputed,
    resharded), or the second tensor of a name (`h~2`). A `host` value lies in the host's memory, where an operation on
    it runs; others lie in the device's.
    """

    name: str
    type: Type
    layout: Layout = REPLICATED
    of: str | None = None
    cotangent: bool = False
    host: bool = False

    @property
    def tensor(self) -> str:
        """The model's name of this tensor, or of the one that it is a cotangent or copy of."""
        return self.of or self.name

    def derived(self, name: str, type: Type | None = None, layout: Layout | None = None) -> Value:
        """A copy of this value under another name."""
        return Value(name, type or self.type, layout or self.layout, self.tensor, self.cotangent, self.host)

    def laid_out(self, type: Type, layout: Layout | None = None) -> Value:
        """The same value in another layout, or part of it: of the type that a rank then holds."""
        return Value(self.name, type, layout or self.layout, self.of, self.cotangent, self.host)

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}" + (f" {{{self.layout}}}" if self.layout.states else "")


@frozen(eq=False, repr=False)
class Node(Shortened):
    """An operation applied to values. `stage` is None until placement."""

    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    scope: str
    span: Span | None = field(default=None, repr=False)
    phase: Phase = Phase.FORWARD
    stage: int | None = None

    def changed(
        self,
        *,
        op: Op | None = None,
        inputs: tuple[Value, ...] | None = None,
        outputs: tuple[Value, ...] | None = None,
        phase: Phase | None = None,
        stage: int | None = None,
    ) -> Node:
        """The node with some fields changed. `evolve` does that for fields of any class, and takes five times as long:
        passes do it for every node.
        """
        return Node(
            self.op if op is None else op,
            self.inputs if inputs is None else inputs,
            self.outputs if outputs is None else outputs,
            self.scope,
            self.span,
            self.phase if phase is None else phase,
            self.stage if stage is None else stage,
        )

    @property
    def placed_on(self) -> int:
        """The stage of a placed node. Raises LookupError before placement."""
        if self.stage is None:
            raise LookupError(f"{self!r} has no stage")
        return self.stage

    @property
    def output(self) -> Value:
        """The only result of the node."""
        (value,) = self.outputs
        return value


@frozen
class Part:
    """What a parameter is one of: the parts of a parameter `name` of type `master`, along `axis`, one for each rank of
    the mesh axis `over`.
    """

    name: str
    master: Type
    axis: str
    over: str
    rank: int


@frozen(eq=False, repr=False)
class Parameter(Shortened):
    """A trained tensor or a buffer. `value` is what the model computes with; the master copy has type `master`, in
    the dtype of accumulation or, if it is not trained, that of the value.

    `initial` is its initializer, `fans` its (fan-in, fan-out) as its `dot` reads it. `decays` is whether weight decay
    applies: whether a `dot` or an `embedding` reads it. A `buffer` and what is `frozen` have no gradient. `kept` are
    stages that keep it even if no operation of a microbatch reads it there: those that compute updates of buffers from
    it, and those where another program of the run reads it. A buffer that `is_state` holds what a program that goes
    through a sequence part by part keeps of earlier parts (`partita.compiler.passes.decode`). A `part` of a parameter
    is one of its own; `initial` and `fans` are those of the whole. `loss` is the metric whose gradient it has, in place
    of the loss's. With `blocks` it is to be stored in four bits: the size of one, and the
    order of axes in which elements follow each other.
    """

    value: Value
    master: Type
    initial: Call
    fans: tuple[int, int]
    decays: bool
    span: Span | None = field(default=None, repr=False)
    buffer: bool = False
    kept: tuple[int, ...] = ()
    frozen: bool = False
    part: Part | None = None
    is_state: bool = False
    loss: str | None = None
    blocks: tuple[int, tuple[str, ...]] | None = None

    @property
    def name(self) -> str:
        """The full name, `gpt.layer.3.attention.wq`."""
        return self.value.name

    @property
    def trained(self) -> bool:
        """Whether it has a gradient and an update by the optimizer."""
        return not self.buffer and not self.frozen


@frozen(eq=False)
class Input:
    """What the data source yields for each step under `name`. `limit` is the axis that its integers index.

    `ignored` are ids that stand for none, and may be out of range. `batch` is the axis that is split into microbatches;
    None if the value is not split.
    """

    name: str
    value: Value
    limit: Axis | None = None
    batch: str | None = None
    span: Span | None = field(default=None, repr=False)
    ignored: tuple[int, ...] = ()


@frozen(eq=False)
class BufferWrite:
    """The value of a buffer after a training step: at first a value of the forward pass; after the split into
    microbatches, the result of UPDATE nodes, which read masters and accumulators. With `after`, that of a parameter,
    once all are updated.
    """

    buffer: str
    value: Value
    span: Span | None = field(default=None, repr=False)
    after: bool = False


@frozen(eq=False)
class Master:
    """The master copy of a parameter or buffer, as UPDATE nodes read it: its value before all updates, or `after`."""

    parameter: str
    value: Value
    after: bool = False

    @property
    def kind(self) -> str:
        """What it is called: `master`, or `updated`."""
        return "updated" if self.after else "master"


@frozen(eq=False)
class Gradient:
    """One contribution to a parameter's gradient, on the stage that reads the parameter.

    A parameter with several uses has several contributions, which its accumulators sum.
    """

    parameter: str
    value: Value
    stage: int | None = None


@frozen
class SparseGradientPart:
    """The `ids` of a lookup in a sparse parameter, or the rows of its gradient; `number` is that of the lookup."""

    number: int
    ids: bool

    def __str__(self) -> str:
        return f"{'ids' if self.ids else 'rows'} {self.number}"


@frozen(eq=False)
class Accumulator:
    """A sum (or maximum) over the microbatches of a step. `value` is the total after the last one.

    `parameter` names the parameter whose gradient it is; None for what the loss, metrics and updates are made of. The
    gradient of a sparse parameter (`partita.compiler.passes.sparse`) has a term for each lookup: accumulators of the
    ids and of the rows, with an axis of microbatches, along which they are not summed.
    """

    name: str
    value: Value
    parameter: str | None = None
    maximum: bool = False
    stage: int | None = None
    term: SparseGradientPart | None = None


@frozen(eq=False)
class Guard:
    """A metric that counts ids outside the axis they index; it must be zero. `span` is that of the lookup."""

    name: str
    axis: Axis
    span: Span | None


@frozen
class Scope:
    """A call of a block, or a repeat with its number of iterations: its path, and its name in the file."""

    path: str
    name: str
    iterations: int | None = None

    @property
    def repeat(self) -> bool:
        """Whether this is a repeat."""
        return self.iterations is not None


@frozen(eq=False)
class Graph:
    """A program for one step on one device. `loss` and `metrics` are scalars; some metrics are `guards`. `inside` has
    the nodes in the body of each scan, as it was built; what a graph means does not depend on it, because the body is
    an attribute of the scan.

    Differentiation fills `gradients`. The split into microbatches turns these, the loss, the metrics and what `updates`
    are made of into `accumulators`; from then on `loss` and `metrics` are values at the end of the step, and UPDATE
    nodes compute the updates from accumulators and `masters`. `asked` are outputs of the model; the split turns them
    into accumulators. `own_sizes` are those of the axes that are padded.
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
    updates: tuple[BufferWrite, ...] = ()
    masters: tuple[Master, ...] = ()
    inside: Mapping[Node, Sequence[Node]] = field(factory=dict, eq=False)
    asked: tuple[tuple[str, Value], ...] = ()
    own_sizes: Mapping[str, int] = field(factory=dict)

    def __repr__(self) -> str:
        return outline(
            "Graph", self.name, (count(len(self.nodes), "operation"), count(len(self.parameters), "parameter"))
        )

    @property
    def leaves(self) -> list[Value]:
        """The values that no node makes: inputs and parameters."""
        return [*(each.value for each in self.inputs), *(each.value for each in self.parameters)]

    @property
    def values(self) -> list[Value]:
        """All values: inputs, parameters, and what nodes make."""
        return [*self.leaves, *(value for node in self.nodes for value in node.outputs)]

    @property
    def names(self) -> list[str]:
        """The names of all values."""
        return [value.name for value in self.values]

    @property
    def repeats(self) -> dict[str, str]:
        """The names of repeats, by path."""
        return {scope.path: scope.name for scope in self.scopes if scope.repeat}

    def producers(self) -> dict[Value, Node]:
        """The node that makes each value; inputs and parameters have none."""
        return producers_of(self.nodes)

    def outputs(self) -> tuple[Value, ...]:
        """The outputs of the graph: the loss, the metrics, the updates of buffers, the contributions to gradients."""
        return (
            self.loss,
            *(value for _, value in self.metrics),
            *(update.value for update in self.updates),
            *(value for _, value in self.asked),
            *(gradient.value for gradient in self.gradients),
        )


def without_iterations(path: str) -> str:
    """A path without its iteration numbers: `gpt.layer.mlp` for `gpt.layer.3.mlp`."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def within(path: str, scope: str) -> bool:
    """Whether a path is inside a scope."""
    return path.startswith(f"{scope}.")


class Builder:
    """Appends nodes, gives values unique names, and holds the scope, span, phase and stage of new nodes."""

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
        """A key for random numbers: the name, numbered from its second use on (docs/random.md)."""
        count = self._keys[name] = self._keys.get(name, 0) + 1
        return name if count == 1 else f"{name}~{count}"

    def fresh(self) -> Builder:
        """A builder without nodes that shares this one's names."""
        other = Builder()
        other._taken = self._taken
        return other

    def unique(self, name: str) -> str:
        """`name`, or with a number after `~` if it is taken."""
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
        """Give new nodes the scope, span and stage of `node`."""
        self.scope, self.span, self.stage = node.scope, node.span, node.stage
        return self

    def value(self, name: str, type: Type) -> Value:
        """A new value with a unique name."""
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
        """Append a node with one result and return that result."""
        (value,) = self.apply_all(op, *inputs, name=name)
        return value

    def part(self, source: Value, ending: str, type: Type | None = None) -> Value:
        """A new tensor that is part of `source` or made for it, named after it with an `ending`."""
        of = f"{source.tensor}.{ending}"
        return evolve(source, name=self.unique(f"{source.name}.{ending}"), type=type or source.type, of=of)

    def derive(self, op: Op, source: Value, *inputs: Value, ending: str) -> Value:
        """Append a node whose result is named as by `part`."""
        (type,) = op.infer(*(value.type for value in inputs))
        value = self.part(source, ending, type)
        self.nodes.append(Node(op, inputs, (value,), self.scope, self.span, self.phase, self.stage))
        return value


def producers_of(nodes: Iterable[Node]) -> dict[Value, Node]:
    """The node that makes each value."""
    return {value: node for node in nodes for value in node.outputs}


def readers_of(nodes: Iterable[Node]) -> dict[Value, list[Node]]:
    """The nodes that read each value, in order, each once."""
    found: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in dict.fromkeys(node.inputs):
            found.setdefault(value, []).append(node)
    return found


def outputs_of(nodes: Iterable[Node]) -> set[Value]:
    """The values that nodes make."""
    return {value for node in nodes for value in node.outputs}


def inputs_of(nodes: Iterable[Node]) -> set[Value]:
    """The values that nodes read."""
    return {value for node in nodes for value in node.inputs}


def substitute(node: Node, mapping: Mapping[Value, Value]) -> Node:
    """The node with its inputs replaced according to `mapping`."""
    inputs = tuple(mapping.get(value, value) for value in node.inputs)
    return node if inputs == node.inputs else node.changed(inputs=inputs)
