"""The records of a schedule: which compute actions each rank runs, in which order.

A schedule is data: one list of `Action`s per rank, made by a pure function of its shape, checked against the
laws (`partita.compiler.laws`), given its communication (`partita.compiler.communication`), simulated, drawn
and executed; always the same lists.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from partita.dsl.brief import shortened
from partita.dsl.source import Span

FORWARD, BACKWARD, WEIGHT, WHOLE_BACKWARD = "F", "B", "W", "BW"
KINDS = (FORWARD, BACKWARD, WEIGHT, WHOLE_BACKWARD)

# The most (rank, chunk, microbatch) triples of a schedule: for each, some ten instructions are written out.
LIMIT = 2**18


@frozen
class Action:
    """One function of a chunk on a microbatch: F, B (gradients of activations), W (of weights), or both: BW."""

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}"


@frozen
class Search:
    """What a search says of its result: the `family` of orders that it is of, its `cost` as simulated (the longest
    time that any rank is occupied), and the `least` cost that any schedule of these stages can have within the memory.
    """

    family: str
    cost: float
    least: float


@frozen
class Schedule:
    """The actions of every pipeline rank.

    `placement[rank][chunk]` is the stage that a rank runs as that chunk; every stage stands there once.
    `bound` is what the schedule promises of each rank's peak of live activations, counted in (chunk,
    microbatch) pairs whose F has run and whose last backward action has not. Without `training` there are
    only F, which keep nothing (evaluation), and the bound is zero.

    `pairs` gives, for each rank, the positions of forwards that are meant to overlap with the whole backward that
    follows them; it is empty where none are. `search` says how good a schedule that was searched for is. `spans` are
    the places of the actions of a schedule that stands in a file.
    """

    name: str
    microbatches: int
    placement: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)
    bound: tuple[int, ...]
    training: bool = True
    pairs: tuple[frozenset[int], ...] = field(default=(), repr=False)
    search: Search | None = field(default=None, eq=False)
    spans: tuple[tuple[Span, ...], ...] = field(default=(), eq=False, repr=False)

    __repr__ = shortened

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks, P."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """The number of stages on each rank, V."""
        return len(self.placement[0])

    @property
    def stages(self) -> int:
        """The number of stages, P·V."""
        return self.ranks * self.chunks

    def home(self, stage: int) -> tuple[int, int]:
        """The (rank, chunk) that runs a stage."""
        for rank, stages in enumerate(self.placement):
            if stage in stages:
                return rank, stages.index(stage)
        raise KeyError(stage)

    def __str__(self) -> str:
        """One line a rank, `F0.0 F0.1 BW0.0 …`."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.actions)


def loop_placement(ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Stage `chunk * ranks + rank` on each rank: Megatron-LM's, and looped BFS's."""
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def v_placement(ranks: int, chunks: int = 2) -> tuple[tuple[int, ...], ...]:
    """Chunk 0 down the ranks, chunk 1 up again, and so on: stages that follow each other at a turn share a rank, which
    hands over without sending.
    """
    return tuple(
        tuple(chunk * ranks + (ranks - 1 - rank if chunk % 2 else rank) for chunk in range(chunks))
        for rank in range(ranks)
    )


def peak_live(actions: Iterable[Action]) -> int:
    """A rank's peak of live activations: pairs whose F has run and whose W or BW has not.

    A rank that runs forwards only keeps nothing.
    """
    live = peak = 0
    kept = False
    for action in actions:
        last = action.kind in (WEIGHT, WHOLE_BACKWARD)
        live += (action.kind == FORWARD) - last
        peak = max(peak, live)
        kept = kept or last
    return peak if kept else 0
