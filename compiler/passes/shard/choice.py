"""Chooses how a node is split along each mesh axis: by the sharding rule with the cheapest resharding.

Mesh axes are decided one at a time. Candidates are the sharding rules of the op, and full replication. A candidate
costs the resharding of its operands (a copy that exists already is free) and of the results to their default layouts.
Weights stay: resharding a matrix or its gradient counts a thousandfold, except where activations would have to be
gathered that an earlier rule splits otherwise. Ties are broken by the least computation, then by the fewest partial
results, then by resharding late: what is exchanged for one operation may serve the next as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from attrs import define, field, frozen

from partita.compiler.graph import Node
from partita.compiler.layout import MAX, SUM, Layout, State, is_split, layout_of, local_type, split_axes
from partita.compiler.mesh import Mesh
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.collective import LOCAL_SECONDS
from partita.compiler.ops.op import Op, ShardingRule
from partita.compiler.passes.shard.resharding import IMPOSSIBLE, Resharding
from partita.dsl.check.layouts import GATHER, HEADS, RING
from partita.dsl.diagnostic import refuse
from partita.dsl.reprs import Shortened
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

# What each exchange needs.
FITS = {
    GATHER: "choose sizes that divide evenly",
    HEADS: "choose sizes so that some axis of heads divides evenly",
    RING: "no window, mask, bias, segments, sink, soft cap, dropout or slices, and a single mesh axis",
}
# A parameter is resharded only if nothing else is possible, or if it must be for the sake of an earlier rule.
WEIGHT_PENALTY, RULE_PENALTY = 1e3, 1e6
# A model has hundreds of decisions.
MAX_CHOOSERS, MAX_KNOWN = 8, 10_000


@frozen(cache_hash=True)
class Operand:
    """An operand: its global type, the layouts in which it exists, and its default layout.

    `free`: available in any layout at no cost (inputs, positions, random numbers); `stays`: a parameter, or what a
    replacement was made for, which is resharded only if nothing else is possible; `written`: what the operation writes
    in place, which is never resharded.
    """

    type: Type
    available: tuple[Layout, ...]
    default: Layout
    free: bool = False
    stays: bool = False
    written: bool = False


@frozen(cache_hash=True)
class Result:
    """A result. `deferred`: it may stay partial until the end of the step, at no cost.

    `stays`: it is the gradient of a parameter, and is computed where that is.
    """

    type: Type
    default: Layout
    deferred: bool = False
    stays: bool = False


@frozen(repr=False)
class Option(Shortened):
    """A candidate along one mesh axis: its cost, and whether it was taken. With `reshards_weights`, the `seconds` of
    weights count a thousandfold.
    """

    mesh_axis: str
    rule: ShardingRule
    seconds: float
    taken: bool
    reshards_weights: bool = False


@frozen(repr=False)
class Choice(Shortened):
    """The layouts that a node's operands must have and its results then have, and the candidates."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    options: tuple[Option, ...]


@frozen
class Exchange:
    """How operations along an axis exchange over a mesh axis that splits it (`Attention.exchange`), and the rule's
    place. The axis of the batch takes no part.
    """

    how: str
    batch: str
    span: Span

    def allows(self, op: Op, rule: ShardingRule) -> bool:
        """Whether a sharding rule exchanges so."""
        return isinstance(op, Attention) and op.exchange(rule) == self.how and rule.operands[0] != self.batch


