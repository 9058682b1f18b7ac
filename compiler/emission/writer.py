"""Python source under way: a module of functions, each written once, and the lines of one function.

Names of the file reach the source only as parts of local names, which shadow nothing of Python's, torch's or ours.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from attrs import evolve

from partita.compiler.emission.segments import Segment, literals, segmented
from partita.compiler.emission.sums import accumulated, summed
from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.op import Argument, as_tensor
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Constant
from partita.compiler.ops.shape import Expand
from partita.dsl.source import Span
from partita.dsl.types import Type

# A view of a local tensor, in a line under way: the tensor, and what makes the view.
_VIEW = re.compile("\0(.*?)\1(.*?)\2")
_DELETE = "del "

HEADER = '''"""{name}: emitted by Partita. Functions are described in partita.compiler.program."""

import torch

from partita.runtime import kernels
'''


class Probe(Protocol):
    """Lines of functions that do not compute but tell `c` of what is computed: whoever runs the program watches."""

    def begin(self) -> list[str]:
        """Lines with which a function of a stage or rank begins."""

    def after(self, node: Node, added: bool, names: Sequence[str]) -> list[str]:
        """Lines behind that of a node, whose results have these names, or were `added` to an accumulator."""


class Module:
    """Source of a whole program under way: the functions so far, shared ones by their text.

    With `compiled`, torch compiles what it can (`segments`); there is no `probe` then.
    """

    def __init__(self, name: str, probe: Probe | None = None, compiled: bool = False) -> None:
        assert probe is None or not compiled, "what torch compiles has no lines to watch"
        self.probe = probe
        self.compiled = compiled
        self.parts = [HEADER.format(name=name)]
        self._shared: dict[tuple[object, ...], str] = {}
        self._names: dict[str, int] = {}

    @property
    def source(self) -> str:
        """The module's text."""
        return "\n\n".join(part.strip("\n") + "\n" for part in self.parts)

    def add(self, name: str, arguments: str, body: Sequence[str], comment: str) -> str:
        """A function under this name, or the name of one with the same text."""
        first = self.probe.begin() if self.probe is not None else ()
        text = "\n".join([f'    """{comment}"""', *(f"    {line}" for line in (*first, *body))])
        key = ("", arguments, text)
        if key not in self._shared:
            self._shared[key] = name
            self.parts.append(f"def {name}({arguments}):\n{text}")
        return self._shared[key]

    def shared(self, stem: str, arguments: str, body: Sequence[str], decorator: str = "", types: object = None) -> str:
        """The name of a function with this text (for arguments of these types); it is written once."""
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
    """Lines of one function, with a local name for every value.

    With a module, whose wishes it then follows: segments go there as functions, whose names begin with `stem`. With a
    `probe`, its lines stand between.
    """

    def __init__(
        self,
        arguments: str,
        known: Mapping[Value, Argument] | None = None,
        module: Module | None = None,
        stem: str = "",
        probe: Probe | None = None,
    ) -> None:
        self.module = module
        self.probe = module.probe if module is not None else probe
        self.stem = stem
        self._lines: list[str] = []
        self.waits = False  # whether it waits for collectives: then the function is a generator
        self._started: dict[Value, tuple[str, Node]] = {}  # results of collectives under way
        self.texts: dict[Value, Argument] = dict(known or {})
        self._taken = set(arguments.split(", "))
        self._counts: dict[str, int] = {}  # where to go on looking for a free name

    def body(self) -> list[str]:
        """The lines. A view that several of them take of one tensor is made once, and ends with the tensor."""
        counts = Counter(view for line in self._lines for view in _VIEW.findall(line))
        made: dict[tuple[str, str], str] = {}
        found: list[str] = []

        def written(view: re.Match[str]) -> str:
            tensor, how = view.groups()
            if counts[tensor, how] == 1:
                return tensor + how
            if (tensor, how) not in made:
                made[tensor, how] = self.free_name(f"{tensor}_matrix")
                found.append(f"{made[tensor, how]} = {tensor}{how}")
            return made[tensor, how]

        for line in self._lines:
            if line.startswith(_DELETE):
                ended = line.removeprefix(_DELETE).split(", ")
                views = [name for (tensor, _), name in made.items() if tensor in ended]
                found.append(_DELETE + ", ".join([*ended, *views]))
            else:
                # The views that it takes come before it.
                found.append(_VIEW.sub(written, line))
        return found

    def line(self, text: str) -> None:
        """One more line."""
        self._lines.append(text)

    def delete(self, values: Iterable[Value]) -> None:
        """Let go of tensors."""
        self.line(_DELETE + ", ".join(self.argument(value).text for value in values))

    def name(self, value: Value, stem: str | None = None) -> str:
        """A new local name for a value, from its own."""
        text = self.free_name(stem or local_stem(value.name))
        self.texts[value] = _named(text, value.type)
        return text

    def free_name(self, stem: str) -> str:
        """A local name that is not taken."""
        text = stem
        count = self._counts.get(stem, 1)
        while text in self._taken:
            count += 1
            text = f"{stem}_{count}"
        self._taken.add(text)
        self._counts[stem] = count
        return text

    def argument(self, value: Value) -> Argument:
        """How a value is written."""
        return self.texts[value]

    def _start(self, node: Node, op: Collective, arguments: Sequence[Argument]) -> None:
        """Start a collective; its results are waited for where the first is read."""
        stem = local_stem(node.outputs[0].name)
        handle = self.free_name(stem if len(node.outputs) == 1 else f"{stem}_bucket")
        self._line(f"{handle} = {op.start(arguments)}", node)
        self._started.update(dict.fromkeys(node.outputs, (handle, node)))
        self.waits = True

    def _arrived(self, value: Value) -> tuple[Value, ...]:
        """Wait for the collective that makes a value, if that is under way; returns all that it makes."""
        if value not in self._started:
            return ()
        handle, node = self._started[value]
        for other in node.outputs:
            del self._started[other]
        if len(node.outputs) == 1:
            # The handle's name becomes the tensor's.
            self.texts[value] = _named(handle, value.type)
            self.line(f"({handle},) = yield {handle}")
        else:
            names = ", ".join(self.name(other) for other in node.outputs)
            self.line(f"{names} = yield {handle}; del {handle}")
        self._probe(node)
        return node.outputs

    def _probe(self, node: Node, added: bool = False) -> None:
        """What the probe wants to have behind a node."""
        if self.probe is not None:
            names = () if added else [self.argument(value).text for value in node.outputs]
            for text in self.probe.after(node, added, names):
                self.line(text)

    def block(
        self,
        nodes: Sequence[Node],
        keep: set[Value],
        accumulators: Mapping[str, tuple[str, Value]],
        more: bool = False,
        apart: bool = False,
    ) -> None:
        """Write nodes in order. `keep` outlives them; `accumulators` gives the text of each target.

        A result that only one accumulation or addition reads is added where it is made; if operations stand `apart`,
        or there is a probe, which wants to see every value, only into accumulators. Locals end with their last use:
        those of the last line with the function, unless it has `more` lines.
        """
        adding = accumulated(nodes, keep)
        read = {value for node in nodes for value in node.inputs}
        literal = literals(nodes, keep, {value for value in read if value in self.texts and self.texts[value].literal})
        units: Sequence[Node | Segment] = nodes
        if self.module is not None and self.module.compiled:
            units = segmented(nodes, keep, literal)
            apart = True
        sums = {} if apart or self.probe is not None else summed(nodes, keep, literal)
        written: set[Node] = set(sums.values())
        reads = [_reads(unit, sums, written) for unit in units]
        last = {value: i for i, each in enumerate(reads) for value in each}
        local: set[Value] = set()
        count = len(units) + more
        for i, node in enumerate(units):
            if node in written:
                continue
            if isinstance(node, Segment):
                local.update(value for read in node.inputs for value in self._arrived(read))
                self._segment(node)
                local.update(node.outputs)
                self._end((*reads[i], *node.outputs), i, local, last, keep, count)
                continue
            if isinstance(node.op, (Receive, Send)):
                continue
            if isinstance(node.op, Constant):
                text = node.op.emit((), (node.output.type,))
                self.texts[node.output] = Argument(text, node.output.type, literal=True)
                continue
            if isinstance(node.op, Expand) and node.output in literal:
                self.texts[node.output] = evolve(self.argument(node.inputs[0]), type=node.output.type)
                continue
            local.update(value for read in reads[i] for value in self._arrived(read))
            arguments = [self.argument(value) for value in node.inputs]
            outputs = node.outputs
            if not node.op.takes_numbers:
                arguments = [as_tensor(argument) for argument in arguments]
            if isinstance(node.op, Collective):
                self._start(node, node.op, arguments)
            elif isinstance(node.op, Accumulate):
                target = accumulators[node.op.target][0]
                self._line(node.op.statement(target, arguments[0]), node)
                self._probe(node)
            elif node in adding:
                self._added(node, adding[node], arguments, accumulators)
                written.add(adding[node])
            else:
                types = [value.type for value in outputs]
                if node in sums:
                    outputs = (sums[node].output, *outputs[1:])
                    expression = node.op.emit_sum(self.argument(reads[i][-1]), arguments, types)
                else:
                    expression = node.op.emit(arguments, types)
                assert expression is not None
                names = ", ".join(self.name(value) for value in outputs)
                local.update(outputs)
                if node.op.is_view:
                    # What is viewed once more may be a copy, and ends with its line.
                    self.texts.update((value, evolve(self.argument(value), views=None)) for value in outputs)
                self._line(f"{names} = {expression}" if names else expression, node)
                self._probe(node)
            self._end((*reads[i], *outputs), i, local, last, keep, count)
        for value in list(self._started):
            self._arrived(value)

    def _end(
        self,
        values: Iterable[Value],
        i: int,
        local: set[Value],
        last: Mapping[Value, int],
        keep: set[Value],
        count: int,
    ) -> None:
        """Delete those of a unit's values that unit `i` of `count` is the last to read; the last unit leaves that to
        the end of the function.
        """
        ended = [v for v in dict.fromkeys(values) if v in local and v not in keep and last.get(v, i) <= i]
        if ended and i + 1 < count:
            self.delete(ended)
        local.difference_update(ended)

    def _segment(self, segment: Segment) -> None:
        """Call a segment, which is a function of the module."""
        assert self.module is not None
        inner = Writer("")
        given = []
        names = []
        for value in segment.inputs:
            outer = self.argument(value)
            if outer.literal:
                inner.texts[value] = outer
            else:
                names.append(inner.name(value, outer.text if outer.text.isidentifier() else None))
                given.append(outer.text)
        # Nothing is changed in place there, and torch puts sums to what they are of by itself.
        inner.block(segment.nodes, set(segment.outputs), {}, apart=True)
        results = ", ".join(inner.argument(value).text for value in segment.outputs)
        name = self.module.shared(
            f"{self.stem}_segment",
            ", ".join(names),
            [*inner.body(), f"return {results}"],
            "@kernels.compiled\n",
            tuple(value.type for value in segment.inputs),
        )
        left = ", ".join(self.name(value) for value in segment.outputs)
        self.line(f"{left} = {name}({', '.join(given)})")

    def _added(
        self,
        node: Node,
        accumulation: Node,
        arguments: Sequence[Argument],
        accumulators: Mapping[str, tuple[str, Value]],
    ) -> None:
        """Write a node's result straight into its accumulator."""
        assert isinstance(accumulation.op, Accumulate)
        text, _ = accumulators[accumulation.op.target]
        statement = node.op.emit_added(Argument(text, accumulation.op.type), arguments, node.output.type)
        assert statement is not None
        self._line(statement, node)
        self._probe(node, added=True)

    def _line(self, text: str, node: Node) -> None:
        self.line(text + (f"  # {place_text(node.span)}" if node.span else ""))


