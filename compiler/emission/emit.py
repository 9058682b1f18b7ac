"""Partitioned graph → Python source: readable functions over torch, one line an operation, the `.par` line beside it.

Turns of a repeat that are alike share one function with their tensors as arguments, and so do stages: functions are
kept by their text. Emitted source contains only names that this module makes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from attrs import define, field

from partita.compiler.emission.functions import StageFunctions, is_literal, made_by, read_by, receives, sends
from partita.compiler.emission.names import View, identifier
from partita.compiler.emission.statements import Call, End, Keep, Load, Return
from partita.compiler.emission.sums import targets
from partita.compiler.emission.writer import Module, Writer
from partita.compiler.graph import Node, Phase, Value, within, without_turns
from partita.compiler.ops.op import Argument

# Arguments of a stage's functions.
PROLOGUE, FUNCTION, REDUCE = ("m", "x", "c"), ("p", "f", "a", "c"), ("a", "c")

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
        self.views: dict[View, str] = {}  # of constants, with their place in `p`

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
        name = f"stage{self.stage.index}_prologue"
        writer = Writer(PROLOGUE, module=self.module, stem=name)
        for i, parameter in enumerate(self.stage.parameters):
            text = f"m[{i}]{self.masters.get(parameter.name, '')}"
            writer.names.texts[parameter.value] = Argument(text, parameter.value.type)
        for i, each in enumerate(self.of.whole_inputs):
            writer.names.texts[each.value] = Argument(f"x[{i}]", each.value.type)
        writer.block(self.of.prologue, self.constants)
        writer.add(Return((*self.constants, *self.views), always=True))
        comment = "Once a step: what the stage computes with."
        self.functions["P"] = self.module.add(name, PROLOGUE, writer.body(), comment)

    def emit_reductions(self, nodes: Iterable[Node], totals: Sequence[Value]) -> None:
        """Write what reduces the stage's accumulators to its totals."""
        name = f"stage{self.stage.index}_reduce"
        writer = Writer(REDUCE, self._accumulators(), self.module, name)
        writer.block(list(nodes), set(totals))
        writer.add(Return(tuple(totals), always=True))
        comment = "Once a step: accumulators as the update wants them."
        self.functions["R"] = self.module.add(name, REDUCE, writer.body(), comment)

    def _accumulators(self) -> dict[Value, Argument]:
        """The accumulators of the stage as arguments."""
        return {each.value: Argument(f"a[{i}]", each.value.type) for i, each in enumerate(self.stage.accumulators)}

    def _emit_function(self, kind: str, name: str, nodes: list[Node], keep: set[Value], later: set[Value]) -> None:
        made = made_by(nodes)
        full = f"stage{self.stage.index}_{name}"
        known = {value: Argument(text, value.type) for value, text in self.constants.items()}
        # To what torch compiles views cost nothing.
        writer = Writer(FUNCTION, known, self.module, full, lend=None if self.module.compiled else self._view)
        writer.names.texts.update(self._accumulators())
        for node in self.stage.nodes:
            if is_literal(node):
                writer.literal(node)
        passing: set[Value] = set()
        sent = {node.inputs[0] for node, _ in sends(nodes)}
        received = {node.output for node, _ in receives(nodes)}
        for value in _ordered_reads(nodes):
            outside = value not in made or value in received
            if outside and value not in self.constants and value not in self.of.literal:
                writer.names.name(value)
                writer.add(Load(value, self.slots.slot(value), value not in later))
                if value not in later:
                    passing.add(value)
        wanted = (keep | sent) - self.of.literal
        stored = [value for value in _ordered(made, nodes) if value in wanted and value not in received]
        self._segments(writer, nodes, wanted, passing)
        for value in stored:
            writer.add(Keep(value, self.slots.slot(value), value in sent))
        self.functions[kind] = self.module.add(full, FUNCTION, writer.body() or ["pass"], f"{kind} of a microbatch.")

    def _view(self, view: View) -> str:
        """The place in `p` of a view of a constant, which the prologue makes."""
        return self.views.setdefault(view, f"p[{len(self.constants) + len(self.views)}]")

    def _segments(self, writer: Writer, nodes: list[Node], wanted: set[Value], passing: set[Value]) -> None:
        """Write runs of nodes of one turn as calls of shared functions, the rest in place."""
        accumulators = {each.name: each.value for each in self.stage.accumulators}
        # What stood in the frame for the last time, or came out of a run, ends with its last use.
        for turn, run, keep in self.of.runs(nodes, wanted):
            made = made_by(run)
            reads = [v for v in _ordered_reads(run) if v in passing and v not in keep]
            if turn is None or len(run) < SEGMENT:
                writer.block(run, keep, accumulators, more=True)
            else:
                self._call(writer, turn, run, keep, accumulators)
            ended = [v for v in reads if not writer.names.texts[v].literal]
            if ended:
                writer.add(End(tuple(ended)))
            passing.difference_update(reads)
            passing |= made & keep - wanted

    def _call(
        self,
        writer: Writer,
        turn: str,
        run: list[Node],
        keep: Collection[Value],
        accumulators: Mapping[str, Value],
    ) -> None:
        kind = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.WEIGHT: "weight"}
        phases = {node.phase for node in run}
        suffix = "backward" if len(phases) > 1 else kind[run[0].phase]
        stem = f"{identifier(turn.split('.')[-2])}_{suffix}"
        made = made_by(run)
        given: dict[Value | View, str] = {}  # with the parameter that stands for it

        def view(view: View) -> str:
            """The parameter for a view of a constant, which the caller has."""
            writer.names.take(view)
            given[view] = inner.names.free(f"{given[view.of]}_matrix")
            return given[view]

        inner = Writer(("c",), module=self.module, stem=stem, lend=view)
        for value in _ordered_reads(run):
            if value in made:
                continue
            outer = writer.names.texts[value]
            if outer.literal:
                inner.names.texts[value] = outer
                continue
            # What comes from outside has the same name in every turn, wherever it comes from.
            outside = None
            if value not in self.constants and not within(value.tensor, turn):
                outside = "d" if value.cotangent else "x"
            given[value] = inner.names.name(value, outside)
            if value in writer.names.lent:
                inner.names.lent.add(value)
        for op in targets(run).values():
            value = accumulators[op.target]
            if value not in given:
                given[value] = inner.names.name(value)
        literals = {node.output for node in run if is_literal(node)}
        results = tuple(v for v in _ordered(made, run) if v in keep and v not in literals)
        inner.block(run, set(results), accumulators)
        inner.add(Return(results))
        # Of some constants only views are read.
        read = {value for each in inner.statements for value in each.reads}
        for unread in {each.of for each in given if isinstance(each, View)} - read:
            del given[unread]
        function = self.module.shared(stem, ", ".join(["c", *given.values()]), inner.body())
        for node in run:
            if is_literal(node):
                writer.names.texts[node.output] = inner.names.texts[node.output]
        writer.waits |= inner.waits
        for value in results:
            writer.names.name(value)
        writer.add(Call(function, tuple(given), results, without_turns(turn), inner.waits))


def _ordered(values: set[Value], nodes: Iterable[Node]) -> list[Value]:
    return [value for node in nodes for value in node.outputs if value in values]


def _ordered_reads(nodes: Iterable[Node]) -> list[Value]:
    return list(dict.fromkeys(value for node in nodes for value in node.inputs))
