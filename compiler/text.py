"""The textual form of a graph, for people and for tests: it parses back to an equal graph.

    graph tiny
    input tokens: i64[batch=32, seq=128] limit 256
    parameter tiny.wte: f32[vocab=256, embed=128] master f32
    %tiny.layer.0.mlp.h: f32[…] = normalize(%tiny.x; over=('embed',), eps=1e-05) F0 @tiny.layer.0.mlp tiny.par:20
    loss %tiny.cross_entropy
    gradient tiny.wte %d(tiny.wte) 0

Attributes stand behind the semicolon as Python literals, axes as `name=size` in angle brackets. Source places are
printed for people and not read back.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from partita.compiler.graph import Accumulator, Gradient, Graph, Guard, Input, Node, Parameter, Phase, Scope, Value
from partita.compiler.ops import OPS
from partita.compiler.ops.op import Op, attributes
from partita.dsl.spec import Call
from partita.dsl.types import Axis, Type


def attribute_text(value: Any) -> str:
    """An attribute of an op."""
    if isinstance(value, Axis):
        return f"<{value}>"
    if isinstance(value, Type):
        return f"<{value}>"
    if isinstance(value, tuple):
        inner = ", ".join(attribute_text(item) for item in value)
        return f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def op_text(op: Op, operands: str) -> str:
    """`dot(%a, %b; over=('embed',))`."""
    fields = ", ".join(f"{a.name}={attribute_text(getattr(op, a.name))}" for a in attributes(type(op)))
    return f"{op.name}({operands}{'; ' if fields else ''}{fields})"


def node_text(node: Node, places: bool = True) -> str:
    """One line, with the source place behind it where `places`."""
    results = ", ".join(f"%{value.name}: {value.type}" for value in node.outputs)
    operands = ", ".join(f"%{value.name}" for value in node.inputs)
    stage = "" if node.stage is None else str(node.stage)
    place = f" {node.span.source.name}:{node.span.line}" if node.span and places else ""
    left = f"{results} = " if results else ""
    return f"{left}{op_text(node.op, operands)} {node.phase}{stage} @{node.scope}{place}"


def graph_text(graph: Graph, places: bool = True) -> str:
    """The whole graph."""
    lines = [f"graph {graph.name}"]
    lines += [f"scope {s.path} {s.name} turns {s.turns}" for s in graph.scopes]
    for each in graph.inputs:
        lines.append(f"input {each.name} %{each.value.name}: {each.value.type} limit {each.limit} batch {each.batch}")
    for parameter in graph.parameters:
        arguments = tuple(sorted(parameter.initial.arguments.items()))
        lines.append(
            f"parameter %{parameter.value.name}: {parameter.value.type} master {parameter.master.dtype} "
            f"initial {parameter.initial.name}{arguments!r} fans {parameter.fans!r} decays {parameter.decays}"
        )
    for accumulator in graph.accumulators:
        lines.append(
            f"accumulator {accumulator.name!r} %{accumulator.value.name}: {accumulator.value.type} "
            f"parameter {accumulator.parameter} maximum {accumulator.maximum}"
        )
    lines += [node_text(node, places) for node in graph.nodes]
    lines.append(f"loss %{graph.loss.name}")
    lines += [f"metric {name} %{value.name}" for name, value in graph.metrics]
    lines += [f"gradient {each.parameter} %{each.value.name} {each.stage}" for each in graph.gradients]
    lines += [f"guard {each.name} <{each.axis}>" for each in graph.guards]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- reading it back

_TYPE = re.compile(r"(\w+)\[([^\]]*)\]")
_RESULT = re.compile(r"%(?P<name>[^:]+): (?P<type>\w+\[[^\]]*\])(?:, )?")
_NODE = re.compile(
    r"(?:(?P<results>%.*?\]) = )?(?P<op>\w+)\((?P<operands>[^;]*?)(?:; (?P<attributes>.*))?\) "
    r"(?P<phase>[PFBWEU])(?P<stage>\d*) @(?P<scope>[\w.]*)(?: [^@]*)?"
)


def parse_type(text: str) -> Type:
    """`f32[batch=32]`."""
    match = _TYPE.fullmatch(text)
    assert match is not None, text
    return Type(match[1], tuple(_axis(part) for part in match[2].split(", ") if part))


def _axis(text: str) -> Axis:
    name, size = text.split("=")
    return Axis(name, int(size))


def parse_op(name: str, attributes: str) -> Op:
    """An op from its name and the text of its attributes."""
    cls = OPS[name]
    # Axes and types become calls that `_literal` knows; everything else is a Python literal.
    text = re.sub(r"<([^<>]*)>", lambda match: f"Angle({match[1]!r})", attributes)
    call = ast.parse(f"op({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return cls(**{str(keyword.arg): _literal(keyword.value) for keyword in call.keywords})


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        (argument,) = node.args
        assert isinstance(argument, ast.Constant)
        assert isinstance(argument.value, str)
        return parse_type(argument.value) if "[" in argument.value else _axis(argument.value)
    if isinstance(node, ast.Tuple):
        return tuple(_literal(item) for item in node.elts)
    if isinstance(node, ast.Name):
        return {"inf": float("inf"), "nan": float("nan")}[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Name):
        return -float("inf")
    return ast.literal_eval(node)


def parse_graph(text: str) -> Graph:
    """The graph of a textual form. ValueError with the line where it is not one."""
    values: dict[str, Value] = {}
    inputs: list[Input] = []
    parameters: list[Parameter] = []
    accumulators: list[Accumulator] = []
    scopes: list[Scope] = []
    nodes: list[Node] = []
    loss: Value | None = None
    metrics: list[tuple[str, Value]] = []
    gradients: list[Gradient] = []
    guards: list[Guard] = []
    graph_name = ""
    for number, line in enumerate(text.splitlines(), 1):
        word, _, rest = line.partition(" ")
        try:
            if word == "graph":
                graph_name = rest
            elif word == "scope":
                path, name, _, turns = rest.split(" ")
                scopes.append(Scope(path, name, None if turns == "None" else int(turns)))
            elif word == "input":
                match = _match(r"(\w+) %(\S+): (\w+\[[^\]]*\]) limit (\S+) batch (\S+)", rest)
                value = values[match[2]] = Value(match[2], parse_type(match[3]))
                limit = None if match[4] == "None" else _axis(match[4])
                inputs.append(Input(match[1], value, limit, None if match[5] == "None" else match[5]))
            elif word == "parameter":
                match = _match(
                    r"%(\S+): (\w+\[[^\]]*\]) master (\w+) initial (\w+?)(\(.*\)) fans (\(.*?\)) decays (\w+)",
                    rest,
                )
                value = values[match[1]] = Value(match[1], parse_type(match[2]))
                initial = Call(match[4], dict(ast.literal_eval(match[5])))
                fans = ast.literal_eval(match[6])
                master = value.type.with_dtype(match[3])
                parameters.append(Parameter(value, master, initial, fans, match[7] == "True"))
            elif word == "accumulator":
                match = _match(r"('.*?') %(.+): (\w+\[[^\]]*\]) parameter (\S+) maximum (\w+)", rest)
                value = values[match[2]] = Value(match[2], parse_type(match[3]))
                parameter = None if match[4] == "None" else match[4]
                name = ast.literal_eval(match[1])
                accumulators.append(Accumulator(name, value, parameter, match[5] == "True"))
            elif word == "loss":
                loss = values[rest[1:]]
            elif word == "metric":
                name, _, value_name = rest.partition(" ")
                metrics.append((name, values[value_name[1:]]))
            elif word == "gradient":
                name, value_name, stage = rest.rsplit(" ", 2)
                gradients.append(Gradient(name, values[value_name[1:]], None if stage == "None" else int(stage)))
            elif word == "guard":
                name, _, axis = rest.partition(" ")
                guards.append(Guard(name, _axis(axis[1:-1]), None))
            elif line:
                nodes.append(_node(line, values))
        except (AssertionError, KeyError, SyntaxError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not of a graph: {line}") from error
    if loss is None:
        raise ValueError("a graph has a loss")
    return Graph(
        graph_name,
        tuple(inputs),
        tuple(parameters),
        tuple(nodes),
        loss,
        tuple(metrics),
        tuple(gradients),
        tuple(accumulators),
        tuple(scopes),
        tuple(guards),
    )


def _match(pattern: str, text: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text)
    assert match is not None
    return match


def _node(line: str, values: dict[str, Value]) -> Node:
    match = _NODE.fullmatch(line)
    assert match is not None
    op = parse_op(match["op"], match["attributes"] or "")
    operands = tuple(values[name.strip()[1:]] for name in match["operands"].split(", ") if name.strip())
    outputs = []
    for result in _RESULT.finditer(match["results"] or ""):
        value = Value(result["name"], parse_type(result["type"]))
        values[value.name] = value
        outputs.append(value)
    stage = int(match["stage"]) if match["stage"] else None
    return Node(op, operands, tuple(outputs), match["scope"], None, Phase(match["phase"]), stage)