def _named(text: str, type: Type) -> Argument:
    """A local tensor, whose views are marked until it is known how many lines take each."""
    return Argument(text, type, views=lambda how: f"\0{text}\1{how}\2")


def _reads(unit: Node | Segment, sums: Mapping[Node, Node], written: Collection[Node]) -> tuple[Value, ...]:
    """What a unit reads; at last the other operand of the sum that it makes."""
    if unit in written:
        return ()
    if not isinstance(unit, Node) or unit not in sums:
        return unit.inputs
    (other,) = (value for value in sums[unit].inputs if value is not unit.outputs[0])
    return (*unit.inputs, other)


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
    if stem in ENDINGS and len(parts) > 1:
        stem = f"{parts[-2]}_{stem}"
    stem = prefix + re.sub(r"\W", "_", stem)
    # A trailing underscore keeps names of the file apart from Python's, and from those of emitted functions.
    return f"{stem}_" if stem in RESERVED or FUNCTION_NAME.fullmatch(stem) else stem


# What the compiler puts behind the name of the value that something is made from.
ENDINGS = ("again", "portion", "rate", "denominator", "keep", "total", "whole", "part", "gathered", "reduced", "moved")
RESERVED = frozenset((*keyword.kwlist, "torch", "kernels", "float"))
FUNCTION_NAME = re.compile(r".*_(forward|backward|weight|prologue|reduce|finish|update|segment)(_\d+)?")
