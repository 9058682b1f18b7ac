"""The textual form of a graph, for people and for tests of passes; it parses back to an equal graph.

    graph tiny
    scope tiny.layer layer iterations 4
    input %tiny.tokens: i64[batch=32, seq=128] limit vocab=256
    parameter %tiny.wte: f32[vocab=256, embed=128] normal(std=0.02) fans 128, 256 decays
    %tiny.h: f32[batch=8, embed=64] {batch/data embed/tensor} = dot(%tiny.x, %tiny.w; over=('embed',)) F0  # tiny.par:20
    %tiny.y: f32[batch=8] {batch/data +/tensor} = reduce(%tiny.h; function='sum', over=('embed',), dtype='f32') F0
    loss %tiny.y
    gradient tiny.w %d(tiny.w) stage 0

A line for each node: its results, each with its local type, in braces its layout unless replicated (`axis/mesh axis`;
`+` is a partial sum, `>` a partial maximum), and `on host` if it lies there; the operation, where pointwise functions
go by their own names; the phase, with the stage if assigned; and after `@` the scope, unless it is the graph itself.
Attributes are Python literals, with axes and types in angle brackets. Values with the same name are numbered: `%x^2`. A
copy of another tensor is marked `of 'x'`, and a cotangent `of 'd(x)'`. Text after ` # `, such as source locations, is
not read back.

Defaults are omitted: an input's name if it is the last part of its value's; a master with the value's axes in the
accumulation dtype; `zeros()`; that `d(x)` is the cotangent of `x`, and `x~2` another `x`; fans of all but the last
axis, and of the last; default attributes. The reader also infers omitted types of results and takes F as the default
phase.

    line        fields in order, optional ones in []
    scope       path name [iterations COUNT]
    input       [name] value [limit AXIS] [ignored INT,…] [cut AXIS]
    parameter   value [master TYPE] [INITIAL] [fans IN, OUT] [decays] [buffer] [kept STAGES] [frozen] [state]
                [loss METRIC] [part RANK of NAME TYPE along AXIS over MESH_AXIS]
    master      parameter value [after]
    accumulator name value [parameter NAME [ids NUMBER | rows NUMBER]] [maximum] [stage STAGE]
    gradient    parameter value [stage STAGE]
    metric      name value
    update      buffer value, or parameter value after
    output      name value
    guard       name AXIS
    padded      AXIS   with its own size, that of the graph is larger
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

from attrs import NOTHING

from partita.compiler.graph import (
    Accumulator,
    BufferWrite,
    Gradient,
    Graph,
    Guard,
    Input,
    Master,
    Node,
    Parameter,
    Part,
    Phase,
    Scope,
    SparseGradientPart,
    Value,
)
from partita.compiler.layout import REPLICATED, Flat, Layout
from partita.compiler.ops import OPS
from partita.compiler.ops.body import Body
from partita.compiler.ops.op import Op, accumulation, attributes
from partita.compiler.ops.pointwise import FUNCTIONS, Pointwise
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.dsl.types import Axis, Type

ZEROS = Call("zeros", {})


def usual_fans(type: Type) -> tuple[int, int]:
    """The default fans of a parameter: those if no `dot` reads it."""
    return (prod(type.shape[:-1]), type.shape[-1]) if type.axes else (1, 1)


def usual_master(type: Type) -> Type:
    """The default type of a master copy: the value's, in the accumulation dtype."""
    return type.with_dtype(accumulation(type.dtype))


# ---------------------------------------------------------------- writing


def attribute_text(value: Any) -> str:
    """An attribute of an op, or an argument of a call, as text."""
    if isinstance(value, (Axis, Type)):
        return f"<{value}>"
    if isinstance(value, Body):
        value = value.literal()
    if isinstance(value, tuple):
        inner = ", ".join(attribute_text(item) for item in value)
        return f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def call_text(call: Call) -> str:
    """`normal(std=0.02)`."""
    return f"{call.name}({', '.join(f'{name}={attribute_text(value)}' for name, value in call.arguments.items())})"


def default_origin(name: str) -> tuple[str | None, bool]:
    """The default tensor of a value with this name, and whether the value is its cotangent: `d(x)` is the cotangent of
    `x`, and `x~2` the second value for it.
    """
    match = re.fullmatch(r"(d\()?(.+?)(~\d+)?(?(1)\))(~\d+)?", name)
    if match is None or not (match[1] or match[3] or match[4]):
        return None, False
    return match[2], bool(match[1])


