"""The gated delta rule: a memory of matrices from keys to values, into which each position writes what it still lacks.

    S[t] = a[t]·S[t−1] + k[t]·u[t]ᵀ    u[t] = β[t]·(v[t] − (a[t]·S[t−1])ᵀ·k[t])    o[t] = S[t]ᵀ·q[t]

Sources: Schlag et al., arXiv 2102.11174; in chunks Yang et al., arXiv 2406.06484; with gates arXiv 2412.06464, and with
a gate for each key arXiv 2510.26692. Within a chunk of positions i and j, of which S is the state before, let P[i, j]
be the product of a after j up to i, G[i] the product up to i, and E[j] that after j. Then, with all u of the chunk at
once,

    (I + T)·u = β·v − β·(G·k)·S    T[i, j] = β[i]·k[i]ᵀ·P[i, j]·k[j] below the diagonal
    o = (G·q)·S + (q·P·kᵀ)·u    next S = G·S + (E·k)ᵀ·u

so that all chunks are computed at once but for the recurrence of their memories (`partita.compiler.ops.delta_scan`).
Products of gates are computed as such, not by their logarithms, so that gates may be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.naming import chunks
from partita.compiler.ops.decoding import WriteState
from partita.compiler.ops.delta_scan import DeltaScan, DeltaScanBlocks
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.inverse import Inverse
from partita.compiler.ops.linear_scan import LinearScan
from partita.compiler.ops.op import Argument, Op, ShardingRule, accumulation, agree, broadcast, op, permuted, wide_bytes
from partita.compiler.ops.pointwise import cast, constant, pointwise
from partita.compiler.ops.position import where_compared
from partita.compiler.ops.reduce import total
from partita.compiler.ops.shape import Arrange, Expand, Merge, Rename, Slice, Split, arranged
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Value

# Positions of a chunk at most: the matrices of more would be larger than memories are. Gates of each key make one of
# these for each.
LONGEST, LONGEST_BY_KEY = 64, 16


@op("delta_rule")
class DeltaRule(Op):
    """The rule over positions `over`; keys have the axis `along`. Operands: q, k, v, β, and a, if `gated`.

    Axes are matched by name, as in products: those of q and k but `along`, and all of v, β and a, are of the result.
    In this form it takes one position after the other; what is trained is built in chunks (`in_chunks`).
    """

    over: str
    along: str
    gated: bool = True
    fusible = False

    def _axes(self, types: Sequence[Type]) -> tuple[Axis, ...]:
        """Of the result, from q to a."""
        found = {axis.name: axis for type in types for axis in type.axes if axis.name != self.along}
        return tuple(found.values())

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """All axes but `along`, in the dtype of v."""
        q, k, v, beta, *gate = types
        assert len(gate) == self.gated, (self, types)
        assert agree(*types), (self, types)
        assert all(x.has(self.along) for x in (q, k)), (self, types)
        assert not any(x.has(self.along) for x in (v, beta)), (self, types)
        return (Type(v.dtype, self._axes(types)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the result but `over`; linear in q and in v."""
        rules = [
            ShardingRule(tuple(name if x.has(name) else None for x in operands), (name,))
            for name in results[0].names
            if name != self.over
        ]
        rest = (None,) * (len(operands) - 3)
        return (*rules, ShardingRule((SUM, None, None, *rest), (SUM,)), ShardingRule((None, None, SUM, *rest), (SUM,)))

    def decode_step(
        self, build: Builder, operands: Sequence[Value], axis: str, state: Callable[[Type], Value]
    ) -> tuple[Value, ...] | None:
        """In chunks, from the memory that is kept."""
        if axis != self.over:
            return None
        k, v = operands[1:3]
        rest = tuple(each for each in self._axes([x.type for x in operands[1:]]) if each.name != axis)
        single = Axis(chunks(axis), 1)
        before = state(Type(accumulation(v.type.dtype), (single, k.type.axis(self.along), *rest)))
        part = _Chunks(build, self, operands, 1)
        result, after = part.result(before), part.last(before)
        return (build.apply(WriteState(1), before, after, result),)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Three products with the memory, which fades."""
        return 7 * operands[0].axis(self.along).size * results[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The operands with all axes, and memories of one position, in the dtype of accumulation."""
        (result,) = results
        keys, size = operands[0].axis(self.along).size, result.axis(self.over).size
        return wide_bytes(result) * (3 + (2 + self.gated) * keys + 6 * keys // size)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, on operands with the positions first and the keys last."""
        rest = [name for name in results[0].names if name != self.over]
        texts = []
        for i, each in enumerate(arguments):
            keyed = i != 2 and i != 3
            order = [self.over, *rest, *([self.along] if keyed else [])]
            texts.append(broadcast(each, order))
        return permuted(f"kernels.delta_rule({', '.join(texts)})", [self.over, *rest], results[0].names)


def in_chunks(build: Builder, op: DeltaRule, operands: Sequence[Value], parts: int, name: str) -> Value:
    """The rule by products of chunks, of which `parts` of the positions have as many each; the result's full name."""
    return _Chunks(build, op, operands, parts).result(name=name)


class _Chunks:
    """The chunks of a sequence: what each makes of the memory before it.

    Matrices of a chunk have the axes `row` and `column`, both of its positions; memories have that of the keys.
    """

    def __init__(self, build: Builder, op: DeltaRule, operands: Sequence[Value], parts: int) -> None:
        self.build = build
        over, key = operands[0].type.axis(op.over), operands[0].type.axis(op.along)
        by_key = any(value.type.has(key.name) for value in operands[4:])
        size = over.size // parts if over.size % parts == 0 else over.size
        length = _longest(size, LONGEST_BY_KEY if by_key else LONGEST)
        chunk, row, column = self.axes = (
            Axis(chunks(over.name), over.size // length),
            Axis(f"{over.name}~row", length),
            Axis(f"{over.name}~column", length),
        )
        self.over, self.key = over, key
        self.names = op.infer(*(value.type for value in operands))[0].names
        q, k, v, beta, *gate = (self._split(value) for value in operands)
        self.dtype, wide = v.type.dtype, accumulation(v.type.dtype)
        reads, writes, self.queries, between = k, k, q, self._compared("greater_equal")
        fades = build.apply(Expand((chunk,)), constant(build, 1.0, Type(wide)))
        if gate:
            between, before, after = self._gates(cast(build, gate[0], wide))
            fades = self._only(before, row, length - 1)
            reads, writes, self.queries = (self._times(x, y) for x, y in ((k, before), (k, after), (q, before)))
        self.scores = self._pairs(q, k, between)
        system = self._times(self._pairs(k, k, self._times(between, self._compared("greater"))), beta)
        solved = build.apply(Inverse(row.name, column.name, triangular=True), system)
        self.values, self.keys = (
            self._renamed(build.apply(Dot((row.name,)), solved, self._times(x, beta)), column, row) for x in (v, reads)
        )
        # What fades, what the chunk writes and reads of the memory, and what it writes anew.
        self.recurrence = chunk.name, row.name, key.name
        self.steps = fades, writes, self.keys, build.apply(Dot((row.name,)), writes, self.values)

    def result(self, before: Value | None = None, name: str | None = None) -> Value:
        """What all positions read; `before` is the memory before the first, if there is one."""
        build, (chunk, row, column) = self.build, self.axes
        memory = (
            build.apply(DeltaScan(*self.recurrence), *self.steps)
            if before is None
            else build.apply(DeltaScan(*self.recurrence, block=chunk.size), *self.steps, before)
        )
        known = build.apply(Dot((self.key.name,)), self.keys, memory)
        lacking = self._renamed(pointwise(build, "subtract", self.values, known), row, column)
        read = build.apply(Dot((self.key.name,)), self.queries, memory)
        result = pointwise(build, "add", read, build.apply(Dot((column.name,)), self.scores, lacking))
        order = [each for own in self.names for each in ((chunk.name, row.name) if own == self.over.name else (own,))]
        return build.apply(Merge((chunk.name, row.name), self.over), arranged(build, result, order), name=name)

    def last(self, before: Value) -> Value:
        """The memory after all positions."""
        build, (chunk, row, _) = self.build, self.axes
        product, last = build.apply_all(DeltaScanBlocks(*self.recurrence, chunk.size), *self.steps)
        kept = self._renamed(build.apply(Dot((self.key.name,)), product, before), row, self.key)
        return pointwise(build, "add", last, kept)

    def _split(self, x: Value) -> Value:
        """A tensor in chunks. What reads it is the rule, and not the products that the rule is made of: a parameter is
        not one of their matrices (`partita.compiler.passes.readers`).
        """
        divided = self.build.apply(Split(self.over.name, self.axes[:2]), x)
        return self.build.apply(Arrange(divided.type.names), divided)

    def _gates(self, gate: Value) -> tuple[Value, Value, Value]:
        """The products of gates between two positions, up to each, and after each."""
        build, (_, row, column) = self.build, self.axes
        outer = tuple(axis for axis in gate.type.axes if axis.name != row.name)
        begin = build.apply(Expand(outer), self._compared("equal"))
        between = build.apply(LinearScan(row.name), gate, begin)
        before = self._times(self._only(between, column, 0), self._only(gate, row, 0))
        after = self._renamed(self._only(between, row, row.size - 1), column, row)
        return between, before, after

    def _pairs(self, a: Value, b: Value, between: Value) -> Value:
        """The products of the positions of two tensors, times what is between them."""
        _, row, column = self.axes
        b = self._renamed(b, row, column)
        if between.type.has(self.key.name):
            return self.build.apply(Dot((self.key.name,)), self._times(a, between), b)
        return self._times(self.build.apply(Dot((self.key.name,)), a, b), between)

    def _times(self, a: Value, b: Value) -> Value:
        """The elementwise product, in the dtype of a."""
        b = cast(self.build, b, a.type.dtype)
        if set(b.type.names) <= set(a.type.names) or set(a.type.names) <= set(b.type.names):
            return pointwise(self.build, "multiply", a, b)
        return self.build.apply(Dot(()), a, b)

    def _compared(self, comparison: str) -> Value:
        """One where a row and a column compare so, and else zero, in the dtype of accumulation."""
        _, row, column = self.axes
        return where_compared(self.build, comparison, row, column, accumulation(self.dtype))

    def _only(self, x: Value, axis: Axis, position: int) -> Value:
        """One position of an axis."""
        single = Axis(f"{axis.name}~one", 1)
        sliced = self.build.apply(Slice(axis.name, single, position), x)
        return total(self.build, sliced, (single.name,), x.type.dtype)

    def _renamed(self, x: Value, old: Axis, new: Axis) -> Value:
        return self.build.apply(Rename(((old.name, new.name),)), x)


def _longest(size: int, limit: int) -> int:
    """The largest divisor of a number of positions up to a limit."""
    return next(length for length in range(min(size, limit), 0, -1) if size % length == 0)
