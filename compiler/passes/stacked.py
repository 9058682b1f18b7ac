"""Shares the work on whole matrices among the ranks that store parts of them.

An update may need something of whole matrices (`OfMatrices`), such as Muon an orthogonal matrix, while parts of these
are stored on several ranks. Matrices of one size that are stored alike are stacked, from all parameters that the same
stages update; the stack is resharded from parts of matrices to whole ones, each rank works on its share, and the
results go back to where parts of them are stored:

    [matrix, rows/data, columns]  →  all-to-all  →  [matrix/data, rows, columns]  →  all-to-all  →  back

As many matrices as the ranks divide evenly are shared so. Of the others, which are fewer than the ranks unless
parameters are stacks themselves, the cost model decides along which mesh axes they are shared, in a stack filled up
with zeros, and along which each rank gathers all of them. What is split already along an axis of a parameter that
stacks matrices, such as experts, stays so.

A stack is no larger than a bucket on each rank, or one matrix, if that is larger: the exchange of one overlaps with the
work on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import ceil, prod

from attrs import evolve, field, frozen

from partita.compiler.graph import Node, Value, outputs_of
from partita.compiler.layout import Layout, global_type, layout_of, local_type
from partita.compiler.ops.op import Op
from partita.compiler.ops.stack import MATRIX, OfMatrices, Stack, Unstack
from partita.compiler.passes.buckets import BUCKET_BYTES
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.passes.sharded_builder import ShardedBuilder
from partita.dsl.reprs import Shortened
from partita.dsl.syntax.source import Span


@frozen(eq=False, repr=False)
class Stacked(Shortened):
    """Nodes that several updates share, between the `prepare` and the `update` of each of these parameters, all of
    which `stages` update.
    """

    parameters: tuple[str, ...]
    stages: tuple[int, ...]
    nodes: tuple[Node, ...]


@frozen(eq=False)
class _Form:
    """A tensor of matrices as part of a stack: `result` is to be what `op` makes of `value`.

    In the stack it has `matrices` matrices; its axes are in `order`, the last of which are called `names` there and
    have `sizes` and the mesh axes `over` which they are split. `kept` of them tell matrices apart.
    """

    op: OfMatrices
    value: Value
    result: Value
    parameter: str
    order: tuple[str, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    over: tuple[tuple[str, ...], ...]
    kept: int
    matrices: int = field(kw_only=True)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for those that can be in one stack."""
        settings = self.op.of((), ())
        return settings, self.value.type.dtype, self.names, self.sizes, self.over, self.kept

    @property
    def merged(self) -> tuple[int, ...]:
        """The sizes of the axes that become the stack's."""
        return tuple(self.value.type.axis(name).size for name in self.order[: -len(self.names)])

    @property
    def dealt(self) -> tuple[str, ...]:
        """The mesh axes along which matrices are split."""
        return tuple(over for own in self.over[self.kept :] for over in own)


