"""Partitioned graph → Python source: readable functions over torch, one line an operation, the `.par` line beside it.

Turns of a repeat that are alike share one function with their tensors as arguments, and so do stages: functions are
kept by their text. Emitted source contains only names that this module makes.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from partita.compiler.cut import Partitioned, StageGraph
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.op import Argument
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Constant
from partita.compiler.placement import turn_of
from partita.dsl.source import Span

HEADER = '''"""{name}: emitted by Partita. Functions are described in partita.compiler.program."""

import torch

from partita.runtime import kernels
'''

# Arguments of a stage's functions.
PROLOGUE, FUNCTION = "m, x, c", "p, f, a, c"

# Shorter runs of a turn stand where they are.
SEGMENT = 4


@frozen
class Slots:
    """The frame of a stage: the slot of every value that crosses from one function or stage to another."""

    of: dict[Value, int] = field(factory=dict)

    def slot(self, value: Value) -> int:
        """The value's slot; a new one if it has none."""
        return self.of.setdefault(value, len(self.of))


class Module:
    """Source of a whole program under way: the functions so far, shared ones by their text."""

    def __init__(self, name: str) -> None:
        self.parts = [HEADER.format(name=name)]
        self._shared: dict[tuple[str, str, str], str] = {}
        self._names: dict[str, int] = {}

    @property
    def source(self) -> str:
        """The module's text."""
        return "\n\n".join(part.strip("\n") + "\n" for part in self.parts)

    def add(self, name: str, arguments: str, body: Sequence[str], comment: str) -> str:
        """A function under this name, or the name of one with the same text."""
        text = "\n".join([f'    """{comment}"""', *(f"    {line}" for line in body)])
        key = ("", arguments, text)
        if key not in self._shared:
            self._shared[key] = name
            self.parts.append(f"def {name}({arguments}):\n{text}")
        return self._shared[key]

    def shared(self, stem: str, arguments: str, body: Sequence[str]) -> str:
        """The name of a function with this text; it is written once."""
        text = "\n".join(f"    {line}" for line in body)
        key = (stem, arguments, text)
        if key not in self._shared:
            count = self._names.get(stem, 0) + 1
            self._names[stem] = count
            name = stem if count == 1 else f"{stem}_{count}"
            self._shared[key] = name
            self.parts.append(f"def {name}({arguments}):\n{text}")
        return self._shared[key]


class Writer:
    """Lines of one function, with a local name for every value."""

    def __init__(self, arguments: str, known: Mapping[Value, str] | None = None) -> None:
        self.lines: list[str] = []
        self.texts: dict[Value, Argument] = {v: Argument(text, v.type) for v, text in (known or {}).items()}
        self._taken = set(arguments.split(", "))

    def name(self, value: Value, stem: str | None = None) -> str:
        """A new local name for a value, from its own."""
        text = stem = stem or local_stem(value.name)
        count = 1
        while text in self._taken:
            count += 1
            text = f"{stem}_{count}"
        self._taken.add(text)
        self.texts[value] = Argument(text, value.type)
        return text

    def argument(self, value: Value) -> Argument:
        """How a value is written."""
        return self.texts[value]

    def block(self, nodes: Sequence[Node], keep: set[Value], accumulators: Mapping[str, tuple[str, Value]]) -> None:
        """Write nodes in order. `keep` outlives them; `accumulators` gives the text of each target.

        A result that only one accumulation reads is added where it is made; locals end with their last use.
        """
        uses: dict[Value, int] = {}
        last: dict[Value, int] = {}
        for i, node in enumerate(nodes):
            for value in node.inputs:
                uses[value] = uses.get(value, 0) + 1
                last[value] = i
        made = {value: node for node in nodes for value in node.outputs}
        fused: dict[Node, Node] = {}
        for node in nodes:
            if isinstance(node.op, Accumulate) and not node.op.maximum:
                (value,) = node.inputs
                producer = made.get(value)
                if producer is not None and uses[value] == 1 and value not in keep:
                    fused[producer] = node
        written: set[Node] = set()
        local: set[Value] = set()
        for i, node in enumerate(nodes):
            if node in written or isinstance(node.op, (Receive, Send)):
                continue
            if isinstance(node.op, Constant):
                text = node.op.emit((), (node.output.type,))
                self.texts[node.output] = Argument(text, node.output.type, literal=True)
                continue
            arguments = [self.argument(value) for value in node.inputs]
            if isinstance(node.op, Accumulate):
                target = accumulators[node.op.target][0]
                self._line(node.op.statement(target, arguments[0]), node)
            elif node in fused and self._fused(node, fused[node], arguments, accumulators):
                written.add(fused[node])
            else:
                text = node.op.emit(arguments, [value.type for value in node.outputs])
                names = ", ".join(self.name(value) for value in node.outputs)
                local.update(node.outputs)
                self._line(f"{names} = {text}", node)
            ended = [
                v
                for v in dict.fromkeys((*node.inputs, *node.outputs))
                if v in local and v not in keep and last.get(v, i) <= i
            ]
            if ended and i + 1 < len(nodes):
                self.lines.append(f"del {', '.join(self.argument(v).text for v in ended)}")
            local.difference_update(ended)

    def _fused(
        self,
        node: Node,
        accumulation: Node,
        arguments: Sequence[Argument],
        accumulators: Mapping[str, tuple[str, Value]],
    ) -> bool:
        """Write a node's result straight into its accumulator, where the op knows how."""
        assert isinstance(accumulation.op, Accumulate)
        text, _ = accumulators[accumulation.op.target]
        target = Argument(text, accumulation.op.type)
        statement = node.op.emit_added(target, arguments, node.output.type)
        if statement is None:
            return False
        self._line(statement, node)
        return True

    def _line(self, text: str, node: Node) -> None:
        self.lines.append(text + (f"  # {place_text(node.span)}" if node.span else ""))


