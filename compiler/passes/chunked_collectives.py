"""Cuts collectives beside products into pieces, so that one piece travels while another is multiplied (`overlap`).

    %x = all_gather(%h)            %h.piece0 = piece(%h; 0)           %h.piece1 = piece(%h; 1)
    %y = dot(%x, %w)               %x.piece0 = all_gather(%h.piece0)  %x.piece1 = all_gather(%h.piece1)
                                   %y.piece0 = dot(%x.piece0, %w)     %y.piece1 = dot(%x.piece1, %w)
                                   %y = join(%y.piece0, %y.piece1)

All pieces of a gather start where the whole did, in order, and each is waited for by its own products. A sum starts to
be reduced as soon as the products of a piece are made, and is waited for where it is first read. Wang et al., "Overlap
communication with dependent computation via decomposition", ASPLOS 2023; Transformer Engine's userbuffers.

Pieces are cut along an axis that the products do not sum over: each element of a result is made by the same sum as
before, of products of fewer rows. Of the axes that can be cut, the outermost is, where pieces are contiguous. What sums
over the axis, such as gradients of weights, reads the whole, joined again. Along one mesh axis, all ranks cut the same
nodes in the same way, so they start the pieces in the same order. `partita.compiler.verify.chunked_collectives` proves
that the result computes what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from attrs import evolve, frozen

from partita.compiler.graph import Builder, Node, Phase, Value, outputs_of, producers_of, readers_of
from partita.compiler.layout import is_split
from partita.compiler.ops.collective import PIECEWISE, AllGather, AllReduce, Collective, ReduceScatter
from partita.compiler.ops.pieces import Join, Piece, contiguous
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.passes.place import iteration_of

# The phases in which a microbatch waits for what is sent; gradients of parameters can be computed at any time.
PHASES = (Phase.FORWARD, Phase.BACKWARD)

# What names of pieces end with, before their number.
PIECE = "piece"


def in_pieces(partitioned: PartitionedGraph, limits: Mapping[str, int]) -> tuple[PartitionedGraph, frozenset[str]]:
    """The same stages, with collectives along the mesh axes of `limits` in at most as many pieces; and the mesh axes
    along which there are some.
    """
    if all(pieces == 1 for pieces in limits.values()):
        return partitioned, frozenset()
    repeats = partitioned.graph.repeats
    names = partitioned.graph.names
    stages = [_Stage(stage, limits, names, repeats) for stage in partitioned.stages]
    result = evolve(partitioned, stages=tuple(stage.in_pieces() for stage in stages))
    return result, frozenset(over for stage in stages for over in stage.over)


@frozen(eq=False)
class _Cut:
    """A collective in pieces: along which axis, how many, and the products, in order, that are computed by piece.

    `blocks` is how many blocks of the axis the products have.
    """

    node: Node
    op: AllGather | ReduceScatter | AllReduce
    axis: str
    pieces: int
    blocks: int
    products: tuple[Node, ...]

    @property
    def gathers(self) -> bool:
        """Whether it comes before its products."""
        return _gathers(self.op)


class _Stage:
    def __init__(
        self, stage: StageGraph, limits: Mapping[str, int], names: Sequence[str], repeats: Mapping[str, str]
    ) -> None:
        self.stage, self.most, self.repeats = stage, limits, repeats
        self.build = Builder([*names, *(value.name for node in stage.nodes for value in node.outputs)])
        self.place = {value: i for i, node in enumerate(stage.nodes) for value in node.outputs}
        self.makers = producers_of(stage.nodes)
        self.readers = readers_of(stage.nodes)
        self.cut: set[Node] = set()  # nodes that are computed by piece
        self.over: set[str] = set()  # mesh axes along which pieces are sent
        self.parts: dict[tuple[Value, int], Value] = {}

    def in_pieces(self) -> StageGraph:
        """The stage, unchanged if it has no such collectives."""
        nodes: list[Node] = []
        for _, run in groupby(self.stage.nodes, self._run):
            nodes += self._in_pieces(list(run))
        return evolve(self.stage, nodes=tuple(nodes)) if self.cut else self.stage

    def _run(self, node: Node) -> tuple[str | None, int]:
        """The nodes of one iteration in one direction, which are emitted together."""
        order = (Phase.PROLOGUE, Phase.FORWARD)
        return iteration_of(node.scope, self.repeats), order.index(node.phase) if node.phase in order else len(order)

    def _in_pieces(self, run: Sequence[Node]) -> Sequence[Node]:
        """The nodes of a run, those of each cut where it begins and where its products are."""
        inside = {node: i for i, node in enumerate(run)}
        cuts = [cut for node in run if (cut := self._found(node, inside)) is not None]
        if not cuts:
            return run
        at = dict(inside)
        instead: dict[int, list[Node]] = {}
        for cut in cuts:
            instead.update((inside[node], []) for node in (cut.node, *cut.products))
        for cut in cuts:
            if cut.gathers:
                place = inside[cut.products[0]]
                instead[inside[cut.node]] = list(self._started(cut))
            else:
                place = inside[cut.products[-1]]
            instead[place] = list(self._multiplied(cut))
            at.update((product, min(place, inside[product])) for product in cut.products)
        before: dict[int, list[Node]] = {}
        for cut in cuts:
            # What has been sent is joined where something reads it. A gather's pieces are not held for longer than its
            # products read them.
            read = [node for node in self.readers.get(cut.node.output, ()) if node not in cut.products]
            places = [at[node] for node in read if node in inside]
            last = inside[cut.products[0]] + 1 if cut.gathers else len(run)
            if read or not cut.gathers:
                before.setdefault(min([last, *places]), []).append(self._sent(cut))
        nodes: list[Node] = []
        for i, node in enumerate(run):
            nodes += before.get(i, ())
            nodes += instead.get(i, (node,))
        return [*nodes, *before.get(len(run), ())]

    # ------------------------------------------------------------ which nodes

    def _found(self, node: Node, inside: Mapping[Node, int]) -> _Cut | None:
        """A collective in as many pieces as its axes have, if products of the same run read or make its tensor."""
        op = node.op
        if not isinstance(op, PIECEWISE) or op.count > 1 or op.parts == 1 or node.phase not in PHASES:
            return None
        gathers = _gathers(op)
        # The tensor that products read or make, and the axis along which ranks have a shard of it.
        whole = node.output if gathers else node.inputs[0]
        ((before, after),) = op.ends
        shared = before if gathers else after
        names = whole.type.names
        outer = names[: names.index(shared) + 1] if shared is not None else names
        for pieces in range(self.most.get(op.over, 1), 1, -1):
            for axis in outer:
                blocks = op.parts if axis == shared else 1
                if whole.type.axis(axis).size % (pieces * blocks):
                    continue
                products = self._read(node, axis, inside) if gathers else self._summed(node, whole, axis, inside)
                if products:
                    self.cut.update((node, *products))
                    self.over.add(op.over)
                    return _Cut(node, op, axis, pieces, blocks, tuple(sorted({*products}, key=inside.__getitem__)))
        return None

    def _read(self, node: Node, axis: str, inside: Mapping[Node, int]) -> list[Node]:
        """The products of what is gathered that can be computed by piece where the first of them is."""
        products: list[Node] = []
        for each in self.readers.get(node.output, ()):
            near = each.phase is node.phase and each in inside and each not in self.cut
            if near and _multiplies(each) and _divides(each, axis):
                first = self.place[(products or [each])[0].output]
                others = [value for value in each.inputs if value is not node.output]
                if not products or all(self.place.get(value, -1) < first for value in others):
                    products.append(each)
        return products

    def _summed(self, reader: Node, value: Value, axis: str, inside: Mapping[Node, int]) -> list[Node]:
        """The products that a value is, or is the sum of, with what adds them; empty if others read it, too."""
        node = self.makers.get(value)
        alone = self.readers[value] == [reader]
        if node is None or node not in inside or not alone or node.phase is not reader.phase or node in self.cut:
            return []
        if not _divides(node, axis) or isinstance(node.op, Collective):
            return []
        if _multiplies(node):
            return [node]
        products = [each for operand in node.inputs for each in self._summed(node, operand, axis, inside)]
        return [*products, node] if products else []

    # ------------------------------------------------------------ pieces

    def _piece(self, cut: _Cut, value: Value, k: int) -> Value:
        """A piece of a value."""
        key = value, k
        if key not in self.parts:
            size = value.type.axis(cut.axis).size // cut.pieces
            self.parts[key] = self.build.part(value, f"{PIECE}{k}", value.type.resized(cut.axis, size))
        return self.parts[key]

    def _taken(self, cut: _Cut, value: Value, k: int, blocks: int, by: Node) -> Node:
        """What takes a piece of a value that is whole, for a node."""
        size = value.type.axis(cut.axis).size // cut.pieces
        piece = self.build.part(value, f"{PIECE}{k}", value.type.resized(cut.axis, size))
        op = Piece(cut.axis, cut.pieces, k, blocks, contiguous(value.type, cut.axis, blocks))
        return evolve(by, op=op, inputs=(value,), outputs=(piece,))

    def _started(self, cut: _Cut) -> Iterator[Node]:
        """The starts of a gather's pieces."""
        (local,) = cut.node.inputs
        for k in range(cut.pieces):
            piece = self._taken(cut, local, k, 1, cut.node)
            yield piece
            yield evolve(cut.node, inputs=piece.outputs, outputs=(self._piece(cut, cut.node.output, k),))

    def _multiplied(self, cut: _Cut) -> Iterator[Node]:
        """The products by piece; those of a gather are joined, others start to be reduced."""
        by_piece = outputs_of(cut.products)
        by_piece |= {cut.node.output} if cut.gathers else set()
        for k in range(cut.pieces):
            pieces: dict[Value, Value] = {}
            for product in cut.products:
                for value in product.inputs:
                    if value in by_piece:
                        pieces[value] = self._piece(cut, value, k)
                    elif value not in pieces and value.type.has(cut.axis):
                        node = self._taken(cut, value, k, cut.blocks, product)
                        pieces[value] = node.output
                        yield node
                piece = self._piece(cut, product.output, k)
                op = product.op.resized(cut.axis, piece.type.axis(cut.axis).size)
                inputs = tuple(pieces.get(value, value) for value in product.inputs)
                yield evolve(product, op=op, inputs=inputs, outputs=(piece,))
            if not cut.gathers:
                inputs = (self._piece(cut, cut.node.inputs[0], k),)
                yield evolve(cut.node, inputs=inputs, outputs=(self._piece(cut, cut.node.output, k),))
        for product in cut.products if cut.gathers else ():
            yield self._joined(cut, product, cut.blocks)

    def _sent(self, cut: _Cut) -> Node:
        """What joins the pieces of what a collective makes."""
        ((_, after),) = cut.op.ends
        return self._joined(cut, cut.node, 1 if after == cut.axis else cut.blocks)

    def _joined(self, cut: _Cut, by: Node, blocks: int) -> Node:
        """What joins the pieces of what a node makes."""
        pieces = tuple(self._piece(cut, by.output, k) for k in range(cut.pieces))
        return evolve(by, op=Join(cut.axis, blocks), inputs=pieces)


def _gathers(op: AllGather | ReduceScatter | AllReduce) -> bool:
    ((before, _),) = op.ends
    return is_split(before)


def _multiplies(node: Node) -> bool:
    """Whether the node is a matrix product."""
    return bool(node.op.matrices([value.type for value in node.inputs], [value.type for value in node.outputs]))


def _divides(node: Node, axis: str) -> bool:
    """Whether the node computes each piece of its only result from pieces of its operands."""
    return len(node.outputs) == 1 and node.output.type.has(axis) and node.op.elementwise_over((axis,))
