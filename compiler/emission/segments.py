"""What torch compiles: runs of operations that read and make nothing but tensors, as functions of their own.

A segment ends where a function waits for a collective, where an operation looks at the moment (`c`), and where the
function ends. What adds into accumulators stays outside and follows its segment: torch.compile makes a copy of what is
changed in place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from attrs import frozen

from partita.compiler.emission.sums import accumulated, stand_ins, uses_of
from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.op import as_tensor
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Constant
from partita.compiler.ops.shape import Expand

# Fewer operations are not worth a call of what torch has compiled.
SHORTEST = 4
_MOMENT = re.compile(r"\bc\b")


@frozen(eq=False)
class Segment:
    """Nodes in order, what they read from outside, and what is read of them later."""

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def literals(nodes: Sequence[Node], keep: Collection[Value], known: Collection[Value] = ()) -> set[Value]:
    """Values that are written as numbers: those `known` to be, constants, and what repeats one along axes, unless it
    outlives the nodes (`keep`).
    """
    found = set(known)
    for node in nodes:
        if isinstance(node.op, Constant) or (
            isinstance(node.op, Expand) and node.inputs[0] in found and node.output not in keep
        ):
            found.add(node.output)
    return found


def segmented(nodes: Sequence[Node], keep: Collection[Value], literal: Collection[Value]) -> list[Node | Segment]:
    """The nodes with segments for what torch compiles. `keep` outlives the nodes; `literal` are numbers."""
    uses = uses_of(nodes)
    units: list[Node | Segment] = []
    for together, run in _runs(nodes, keep, literal):
        units += [_segment(run, uses, keep)] if together and len(run) >= SHORTEST else run
    return units


def compiled_units(nodes: Sequence[Node], keep: Collection[Value], known: Collection[Value]) -> list[list[Node]]:
    """The nodes in the order in which they then run: those of a segment together, any other alone. `known` are numbers
    from elsewhere.
    """
    units: list[list[Node]] = []
    for together, run in _runs(nodes, keep, literals(nodes, keep, known)):
        units += [run] if together and len(run) >= SHORTEST else [[node] for node in run]
    return units


def _segment(run: Sequence[Node], uses: Counter[Value], keep: Collection[Value]) -> Segment:
    """A run with what it reads from outside, and what is read of it there; `uses` counts the reads of all nodes."""
    own = uses_of(run)
    made = dict.fromkeys(value for node in run for value in node.outputs)
    return Segment(
        tuple(run),
        tuple(value for value in own if value not in made),
        tuple(value for value in made if value in keep or uses[value] > own[value]),
    )


def _runs(
    nodes: Sequence[Node], keep: Collection[Value], literal: Collection[Value]
) -> Iterator[tuple[bool, list[Node]]]:
    """Runs of what can be compiled together (True), and of what cannot be."""
    adding = accumulated(nodes, keep)
    under_way: set[Value] = set()
    run: list[Node] = []
    later: list[Node] = []

    def ended() -> Iterator[tuple[bool, list[Node]]]:
        for together, part in ((True, run), (False, later)):
            if part:
                yield together, list(part)
            part.clear()

    for node in nodes:
        if isinstance(node.op, (Receive, Send)):
            continue
        if node.outputs and node.outputs[0] in literal:
            yield False, [node]
        elif node in adding or isinstance(node.op, Accumulate):
            later.append(node)
        else:
            pure = _pure(node, literal)
            if not pure or not under_way.isdisjoint(node.inputs):
                yield from ended()
                under_way.difference_update(node.inputs)
            if isinstance(node.op, Collective):
                under_way.update(node.outputs)
            if pure:
                run.append(node)
            else:
                yield False, [node]
    yield from ended()


def _pure(node: Node, literal: Collection[Value]) -> bool:
    """Whether a node reads nothing but tensors and numbers that are always the same."""
    if isinstance(node.op, Collective):
        return False
    arguments = stand_ins(node, literal)
    if not node.op.takes_numbers:
        arguments = [as_tensor(each) for each in arguments]
    return not _MOMENT.search(node.op.emit(arguments, [value.type for value in node.outputs]))
