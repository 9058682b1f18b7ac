"""The syntax tree of a file: every node has a span, and names are not resolved.

Spans are not compared: two trees are equal if they say the same.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import field, frozen

from partita.dsl.syntax.source import Span


@frozen
class Name:
    """A single name: a declared one, or a reference that cannot be a path."""

    text: str
    span: Span = field(eq=False, repr=False)


# ---------------------------------------------------------------- expressions


@frozen
class Path:
    """`x` or `gpt.layer.attention`."""

    parts: tuple[Name, ...]
    span: Span = field(eq=False, repr=False)

    def __str__(self) -> str:
        return ".".join(part.text for part in self.parts)


@frozen
class Number:
    """A number as written, with its unit; `partita.dsl.syntax.units` reads it."""

    text: str
    span: Span = field(eq=False, repr=False)


@frozen
class String:
    """A string as written, with its quotation marks."""

    text: str
    span: Span = field(eq=False, repr=False)

    @property
    def value(self) -> str:
        """The string without quotation marks and escapes; `n` and `t` after a backslash mean newline and tab."""
        parts, escaped = [], False
        for character in self.text[1:-1]:
            if escaped:
                parts.append({"n": "\n", "t": "\t"}.get(character, character))
            elif character != "\\":
                parts.append(character)
            escaped = character == "\\" and not escaped
        return "".join(parts)


@frozen
class Boolean:
    """`true` or `false`."""

    value: bool
    span: Span = field(eq=False, repr=False)


@frozen
class Negative:
    """`-operand`."""

    operand: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Not:
    """`not operand`."""

    operand: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Binary:
    """`left operator right`; the operators are + - * /, the comparisons, `and` and `or`."""

    left: Expression
    operator: str
    right: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Group:
    """An expression in parentheses."""

    inner: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Arrow:
    """`left -> right`, in call arguments and lists."""

    left: Expression
    right: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Argument:
    """One argument of a call; `name` is None if it is positional."""

    name: Name | None
    value: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Call:
    """`name(arguments)`."""

    name: Name
    arguments: tuple[Argument, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class List:
    """`[items]`."""

    items: tuple[Expression, ...]
    span: Span = field(eq=False, repr=False)


Expression: TypeAlias = Path | Number | String | Boolean | Negative | Not | Binary | Group | Arrow | Call | List


def bare(expression: Expression) -> Expression:
    """The expression without enclosing parentheses."""
    while isinstance(expression, Group):
        expression = expression.inner
    return expression


def single(expression: Expression) -> Name | None:
    """The name, if the expression is a single one."""
    expression = bare(expression)
    if isinstance(expression, Path) and len(expression.parts) == 1:
        return expression.parts[0]
    return None


# ---------------------------------------------------------------- models


@frozen
class TensorType:
    """`i64[batch, seq]`; without a dtype it is f32."""

    dtype: Name | None
    axes: tuple[Name, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Input:
    """An input of a block or model."""

    name: Name
    type: TensorType
    span: Span = field(eq=False, repr=False)


@frozen
class Param:
    """`param names: type ~ initial`."""

    names: tuple[Name, ...]
    type: TensorType
    initial: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Buffer:
    """`buffer names: type ~ initial`."""

    names: tuple[Name, ...]
    type: TensorType
    initial: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Sample:
    """`sample names: type ~ distribution`."""

    names: tuple[Name, ...]
    type: TensorType
    distribution: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Let:
    """`let names = value`."""

    names: tuple[Name, ...]
    value: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Repeat:
    """`repeat count as name { body }`."""

    count: Expression
    name: Name
    body: tuple[Statement, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Scan:
    """`scan axis { body }`, or `scan axis backward { body }`."""

    axis: Name
    backward: bool
    body: tuple[Statement, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Update:
    """`update name = value`."""

    name: Name
    value: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Loss:
    """`loss value`."""

    value: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Metric:
    """`metric name = value`."""

    name: Name
    value: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Output:
    """`output name = value`."""

    name: Name
    value: Expression
    span: Span = field(eq=False, repr=False)


Statement: TypeAlias = Param | Buffer | Sample | Let | Repeat | Scan | Update | Loss | Metric | Output


@frozen
class Return:
    """`return values`, the end of a block."""

    values: tuple[Expression, ...]
    span: Span = field(eq=False, repr=False)


# ---------------------------------------------------------------- declarations


@frozen
class Import:
    """`import "file"`."""

    path: String
    span: Span = field(eq=False, repr=False)


@frozen
class Entry:
    """`key = value`: the size of an axis or mesh axis, a constant, or a setting."""

    key: Name
    value: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Axes:
    """`axis name = size, …`."""

    entries: tuple[Entry, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Constants:
    """`const name = number, …`."""

    entries: tuple[Entry, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Block:
    """`block name(inputs) { body return results }`."""

    name: Name
    inputs: tuple[Input, ...]
    body: tuple[Statement, ...]
    results: Return
    span: Span = field(eq=False, repr=False)


@frozen
class Model:
    """`model name(inputs) { body }`."""

    name: Name
    inputs: tuple[Input, ...]
    body: tuple[Statement, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Table:
    """`{ key = value … }`."""

    entries: tuple[Entry, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Operation:
    """`op name(inputs) -> results { settings }`."""

    name: Name
    inputs: tuple[Input, ...]
    results: tuple[TensorType, ...]
    table: Table
    span: Span = field(eq=False, repr=False)

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The types of its inputs and of its results."""
        return (*(each.type for each in self.inputs), *self.results)


