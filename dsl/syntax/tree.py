"""The syntax tree of a file: every node has a span, and names are not resolved.

Spans are not compared: two trees are equal if they say the same.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from attrs import field, frozen

from partita.dsl.syntax.source import Span

# What some characters mean after a backslash in a string; others are themselves.
ESCAPES = {"n": "\n", "t": "\t"}


@frozen
class Node:
    """What is written at a place of a file."""

    span: Span = field(eq=False, repr=False, kw_only=True)


@frozen
class Name(Node):
    """A single name: a declared one, or a reference that cannot be a path."""

    text: str


# ---------------------------------------------------------------- expressions


@frozen
class Iterations(Node):
    """Some iterations of a repeat in a path: `[0]` or `[0..7]`, both ends included."""

    first: Expression
    last: Expression | None


@frozen
class Path(Node):
    """`x` or `gpt.layer.attention`; `iterations`, by part, are in paths of rules such as `layer[0..7].attention`, and
    in `skips[3]`, what an iteration has kept.
    """

    parts: tuple[Name, ...]
    iterations: tuple[Iterations | None, ...] = ()

    def __str__(self) -> str:
        return ".".join(part.text for part in self.parts)


@frozen
class Number(Node):
    """A number as written, with its unit; `partita.dsl.syntax.units` reads it."""

    text: str


@frozen
class String(Node):
    """A string as written, with its quotation marks."""

    text: str

    @property
    def value(self) -> str:
        """The string without quotation marks and escapes."""
        return re.sub(r"\\(.)", lambda escaped: ESCAPES.get(escaped[1], escaped[1]), self.text[1:-1])


@frozen
class Boolean(Node):
    """`true` or `false`."""

    value: bool


@frozen
class Negative(Node):
    """`-operand`."""

    operand: Expression


@frozen
class Not(Node):
    """`not operand`."""

    operand: Expression


@frozen
class Binary(Node):
    """`left operator right`; the operators are + - * /, the comparisons, `and` and `or`."""

    left: Expression
    operator: str
    right: Expression


@frozen
class Group(Node):
    """An expression in parentheses."""

    inner: Expression


@frozen
class Arrow(Node):
    """`left -> right`, in call arguments and lists."""

    left: Expression
    right: Expression


@frozen
class Argument(Node):
    """One argument of a call; `name` is None if it is positional."""

    name: Name | None
    value: Expression


@frozen
class Call(Node):
    """`name(arguments)`."""

    name: Name
    arguments: tuple[Argument, ...]


@frozen
class List(Node):
    """`[items]`."""

    items: tuple[Expression, ...]


Expression: TypeAlias = Path | Number | String | Boolean | Negative | Not | Binary | Group | Arrow | Call | List


def bare(expression: Expression) -> Expression:
    """The expression without enclosing parentheses."""
    while isinstance(expression, Group):
        expression = expression.inner
    return expression


def single(expression: Expression) -> Name | None:
    """The name, if the expression is a single one."""
    expression = bare(expression)
    if isinstance(expression, Path) and len(expression.parts) == 1 and not any(expression.iterations):
        return expression.parts[0]
    return None


# ---------------------------------------------------------------- models


@frozen
class TensorType(Node):
    """`i64[batch, seq]`; without a dtype it is f32."""

    dtype: Name | None
    axes: tuple[Name, ...]


@frozen
class Input(Node):
    """An input of a block or model; without a type it is a number (`name: number`), which each call gives."""

    name: Name
    type: TensorType | None

    @property
    def is_number(self) -> bool:
        """Whether it is no tensor."""
        return self.type is None


@frozen
class Param(Node):
    """`param names: type ~ initial`."""

    names: tuple[Name, ...]
    type: TensorType
    initial: Expression


@frozen
class Buffer(Node):
    """`buffer names: type ~ initial`."""

    names: tuple[Name, ...]
    type: TensorType
    initial: Expression


@frozen
class Sample(Node):
    """`sample names: type ~ distribution`."""

    names: tuple[Name, ...]
    type: TensorType
    initial: Expression


@frozen
class Share(Node):
    """`share name = block`: one set of the block's parameters, for all calls of the name."""

    name: Name
    block: Expression


@frozen
class Copy(Node):
    """`frozen copy name = source`: what is shared, with the same initial values, and not trained; or
    `ema copy name = source(decay = 0.99)`, which follows it, with the arguments in `following`.
    """

    name: Name
    source: Name
    following: tuple[Argument, ...] | None = None


@frozen
class Let(Node):
    """`let names = values`: a call with as many results, or a value for each."""

    names: tuple[Name, ...]
    values: tuple[Expression, ...]


@frozen
class Repeat(Node):
    """`repeat count as name { body }`."""

    count: Expression
    name: Name
    body: tuple[Statement, ...]


@frozen
class Scan(Node):
    """`scan axis { body }`, or `scan axis backward { body }`."""

    axis: Name
    backward: bool
    body: tuple[Statement, ...]


@frozen
class Keep(Node):
    """`keep value as name`, in a repeat."""

    value: Expression
    name: Name


@frozen
class Update(Node):
    """`update name = value`, of a buffer; or `after update name = value`, of a parameter."""

    name: Name
    value: Expression
    after: bool = False


@frozen
class Loss(Node):
    """`loss value`, or `loss name = value`."""

    name: Name | None
    value: Expression


@frozen
class Metric(Node):
    """`metric name = value`."""

    name: Name
    value: Expression


@frozen
class Output(Node):
    """`output name = value`."""

    name: Name
    value: Expression


Statement: TypeAlias = (
    Param | Buffer | Sample | Share | Copy | Let | Repeat | Scan | Keep | Update | Loss | Metric | Output
)