def origin_text(value: Value) -> str:
    """` of 'x'` for a copy, ` of 'd(x)'` for a cotangent; empty if the name implies it."""
    if (value.of, value.cotangent) == default_origin(value.name):
        return ""
    return f" of 'd({value.of or ''})'" if value.cotangent else f" of '{value.of or ''}'"


def layout_text(layout: Layout) -> str:
    """`{batch/data +/tensor}`; `{}` is replicated; `{flat/data of embed=6, heads=5 in 4}` is flat, in 4 parts."""
    states = " ".join(f"{state}/{mesh_axis}" for mesh_axis, state in layout.states)
    flat = layout.flat
    form = "" if flat is None else f" of {', '.join(map(str, flat.axes))} in {flat.parts}"
    return f"{{{states}{form}}}"


class GraphWriter:
    """Writes lines. The scope `root` is omitted; with `places`, nodes have their source locations."""

    def __init__(self, root: str, places: bool = True) -> None:
        self.root = root
        self.places = places
        self._names: dict[Value, str] = {}
        self._taken: dict[str, int] = {}

    def knows(self, value: Value) -> bool:
        """Whether a value has been written."""
        return value in self._names

    def name(self, value: Value) -> str:
        """The value's name, numbered if another value has it already."""
        if value not in self._names:
            count = self._taken[value.name] = self._taken.get(value.name, 0) + 1
            self._names[value] = f"%{value.name}" if count == 1 else f"%{value.name}^{count}"
        return self._names[value]

    def names(self, values: Iterable[Value]) -> str:
        """`%a, %b`."""
        return ", ".join(map(self.name, values))

    def value(self, value: Value) -> str:
        """`%x: f32[batch=8] {batch/data}`."""
        layout = f" {layout_text(value.layout)}" if value.layout != REPLICATED else ""
        host = " on host" if value.host else ""
        return f"{self.name(value)}: {value.type}{layout}{host}{origin_text(value)}"

    def node(self, node: Node) -> str:
        """A node's line; operands are names, even if they were not defined before."""
        operands = self.names(node.inputs)
        results = ", ".join(map(self.value, node.outputs))
        stage = "" if node.stage is None else str(node.stage)
        scope = f" @{node.scope}" if node.scope != self.root else ""
        return f"{results}{' = ' if results else ''}{self._op(node.op, operands)} {node.phase}{stage}{scope}" + (
            self._place(node.span)
        )

    def _op(self, op: Op, operands: str) -> str:
        if isinstance(op, Pointwise):
            return f"{op.function}({operands})"
        fields = [
            f"{each.name}={attribute_text(getattr(op, each.name))}"
            for each in attributes(type(op))
            if each.default is NOTHING or getattr(op, each.name) != each.default
        ]
        return f"{op.name}({operands}{'; ' if operands and fields else ''}{', '.join(fields)})"

    def _place(self, span: Span | None) -> str:
        return f"  # {span.source.name}:{span.line}" if span and self.places else ""

    def input(self, each: Input) -> str:
        """`input %m.tokens: i64[batch=32] limit vocab=256`."""
        name = f"{each.name} " if each.name != each.value.name.rsplit(".", 1)[-1] else ""
        limit = f" limit {each.limit}" if each.limit is not None else ""
        cut = f" cut {each.batch}" if each.batch is not None else ""
        ignored = f" ignored {','.join(map(str, each.ignored))}" if each.ignored else ""
        return f"input {name}{self.value(each.value)}{limit}{ignored}{cut}"

    def parameter(self, each: Parameter) -> str:
        """`parameter %m.w: f32[embed=64] normal(std=0.02)`."""
        words = [self.value(each.value)]
        if each.master != usual_master(each.value.type):
            words.append(f"master {each.master}")
        if each.initial != ZEROS:
            words.append(call_text(each.initial))
        if each.fans != usual_fans(each.master):
            words.append(f"fans {each.fans[0]}, {each.fans[1]}")
        words += ["decays"] if each.decays else []
        words += ["buffer"] if each.buffer else []
        words += [f"kept {', '.join(map(str, each.kept))}"] if each.kept else []
        words += ["frozen"] if each.frozen else []
        words += ["state"] if each.is_state else []
        words += [f"loss {each.loss}"] if each.loss is not None else []
        if each.part is not None:
            part = each.part
            words.append(f"part {part.rank} of {part.name} {part.master} along {part.axis} over {part.over}")
        return f"parameter {' '.join(words)}"

    def master(self, each: Master) -> str:
        """`master m.bias %master(m.bias): f32[experts=8]`."""
        return f"master {each.parameter} {self.value(each.value)}{' after' * each.after}"

    def accumulator(self, each: Accumulator) -> str:
        """`accumulator m.w %total(d(m.w))@0: f32[embed=64] parameter m.w stage 0`."""
        parameter = f" parameter {each.parameter}" if each.parameter is not None else ""
        stage = f" stage {each.stage}" if each.stage is not None else ""
        maximum = " maximum" if each.maximum else ""
        term = f" {each.term}" if each.term is not None else ""
        return f"accumulator {each.name} {self.value(each.value)}{parameter}{term}{maximum}{stage}"

    def gradient(self, each: Gradient) -> str:
        """`gradient m.w %d(m.w) stage 0`."""
        stage = f" stage {each.stage}" if each.stage is not None else ""
        return f"gradient {each.parameter} {self.name(each.value)}{stage}"

    def graph(self, graph: Graph) -> list[str]:
        """The lines of a graph."""
        return [
            f"graph {graph.name}",
            *(
                f"scope {s.path} {s.name}{'' if s.iterations is None else f' iterations {s.iterations}'}"
                for s in graph.scopes
            ),
            *map(self.input, graph.inputs),
            *map(self.parameter, graph.parameters),
            *map(self.accumulator, graph.accumulators),
            *map(self.master, graph.masters),
            *map(self.node, graph.nodes),
            f"loss {self.name(graph.loss)}",
            *(f"metric {name} {self.name(value)}" for name, value in graph.metrics),
            *(f"update {each.buffer} {self.name(each.value)}{' after' * each.after}" for each in graph.updates),
            *(f"output {name} {self.name(value)}" for name, value in graph.asked),
            *map(self.gradient, graph.gradients),
            *(f"guard {each.name} {each.axis}" for each in graph.guards),
            *(f"padded {Axis(*each)}" for each in graph.own_sizes.items()),
        ]


