"""What attention and its gradient share: operands, axes, costs, and the source text of the kernels' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from attrs import evolve, frozen

from partita.compiler.layout import is_split
from partita.compiler.ops.op import Argument, Kernel, Op, ShardingRule, agree, broadcast, permuted
from partita.compiler.ops.position import (
    SLICE,
    ZIGZAG,
    Positioned,
    Shards,
    positions_code_of,
    random_text,
    whole_size,
    zigzag_ranks,
)
from partita.compiler.ops.runs import Runs, seen, zigzag_runs
from partita.dsl.check.layouts import GATHER, HEADS
from partita.dsl.types import Axis, Type

# Operands after q, k and v, in their order; and those of them that have a gradient.
EXTRAS = ("mask", "bias", "segments", "sink")
TRAINED = ("bias", "sink")


@frozen
class Attention(Positioned):
    """Operands: q, k, v, then those of EXTRAS that are present.

    `values` is v's axis instead of `along`, if it has one of its own. `window` is the distance from which on positions
    do not see each other, `softcap` bounds the scores (c · tanh(score / c)), `dropout` is the rate at which weights are
    dropped: by random numbers of `key`, which number the scores by the axes `numbered`, with their global sizes: those
    of the queries, then `over`.

    In self-attention, queries may be sharded along `over` with keys and values replicated; what depends on positions
    must then know that of its first query.
    """

    over: str
    along: str
    causal: bool
    scale: float
    mask: bool = False
    bias: bool = False
    values: str | None = None
    window: int | None = None
    softcap: float | None = None
    segments: bool = False
    sink: bool = False
    dropout: float = 0.0
    key: str = ""
    numbered: tuple[tuple[str, int], ...] = ()
    shards: Shards = ()
    fusible = False
    finds_positions = True

    @property
    def structural_key(self) -> Op:
        """Of any key."""
        return evolve(self, key="") if self.key else self

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Whether it drops weights."""
        return bool(self.dropout)

    def vmapped(self, axis: Axis) -> Op | None:
        """With random numbers of its own at each position."""
        if not self.dropout:
            return self
        return evolve(self, numbered=((axis.name, axis.size), *self.numbered))

    def without_dropout(self) -> Op:
        """What an evaluation has in its place."""
        return evolve(self, dropout=0.0, key="", numbered=())

    @property
    def wide(self) -> str:
        """The axis of the values: `along`, unless they have one of their own."""
        return self.values or self.along

    @property
    def extras(self) -> tuple[str, ...]:
        """The operands after q, k and v."""
        return tuple(name for name in EXTRAS if getattr(self, name))

    @property
    def trained(self) -> tuple[int, ...]:
        """The positions of operands that have a gradient."""
        return (0, 1, 2, *(3 + i for i, name in enumerate(self.extras) if name in TRAINED))

    @property
    def materializes(self) -> tuple[str, ...]:
        """What no fused kernel has anywhere, so that the scores are made."""
        options = {"mask": self.mask, "bias": self.bias, "softcap": self.softcap is not None, "dropout": self.random}
        return tuple(name for name, present in options.items() if present)

    @property
    def unfused(self) -> tuple[str, ...]:
        """Its options that no fused kernel has, so that it materializes what that would not: a soft cap and dropout. (A
        mask and a bias are matrices themselves.)
        """
        options = {"softcap": self.softcap is not None, "dropout": self.random}
        return tuple(name for name, present in options.items() if present)

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """Products of other shapes than a single matrix product's."""
        return ()

    def seen_keys(self, operands: Sequence[Type]) -> tuple[int, int]:
        """The keys that each query goes through, all or those of the window; and the size of heads, of queries or of
        values, whichever is larger.
        """
        q, k, v = operands[:3]
        length = k.axis(self.over).size
        size = max(q.axis(self.along).size, v.axis(self.wide).size)
        return length if self.window is None else min(self.window, length), size

    @property
    def begins(self) -> tuple[str, ...]:
        """Positions, if it depends on them; with dropout the coordinates of all queries."""
        if self.dropout:
            return tuple(name for name, _ in self.numbered[:-1])
        return (self.over,) if self.causal or self.window or self.segments else ()

    @property
    def reads_context(self) -> bool:
        """For where a shard begins; with dropout for the seed and the step."""
        return bool(self.dropout) or super().reads_context

    def is_causal(self, axis: str) -> bool:
        """Whether, split along an axis, queries depend on keys and values only at positions up to theirs; and of the
        gradient, whether the terms of their cotangents are zero after there.
        """
        return self.causal and axis == self.over

    def check(self, q: Type, *others: Type) -> None:
        """Sizes must match, except for the queries' own positions."""
        assert agree(q.without([self.over]), *others), (self, q, others)

    def attended(self, q: Type, v: Type) -> Type:
        """q's axes, with that of the values in the place of `along`."""
        wide = v.axis(self.wide)
        return evolve(q, axes=tuple(wide if axis.name == self.along else axis for axis in q.axes))

    # ------------------------------------------------------------ axes

    def exchange(self, rule: ShardingRule) -> str | None:
        """The way in which queries read the keys and values of all positions by a sharding rule
        (`partita.dsl.check.layouts`): by the state of the queries.
        """
        state = rule.operands[0]
        return None if not is_split(state) else GATHER if state == self.over else HEADS

    def orders(self, q: Type, k: Type, v: Type) -> tuple[list[str], list[str], list[str]]:
        """Axes of q in three groups: batch axes that k or v have too; other batch axes; and the query position.

        In self-attention the position is `over`. Otherwise every axis that k and v lack holds queries: the longest is
        taken as the position, and the rest are batch axes along which k and v repeat.
        """
        shared = [n for n in q.names if (k.has(n) or v.has(n)) and n not in (self.over, self.along)]
        own = [n for n in q.names if n not in shared and n not in (self.over, self.along)]
        if q.has(self.over):
            return shared, own, [self.over]
        if not own:
            return shared, [], []
        position = max(own, key=lambda name: q.axis(name).size)
        return shared, [name for name in own if name != position], [position]

    def split_axes(self, q: Type) -> tuple[str, ...]:
        """The batch axes, and the query position of cross attention."""
        return tuple(name for name in q.names if name not in (self.over, self.along))

    def queries(self, types: Sequence[Type]) -> list[str]:
        """q's axes but `along`, in the kernels' order."""
        shared, own, position = self.orders(*types[:3])
        return [*shared, *own, *position]

    def scores(self, types: Sequence[Type]) -> list[str]:
        """Axes of the scores. In self-attention, queries and keys share a name; a mask or bias has it for the keys."""
        return [*("" if name == self.over else name for name in self.queries(types)), self.over]

    # ------------------------------------------------------------ source text

    def call(self, arguments: Sequence[Argument]) -> str:
        """Texts of q, k and v as in `heads`, of other operands with the axes of the scores, and of the options."""
        types = [argument.type for argument in arguments]
        texts = [self.heads(arguments)]
        for word, argument in zip(self.extras, arguments[3:], strict=False):
            axes = self.queries(types) if word == "sink" else self.scores(types)
            texts.append(f"{word}={broadcast(argument, axes)}")
        groups = tuple(map(len, self.orders(*types[:3])))
        texts += [f"groups={groups}", f"causal={self.causal}", f"scale={self.scale!r}"]
        texts += [f"{word}={value!r}" for word in ("window", "softcap") if (value := getattr(self, word)) is not None]
        if self.dropout:
            texts += [f"keep={self._kept(types)}", f"rate={self.dropout!r}"]
        if (places := self._places(types[0])) is not None:
            texts.append(places)
        return ", ".join(texts)

    def _places(self, q: Type) -> str | None:
        """Text of where queries and keys stand, if that matters and they do not all stand in order."""
        if self.over not in self.begins or not q.has(self.over):
            return None
        own = positions_code_of(q.axis(self.over), self.shards)
        if zigzag_ranks(self.over, self.shards) is None:
            return None if own == "0" else f"start={own}"
        return f"places=({own}, {self._keys_text(q)})"

    def _keys_text(self, q: Type) -> str:
        """Text of where the keys stand, which are those of all positions."""
        whole = Axis(self.over, whole_size(q.axis(self.over), self.shards))
        return positions_code_of(whole, tuple(cut for cut in self.shards if cut[1] == ZIGZAG))

    def _kept(self, types: Sequence[Type]) -> str:
        """Text of the mask of weights that are not dropped."""
        q, k = types[:2]
        axes = [q.axis(name) for name, _ in self.numbered[:-1]]
        shape = (*(axis.size for axis in axes), k.axis(self.over).size)
        starts = [
            *(positions_code_of(axis, self.shards) for axis in axes),
            self._keys_text(q) if q.has(self.over) else "0",
        ]
        text = random_text("keep", self.dropout, self.key, shape, starts, self.numbered, "bool")
        names = [*("" if axis.name == self.over else axis.name for axis in axes), self.over]
        return permuted(text, names, self.scores(types))

    def heads(self, arguments: Sequence[Argument]) -> str:
        """Texts of q as [shared, own, position, along], of k as [shared, over, along], and of v likewise."""
        q, k, v = arguments[:3]
        shared, own, position = self.orders(q.type, k.type, v.type)
        texts = [permuted(q.text, q.type.names, [*shared, *own, *position, self.along])]
        for x, last in ((k, self.along), (v, self.wide)):
            have = [name for name in shared if x.type.has(name)]
            text = permuted(x.text, x.type.names, [*have, self.over, last])
            if have != shared:
                text += f"[{', '.join(':' if name in have else 'None' for name in shared)}]"
            texts.append(text)
        return ", ".join(texts)

    def usual(self, arguments: Sequence[Argument]) -> bool:
        """Whether q, k and v are [batch, heads, position, along], with nothing else and no query offset."""
        if self.extras or self.materializes or self.window:
            return False
        q, k, v = (argument.type for argument in arguments)
        if v.axis(self.wide).size != q.axis(self.along).size:
            return False
        shared, own, position = self.orders(q, k, v)
        alike = all(x.has(name) for x in (k, v) for name in shared)
        whole = self._places(q) is None
        return (len(shared), len(own), len(position)) == (2, 0, 1) and alike and whole

    def text(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A call of the kernel of attention, with results in q's order."""
        names = self.queries([argument.type for argument in arguments])
        orders = (results[0].names, results[1].names)
        first = tuple([*names, self.wide].index(name) for name in orders[0])
        second = tuple(names.index(name) for name in orders[1])
        if self.usual(arguments):
            return f"kernels.attend_heads({self.heads(arguments)}, {self.causal}, {self.scale!r}, ({first}, {second}))"
        return f"kernels.attend({self.call(arguments)}, orders=({first}, {second}))"

    def gradient_text(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A call of the kernel of its gradient, with results in their operands' orders."""
        inputs, (o, denominator, d) = arguments[:-3], arguments[-3:]
        types = [argument.type for argument in inputs]
        names = self.queries(types)
        views = ", ".join(
            permuted(x.text, x.type.names, order)
            for x, order in ((o, [*names, self.wide]), (denominator, names), (d, [*names, self.wide]))
        )
        shared = self.orders(*types[:3])[0]
        layouts = [[*names, self.along]]
        ends = zip(types[1:3], (self.along, self.wide), strict=True)
        layouts += [[*(n for n in shared if x.has(n)), self.over, last] for x, last in ends]
        for i, word in enumerate((name for name in self.extras if name in TRAINED), 3):
            axes = names if word == "sink" else self.scores(types)
            layouts.append([name for name in axes if name and results[i].has(name)])
        shapes = [
            (tuple(type.axis(each).size for each in layout), tuple(map(layout.index, type.names)))
            for layout, type in zip(layouts, results, strict=True)
        ]  # emitted as tuples, which Python stores as constants
        if self.usual(inputs):
            orders = tuple(order for _, order in shapes)
            heads = self.heads(inputs)
            return f"kernels.attend_heads_gradient({heads}, {views}, {self.causal}, {self.scale!r}, {orders})"
        return f"kernels.attend_gradient({self.call(inputs)}, result=({views}), shapes={tuple(shapes)})"

    # ------------------------------------------------------------ costs

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By the number of queries, the number of keys that each sees, and the mean size of a key and a value; in
        pieces, which cost more than their arithmetic, like all at once.
        """
        q, k, v = operands[:3]
        along = q.axis(self.along).size
        name = ".".join([self.name, *["causal"] * self.causal, *["scores"] * bool(self.materializes)])
        sizes = (q.elements / along, float(k.axis(self.over).size), (along + v.axis(self.wide).size) / 2)
        whole = Kernel(name, sizes, float(self.flops(operands, results)))
        return whole._replace(name=f"{name}.pieces", alike=whole) if self.in_pieces(operands) else whole

    def in_pieces(self, operands: Sequence[Type]) -> bool:
        """Whether queries may stand elsewhere than at the first keys, so that attention is computed in pieces."""
        split = any(name == self.over for name, *_ in self.shards)
        return split and operands[0].has(self.over) and self.over in self.begins

    def counted(self, operands: Sequence[Type], keys: int, values: int) -> int:
        """FLOPs of some products of queries with `along`, and some with the axis of the values: of the pairs that see
        each other, on the rank that has most of them, in the mean over its slices.
        """
        q, k, v = operands[:3]
        along, length = q.axis(self.along).size, k.axis(self.over).size
        pairs = q.elements // along * length
        full = 2 * pairs * (keys * along + values * v.axis(self.wide).size)
        if not self.causal and (self.window is None or self.window >= length):
            return full
        if not q.has(self.over):
            return full // 2 if self.causal else full
        slices = prod(parts for name, over, parts in self.shards if (name, over) == (self.over, SLICE))
        return full * self.pairs(q, k, slices) // (2 * q.axis(self.over).size * length * slices)

    def pairs(self, q: Type, k: Type, slices: int) -> int:
        """Twice the pairs of positions that see each other, on the rank that has most of them, in all slices."""
        keys = ((0, k.axis(self.over).size),)
        each = [seen(queries, keys, self.causal, self.window) for queries in self.of_ranks(q.axis(self.over))]
        ranks = len(each) // slices  # slices are the outermost cut
        return max(sum(each[rank::ranks]) for rank in range(ranks))

    def of_ranks(self, own: Axis) -> list[Runs]:
        """The positions of the queries of each shard, of which `own` is one."""
        length, ranks = whole_size(own, self.shards), zigzag_ranks(self.over, self.shards)
        starts = range(0, length, own.size)
        if ranks is None:
            return [((start, own.size),) for start in starts]
        return [zigzag_runs(start, own.size, length, ranks) for start in starts]