@frozen
class Mesh:
    """`mesh name(axes) { settings }`."""

    name: Name
    axes: tuple[Entry, ...]
    table: Table | None
    span: Span = field(eq=False, repr=False)


@frozen
class Target:
    """What a shard rule applies to: `embed`, `state`, `gpt.wte: embed`."""

    path: Path | None
    name: Name
    span: Span = field(eq=False, repr=False)


@frozen
class Shard:
    """`shard targets -> mesh axes by words`."""

    targets: tuple[Target, ...]
    mesh_axes: tuple[Name, ...]
    by: tuple[Name, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Stage:
    """`stage repeats -> mesh axis [counts]`."""

    repeats: tuple[Name, ...]
    mesh_axis: Name
    counts: List | None
    span: Span = field(eq=False, repr=False)


@frozen
class Place:
    """`place paths -> mesh axis[first .. last]`."""

    paths: tuple[Path, ...]
    mesh_axis: Name
    first: Expression
    last: Expression | None
    span: Span = field(eq=False, repr=False)


@frozen
class Recompute:
    """`recompute paths`."""

    paths: tuple[Path, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Offload:
    """`offload paths by word`."""

    paths: tuple[Path, ...]
    by: Name | None
    span: Span = field(eq=False, repr=False)


@frozen
class Overlap:
    """`overlap mesh axes in pieces`."""

    mesh_axes: tuple[Name, ...]
    pieces: Expression
    span: Span = field(eq=False, repr=False)


Rule: TypeAlias = Shard | Stage | Place | Recompute | Offload | Overlap


@frozen
class Layout:
    """`layout name on mesh { rules }`."""

    name: Name
    mesh: Name
    rules: tuple[Rule, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Schedule:
    """`schedule name = call`."""

    name: Name
    call: Call
    span: Span = field(eq=False, repr=False)


@frozen
class FreezeRule:
    """`freeze targets`."""

    targets: tuple[Path, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class UpdateRule:
    """`update targets -> call`."""

    targets: tuple[Path, ...]
    call: Call
    span: Span = field(eq=False, repr=False)


@frozen
class Optimizer:
    """`optimizer name { rules }`."""

    name: Name
    rules: tuple[FreezeRule | UpdateRule, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Train:
    """`train { settings }`."""

    table: Table
    span: Span = field(eq=False, repr=False)


@frozen
class Claim:
    """`measure comparison limit`."""

    measure: Path | Call
    comparison: str
    limit: Expression
    span: Span = field(eq=False, repr=False)


@frozen
class Expect:
    """`expect { claims }`."""

    claims: tuple[Claim, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class WeightAxis:
    """An axis of theirs: ours in a product, of which a factor may be a sum. `joined`: there is a `+` before `value`,
    and before that the product `outer`, if there is one.
    """

    outer: Expression | None
    joined: bool
    value: Expression
    span: Span = field(eq=False, repr=False)

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """Both expressions, if there are two."""
        return (self.value,) if self.outer is None else (self.outer, self.value)


@frozen
class Correspondence:
    """`ours = "theirs" [axes]`; without `axes` theirs is a scalar."""

    ours: tuple[Path, ...]
    theirs: tuple[String, ...]
    axes: tuple[WeightAxis, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Skip:
    """`skip "patterns"`."""

    patterns: tuple[String, ...]
    span: Span = field(eq=False, repr=False)


@frozen
class Weights:
    """`weights name { lines }`."""

    name: Name
    lines: tuple[Correspondence | Skip, ...]
    span: Span = field(eq=False, repr=False)


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
    | Optimizer
    | Train
    | Expect
    | Weights
)


@frozen
class File:
    """A file."""

    declarations: tuple[Declaration, ...]
    span: Span = field(eq=False, repr=False)