def graph_text(graph: Graph, places: bool = True) -> str:
    """The graph as text; with `places`, nodes have their source locations."""
    return "\n".join(GraphWriter(graph.name, places).graph(graph)) + "\n"


# ---------------------------------------------------------------- parsing

TYPE = r"\w+\[[^\]]*\]"
VALUE = rf"%[^:%]+?: {TYPE}(?: {{[^}}]*}})?(?: on host)?(?: of '[^']*')?"
CALL = r"\w+\([^)]*\)"
_VALUE = re.compile(
    rf"%(?P<name>[^:%]+?)(?:: (?P<type>{TYPE}))?(?: {{(?P<layout>[^}}]*)}})?(?: on (?P<host>host))?"
    r"(?: of '(?P<of>[^']*)')?"
)
_RESULT = re.compile(rf"(?:{_VALUE.pattern})(?:, |$)")
_NODE = re.compile(
    r"(?:(?P<results>%.+?) = )?(?P<op>\w+)\((?P<arguments>.*)\)"
    r"(?: (?P<phase>[PFBWREUO])(?P<stage>\d*))?(?: @(?P<scope>.*))?"
)


def parse_axis(text: str) -> Axis:
    """`batch=32`."""
    name, size = text.split("=")
    return Axis(name, int(size))


def parse_type(text: str) -> Type:
    """`f32[batch=32]`."""
    match = matched(r"(\w+)\[([^\]]*)\]", text)
    return Type(match[1], tuple(parse_axis(part) for part in match[2].split(", ") if part))


def parse_layout(text: str) -> Layout:
    """The layout within braces: `batch/data +/tensor`, `flat/data of embed=6, heads=5 in 4`."""
    match = matched(r"(.*?)(?: of (.+) in (\d+))?", text)
    pairs = tuple((mesh_axis, state) for state, mesh_axis in (part.split("/") for part in match[1].split()))
    if match[2] is None:
        return Layout(pairs)
    axes = tuple(map(parse_axis, match[2].split(", ")))
    split = {state for _, state in pairs}
    return Layout(pairs, Flat(axes, int(match[3]), tuple(axis.name for axis in axes if axis.name in split)))


def parse_op(name: str, attributes: str) -> Op:
    """Parses an op from its name and the text of its attributes."""
    if name in FUNCTIONS and not attributes:
        return Pointwise(name)
    return OPS[name](**_keywords(attributes))


def parse_call(text: str) -> Call:
    """`normal(std=0.02)`."""
    name, _, arguments = text.partition("(")
    return Call(name, _keywords(arguments[:-1]))


