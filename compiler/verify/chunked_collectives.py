"""Puts pieces together again (`passes.chunked_collectives`), and validates that they were pieces of one tensor.

Returns stages in which each collective and each product is in one piece: the first piece stands for the whole, the
others must be the same operation on the other pieces. What the stages then compute is validated as that of any other
stages. Invariants:

- A piece is made before it is read, in the same phase or an earlier one.
- It is what an operation takes from a tensor, what a collective makes of a piece, or what an operation that
  computes each position of the axis by itself makes of pieces, which all have one number and one order of positions.
- A collective along the axis of the pieces gathers them in blocks, one for each rank, or scatters these blocks.
- The whole is joined of all its pieces, in order. Nothing else reads pieces; so they are not sent or accumulated.
"""

from __future__ import annotations

from functools import singledispatchmethod

from attrs import define, evolve, field, frozen

from partita.compiler.graph import Node, Phase, Value, outputs_of, substitute
from partita.compiler.ops.collective import PIECEWISE, Reshard
from partita.compiler.ops.op import Op
from partita.compiler.ops.pieces import Join, Piece, whole_size
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.verify.checker import Checker, quoted
from partita.compiler.verify.rules import require
from partita.dsl.types import Type

PHASES = tuple(Phase)


def in_one_piece(partitioned: PartitionedGraph, check: Checker) -> PartitionedGraph:
    """The stages with nothing in pieces."""
    return evolve(partitioned, stages=tuple(_Stage(check, stage).whole() for stage in partitioned.stages))


@frozen
class _Form:
    """How tensors are cut: along an axis, into how many pieces, each of them a part of each of the blocks."""

    axis: str
    pieces: int
    blocks: int

    def whole(self, type: Type) -> Type:
        """The type of what has pieces of a type."""
        return type.resized(self.axis, whole_size(type, self.axis, self.pieces))


@frozen(eq=False)
class _Part:
    """The piece `index` of `whole`."""

    whole: Value
    form: _Form
    index: int


