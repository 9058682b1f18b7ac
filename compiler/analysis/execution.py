"""How a program is executed: as the executor here does it, or as other systems do (`docs/costs.md`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from attrs import evolve, frozen

from partita.compiler.costs.devices import Device
from partita.compiler.costs.nodes import seconds as node_seconds
from partita.compiler.costs.nodes import timed
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.ops.pieces import Join, Piece
from partita.compiler.passes.chunked_collectives import PIECE
from partita.compiler.passes.place import iteration_of
from partita.compiler.state import Cut


@frozen
class Execution:
    """How a program is executed. The defaults are how the executor here does it; other systems do otherwise.

    Collectives of the phases in `waits` are waited for where they start. `exchanges`: an action lasts until what it
    sends has arrived (1), and until each message has, one after the other, that it sends or receives (2). `sum_bytes`:
    bytes that are moved to add a microbatch's gradient to their sum, for each element (None: as the program does it;
    0: the product that makes the gradient adds it). `reductions`:
    how many times as long a reduction of gradients takes. `whole`: where iterations of a repeat are made again, so are
    the products and sums that the backward pass does not need (the last of a layer). `narrow`: products of iterations
    have operands of 8 bits, as those of Transformer Engine's layers (`narrowed`), in which they are gathered as well.
    `userbuffers`: what is cut into pieces (`overlap`) is sent by engines that copy, which slow nothing down, and from
    and to where products read and write it; and pieces of products run beside one another. `apart`: the share of a
    device's multiprocessors that what microbatches send has for itself, with which it is hidden; the others multiply.
    """

    waits: frozenset[Phase] = frozenset()
    exchanges: int = 0
    sum_bytes: float | None = None
    reductions: float = 1.0
    whole: bool = False
    narrow: bool = False
    userbuffers: bool = False
    apart: float = 0.0


OURS = Execution()
# Waits for all that is sent.
BLOCKING = Execution(frozenset(Phase), exchanges=1)


def timed_as(
    execution: Execution, state: Cut, nodes: Sequence[Node], keep: Collection[Value]
) -> Iterator[tuple[Node, float]]:
    """`timed`, of a program that is executed as said."""
    times = timed(nodes, state.device, state.compiles, keep)
    if execution.userbuffers:
        times = _streamed(state.device, times)
    if execution.narrow:
        times = narrowed(state, times, _for_a_step(state))
    return _with_fewer(execution.apart, times) if execution.apart else times


def narrowed(
    state: Cut, took: Iterable[tuple[Node, float]], cast: Iterable[Value] = ()
) -> Iterator[tuple[Node, float]]:
    """The times of nodes, if the products of iterations of repeats, forward and backward, have operands of 8 bits. Each
    that is not `cast` in 8 bits is cast once in a pass, and transposed: it is read, and written twice (Transformer
    Engine's `cast_transpose`).
    """
    device, narrow, repeats, cast = state.device, state.device.narrowed(), state.partitioned.graph.repeats, {*cast}
    for node, seconds in took:
        if _of_layer(node, repeats):
            new = {*node.inputs} - cast
            cast |= new
            moved = sum(value.type.bytes + 2 * value.type.elements for value in new)
            seconds *= node_seconds(node, narrow) / node_seconds(node, device)
            seconds += moved / (device.bandwidth * device.streaming)
        yield node, seconds


def _for_a_step(state: Cut) -> set[Value]:
    """What is there for a whole step: parameters, and what is made of them before it."""
    stages = state.partitioned.stages
    outputs = (
        value for stage in stages for node in stage.nodes if node.phase is Phase.PROLOGUE for value in node.outputs
    )
    return {*outputs, *(parameter.value for stage in stages for parameter in stage.parameters)}


def fp8_operands(state: Cut, nodes: Iterable[Node]) -> set[Value]:
    """The operands of products inside repeats."""
    repeats = state.partitioned.graph.repeats
    return {value for node in nodes if _of_layer(node, repeats) for value in node.inputs}


def _of_layer(node: Node, repeats: Mapping[str, str]) -> bool:
    """Whether it is a product of an iteration of a repeat."""
    return iteration_of(node.scope, repeats) is not None and _multiplies(node)


def _streamed(device: Device, took: Iterable[tuple[Node, float]]) -> Iterator[tuple[Node, float]]:
    """The times of nodes, if pieces of products run beside one another, on pieces where they lie."""
    filled = evolve(device, products=evolve(device.products, filled=True))
    for node, seconds in took:
        if isinstance(node.op, (Piece, Join)):
            seconds = 0.0
        elif in_pieces(node) and _multiplies(node):
            seconds = node_seconds(node, filled)
        yield node, seconds


def _with_fewer(apart: float, took: Iterable[tuple[Node, float]]) -> Iterator[tuple[Node, float]]:
    """The times of nodes, if that share of multiprocessors does something else."""
    for node, seconds in took:
        yield node, seconds if _units(node) is None else seconds / (1 - apart)


def _units(node: Node) -> tuple[int, ...] | None:
    """What it multiplies (`Op.matrices`)."""
    return node.op.matrices([value.type for value in node.inputs], [value.type for value in node.outputs])


def _multiplies(node: Node) -> bool:
    """Whether it is a product of matrices."""
    return bool(_units(node))


def in_pieces(node: Node) -> bool:
    """Whether it reads or makes a piece."""
    return any(value.name.rpartition(".")[2].removeprefix(PIECE).isdigit() for value in (*node.inputs, *node.outputs))