@define(eq=False)
class Chooser:
    """Chooses for nodes on one mesh; equal nodes are decided once. `exchanges` are those that the layout says, by axis
    and mesh axis.
    """

    resharding: Resharding
    exchanges: Mapping[tuple[str, str], Exchange] = field(factory=dict)
    _known: dict[tuple[Op, tuple[Operand, ...], tuple[Result, ...]], Choice] = field(factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layouts."""
        return self.resharding.mesh

    def choose(self, op: Op, operands: tuple[Operand, ...], results: tuple[Result, ...]) -> Choice:
        """The layouts of operands and results."""
        key = (op, operands, results)
        choice = self._known.get(key)
        if choice is None:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            choice = self._known[key] = self._decide(op, operands, results)
        return choice

    def _decide(self, op: Op, operands: Sequence[Operand], results: Sequence[Result]) -> Choice:
        rules = op.sharding_rules([x.type for x in operands], [y.type for y in results])
        whole = ShardingRule((None,) * len(operands), (None,) * len(results))
        chosen: dict[str, ShardingRule] = {}
        options: list[Option] = []
        sizes = self.mesh.sizes
        for over in self.mesh.sharding:
            rated: list[tuple[tuple[float, float, int, float], ShardingRule, float]] = []
            exchange = self._said(op, over, operands)
            for rule in (whole, *rules):
                if exchange is not None and not exchange.allows(op, rule):
                    continue
                if not _divides(rule, over, chosen, operands, results, sizes):
                    continue
                before, forbidden = self._operands(rule, over, operands, results)
                seconds = before
                seconds += sum(self._result(y, over, state) for y, state in zip(results, rule.results, strict=True))
                if seconds == IMPOSSIBLE:
                    continue
                shares = any(is_split(state) for state in (*rule.operands, *rule.results))
                partial = sum(
                    state in (SUM, MAX) and not y.deferred for y, state in zip(results, rule.results, strict=True)
                )
                work = 1 / sizes[over] if shares else 1.0
                key = _rounded(seconds + RULE_PENALTY * forbidden), work, partial, _rounded(before)
                rated.append((key, rule, _rounded(seconds)))
            if not rated and exchange is not None:
                raise refuse(
                    "E0419",
                    f"`{op.label}` cannot be exchanged over `{over}` of {sizes[over]} by `{exchange.how}`",
                    exchange.span,
                    notes=[f"the queries are {operands[0].type}"],
                    help=f"{FITS[exchange.how]}; or another exchange",
                )
            assert rated, (op, operands)
            _, best, _ = min(rated, key=lambda each: each[0])
            chosen[over] = best
            for _, rule, seconds in rated:
                options.append(
                    Option(over, rule, seconds, rule is best, self._reshards_weights(rule, over, operands, results))
                )

        def layouts(states: Sequence[Sequence[State]]) -> tuple[Layout, ...]:
            return tuple(layout_of(zip(self.mesh.sharding, column, strict=True)) for column in states)

        by_operand = [[chosen[over].operands[i] for over in self.mesh.sharding] for i in range(len(operands))]
        by_result = [[chosen[over].results[j] for over in self.mesh.sharding] for j in range(len(results))]
        return Choice(layouts(by_operand), layouts(by_result), tuple(options))

    def _said(self, op: Op, over: str, operands: Sequence[Operand]) -> Exchange | None:
        """How the layout says that an operation is exchanged over a mesh axis that splits its first operand."""
        if not isinstance(op, Attention) or operands[0].default.state(over) != op.over:
            return None
        return self.exchanges.get((op.over, over))

    # ------------------------------------------------------------ costs

    def _operands(
        self, rule: ShardingRule, over: str, operands: Sequence[Operand], results: Sequence[Result]
    ) -> tuple[float, float]:
        """The cost of what the rule needs of the operands, and how much of it should not be.

        Activations are not gathered along an axis that an earlier rule of the layout splits in the result, too, nor
        moved at all where a weight is moved: that is for their sake.
        """
        undone = _undone(rule, over, results) if any(x.stays for x in operands) else None
        moves = any(self._moves(x, over, state) for x, state in zip(operands, rule.operands, strict=True))
        seconds = forbidden = 0.0
        for x, state in zip(operands, rule.operands, strict=True):
            default, cost = x.default.state(over), self._operand(x, over, state)
            leaves = not x.stays and is_split(default) and (moves or (state is None and default == undone))
            seconds += cost
            forbidden += cost if leaves else 0.0
        return seconds, forbidden

    def _moves(self, x: Operand, over: str, state: State) -> bool:
        """Whether a weight has to be moved; a local step communicates nothing."""
        return x.stays and self._operand(x, over, state) > WEIGHT_PENALTY * LOCAL_SECONDS

    def _operand(self, x: Operand, over: str, target: State) -> float:
        if x.written:
            return 0.0 if target == x.default.state(over) else IMPOSSIBLE
        if x.free:
            return 0.0 if target not in (SUM, MAX) else IMPOSSIBLE
        factor = WEIGHT_PENALTY if x.stays else 1.0
        return min(self._seconds(x.type, layout, over, target, x.default) for layout in x.available) * factor

    def _result(self, y: Result, over: str, state: State) -> float:
        if y.deferred and y.default.state(over) is None and state in (SUM, None):
            return 0.0
        factor = WEIGHT_PENALTY if y.stays else 1.0
        # Along the other mesh axes, the default layout is assumed.
        layout = layout_of((name, state if name == over else y.default.state(name)) for name in self.mesh.sharding)
        return factor * self._seconds(y.type, layout, over, y.default.state(over), y.default)

    def _reshards_weights(
        self, rule: ShardingRule, over: str, operands: Sequence[Operand], results: Sequence[Result]
    ) -> bool:
        threshold = WEIGHT_PENALTY * LOCAL_SECONDS
        return any(self._moves(x, over, state) for x, state in zip(operands, rule.operands, strict=True)) or any(
            y.stays and self._result(y, over, state) > threshold for y, state in zip(results, rule.results, strict=True)
        )

    def _seconds(self, type: Type, layout: Layout, over: str, target: State, default: Layout) -> float:
        """The time to change the state along one mesh axis. What is partial along another, of which each rank has all,
        is first reduced to its default state there: so a path does it where that is less to send.
        """
        bytes = float(type.bytes)
        for name, state in layout.states:
            other = default.state(name) if state in (SUM, MAX) else state
            if name != over and is_split(other):
                bytes /= self.mesh.sizes[name]
        return self.resharding.change_seconds(bytes, over, layout.state(over), target, default.state(over))


@lru_cache(maxsize=MAX_CHOOSERS)
def chooser(mesh: Mesh, exchanges: tuple[tuple[tuple[str, str], Exchange], ...]) -> Chooser:
    """The chooser for a mesh and what a layout says of exchanges. What is decided for training is known to evaluation,
    and to later compilations in the same process.
    """
    return Chooser(Resharding(mesh), dict(exchanges))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.9g}")


def _undone(rule: ShardingRule, over: str, results: Sequence[Result]) -> State:
    """The axis along which a result is split by default, where a rule splits it along another."""
    for y, state in zip(results, rule.results, strict=True):
        default = y.default.state(over)
        if is_split(default) and is_split(state) and state != default:
            return default
    return None


def _divides(
    rule: ShardingRule,
    over: str,
    chosen: dict[str, ShardingRule],
    operands: Sequence[Operand],
    results: Sequence[Result],
    sizes: dict[str, int],
) -> bool:
    """Whether the splits of a rule divide evenly, together with those chosen already."""
    types = [x.type for x in operands] + [y.type for y in results]
    for position, (type, state) in enumerate(zip(types, (*rule.operands, *rule.results), strict=True)):
        if not is_split(state):
            continue
        parts = sizes[over]
        for other, earlier in chosen.items():
            if (*earlier.operands, *earlier.results)[position] == state:
                parts *= sizes[other]
        if type.axis(state).size % parts:
            return False
    return True


def local_op(node: Node, operands: Sequence[Layout], results: Sequence[Layout], mesh: Mesh) -> Op:
    """The op of a node on one rank's shards, for these layouts of its operands and results."""
    op = node.op
    pairs = list(zip((*node.inputs, *node.outputs), (*operands, *results), strict=True))
    for over in mesh.sharding:
        for axis in split_axes(layout.state(over) for _, layout in pairs):
            value, layout = next((value, at) for value, at in pairs if at.state(over) == axis)
            size = local_type(value.type, layout, mesh.sizes).axis(axis).size
            op = op.sharded(axis, size, over, mesh.sizes[over])
    return op