@define(eq=False)
class _Stage:
    check: Checker
    stage: StageGraph
    parts: dict[Value, _Part] = field(factory=dict)
    instead: dict[Value, Value] = field(factory=dict)
    # What a whole is made by: the operation, its operands, its phase, and how its pieces are cut.
    made: dict[tuple[object, ...], Node] = field(factory=dict)
    phases: dict[Value, int] = field(factory=dict)
    joined: dict[Value, Value] = field(factory=dict)  # what first joins the pieces of a whole

    def whole(self) -> StageGraph:
        """The stage, as it is if nothing is in pieces."""
        if not any(isinstance(node.op, (Piece, Join)) for node in self.stage.nodes):
            return self.stage
        nodes: list[Node] = []
        for node in self.stage.nodes:
            with self.check.at(node.span, f"on stage {self.stage.index}"):
                for value in node.inputs:
                    early = self.phases.get(value, 0) <= PHASES.index(node.phase)
                    require(early, f"`{value.name}` is made after the phase in which it is read", value)
                nodes += self._whole(node.op, node)
            self.phases.update(dict.fromkeys(node.outputs, PHASES.index(node.phase)))
        # What is joined is what was made as a whole, and has its own name, by which it may be sent.
        wholes = outputs_of(self.made.values())
        names = {whole: value for whole, value in self.joined.items() if whole in wholes}
        named = (
            evolve(substitute(node, names), outputs=tuple(names.get(value, value) for value in node.outputs))
            for node in nodes
        )
        return evolve(self.stage, nodes=tuple(named))

    @singledispatchmethod
    def _whole(self, op: Op, node: Node) -> list[Node]:
        parts = [self.parts[value] for value in node.inputs if value in self.parts]
        if not parts:
            inputs = tuple(self.instead.get(value, value) for value in node.inputs)
            return [node if inputs == node.inputs else evolve(node, inputs=inputs)]
        form, index = parts[0].form, parts[0].index
        alike = all((each.form, each.index) == (form, index) for each in parts)
        require(alike, f"{quoted(node)} reads different pieces", *node.inputs)
        beside = [value for value in node.inputs if value not in self.parts]
        mixed = any(value.type.has(form.axis) for value in beside)
        require(not mixed, f"{quoted(node)} reads a piece beside what is whole", *node.inputs)
        single = len(node.outputs) == 1 and op.elementwise_over((form.axis,))
        require(single, f"{quoted(node)} does not compute each position of `{form.axis}` by itself", *node.inputs)
        return self._made(node, form, form, index)

    @_whole.register(Piece)
    def _taken(self, op: Piece, node: Node) -> list[Node]:
        (value,) = node.inputs
        require(value not in self.parts, f"{quoted(node)} is taken from a piece", value)
        whole = self.instead.get(value, value)
        self._infers(node)
        require(node.output.layout == whole.layout, f"{quoted(node)} has another layout", node.output, whole)
        self.parts[node.output] = _Part(whole, _Form(op.axis, op.pieces, op.blocks), op.index)
        self.check.nodes += 1
        return []

    @_whole.register(Join)
    def _joined(self, op: Join, node: Node) -> list[Node]:
        parts = [self.parts[value] for value in node.inputs if value in self.parts]
        form = _Form(op.axis, len(node.inputs), op.blocks)
        have = [(each.whole, each.form, each.index) for each in parts]
        expected = [(each.whole, form, index) for index, each in enumerate(parts[:1] * len(node.inputs))]
        require(bool(have) and have == expected, f"{quoted(node)} is not joined of all pieces, in order", *node.inputs)
        self._infers(node)
        (whole, *_) = (each.whole for each in parts)
        alike = (node.output.type, node.output.layout) == (whole.type, whole.layout)
        require(alike, f"{quoted(node)} is not what was in pieces", node.output, whole)
        self.instead[node.output] = whole
        self.joined.setdefault(whole, node.output)
        self.check.nodes += 1
        return []

    @_whole.register(Reshard)
    def _sent(self, op: Reshard, node: Node) -> list[Node]:
        if not any(value in self.parts for value in node.inputs):
            inputs = tuple(self.instead.get(value, value) for value in node.inputs)
            return [node if inputs == node.inputs else evolve(node, inputs=inputs)]
        known = isinstance(op, PIECEWISE) and op.count == 1
        require(known, f"{quoted(node)} is not made piece by piece", *node.inputs)
        part, ((before, after),) = self.parts[node.inputs[0]], op.ends
        form = part.form
        if before == form.axis:
            form = evolve(form, blocks=form.blocks * op.parts)
        elif after == form.axis:
            require(form.blocks % op.parts == 0, f"{quoted(node)} scatters pieces that are not in blocks", *node.inputs)
            form = evolve(form, blocks=form.blocks // op.parts)
        return self._made(node, part.form, form, part.index)

    # ------------------------------------------------------------ values

    def _made(self, node: Node, before: _Form, after: _Form, index: int) -> list[Node]:
        """The whole of which a node makes a piece, at its first piece."""
        self._infers(node)
        inputs = tuple(
            self.parts[value].whole if value in self.parts else self.instead.get(value, value) for value in node.inputs
        )
        (value,) = node.outputs
        require(value.type.has(after.axis), f"{quoted(node)} is not a piece", value)
        type = after.whole(value.type)
        op = node.op.resized(after.axis, type.axis(after.axis).size)
        back = op.resized(after.axis, value.type.axis(after.axis).size)
        require(back == node.op, f"{quoted(node)} works on another piece than it is given", value)
        key = op, inputs, value.layout, node.phase, node.scope, before, after
        whole_node = self.made.get(key)
        if whole_node is None:
            whole = evolve(value, type=type, name=f"{value.name} in one piece")
            whole_node = self.made[key] = evolve(node, op=op, inputs=inputs, outputs=(whole,))
            self.parts[value] = _Part(whole, after, index)
            return [whole_node]
        self.parts[value] = _Part(whole_node.output, after, index)
        self.check.nodes += 1
        return []

    def _infers(self, node: Node) -> None:
        try:
            inferred = node.op.infer(*(value.type for value in node.inputs))
        except Exception:  # operations assert that their operands fit
            inferred = ()
        require(
            inferred == tuple(value.type for value in node.outputs), f"{quoted(node)} has another type", *node.outputs
        )
