"""How a graph reads its inputs and parameters: as matrices, as tables, as indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from attrs import frozen

from partita.compiler.graph import Node, Value, producers_of
from partita.compiler.ops.loss import KnownTargets
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.reduce import ArgMax
from partita.compiler.ops.traits import ReadsWeights, SameTensor
from partita.compiler.optimizers.registry import Matrix
from partita.dsl.types import INTEGERS, Axis

EQUAL = Pointwise("equal")
# By axis, the axes that it is made of.
Sources = Mapping[str, tuple[str, ...]]


@frozen(eq=False)
class Reader:
    """A node that reads a tensor as its operand at `position`. If the operand is another form of the tensor, `axes`
    gives the tensor's axes for each of its own.
    """

    node: Node
    position: int
    axes: Sources | None

    def sources(self, names: Iterable[str]) -> Iterator[str]:
        """The tensor's axes that axes of the operand are made of."""
        return (source for name in names for source in ((name,) if self.axes is None else self.axes[name]))


class Readers:
    """The readers of inputs and parameters, including those behind operations that preserve identity, and those in the
    bodies of scans, which `inside` has. A dropout does not preserve identity, even if it drops nothing.
    """

    def __init__(self, nodes: Iterable[Node], inside: Mapping[Node, Sequence[Node]]) -> None:
        nodes = [each for node in nodes for each in (*inside.get(node, ()), node)]
        self.readers: dict[Value, list[Reader]] = {}
        self.producers = producers_of(nodes)
        roots: dict[Value, tuple[Value, Sources]] = {}
        for node in nodes:
            for position, value in enumerate(node.inputs):
                root, axes = roots.get(value, (value, None))
                self.readers.setdefault(root, []).append(Reader(node, position, axes))
            if isinstance(node.op, SameTensor):
                (source,) = node.inputs
                root, axes = roots.get(source, (source, None))
                reader = Reader(node, 0, axes)
                sources = node.op.sources(source.type)
                roots[node.output] = root, {new: tuple(reader.sources(old)) for new, old in sources.items()}

    def limit(self, value: Value) -> Axis | None:
        """The axis that an integer input indexes; the shortest, if there are several. Ids that are made of floats are
        computed: the data is not checked for them.
        """
        if value.type.dtype not in INTEGERS:
            return None
        axes = []
        for each in self._indexing(value):
            node, position = each.node, each.position
            ids = node.op.ids([operand.type for operand in node.inputs])
            if ids is not None and ids[0] == position:
                axes.append(ids[1])
            elif node.op == EQUAL:
                best = self.producers.get(node.inputs[1 - position])
                if best is not None and isinstance(best.op, ArgMax):  # accuracy
                    axes.append(best.inputs[0].type.axis(best.op.over))
        return min(axes, key=lambda axis: axis.size) if axes else None

    def ignored(self, value: Value) -> tuple[int, ...]:
        """The ids of an integer input that stand for none where it is an index."""
        if value.type.dtype not in INTEGERS:
            return ()
        ops = {each.node.op for each in self._indexing(value)}
        ids = {each.ignore for each in ops if isinstance(each, KnownTargets)}
        return tuple(sorted(each for each in ids if each is not None))

    def _as_weights(self, value: Value) -> Iterator[tuple[Reader, ReadsWeights]]:
        return ((each, op) for each in self.readers.get(value, ()) if isinstance(op := each.node.op, ReadsWeights))

    def _indexing(self, value: Value) -> Iterator[Reader]:
        """The readers of integers, wherever these are moved to: with others in a `concat`, say."""
        for each in self.readers.get(value, ()):
            yield each
            if each.node.op.rearranges:
                yield from self._indexing(each.node.output)

    def decays(self, value: Value) -> bool:
        """Whether a `dot` or an `embedding` reads a parameter."""
        return any(True for _ in self._as_weights(value))

    def fans(self, value: Value) -> tuple[int, int]:
        """Fan-in, the axes its first `dot` sums over, and fan-out, the rest; without a `dot`, that is the last axis."""
        sizes = value.type.shape
        for each, op in self._as_weights(value):
            fans = op.fans(each.node.inputs[each.position].type)
            if fans is not None:
                return fans
        return (prod(sizes[:-1]), sizes[-1]) if sizes else (1, 1)

    def matrix(self, value: Value) -> Matrix | None:
        """A parameter as its first product reads it; None if none does.

        An axis of which a part is summed, because the parameter is split before the product, counts as summed.
        """
        for each, op in self._as_weights(value):
            groups = op.matrix([operand.type for operand in each.node.inputs], each.position)
            if groups is not None:
                inner, stacked = (set(each.sources(names)) for names in groups)
                names = value.type.names
                return Matrix(
                    tuple(name for name in names if name in inner),
                    tuple(name for name in names if name in stacked - inner),
                    tuple(name for name in names if name not in inner | stacked),
                )
        return None

    def rows(self, value: Value) -> tuple[str, ...]:
        """The axes that tell apart the rows of a table that are looked up; empty if they are not."""
        for each, op in self._as_weights(value):
            rows = op.looked_up([operand.type for operand in each.node.inputs], each.position)
            if rows:
                return tuple(each.sources(rows))
        return ()