def place_text(span: Span) -> str:
    """`gpt.par:31`, with nothing of the file's name that could end a comment."""
    name = re.sub(r"[^\w./ -]", "_", span.source.name)
    return f"{name[-80:]}:{span.line}"


def local_stem(name: str) -> str:
    """A Python name from a value's: `d(gpt.layer.3.mlp.h)` is `d_h`."""
    prefix = ""
    while (match := re.fullmatch(r"(\w+)\((.*)\)(.*)", name)) is not None:
        prefix += f"{match[1]}_"
        name = match[2] + match[3]
    parts = [part for part in re.split(r"[.@]", name.split("~")[0]) if part and not part.isdigit()]
    stem = parts[-1] if parts else "value"
    if stem in ("again", "portion", "rate", "denominator", "keep", "total", "whole") and len(parts) > 1:
        stem = f"{parts[-2]}_{stem}"
    stem = prefix + re.sub(r"\W", "_", stem)
    # A trailing underscore keeps names of the file apart from Python's, and from those of emitted functions.
    return f"{stem}_" if stem in RESERVED or FUNCTION_NAME.fullmatch(stem) else stem


RESERVED = frozenset((*keyword.kwlist, "torch", "kernels", "float"))
FUNCTION_NAME = re.compile(r".*_(forward|backward|weight|prologue|finish|update)(_\d+)?")