def _keywords(text: str) -> dict[str, Any]:
    # Axes and types become calls that `_literal` knows; everything else is a Python literal.
    text = re.sub(r"<([^<>]*)>", lambda match: f"Angle({match[1]!r})", text)
    match ast.parse(f"call({text})", mode="eval").body:
        case ast.Call(args=[], keywords=keywords):
            return {str(keyword.arg): _literal(keyword.value) for keyword in keywords}
    raise ValueError(text)


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Call(args=[ast.Constant(value=str(text))]):
            return parse_type(text) if "[" in text else parse_axis(text)
        case ast.Tuple(elts=items):
            return tuple(map(_literal, items))
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -float("inf")
    return ast.literal_eval(node)


def matched(pattern: str | re.Pattern[str], text: str) -> re.Match[str]:
    """The match of the full text. Raises ValueError without one."""
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(text)
    return match


def _value(match: re.Match[str], type: Type) -> Value:
    """A value under its own name, without the number that distinguishes it from others of that name."""
    name, of = match["name"].partition("^")[0], match["of"]
    if of is None:
        tensor, cotangent = default_origin(name)
    else:
        cotangent = of.startswith("d(")
        tensor = (of[2:-1] if cotangent else of) or None
    return Value(name, type, parse_layout(match["layout"] or ""), tensor, cotangent, bool(match["host"]))


def _number(text: str | None) -> int | None:
    return int(text) if text else None


class GraphReader:
    """Reads lines and records the values that they define. The default scope of nodes is `root`."""

    def __init__(self, root: str, values: Iterable[Value] = ()) -> None:
        self.root = root
        self.values: dict[str, Value] = {f"%{value.name}": value for value in values}

    def named(self, text: str) -> tuple[Value, ...]:
        """The values of `%a, %b`."""
        return tuple(self.values[name] for name in text.split(", ") if name)

    def value(self, text: str) -> Value:
        """A new value: `%x: f32[batch=8] {batch/data}`."""
        match = matched(_VALUE, text)
        return self.defined(match["name"], _value(match, parse_type(match["type"])))

    def defined(self, name: str, value: Value) -> Value:
        """Binds a name to a value. Raises ValueError if it is bound already."""
        if f"%{name}" in self.values:
            raise ValueError(f"there are two values %{name}")
        self.values[f"%{name}"] = value
        return value

    def node(self, line: str) -> Node:
        """Parses a node; omitted types are inferred."""
        match = matched(_NODE, line)
        operands, semicolon, fields = match["arguments"].partition("; ")
        if not semicolon and not operands.startswith("%"):
            operands, fields = "", operands
        op = parse_op(match["op"], fields)
        inputs = self.named(operands)
        results = list(_RESULT.finditer(match["results"] or ""))
        if all(each["type"] for each in results):
            types = [parse_type(each["type"]) for each in results]
        else:
            types = list(op.infer(*(value.type for value in inputs)))
        outputs = tuple(
            self.made(op, each["name"], _value(each, type)) for each, type in zip(results, types, strict=True)
        )
        scope = match["scope"] if match["scope"] is not None else self.root
        return Node(op, inputs, outputs, scope, None, Phase(match["phase"] or "F"), _number(match["stage"]))

    def made(self, op: Op, name: str, value: Value) -> Value:
        """Defines a result of an operation."""
        return self.defined(name, value)

    def scope(self, text: str) -> Scope:
        """Parses the text after the word `scope`; the following methods do the same for their words."""
        match = matched(r"(\S+) (\S+)(?: iterations (\d+))?", text)
        return Scope(match[1], match[2], _number(match[3]))

    def input(self, text: str) -> Input:
        """Parses an input."""
        match = matched(rf"(?:(\w+) )?({VALUE})(?: limit (\S+))?(?: ignored (\S+))?(?: cut (\S+))?", text)
        value = self.value(match[2])
        limit = parse_axis(match[3]) if match[3] else None
        ignored = tuple(map(int, match[4].split(","))) if match[4] else ()
        return Input(match[1] or value.name.rsplit(".", 1)[-1], value, limit, match[5], ignored=ignored)

    def parameter(self, text: str) -> Parameter:
        """Parses a parameter."""
        fans, kept = r"fans (\d+), (\d+)", r"kept ([\d, ]+)"
        words = rf"(?: master ({TYPE}))?(?: ({CALL}))?(?: {fans})?( decays)?( buffer)?(?: {kept})?( frozen)?( state)?"
        words += r"(?: loss (\S+))?"
        parts = rf"(?: part (\d+) of (\S+) ({TYPE}) along (\S+) over (\S+))?"
        match = matched(rf"({VALUE}){words}{parts}", text)
        value = self.value(match[1])
        master = parse_type(match[2]) if match[2] else usual_master(value.type)
        initial = parse_call(match[3]) if match[3] else ZEROS
        known = (int(match[4]), int(match[5])) if match[4] else usual_fans(master)
        stages = tuple(map(int, match[8].split(", "))) if match[8] else ()
        decays, buffer, frozen, state = (bool(match[group]) for group in (6, 7, 9, 10))
        part = Part(match[13], parse_type(match[14]), match[15], match[16], int(match[12])) if match[12] else None
        return Parameter(value, master, initial, known, decays, None, buffer, stages, frozen, part, state, match[11])

    def master(self, text: str) -> Master:
        """Parses a master."""
        name, _, value = text.removesuffix(" after").partition(" ")
        return Master(name, self.value(value), text.endswith(" after"))

    def new_value(self, text: str) -> BufferWrite:
        """Parses the new value of a buffer."""
        name, _, value = text.removesuffix(" after").partition(" ")
        return BufferWrite(name, self.values[value], after=text.endswith(" after"))

    def accumulator(self, text: str) -> Accumulator:
        """Parses an accumulator."""
        pattern = rf"([^%]+) ({VALUE})(?: parameter (\S+))?(?: (ids|rows) (\d+))?( maximum)?(?: stage (\d+))?"
        name, value, parameter, kind, number, maximum, stage = matched(pattern, text).groups()
        term = SparseGradientPart(int(number), kind == "ids") if kind else None
        return Accumulator(name, self.value(value), parameter, bool(maximum), _number(stage), term)

    def gradient(self, text: str) -> Gradient:
        """Parses a contribution to a gradient."""
        match = matched(r"(\S+) (%.+?)(?: stage (\d+))?", text)
        return Gradient(match[1], self.values[match[2]], _number(match[3]))

    def metric(self, text: str) -> tuple[str, Value]:
        """Parses a metric."""
        name, _, value = text.partition(" ")
        return name, self.values[value]

    def guard(self, text: str) -> Guard:
        """Parses a guard."""
        name, _, axis = text.partition(" ")
        return Guard(name, parse_axis(axis), None)