@frozen
class Return(Node):
    """`return values`, the end of a block."""

    values: tuple[Expression, ...]


# ---------------------------------------------------------------- declarations


@frozen
class Import(Node):
    """`import "file"`."""

    path: String


@frozen
class Entry(Node):
    """`key = value`: the size of an axis or mesh axis, a constant, or a setting."""

    key: Name
    value: Expression


@frozen
class Axes(Node):
    """`axis name = size, …`."""

    entries: tuple[Entry, ...]


@frozen
class Constants(Node):
    """`const name = number, …`."""

    entries: tuple[Entry, ...]


@frozen
class Block(Node):
    """`block name(inputs) { body return results }`."""

    name: Name
    inputs: tuple[Input, ...]
    body: tuple[Statement, ...]
    results: Return


@frozen
class Model(Node):
    """`model name(inputs) { body }`."""

    name: Name
    inputs: tuple[Input, ...]
    body: tuple[Statement, ...]


@frozen
class Table(Node):
    """`{ key = value … }`."""

    entries: tuple[Entry, ...]


@frozen
class Operation(Node):
    """`op name(inputs) -> results { settings }`."""

    name: Name
    inputs: tuple[Input, ...]
    results: tuple[TensorType, ...]
    table: Table

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The types of its inputs and of its results."""
        return (*(each.type for each in self.inputs if each.type is not None), *self.results)


@frozen
class Mesh(Node):
    """`mesh name(axes) { settings }`."""

    name: Name
    axes: tuple[Entry, ...]
    table: Table | None


@frozen
class Target(Node):
    """What a shard rule applies to: `embed`, `state`, `gpt.wte: embed`."""

    path: Path | None
    name: Name


@frozen
class Shard(Node):
    """`shard targets -> mesh axes uneven by words`."""

    targets: tuple[Target, ...]
    mesh_axes: tuple[Name, ...]
    uneven: Name | None = None
    by: tuple[Name, ...] = ()


@frozen
class Stage(Node):
    """`stage repeats -> mesh axis [counts]`."""

    repeats: tuple[Name, ...]
    mesh_axis: Name
    counts: List | None = None


@frozen
class Place(Node):
    """`place paths -> mesh axis[first .. last]`."""

    paths: tuple[Path, ...]
    mesh_axis: Name
    first: Expression
    last: Expression | None = None


@frozen
class Recompute(Node):
    """`recompute paths`."""

    paths: tuple[Path, ...]


@frozen
class Offload(Node):
    """`offload paths by word`."""

    paths: tuple[Path, ...]
    by: Name | None = None


@frozen
class Overlap(Node):
    """`overlap mesh axes in pieces`."""

    mesh_axes: tuple[Name, ...]
    pieces: Expression


Rule: TypeAlias = Shard | Stage | Place | Recompute | Offload | Overlap


@frozen
class Layout(Node):
    """`layout name on mesh { rules }`."""

    name: Name
    mesh: Name
    rules: tuple[Rule, ...]


@frozen
class Schedule(Node):
    """`schedule name = call`."""

    name: Name
    call: Call


@frozen
class FreezeRule(Node):
    """`freeze targets`, perhaps `as call`: stored in that form."""

    targets: tuple[Path, ...]
    stored: Call | None = None


@frozen
class UpdateRule(Node):
    """`update targets -> call`, perhaps `by loss`."""

    targets: tuple[Path, ...]
    call: Call
    loss: Name | None = None


OptimizerRule: TypeAlias = FreezeRule | UpdateRule


@frozen
class Lora(Node):
    """`lora targets -> call`."""

    targets: tuple[Path, ...]
    call: Call


AdapterRule: TypeAlias = Lora | FreezeRule


@frozen
class Adapters(Node):
    """`adapters name { rules }`."""

    name: Name
    rules: tuple[AdapterRule, ...]


@frozen
class Optimizer(Node):
    """`optimizer name { rules }`."""

    name: Name
    rules: tuple[OptimizerRule, ...]


@frozen
class Train(Node):
    """`train { settings }`."""

    table: Table


@frozen
class Claim(Node):
    """`measure comparison limit`."""

    measure: Path | Call
    comparison: str
    limit: Expression


@frozen
class Expect(Node):
    """`expect { claims }`."""

    claims: tuple[Claim, ...]


@frozen
class WeightAxis(Node):
    """An axis of theirs: ours in a product, of which a factor may be a sum. `joined`: there is a `+` before `value`,
    and before that the product `outer`, if there is one.
    """

    outer: Expression | None
    joined: bool
    value: Expression

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """Both expressions, if there are two."""
        return (self.value,) if self.outer is None else (self.outer, self.value)


@frozen
class Correspondence(Node):
    """`ours = "theirs" [axes]`; without `axes` theirs is a scalar."""

    ours: tuple[Path, ...]
    theirs: tuple[String, ...]
    axes: tuple[WeightAxis, ...] = ()


@frozen
class Skip(Node):
    """`skip "patterns"`."""

    patterns: tuple[String, ...]


WeightsLine: TypeAlias = Correspondence | Skip


@frozen
class Weights(Node):
    """`weights name { lines }`."""

    name: Name
    lines: tuple[WeightsLine, ...]


Declaration: TypeAlias = (
    Import
    | Axes
    | Constants
    | Block
    | Operation
    | Model
    | Mesh
    | Layout
    | Schedule
    | Adapters
    | Optimizer
    | Train
    | Expect
    | Weights
)


@frozen
class File(Node):
    """A file."""

    declarations: tuple[Declaration, ...]
