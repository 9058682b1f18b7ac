"""Partitioned graph → Python source: readable functions over torch, one line an operation, the `.par` line beside it.

Turns of a repeat that are alike share one function with their tensors as arguments, and so do stages: functions are
kept by their text. Emitted source contains only names that this module makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from attrs import define, evolve, field

from partita.compiler.emission.functions import StageFunctions, is_literal, made_by, read_by
from partita.compiler.emission.writer import Module, Writer
from partita.compiler.graph import Node, Phase, Value, without_turns
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.op import Argument
from partita.compiler.ops.optimizer import Accumulate

# Arguments of a stage's functions.
PROLOGUE, FUNCTION, REDUCE = "m, x, c", "p, f, a, c", "a, c"

# Shorter runs of a turn stand where they are.
SEGMENT = 4


@define
class Slots:
    """The frame of a stage: the slot of every value that crosses from one function or stage to another.

    Slots are given in the order in which they are asked for, which is that of emission.
    """

    of: dict[Value, int] = field(factory=dict)

    def slot(self, value: Value) -> int:
        """The value's slot; a new one if it has none."""
        return self.of.setdefault(value, len(self.of))


class StageEmitter:
    """Emits the functions of one stage, and finds its frame on the way."""

    def __init__(
        self,
        module: Module,
        of: StageFunctions,
        masters: Mapping[str, str],
    ) -> None:
        self.module = module
        self.of = of
        self.stage = of.stage
        self.slots = Slots()
        self.masters = masters
        self.functions: dict[str, str] = {}
        self.constants = self._constants()
        self.views: dict[tuple[str, str], str] = {}  # of constants, with their place in `p`

    def _constants(self) -> dict[Value, str]:
        """Values that hold for the whole step, with their place in `p`: parameters, then the prologue's results."""
        read = {v for node in self.stage.nodes if node.phase is not Phase.PROLOGUE for v in node.inputs}
        values = [parameter.value for parameter in self.stage.parameters if parameter.value in read]
        values += [v for node in self.of.prologue for v in node.outputs if v in read and not is_literal(node)]
        values += [each.value for each in self.of.whole_inputs if each.value in read]
        return {value: f"p[{i}]" for i, value in enumerate(values)}

    def emit(self) -> None:
        """Write all functions of the stage."""
        crossing = read_by(self.of.groups["BW"]) & made_by(self.of.groups["F"])
        inputs = {each.value for each in self.stage.inputs if each.batch is not None}
        for each in self.stage.inputs:
            if each.batch is not None:
                self.slots.slot(each.value)
        between = read_by(self.of.groups["W"]) & made_by(self.of.groups["B"])
        names = {"F": "forward", "B": "backward", "W": "weight", "BW": "whole_backward"}
        keeps = {"F": crossing, "B": between, "W": set[Value](), "BW": set[Value]()}
        # What a function reads last is taken out of the frame, so that it ends with its last use.
        later = {
            "F": read_by(self.of.groups["BW"]) | inputs,
            "B": read_by(self.of.groups["W"]),
            "W": set[Value](),
            "BW": set[Value](),
        }
        for kind, nodes in self.of.groups.items():
            if kind in self.of.kinds:
                self._emit_function(kind, names[kind], nodes, keeps[kind], later[kind])
        self._emit_prologue()  # at last: now it is known which views they read

    def _emit_prologue(self) -> None:
        writer = Writer(PROLOGUE, module=self.module, stem=f"stage{self.stage.index}_prologue")
        for i, parameter in enumerate(self.stage.parameters):
            text = f"m[{i}]{self.masters.get(parameter.name, '')}"
            writer.texts[parameter.value] = Argument(text, parameter.value.type)
        for i, each in enumerate(self.of.whole_inputs):
            writer.texts[each.value] = Argument(f"x[{i}]", each.value.type)
        writer.block(self.of.prologue, set(self.constants), {})
        results = [writer.argument(value).text for value in self.constants]
        of = dict(zip(self.constants.values(), results, strict=True))
        results += [of[text] + how for text, how in self.views]
        body = [*writer.body(), f"return ({', '.join(results)}{',' if results else ''})"]
        name = f"stage{self.stage.index}_prologue"
        self.functions["P"] = self.module.add(name, PROLOGUE, body, "Once a step: what the stage computes with.")

    def emit_reductions(self, nodes: Iterable[Node], totals: Sequence[Value]) -> None:
        """Write what reduces the stage's accumulators to its totals."""
        writer = Writer(REDUCE, module=self.module, stem=f"stage{self.stage.index}_reduce")
        for i, each in enumerate(self.stage.accumulators):
            writer.texts[each.value] = Argument(f"a[{i}]", each.value.type)
        writer.block(list(nodes), set(totals), {})
        texts = [writer.argument(value).text for value in totals]
        body = [*writer.body(), f"return ({', '.join(texts)},)"]
        name = f"stage{self.stage.index}_reduce"
        self.functions["R"] = self.module.add(name, REDUCE, body, "Once a step: accumulators as the update wants them.")

    def _emit_function(self, kind: str, name: str, nodes: list[Node], keep: set[Value], later: set[Value]) -> None:
        made = made_by(nodes)
        writer = Writer(FUNCTION, self._known(), self.module, f"stage{self.stage.index}_{name}")
        for node in self.stage.nodes:
            if is_literal(node):
                text = node.op.emit((), (node.output.type,))
                writer.texts[node.output] = Argument(text, node.output.type, literal=True)
        body: list[str] = []
        passing: set[Value] = set()
        sent = {node.inputs[0] for node in nodes if isinstance(node.op, Send)}
        received = {node.output for node in nodes if isinstance(node.op, Receive)}
        for value in _ordered_reads(nodes):
            outside = value not in made or value in received
            if outside and value not in self.constants and value not in self.of.literal:
                slot = self.slots.slot(value)
                text = writer.name(value)
                body.append(f"{text} = f[{slot}]" + ("" if value in later else f"; f[{slot}] = None"))
                if value not in later:
                    passing.add(value)
        stored = [v for v in dict.fromkeys([*_ordered(made, nodes)]) if v in keep | sent and v not in self.of.literal]
        wanted = (keep | sent) - self.of.literal
        accumulators = {each.name: (f"a[{i}]", each.value) for i, each in enumerate(self.stage.accumulators)}
        self._segments(writer, nodes, wanted, passing, accumulators)
        body += writer.body()
        for value in stored:
            if value in received:
                continue
            text = writer.argument(value).text
            suffix = ".contiguous()" if value in sent else ""
            body.append(f"f[{self.slots.slot(value)}] = {text}{suffix}")
        full = f"stage{self.stage.index}_{name}"
        self.functions[kind] = self.module.add(full, FUNCTION, body or ["pass"], f"{kind} of a microbatch.")

    def _known(self) -> dict[Value, Argument]:
        """The constants as arguments; to what torch compiles views cost nothing."""
        if self.module.compiled:
            return {value: Argument(text, value.type) for value, text in self.constants.items()}
        return {v: Argument(text, v.type, views=partial(self._view, text)) for v, text in self.constants.items()}

    def _view(self, text: str, how: str) -> str:
        """The text of a view of a constant, which the prologue makes."""
        return self.views.setdefault((text, how), f"p[{len(self.constants) + len(self.views)}]")

    def _segments(
        self,
        writer: Writer,
        nodes: list[Node],
        wanted: set[Value],
        passing: set[Value],
        accumulators: Mapping[str, tuple[str, Value]],
    ) -> None:
        """Write runs of nodes of one turn as calls of shared functions, the rest in place."""
        # What stood in the frame for the last time, or came out of a run, ends with its last use.
        for turn, run, keep in self.of.runs(nodes, wanted):
            made = made_by(run)
            reads = [v for v in _ordered_reads(run) if v in passing and v not in keep]
            if turn is None or len(run) < SEGMENT:
                writer.block(run, keep, accumulators, more=True)
            else:
                self._call(writer, turn, run, keep, accumulators)
            ended = [v for v in reads if not writer.argument(v).literal]
            if ended:
                writer.delete(ended)
            passing.difference_update(reads)
            passing |= made & keep - wanted

    def _call(
        self,
        writer: Writer,
        turn: str,
        run: list[Node],
        keep: set[Value],
        accumulators: Mapping[str, tuple[str, Value]],
    ) -> None:
        kind = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.WEIGHT: "weight"}
        phases = {node.phase for node in run}
        suffix = "backward" if len(phases) > 1 else kind[run[0].phase]
        stem = re.sub(r"\W", "_", turn.split(".")[-2]) + f"_{suffix}"
        inner = Writer("c", module=self.module, stem=stem)
        made = made_by(run)
        given: list[str] = []
        names: list[str] = []
        views: dict[tuple[str, str], str] = {}

        def view(outer: Argument, name: str, how: str) -> str:
            """A view that the caller has, as one more argument."""
            if (name, how) not in views:
                views[name, how] = inner.free_name(f"{name}_matrix")
                names.append(views[name, how])
                given.append(outer.viewed(how))
            return views[name, how]

        for value in _ordered_reads(run):
            if value in made:
                continue
            outer = writer.argument(value)
            if outer.literal:
                inner.texts[value] = outer
                continue
            # What comes from outside has the same name in every turn, wherever it comes from.
            outside = None
            if value not in self.constants and not _within(value, turn):
                outside = "d" if value.name.startswith("d(") else "x"
            names.append(inner.name(value, outside))
            given.append(outer.text)
            if value in self.constants and outer.views is not None:
                inner.texts[value] = evolve(inner.texts[value], views=partial(view, outer, names[-1]))
        targets: dict[str, tuple[str, Value]] = {}
        for node in run:
            if isinstance(node.op, Accumulate) and node.op.target not in targets:
                text, value = accumulators[node.op.target]
                names.append(inner.name(value))
                given.append(text)
                targets[node.op.target] = (inner.argument(value).text, value)
        results = [v for v in _ordered(made, run) if v in keep and not _is_literal(v, run)]
        inner.block(run, set(results), targets)
        body = inner.body()
        texts = [inner.argument(v).text for v in results]
        body.append(f"return {', '.join(texts)}" if texts else "return")
        # Of some constants only views are read.
        text = "\n".join(body)
        unread = {name for name, _ in views if not re.search(rf"\b{name}\b", text)}
        given = [each for name, each in zip(names, given, strict=True) if name not in unread]
        names = [name for name in names if name not in unread]
        function = self.module.shared(stem, ", ".join(["c", *names]), body)
        for node in run:
            if is_literal(node):
                writer.texts[node.output] = inner.argument(node.output)
        call = f"{function}({', '.join(['c', *given])})"
        if inner.waits:
            call = f"yield from {call}"
            writer.waits = True
        if results:
            left = ", ".join(writer.name(v) for v in results)
            call = f"{left} = {call}"
        writer.line(f"{call}  # a turn of {without_turns(turn)}")


def _within(value: Value, scope: str) -> bool:
    """Whether a value, or the one whose cotangent it is, belongs to a scope."""
    return value.name.removeprefix("d(").startswith(scope + ".")


def _is_literal(value: Value, nodes: Iterable[Node]) -> bool:
    return any(is_literal(node) and value in node.outputs for node in nodes)


def _ordered(values: set[Value], nodes: Iterable[Node]) -> list[Value]:
    return [value for node in nodes for value in node.outputs if value in values]


def _ordered_reads(nodes: Iterable[Node]) -> list[Value]:
    return list(dict.fromkeys(value for node in nodes for value in node.inputs))
