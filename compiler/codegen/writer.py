"""Nodes → the statements of a function, and a module of deduplicated functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from attrs import evolve

from partita.compiler.codegen.multi_tensor import ForeachGroup, together
from partita.compiler.codegen.names import Names, View, local_stem
from partita.compiler.codegen.segments import Segment, literals, segmented
from partita.compiler.codegen.squares import with_sums_of_squares
from partita.compiler.codegen.statements import (
    Add,
    Call,
    Compute,
    Delete,
    Each,
    Note,
    Return,
    Start,
    Statement,
    Wait,
    create_shared_views,
)
from partita.compiler.codegen.sums import accumulated, collective, summed, targets
from partita.compiler.graph import Node, Value, inputs_of, outputs_of
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Transfer
from partita.compiler.ops.op import Argument
from partita.compiler.ops.optimizer import updated_in_place
from partita.compiler.ops.shape import Expand

HEADER = '''"""{name}: emitted by Partita. Functions are described in partita.compiler.program."""

import torch

from partita.runtime import kernels
'''


class Probe(ABC):
    """Inserts lines that report computed values to `c`, for observers of the program."""

    def begin(self) -> list[str]:
        """Lines at the start of a function of a stage or rank; by default none."""
        return []

    @abstractmethod
    def after(self, node: Node, added: bool, names: Sequence[str]) -> list[str]:
        """Lines after that of a node, whose results have these names, or were `added` to an accumulator."""


class Module:
    """The source of a program under construction; functions with the same text are shared.

    With `compiled`, torch compiles segments (`segments`), and there is no `probe`. `entries` are the names of functions
    to come, which shared ones do not take.
    """

    def __init__(
        self, name: str, probe: Probe | None = None, compiled: bool = False, entries: Collection[str] = ()
    ) -> None:
        assert probe is None or not compiled, "what torch compiles has no lines to watch"
        self.probe = probe
        self.compiled = compiled
        self.parts = [HEADER.format(name=name)]
        self._shared: dict[tuple[object, ...], str] = {}
        self._names = dict.fromkeys(entries, 1)

    @property
    def source(self) -> str:
        """The module's text."""
        return "\n\n".join(part.strip("\n") + "\n" for part in self.parts)

    def add(self, name: str, arguments: Sequence[str], body: Sequence[str], comment: str) -> str:
        """Adds a function; returns its name, or that of an existing one with the same text."""
        first = self.probe.begin() if self.probe is not None else ()
        text = "\n".join([f'    """{comment}"""', *(f"    {line}" for line in (*first, *body))])
        key = ("", tuple(arguments), text)
        if key not in self._shared:
            self._shared[key] = name
            self.parts.append(f"def {name}({', '.join(arguments)}):\n{text}")
        return self._shared[key]

    def shared(self, stem: str, arguments: str, body: Sequence[str], decorator: str = "", types: object = None) -> str:
        """The name of a function with this text (for arguments of these types), added if it is new."""
        text = "\n".join(f"    {line}" for line in body)
        key = (stem, arguments, text, types)
        if key not in self._shared:
            count = self._names.get(stem, 0) + 1
            self._names[stem] = count
            name = stem if count == 1 else f"{stem}_{count}"
            self._shared[key] = name
            self.parts.append(f"{decorator}def {name}({arguments}):\n{text}")
        return self._shared[key]