class StageEmitter:
    """Emits the functions of one stage, and finds its frame on the way."""

    def __init__(
        self,
        module: Module,
        partitioned: Partitioned,
        stage: StageGraph,
        masters: Mapping[str, str],
        kinds: Iterable[str],
    ) -> None:
        self.module = module
        self.stage = stage
        self.partitioned = partitioned
        self.slots = Slots()
        self.repeats = {s.path: s.name for s in partitioned.graph.scopes if s.repeat}
        self.masters = masters
        self.functions: dict[str, str] = {}
        self.prologue = [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
        made = {value: node.phase for node in stage.nodes for value in node.outputs}
        for each in stage.inputs:
            made[each.value] = Phase.PROLOGUE
        self.made = made
        self.groups = {
            kind: [node for node in stage.nodes if node.phase in phases]
            for kind, phases in (
                ("F", (Phase.FORWARD,)),
                ("B", (Phase.BACKWARD,)),
                ("W", (Phase.WEIGHT,)),
                ("BW", (Phase.BACKWARD, Phase.WEIGHT)),
            )
        }
        self.kinds = set(kinds)
        self.constants = self._constants()

    def _constants(self) -> dict[Value, str]:
        """Values that hold for the whole step, with their place in `p`: parameters, then the prologue's results."""
        read = {v for node in self.stage.nodes if node.phase is not Phase.PROLOGUE for v in node.inputs}
        values = [parameter.value for parameter in self.stage.parameters]
        values += [v for node in self.prologue for v in node.outputs if v in read and not _literal(node)]
        values += [each.value for each in self.whole_inputs() if each.value in read and each.batch is None]
        return {value: f"p[{i}]" for i, value in enumerate(values)}

    def whole_inputs(self) -> list:  # type: ignore[type-arg]
        """Inputs that the prologue gets, over the whole batch."""
        return [each for each in self.stage.inputs if each.batch is None]

    def emit(self) -> None:
        """Write all functions of the stage."""
        self._emit_prologue()
        backward = [*self.groups["BW"]]
        crossing = _read(self.groups["BW"]) & _made(self.groups["F"])
        inputs = {each.value for each in self.stage.inputs if each.batch is not None}
        for each in self.stage.inputs:
            if each.batch is not None:
                self.slots.slot(each.value)
        between = _read(self.groups["W"]) & _made(self.groups["B"])
        names = {"F": "forward", "B": "backward", "W": "weight", "BW": "whole_backward"}
        keeps = {"F": crossing, "B": between, "W": set[Value](), "BW": set[Value]()}
        # What a function reads last is taken out of the frame, so that it ends with its last use.
        later = {
            "F": _read(backward) | inputs,
            "B": _read(self.groups["W"]),
            "W": set[Value](),
            "BW": set[Value](),
        }
        for kind, nodes in self.groups.items():
            if nodes and kind in self.kinds:
                self._emit_function(kind, names[kind], nodes, keeps[kind], later[kind])

    def _emit_prologue(self) -> None:
        writer = Writer(PROLOGUE)
        for i, parameter in enumerate(self.stage.parameters):
            writer.texts[parameter.value] = Argument(f"m[{i}]", parameter.value.type)
        for i, each in enumerate(self.whole_inputs()):
            writer.texts[each.value] = Argument(f"x[{i}]", each.value.type)
        writer.block(self.prologue, set(self.constants), {})
        results = []
        for value in self.constants:
            text = writer.argument(value).text
            if text.startswith("m["):
                text += self.masters.get(value.name, "")
            results.append(text)
        body = [*writer.lines, f"return ({', '.join(results)}{',' if results else ''})"]
        name = f"stage{self.stage.index}_prologue"
        self.functions["P"] = self.module.add(name, PROLOGUE, body, "Once a step: what the stage computes with.")

    def _emit_function(self, kind: str, name: str, nodes: list[Node], keep: set[Value], later: set[Value]) -> None:
        made = _made(nodes)
        literal = {v for node in self.stage.nodes if _literal(node) for v in node.outputs}
        writer = Writer(FUNCTION, self.constants)
        for node in self.stage.nodes:
            if _literal(node):
                text = node.op.emit((), (node.output.type,))
                writer.texts[node.output] = Argument(text, node.output.type, literal=True)
        body: list[str] = []
        passing: set[Value] = set()
        sent = {node.inputs[0] for node in nodes if isinstance(node.op, Send)}
        received = {node.output for node in nodes if isinstance(node.op, Receive)}
        for value in _ordered_reads(nodes):
            outside = value not in made or value in received
            if outside and value not in self.constants and value not in literal:
                slot = self.slots.slot(value)
                text = writer.name(value)
                body.append(f"{text} = f[{slot}]" + ("" if value in later else f"; f[{slot}] = None"))
                if value not in later:
                    passing.add(value)
        stored = [v for v in dict.fromkeys([*_ordered(made, nodes)]) if v in keep | sent and v not in literal]
        wanted = (keep | sent) - literal
        accumulators = {each.name: (f"a[{i}]", each.value) for i, each in enumerate(self.stage.accumulators)}
        self._segments(writer, nodes, wanted, passing, accumulators)
        body += writer.lines
        for value in stored:
            if value in received:
                continue
            text = writer.argument(value).text
            suffix = ".contiguous()" if value in sent else ""
            body.append(f"f[{self.slots.slot(value)}] = {text}{suffix}")
        full = f"stage{self.stage.index}_{name}"
        self.functions[kind] = self.module.add(full, FUNCTION, body or ["pass"], f"{kind} of a microbatch.")

    def _segments(
        self,
        writer: Writer,
        nodes: list[Node],
        wanted: set[Value],
        passing: set[Value],
        accumulators: Mapping[str, tuple[str, Value]],
    ) -> None:
        """Write runs of nodes of one turn as calls of shared functions, the rest in place."""
        runs: list[tuple[str | None, list[Node]]] = []
        for node in nodes:
            if isinstance(node.op, (Send, Receive)):
                continue
            turn = turn_of(node.scope, self.repeats)
            if runs and runs[-1][0] == turn:
                runs[-1][1].append(node)
            else:
                runs.append((turn, [node]))
        # What is read after each run must come out of it.
        after: list[set[Value]] = []
        needed = set(wanted)
        for _, run in reversed(runs):
            after.append(set(needed))
            needed |= _read(run)
        after.reverse()
        # What stood in the frame for the last time, or came out of a run, ends with its last use.
        for (turn, run), keep in zip(runs, after, strict=True):
            made = _made(run)
            if turn is None or len(run) < SEGMENT:
                writer.block(run, keep, accumulators)
            else:
                self._call(writer, turn, run, keep, accumulators)
            ended = [v for v in _ordered_reads(run) if v in passing and v not in keep]
            if ended:
                writer.lines.append(f"del {', '.join(writer.argument(v).text for v in ended)}")
            passing.difference_update(ended)
            passing |= made & keep - wanted

    def _call(
        self,
        writer: Writer,
        turn: str,
        run: list[Node],
        keep: set[Value],
        accumulators: Mapping[str, tuple[str, Value]],
    ) -> None:
        inner = Writer("c")
        made = _made(run)
        given: list[str] = []
        names: list[str] = []
        for value in _ordered_reads(run):
            if value in made:
                continue
            outer = writer.argument(value)
            if outer.literal:
                inner.texts[value] = outer
                continue
            # What comes from outside has the same name in every turn, wherever it comes from.
            stem = None
            if value not in self.constants and not _within(value, turn):
                stem = "d" if value.name.startswith("d(") else "x"
            names.append(inner.name(value, stem))
            given.append(outer.text)
        targets: dict[str, tuple[str, Value]] = {}
        for node in run:
            if isinstance(node.op, Accumulate) and node.op.target not in targets:
                text, value = accumulators[node.op.target]
                names.append(inner.name(value))
                given.append(text)
                targets[node.op.target] = (inner.argument(value).text, value)
        results = [v for v in _ordered(made, run) if v in keep and not _is_literal(v, run)]
        inner.block(run, set(results), targets)
        body = list(inner.lines)
        texts = [inner.argument(v).text for v in results]
        body.append(f"return {', '.join(texts)}" if texts else "return")
        stem = turn.split(".")[-2]
        kind = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.WEIGHT: "weight"}
        phases = {node.phase for node in run}
        suffix = "backward" if len(phases) > 1 else kind[run[0].phase]
        stem = re.sub(r"\W", "_", stem)
        function = self.module.shared(f"{stem}_{suffix}", ", ".join(["c", *names]), body)
        for node in run:
            if _literal(node):
                writer.texts[node.output] = inner.argument(node.output)
        call = f"{function}({', '.join(['c', *given])})"
        if results:
            left = ", ".join(writer.name(v) for v in results)
            call = f"{left} = {call}"
        path = ".".join(part for part in turn.split(".") if not part.isdigit())
        writer.lines.append(f"{call}  # a turn of {path}")


def _within(value: Value, scope: str) -> bool:
    """Whether a value, or the one whose cotangent it is, belongs to a scope."""
    return value.name.removeprefix("d(").startswith(scope + ".")


def _literal(node: Node) -> bool:
    return isinstance(node.op, Constant)


def _is_literal(value: Value, nodes: Iterable[Node]) -> bool:
    return any(_literal(node) and value in node.outputs for node in nodes)


def _made(nodes: Iterable[Node]) -> set[Value]:
    return {value for node in nodes for value in node.outputs}


def _ordered(values: set[Value], nodes: Iterable[Node]) -> list[Value]:
    return [value for node in nodes for value in node.outputs if value in values]


def _read(nodes: Iterable[Node]) -> set[Value]:
    return {value for node in nodes for value in node.inputs}


def _ordered_reads(nodes: Iterable[Node]) -> list[Value]:
    return list(dict.fromkeys(value for node in nodes for value in node.inputs))
