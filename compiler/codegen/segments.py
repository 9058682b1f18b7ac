"""Segments for torch.compile: runs of operations that only read and make tensors, as separate functions.

A segment ends where the function waits for a collective, where an operation reads the context, and where the function
ends. It adds what it makes to accumulators itself, in the kernels that make it. Products that add themselves to theirs
follow it: of GPUs, these are kernels that torch.compile does not generate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from attrs import frozen

from partita.compiler.codegen.sums import accumulated, collective, targets, uses_of
from partita.compiler.graph import Node, Value
from partita.compiler.ops.communication import Transfer
from partita.compiler.ops.loss import NegativeLogLikelihood, NegativeLogLikelihoodGradient
from partita.compiler.ops.op import Argument
from partita.compiler.ops.optimizer import Accumulate, target_of
from partita.compiler.ops.shape import Expand
from partita.compiler.ops.traits import legalized

# Fewer operations are not worth the call of a compiled function, unless one makes several passes over its operands.
SHORTEST = 4


@frozen(eq=False)
class Segment:
    """Nodes in order, the values they read from outside, the results that are read outside, and the accumulations."""

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    sums: tuple[Accumulate, ...] = ()


def literals(nodes: Sequence[Node], keep: Collection[Value], known: Collection[Value] = ()) -> set[Value]:
    """Values written as literals: `known` ones, constants, and broadcasts of these unless they outlive the nodes
    (`keep`).
    """
    literal = set(known)
    for node in nodes:
        repeats = isinstance(node.op, Expand) and node.inputs[0] in literal and node.output not in keep
        if repeats or node.op.literal is not None:
            literal.add(node.output)
    return literal


def segmented(nodes: Sequence[Node], keep: Collection[Value], literal: Collection[Value]) -> list[Node | Segment]:
    """The nodes, grouped into segments where possible. `keep` outlives the nodes; `literal` values are literals."""
    uses = uses_of(nodes)
    units: list[Node | Segment] = []
    for together, run in _runs(nodes, keep, literal):
        units += [_segment(run, uses, keep)] if together and _worth(run) else run
    return units


def compiled_units(nodes: Sequence[Node], keep: Collection[Value], known: Collection[Value]) -> list[list[Node]]:
    """The nodes in execution order, those of a segment together, others alone. `known` are literals from elsewhere."""
    units: list[list[Node]] = []
    for together, run in _runs(nodes, keep, literals(nodes, keep, known)):
        units += [run] if together and _worth(run) else [[node] for node in run]
    return units


# Unless torch.compile generates their kernel, several go through their operands on a GPU.
MULTI_KERNEL = (NegativeLogLikelihood, NegativeLogLikelihoodGradient)


def _worth(run: Sequence[Node]) -> bool:
    return len(run) >= SHORTEST or any(isinstance(node.op, MULTI_KERNEL) for node in run)


def _segment(run: Sequence[Node], uses: Counter[Value], keep: Collection[Value]) -> Segment:
    """The segment of a run; `uses` counts the reads by all nodes of the function."""
    own = uses_of(run)
    produced = dict.fromkeys(value for node in run for value in node.outputs)
    return Segment(
        tuple(run),
        tuple(value for value in own if value not in produced),
        tuple(value for value in produced if value in keep or uses[value] > own[value]),
        tuple(targets(run).values()),
    )


def _runs(
    nodes: Sequence[Node], keep: Collection[Value], literal: Collection[Value]
) -> Iterator[tuple[bool, list[Node]]]:
    """Runs of nodes, with whether they can be compiled together."""
    added = accumulated(nodes, keep)
    apart = {*added, *added.values(), *(node for node in targets(nodes) if not _pure(node, literal))}
    under_way: set[Value] = set()
    run: list[Node] = []
    later: list[Node] = []

    def ended() -> Iterator[tuple[bool, list[Node]]]:
        for together, part in ((True, run), (False, later)):
            if part:
                yield together, list(part)
            part.clear()

    def waits(node: Node) -> bool:
        """Whether an accumulation must not run yet: what it adds is under way, or others to its target come first."""
        return not under_way.isdisjoint(node.inputs) or any(target_of(each.op) == target_of(node.op) for each in later)

    for node in nodes:
        if isinstance(node.op, Transfer):
            continue
        if node.outputs and node.outputs[0] in literal:
            yield False, [node]
        elif node in apart or (target_of(node.op) and waits(node)):
            later.append(node)
        else:
            pure = _pure(node, literal)
            if not pure or not under_way.isdisjoint(node.inputs):
                yield from ended()
                under_way.difference_update(node.inputs)
            if collective(node) is not None:
                under_way.update(node.outputs)
            if pure:
                run.append(node)
            else:
                yield False, [node]
    yield from ended()


def _pure(node: Node, literal: Collection[Value]) -> bool:
    """Whether a node reads only tensors and fixed literals."""
    if collective(node) is not None or node.op.reads_context:
        return False
    arguments = [Argument("", value.type, value in literal) for value in node.inputs]
    taken = legalized(node.op, arguments, [value.type for value in node.outputs])
    # A literal that becomes a tensor reads the context's device.
    return all(each.literal <= as_taken.literal for each, as_taken in zip(arguments, taken, strict=True))
