"""Which way a node is split along each mesh axis: the one that moves least.

One mesh axis at a time: its candidates are the ways of the op, and everything whole. What a candidate moves is what
its operands need to come there (a copy that exists already is free) and the results' way home. Weights stay: moving a
parameter, or its gradient, counts a thousandfold. Of candidates that move equally, the one that computes least is
taken, then the one that leaves fewer partial results.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from partita.compiler.graph import Node
from partita.compiler.layout import MAX, SUM, Layout, State, is_split, layout_of, local_type, split_axes
from partita.compiler.mesh import Mesh
from partita.compiler.ops.collective import LOCAL_SECONDS
from partita.compiler.ops.op import Op, Way
from partita.compiler.sharding.moves import IMPOSSIBLE, Moves
from partita.dsl.brief import shortened
from partita.dsl.types import Type

# A parameter is moved only where nothing else is possible.
WEIGHTS_STAY = 1000.0


@frozen(cache_hash=True)
class Operand:
    """What is known of an operand: its whole type, where it lies already, and its home.

    `free`: it can be had in any layout (inputs, positions, random numbers); `stays`: it is a parameter, or what a
    replacement was made for, and is moved only where nothing else is possible.
    """

    type: Type
    available: tuple[Layout, ...]
    home: Layout
    free: bool = False
    stays: bool = False


@frozen(cache_hash=True)
class Result:
    """What is known of a result. `deferred`: parts of its sum may wait for the end of the step, free of charge.

    `stays`: it is the gradient of a parameter, and made where that is.
    """

    type: Type
    home: Layout
    deferred: bool = False
    stays: bool = False


@frozen
class Option:
    """A candidate along one mesh axis: what it moves, in seconds, and whether it was taken. What `moves_weights` counts
    a thousandfold."""

    mesh_axis: str
    way: Way
    seconds: float
    taken: bool
    moves_weights: bool = False

    __repr__ = shortened


@frozen
class Choice:
    """The layouts that a node's operands must have and its results then have; and what else there was."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    options: tuple[Option, ...]

    __repr__ = shortened


@define(eq=False)
class Chooser:
    """Chooses for nodes on one mesh; alike nodes are decided once."""

    moves: Moves
    _known: dict[tuple[Op, tuple[Operand, ...], tuple[Result, ...]], Choice] = field(factory=dict)

    @property
    def mesh(self) -> Mesh:
        """That on which the layouts are."""
        return self.moves.mesh

    def choose(self, op: Op, operands: tuple[Operand, ...], results: tuple[Result, ...]) -> Choice:
        """The layouts of operands and results."""
        key = (op, operands, results)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._decide(op, operands, results)
        return found

    def _decide(self, op: Op, operands: Sequence[Operand], results: Sequence[Result]) -> Choice:
        ways = op.ways([x.type for x in operands], [y.type for y in results])
        whole = Way((None,) * len(operands), (None,) * len(results))
        chosen: dict[str, Way] = {}
        options: list[Option] = []
        sizes = self.mesh.sizes
        for over in self.mesh.sharding:
            rated: list[tuple[tuple[float, float, int], Way]] = []
            for way in (whole, *ways):
                if not _divides(way, over, chosen, operands, results, sizes):
                    continue
                seconds = sum(self._operand(x, over, state) for x, state in zip(operands, way.operands, strict=True))
                seconds += sum(self._result(y, over, state) for y, state in zip(results, way.results, strict=True))
                if seconds == IMPOSSIBLE:
                    continue
                shares = any(is_split(state) for state in (*way.operands, *way.results))
                partial = sum(
                    state in (SUM, MAX) and not y.deferred for y, state in zip(results, way.results, strict=True)
                )
                rated.append(((float(f"{seconds:.9g}"), 1 / sizes[over] if shares else 1.0, partial), way))
            assert rated, (op, operands)
            _, best = min(rated, key=lambda pair: pair[0])
            chosen[over] = best
            for rate, way in rated:
                options.append(
                    Option(over, way, rate[0], way is best, self._moves_weights(way, over, operands, results))
                )

        def layouts(states: Sequence[Sequence[State]]) -> tuple[Layout, ...]:
            return tuple(layout_of(zip(self.mesh.sharding, column, strict=True)) for column in states)

        by_operand = [[chosen[over].operands[i] for over in self.mesh.sharding] for i in range(len(operands))]
        by_result = [[chosen[over].results[j] for over in self.mesh.sharding] for j in range(len(results))]
        return Choice(layouts(by_operand), layouts(by_result), tuple(options))

    # ------------------------------------------------------------ costs

    def _operand(self, x: Operand, over: str, wanted: State) -> float:
        if x.free:
            return 0.0 if wanted not in (SUM, MAX) else IMPOSSIBLE
        factor = WEIGHTS_STAY if x.stays else 1.0
        return min(self._seconds(x.type, layout, over, wanted, x.home) for layout in x.available) * factor

    def _result(self, y: Result, over: str, state: State) -> float:
        if y.deferred and y.home.state(over) is None and state in (SUM, None):
            return 0.0
        factor = WEIGHTS_STAY if y.stays else 1.0
        # Along the other mesh axes it is thought to lie as at home.
        layout = layout_of((name, state if name == over else y.home.state(name)) for name in self.mesh.sharding)
        return factor * self._seconds(y.type, layout, over, y.home.state(over), y.home)

    def _moves_weights(self, way: Way, over: str, operands: Sequence[Operand], results: Sequence[Result]) -> bool:
        least = WEIGHTS_STAY * LOCAL_SECONDS  # a local step moves nothing
        return any(
            x.stays and self._operand(x, over, state) > least for x, state in zip(operands, way.operands, strict=True)
        ) or any(
            y.stays and self._result(y, over, state) > least for y, state in zip(results, way.results, strict=True)
        )

    def _seconds(self, type: Type, layout: Layout, over: str, wanted: State, home: Layout) -> float:
        """The time it takes to change the state along one mesh axis."""
        bytes = float(type.bytes)
        for name, other in layout.states:
            if name != over and is_split(other):
                bytes /= self.mesh.sizes[name]
        return self.moves.change_seconds(bytes, over, layout.state(over), wanted, home.state(over))


def _divides(
    way: Way,
    over: str,
    chosen: dict[str, Way],
    operands: Sequence[Operand],
    results: Sequence[Result],
    sizes: dict[str, int],
) -> bool:
    """Whether what a way splits can be split, beside what is split already."""
    types = [x.type for x in operands] + [y.type for y in results]
    for position, (type, state) in enumerate(zip(types, (*way.operands, *way.results), strict=True)):
        if not is_split(state):
            continue
        parts = sizes[over]
        for other, taken in chosen.items():
            if (*taken.operands, *taken.results)[position] == state:
                parts *= sizes[other]
        if type.axis(state).size % parts:
            return False
    return True


def localized(node: Node, operands: Sequence[Layout], results: Sequence[Layout], mesh: Mesh) -> Op:
    """The op of a node on what one rank holds, when its operands and results have these layouts."""
    op = node.op
    pairs = list(zip((*node.inputs, *node.outputs), (*operands, *results), strict=True))
    for over in mesh.sharding:
        for axis in split_axes(layout.state(over) for _, layout in pairs):
            value, layout = next((value, at) for value, at in pairs if at.state(over) == axis)
            size = local_type(value.type, layout, mesh.sizes).axis(axis).size
            op = op.sharded(axis, size, over, mesh.sizes[over])
    return op