class StackingBuilder(ShardedBuilder):
    """A builder that defers operations on whole matrices of which operands are split: their results are made by
    `stacked`.
    """

    _deferred: list[_Form]

    def __init__(self, resharding: Resharding, taken: Sequence[str], seconds: Callable[[Node], float]) -> None:
        super().__init__(resharding, taken)
        self.seconds = seconds
        self._deferred = []

    def apply_all(self, op: Op, *inputs: Value, name: str | None = None) -> tuple[Value, ...]:
        """As for any operation, or its result before there is any node that makes it."""
        if isinstance(op, OfMatrices):
            (value,) = inputs
            if any(value.layout.over(axis) for side in op.sides(value.type) for axis in side):
                result = evolve(self.value(name or f"{self.scope}.{op.label}", value.type), layout=value.layout)
                self._deferred.append(self._form(op, value, result))
                return (result,)
        return super().apply_all(op, *inputs, name=name)

    def deferred(self, nodes: Sequence[Node]) -> bool:
        """Whether some deferred operation reads a result of these nodes."""
        outputs = outputs_of(nodes)
        return any(each.value in outputs for each in self._deferred)

    def _form(self, op: OfMatrices, value: Value, result: Value) -> _Form:
        type = global_type(value.type, value.layout, self.resharding.mesh.sizes)

        def by_split(axis: str) -> tuple[bool, tuple[str, ...], int]:
            over = value.layout.over(axis)
            return not over, over, -type.axis(axis).size

        # The operation is alike for a matrix and its transpose: the side that is split first is that of the rows.
        rows, columns = sorted(
            (sorted(side, key=by_split) for side in op.sides(type)), key=lambda side: list(map(by_split, side))
        )
        kept = sorted((axis for axis in op.stacked if value.layout.over(axis)), key=by_split)
        merged = [axis for axis in op.stacked if axis not in kept]
        own = (*kept, *rows, *columns)
        words = (("stack", kept), ("rows", rows), ("columns", columns))
        return _Form(
            op,
            value,
            result,
            self.scope,
            (*merged, *own),
            tuple(f"{word}{i + 1}" if i else word for word, axes in words for i in range(len(axes))),
            tuple(type.axis(axis).size for axis in own),
            tuple(value.layout.over(axis) for axis in own),
            len(kept),
            matrices=prod(type.axis(axis).size for axis in merged),
        )

    # ------------------------------------------------------------ stacks

    def stacked(self, stages: Mapping[str, tuple[int, ...]], spans: Mapping[str, Span | None]) -> tuple[Stacked, ...]:
        """What makes the results of all deferred operations. By parameter: the stages that update it, and the place of
        the rule by which they do.
        """
        groups: dict[tuple[object, ...], list[_Form]] = {}
        for each in self._deferred:
            groups.setdefault((*each.key, stages[each.parameter]), []).append(each)
        stacks = []
        for group in groups.values():
            for part in self._cut(group):
                self.nodes = []
                self.scope = f"stack of {part[0].parameter}"
                self.span = spans.get(part[0].parameter)
                self._shared(part)
                names = tuple(dict.fromkeys(each.parameter for each in part))
                stacks.append(Stacked(names, stages[names[0]], tuple(self.nodes)))
        return tuple(stacks)

    def _ranks(self, over: Sequence[str]) -> int:
        return prod(self.resharding.mesh.sizes[each] for each in over)

    def _cut(self, group: Sequence[_Form]) -> Iterator[Sequence[_Form]]:
        """Parts of a group: as many matrices as all ranks divide evenly and a bucket holds, and at last the others."""
        ranks = self._ranks(group[0].dealt)
        share = [each.value.type.bytes for each in group]
        start = 0
        while start < len(group):
            end, matrices, part_bytes = None, 0, 0
            for i in range(start, len(group)):
                matrices, part_bytes = matrices + group[i].matrices, part_bytes + share[i]
                if end is not None and part_bytes > BUCKET_BYTES:
                    break
                if matrices % ranks == 0:
                    end = i + 1
            yield group[start:end]
            start = end or len(group)

    def _shared(self, part: Sequence[_Form]) -> None:
        """Appends the nodes for some matrices of one size."""
        first = part[0]
        if sum(each.matrices for each in part) % self._ranks(first.dealt) == 0:
            return self._stack(part, first.dealt)
        choices = product(*(((over,), ()) for over in first.dealt))
        over = min((tuple(x for each in choice for x in each) for choice in choices), key=lambda o: self._cost(part, o))
        if over:
            return self._stack(part, over)
        for each in part:
            self._gather(each)
        return None

    def _layouts(self, first: _Form, over: Sequence[str]) -> tuple[Layout, Layout]:
        """That of a stack, and that in which it is shared along these mesh axes and replicated along others."""
        stored = {mesh: name for name, own in zip(first.names, first.over, strict=True) for mesh in own}
        kept = {mesh: stored[mesh] for own in first.over[: first.kept] for mesh in own}
        dealt = kept | dict.fromkeys(over, MATRIX)
        axes = self.resharding.mesh.sharding
        return layout_of((axis, stored.get(axis)) for axis in axes), layout_of((axis, dealt.get(axis)) for axis in axes)

    def _operation(self, first: _Form) -> OfMatrices:
        """That on a stack."""
        rows = tuple(name for name in first.names if name.startswith("rows"))
        return first.op.of(rows, (MATRIX, *first.names[: first.kept]))

    def _cost(self, part: Sequence[_Form], over: Sequence[str]) -> float:
        """Seconds of sharing some matrices along these mesh axes."""
        stack, sizes = self._stack_of(part, over), self.resharding.mesh.sizes
        stored, dealt = self._layouts(part[0], over)
        (local,) = stack.infer(*(each.value.type for each in part))
        shared = local_type(global_type(local, stored, sizes), dealt, sizes)
        value = Value("", shared)
        work = self.seconds(Node(self._operation(part[0]), (value,), (value,), ""))
        exchange = self.resharding.cost(local, stored, dealt)
        return exchange + work + self.resharding.cost(shared, dealt, stored)

    def _stack_of(self, part: Sequence[_Form], over: Sequence[str]) -> Stack:
        ranks = self._ranks(over)
        count = ceil(sum(each.matrices for each in part) / ranks) * ranks
        return Stack(tuple(each.order for each in part), part[0].names, count)

    def _stack(self, part: Sequence[_Form], over: Sequence[str]) -> None:
        """Each rank along these mesh axes has its share of the matrices."""
        stack = self._stack_of(part, over)
        stored, dealt = self._layouts(part[0], over)
        (whole,) = self.laid_out(stack, [each.value for each in part], (stored,))
        (output,) = self.laid_out(self._operation(part[0]), (self.moved(whole, dealt),), (dealt,))
        back = self.moved(output, stored)
        starts = stack.starts([each.value.type for each in part])
        for each, start in zip(part, starts, strict=False):
            op = Unstack(start, each.order, each.names, each.merged, each.value.type.names)
            self._append(op, back, each.result)

    def _gather(self, each: _Form) -> None:
        """Each rank has all of the matrices."""
        kept = {axis for axis in each.op.stacked if each.value.layout.over(axis)}
        whole = layout_of((over, state if state in kept else None) for over, state in each.value.layout.states)
        (output,) = self.laid_out(each.op, (self.moved(each.value, whole),), (whole,))
        self.moved(output, each.result.layout)
        self.nodes[-1] = evolve(self.nodes[-1], outputs=(each.result,))

    def _append(self, op: Op, value: Value, result: Value) -> None:
        self.nodes.append(Node(op, (value,), (result,), self.scope, self.span, self.phase, self.stage))