def read_lines(text: str, words: Mapping[str, Callable[[str], object]], node: Callable[[str], object]) -> None:
    """Passes the rest of a line to the reader of its first word, and lines that start with none of `words` to `node`.

    Raises ValueError with the offending line.
    """
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition(" # ")[0].strip()
        if not content or content.startswith("#"):
            continue
        word, _, rest = content.partition(" ")
        try:
            if word in words:
                words[word](rest)
            else:
                node(content)
        except (AssertionError, IndexError, KeyError, SyntaxError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} cannot be read: {line}") from error


def parse_graph(text: str, more: Mapping[str, Callable[[str], object]] | None = None) -> Graph:
    """Parses a graph; lines that start with a word of `more` go to its reader. Raises ValueError with a bad line."""
    reader = GraphReader("")
    kinds: dict[str, Callable[[str], Any]] = {
        "scope": reader.scope,
        "input": reader.input,
        "parameter": reader.parameter,
        "accumulator": reader.accumulator,
        "master": reader.master,
        "update": reader.new_value,
        "output": reader.metric,
        "loss": lambda text: reader.values[text],
        "metric": reader.metric,
        "gradient": reader.gradient,
        "guard": reader.guard,
        "padded": parse_axis,
    }
    items: dict[str, list[Any]] = {kind: [] for kind in (*kinds, "node")}

    def named(text: str) -> None:
        reader.root = text

    def taken(kind: str, read: Callable[[str], Any]) -> Callable[[str], None]:
        return lambda text: items[kind].append(read(text))

    words = {kind: taken(kind, read) for kind, read in kinds.items()}
    read_lines(text, {"graph": named, **words, **(more or {})}, taken("node", reader.node))
    if len(items["loss"]) != 1:
        raise ValueError("a graph has one loss")
    return Graph(
        name=reader.root,
        inputs=tuple(items["input"]),
        parameters=tuple(items["parameter"]),
        nodes=tuple(items["node"]),
        loss=items["loss"][0],
        metrics=tuple(items["metric"]),
        gradients=tuple(items["gradient"]),
        accumulators=tuple(items["accumulator"]),
        scopes=tuple(items["scope"]),
        guards=tuple(items["guard"]),
        updates=tuple(items["update"]),
        masters=tuple(items["master"]),
        asked=tuple(items["output"]),
        own_sizes={axis.name: axis.size for axis in items["padded"]},
    )