class Writer:
    """The statements of a function under construction.

    A `module` provides the probe and receives segments as functions, whose names begin with `stem`. The lines of a
    `probe` are inserted between statements. `lend` names the views of `known` values, which come from the caller.
    """

    def __init__(
        self,
        arguments: Iterable[str] = (),
        known: Mapping[Value, Argument] | None = None,
        module: Module | None = None,
        stem: str = "",
        probe: Probe | None = None,
        lend: Callable[[View], str] | None = None,
    ) -> None:
        self.module = module
        self.probe = module.probe if module is not None else probe
        self.stem = stem
        self.names = Names(arguments, known, lend)
        self.statements: list[Statement] = []
        self.waits = False  # whether the function waits for collectives, which makes it a generator
        self.after: Mapping[Node, Sequence[Node]] = {}  # nodes to write after others
        self.own: set[Value] = set()  # nothing else has their memory
        self._started: dict[Value, tuple[str, Node]] = {}  # results of collectives in flight
        self._given: set[Value] = set()  # those whose handles are an argument
        self._crossing: set[Value] = set()  # those that may be in flight where a block ends
        self._readers: dict[Value, set[Node]] = {}  # of values that one block makes and others read
        self._late: dict[Value, Node] = {}  # what is computed where it is first read

    def body(self) -> list[str]:
        """The lines of source."""
        return [each.text(self.names) for each in create_shared_views(self.statements, self.names)]

    def add(self, statement: Statement) -> None:
        """Appends a statement."""
        self.statements.append(statement)

    def _start(self, node: Node, op: Collective) -> None:
        """Starts a collective; its results are awaited where the first is read."""
        stem = local_stem(node.outputs[0].name)
        handle = self.names.free(stem if len(node.outputs) == 1 else f"{stem}_bucket")
        self.add(Start(node, op, handle))
        self._started.update(dict.fromkeys(node.outputs, (handle, node)))

    def begun(
        self, nodes: Iterable[Node], handles: str, rest: Sequence[Node] = (), keep: Collection[Value] = ()
    ) -> None:
        """Collectives have begun: their `handles` are an argument. Results are awaited, and the `rest` of what follows
        from them computed, where they are first read or at `arrive`. What is to `keep` outlives the rest.
        """
        for i, node in enumerate(nodes):
            self._started.update(dict.fromkeys(node.outputs, (f"{handles}[{i}]", node)))
            self._given.update(node.outputs)
            self._crossing.update(node.outputs)
        for node in rest:
            self._late.update(dict.fromkeys(node.outputs, node))
            self._crossing.update(node.outputs)
        self._ending(rest, self._crossing.difference(keep))

    def leave(self, start: Iterable[Node], keep: Collection[Value] = ()) -> None:
        """Nodes that start collectives for which the function does not wait: it returns their handles, and what is to
        `keep`. They may stand in several blocks.
        """
        nodes = tuple(start)
        results = outputs_of(nodes)
        self._crossing |= results
        self._ending(nodes, results.difference(keep))

    def _ending(self, nodes: Iterable[Node], values: Collection[Value]) -> None:
        """Values end when the last of those nodes that read them has been written."""
        for node in nodes:
            for value in node.inputs:
                if value in values:
                    self._readers.setdefault(value, set()).add(node)

    def compute(self, values: Iterable[Value]) -> None:
        """Computes those of the values that are computed late; a collective starts."""
        for value in values:
            if value in self._late:
                node = self._late[value]
                for other in node.outputs:
                    del self._late[other]
                self.arrive(node.inputs)
                self.block([node], self._crossing, more=True)

    def late(self) -> set[Node]:
        """What is still to be computed, where it is first read."""
        return {*self._late.values()}

    def arrive(self, values: Iterable[Value]) -> None:
        """Waits for those of the values that are in flight, and computes those that are computed late."""
        for value in values:
            self._arrived(value)

    def handles(self, nodes: Iterable[Node]) -> tuple[str, ...]:
        """The handles of collectives in flight."""
        return tuple(self._started[node.outputs[0]][0] for node in nodes)

    def _arrived(self, value: Value) -> tuple[Value, ...]:
        """Waits for the collective that makes a value, if it is in flight; returns the results that a block ends."""
        self.compute([value])
        if value not in self._started:
            return ()
        handle, node = self._started[value]
        for other in node.outputs:
            del self._started[other]
        is_argument = value in self._given
        if len(node.outputs) == 1 and not is_argument:
            self.names.named(value, handle)
        else:
            for other in node.outputs:
                self.names.name(other)
        self.add(Wait(handle, node.outputs, is_argument))
        self.waits = True
        self._probe(node)
        return tuple(other for other in node.outputs if other not in self._crossing)

    def _probe(self, node: Node, added: bool = False) -> None:
        """Adds the probe's lines after a node."""
        if self.probe is not None:
            names = () if added else [self.names.text(value) for value in node.outputs]
            for text in self.probe.after(node, added, names):
                self.add(Note(text))

    def block(
        self,
        nodes: Sequence[Node],
        keep: Collection[Value],
        accumulators: Mapping[str, Value] | None = None,
        more: bool = False,
        apart: bool = False,
    ) -> None:
        """Writes nodes in order. `keep` outlives them; `accumulators` has the values of targets by name.

        A result read by a single accumulation or addition only is fused with it; with `apart`, or with a probe, which
        must see every value, only with accumulations. Locals are deleted after their last use, except on the function's
        last line; `more` means that lines follow.
        """
        texts = self.names.texts
        awaited = set(self._started)  # by a block around this one, which frees them
        groups: Mapping[Node, ForeachGroup] = {}
        if self.probe is None:
            nodes, groups = together(with_sums_of_squares(nodes, keep), keep)
        accumulations = targets(nodes)
        adding = accumulated(nodes, keep)
        read = inputs_of(nodes)
        literal = literals(nodes, keep, {value for value in read if value in texts and texts[value].literal})
        units: Sequence[Node | Segment] = nodes
        if self.module is not None and self.module.compiled:
            units = segmented(nodes, keep, literal)
            apart = True
        sums = {} if apart or self.probe is not None else summed(nodes, keep, literal)
        written: set[Node] = set(sums.values())
        for call in groups.values():
            written.update(call.nodes[1:])
        reads = [_reads(unit, sums, written, groups) for unit in units]
        last = {value: i for i, each in enumerate(reads) for value in each}
        local: set[Value] = set()
        own = self.own
        count = len(units) + more

        def end(values: Iterable[Value], i: int) -> None:
            """Deletes those of these values that unit `i` is the last to read, unless the function ends there."""
            ended = [v for v in dict.fromkeys(values) if v in local and v not in keep and last.get(v, i) <= i]
            ended += [each for each in self._read(units[i]) if each not in ended and not texts[each].literal]
            if ended and i + 1 < count:
                self.add(Delete(tuple(ended)))
            local.difference_update(ended)

        def write(i: int, unit: Node | Segment) -> None:
            if isinstance(unit, Segment):
                local.update(value for read in unit.inputs for value in self._arrived(read))
                self._segment(unit, accumulators or {})
                own.difference_update(unit.inputs)
                local.update(unit.outputs)
                end((*reads[i], *unit.outputs), i)
                return
            node, op = unit, unit.op
            if isinstance(op, Transfer):
                return
            if op.literal is not None:
                self.literal(node)
                return
            if isinstance(op, Expand) and node.output in literal:
                texts[node.output] = evolve(texts[node.inputs[0]], type=node.output.type)
                return
            local.update(value for read in reads[i] for value in self._arrived(read))
            outputs = node.outputs
            if (communication := collective(node)) is not None:
                self._start(node, communication)
                own.difference_update(node.inputs)
            elif node in groups:
                # A view that is written to does not end here if its result, which is the view, is read below.
                results = self._each(groups[node])
                local.difference_update(view for result, view in results if result in keep or result in last)
            elif node in accumulations or node in adding:
                accumulation = accumulations[adding.get(node, node)]
                self.add(Add(node, self.names.taken(node), accumulation, (accumulators or {})[accumulation.target]))
                self._probe(node, added=node in adding)
                if node in adding:
                    written.add(adding[node])
            else:
                plus = None
                if node in sums:
                    outputs, plus = (sums[node].output, *outputs[1:]), reads[i][-1]
                ends = plus in own and plus not in keep and last[plus] <= i
                self.add(Compute(node, self.names.taken(node), outputs, plus, ends))
                for value in outputs:
                    self.names.name(value)
                if op.is_view:
                    self.names.fixed.update(outputs)
                    own.difference_update(node.inputs)
                elif op.allocates:
                    own.update(outputs)
                local.update(outputs)
                self._probe(node)
            end((*reads[i], *outputs), i)

        behind = _written_behind(nodes, units) if self.after else {}
        for i, unit in enumerate(units):
            if unit not in written:
                write(i, unit)
            self.follow(behind.get(i, ()))
        self.arrive([value for value in self._started if value not in self._crossing and value not in awaited])

    def follow(self, nodes: Iterable[Node]) -> None:
        """Writes what comes after nodes."""
        behind = [each for node in nodes for each in self.after.get(node, ())]
        if behind:
            self.block(behind, self._crossing, more=True)

    def _read(self, unit: Node | Segment) -> list[Value]:
        """The values of other blocks that have been read by all their readers with this unit."""
        nodes = (unit,) if isinstance(unit, Node) else unit.nodes
        operands = dict.fromkeys(value for node in nodes for value in node.inputs if value in self._readers)
        for value in operands:
            self._readers[value].difference_update(nodes)
        ended = [value for value in operands if not self._readers[value]]
        for value in ended:
            del self._readers[value]
        return ended

    def literal(self, node: Node) -> None:
        """Writes a node's result as a literal."""
        type = node.output.type
        self.names.texts[node.output] = Argument(node.op.emit((), (type,)), type, literal=True)

    def _each(self, call: ForeachGroup) -> list[tuple[Value, Value]]:
        """Makes updates in one call. Their results are what they have written to, which is returned beside each."""
        self.add(Each(call))
        results: list[tuple[Value, Value]] = []
        for node in call.updates:
            results += zip(node.outputs, updated_in_place(node), strict=True)
        for result, operand in results:
            self.names.texts[result] = evolve(self.names.texts[operand], type=result.type)
        return results

    def _segment(self, segment: Segment, accumulators: Mapping[str, Value]) -> None:
        """Calls a segment, which becomes a function of the module; the accumulators to which it adds come last."""
        assert self.module is not None
        inner = Writer()
        operands = []
        totals = dict.fromkeys(accumulators[op.target] for op in segment.sums)
        for value in (*segment.inputs, *totals):
            outer = self.names.texts[value]
            if outer.literal:
                inner.names.texts[value] = outer
            else:
                inner.names.name(value, outer.text if value in self.names.local else None)
                operands.append(value)
        arguments = inner.names.list(operands)
        # torch.compile fuses other additions itself.
        inner.block(segment.nodes, set(segment.outputs), accumulators, apart=True)
        inner.add(Return(segment.outputs))
        name = self.module.shared(
            f"{self.stem}_segment",
            arguments,
            inner.body(),
            "@kernels.compiled\n",
            tuple(value.type for value in (*segment.inputs, *totals)),
        )
        for value in segment.outputs:
            self.names.name(value)
        self.add(Call(name, tuple(operands), segment.outputs))


def _written_behind(nodes: Sequence[Node], units: Sequence[Node | Segment]) -> dict[int, list[Node]]:
    """The nodes by the number of the unit behind which what comes after them can stand: all nodes before them are
    written by then, which units may write in another order.
    """
    numbers = {
        each: i for i, unit in enumerate(units) for each in (unit.nodes if isinstance(unit, Segment) else (unit,))
    }
    behind: dict[int, list[Node]] = {}
    last = 0
    for node in nodes:
        last = max(last, numbers.get(node, 0))
        behind.setdefault(last, []).append(node)
    return behind


def _reads(
    unit: Node | Segment, sums: Mapping[Node, Node], written: Collection[Node], groups: Mapping[Node, ForeachGroup]
) -> tuple[Value, ...]:
    """What a unit reads, with what is made by the same call; the other operand of a sum that it makes comes last."""
    if unit in written:
        return ()
    if isinstance(unit, Node) and unit in groups:
        return groups[unit].reads
    if not isinstance(unit, Node) or unit not in sums:
        return unit.inputs
    (other,) = (value for value in sums[unit].inputs if value is not unit.outputs[0])
    return (*unit.inputs, other)
