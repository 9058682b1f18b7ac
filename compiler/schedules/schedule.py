"""The records of a schedule: which compute actions each rank runs, in which order.

A schedule is data: one list of `Action`s per rank, built by a pure function of its shape. The same lists are checked
(`partita.compiler.schedules.invariants`), given their communication (`partita.compiler.schedules.communication`),
simulated, drawn and executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from attrs import field, frozen

from partita.dsl.reprs import Shortened
from partita.dsl.syntax.source import Span

FORWARD, BACKWARD, WEIGHT, FULL_BACKWARD = "F", "B", "W", "BW"
KINDS = (FORWARD, BACKWARD, WEIGHT, FULL_BACKWARD)
# Copies of what a microbatch keeps between F and its backward pass (`partita.compiler.schedules.offload`).
OFFLOAD, LOAD = "O", "L"
COPIES = (OFFLOAD, LOAD)

# The most (rank, chunk, microbatch) triples of a schedule; each takes about ten instructions.
LIMIT = 2**18


@frozen
class Action:
    """A function of a chunk on a microbatch: F, B (gradients of activations), W (of weights), or BW (both). Or a copy
    of what it keeps of F: into the host's memory, where it is complete (O), or back, where it starts (L).
    """

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}"


@frozen
class Search:
    """What a search reports of its result: the `family` of orders, the simulated `cost`, `least`, a lower bound on the
    cost of any schedule of these stages within the memory limit, and what it minimizes: the longest time that any rank
    is occupied (`bubble`), or the end of the last action (`step_time`).
    """

    family: str
    cost: float
    least: float
    minimize: str = "bubble"


@frozen
class SharedVocabulary:
    """The stages of a pipeline of so many `ranks` and `stages` whose ranks share an axis. `inputs` and `outputs`:
    whether parts come before the first stage, and after the last one.

    The pipeline's stages keep their numbers. Then come the output parts by rank, the loss stage, the input parts.
    """

    ranks: int
    stages: int
    inputs: bool = False
    outputs: bool = False

    def output(self, rank: int) -> int:
        """The stage of a rank's output part."""
        return self.stages + rank

    @property
    def loss(self) -> int:
        """The stage after the output parts, on the rank of the last stage."""
        return self.stages + self.ranks

    def input(self, rank: int) -> int:
        """The stage of a rank's input part."""
        return self.stages + (self.ranks + 1 if self.outputs else 0) + rank

    @property
    def total(self) -> int:
        """The number of all stages."""
        return self.stages + (self.ranks + 1) * self.outputs + self.ranks * self.inputs

    @property
    def first(self) -> frozenset[int]:
        """The stages that come before stage 0."""
        return frozenset(map(self.input, range(self.ranks))) if self.inputs else frozenset()

    def placement(self, placement: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank by chunk, from those of the pipeline alone."""
        home = ranks_of(placement)[self.stages - 1]
        lines = []
        for rank, line in enumerate(placement):
            more = (self.output(rank),) * self.outputs + (self.input(rank),) * self.inputs
            lines.append((*line, *more, *((self.loss,) if self.outputs and rank == home else ())))
        return tuple(lines)


@frozen(repr=False)
class Schedule(Shortened):
    """The actions of every pipeline rank.

    `placement[rank][chunk]` is the stage that a rank runs as that chunk; every stage occurs once. `bound` is the
    declared bound on each rank's peak of live activations, counted in (chunk, microbatch) pairs whose F has run and
    whose last backward action has not, without those between O and L. Without `training` (evaluation) there are only F,
    which keep nothing, and the bound is zero.

    `pairs` gives, for each rank, the positions of forwards that should overlap with the full backward that follows; it
    is empty if there are none. `search` is the report of the search that found the schedule. `spans` locate the actions
    of a schedule read from a file. `spread` says which stages are parts of an axis that all ranks share
    (`partita.compiler.schedules.vocab_parallel`). Unless `ascending`, the backwards of a chunk may run in any order of
    microbatches, which is the order in which gradients are summed.

    With `slices`, each part of the batch counts as so many `microbatches`, one for each slice of its sequence: slice s
    of part b is microbatch `b * slices + s`. Their backwards run from the last slice to the first.
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
    spread: SharedVocabulary | None = None
    ascending: bool = True
    slices: int = 1

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks, P."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """The most stages on a rank, V."""
        return max(map(len, self.placement), default=0)

    @cached_property
    def copies(self) -> bool:
        """Whether some of it is copied to the host's memory and back."""
        return any(action.kind in COPIES for line in self.actions for action in line)

    @property
    def own_chunks(self) -> int:
        """The number of the pipeline's stages on each rank, without parts that all ranks share."""
        return self.chunks if self.spread is None else self.spread.stages // self.spread.ranks

    @property
    def own_placement(self) -> tuple[tuple[int, ...], ...]:
        """The placement of the pipeline's own stages."""
        if self.spread is None:
            return self.placement
        return tuple(tuple(stage for stage in line if stage < self.spread.stages) for line in self.placement)

    def passes(self, rank: int, action: Action) -> str:
        """The name of an action of a part that all ranks share, by its kind; "" for those of the pipeline's stages."""
        stage = self.placement[rank][action.chunk]
        if self.spread is None or stage < self.spread.stages:
            return ""
        names = ("E", "G") if stage in self.spread.first else ("L", "L") if stage == self.spread.loss else ("S", "T")
        return names[action.kind != FORWARD]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return sum(map(len, self.placement))

    def depth(self, stage: int) -> int:
        """The place of a stage in the order of stages of a microbatch: those that depend on it come later."""
        return stage - self.stages if self.spread is not None and stage in self.spread.first else stage

    def turn(self, kind: str, microbatch: int) -> int:
        """The place of a microbatch in the order in which a stage runs its actions of a kind."""
        return turn(kind, microbatch, self.slices)

    def position(self, stage: int) -> tuple[int, int]:
        """The (rank, chunk) that runs a stage."""
        for rank, stages in enumerate(self.placement):
            if stage in stages:
                return rank, stages.index(stage)
        raise KeyError(stage)

    def rank_of(self, stage: int) -> int:
        """The rank that runs a stage."""
        return self.position(stage)[0]

    def last_kind(self, stage: int) -> str:
        """The kind of a stage's last action."""
        rank, chunk = self.position(stage)
        return next(action.kind for action in reversed(self.actions[rank]) if action.chunk == chunk)

    def __str__(self) -> str:
        """One line per rank, `F0.0 F0.1 BW0.0 …`."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.actions)


def turn(kind: str, microbatch: int, slices: int) -> int:
    """The place of a microbatch among those of an action's kind: F of slices in order, all else in the reverse order.
    It is its own inverse.
    """
    part, own = divmod(microbatch, slices)
    return microbatch if kind == FORWARD else part * slices + slices - 1 - own


def ranks_of(placement: Sequence[Sequence[int]]) -> dict[int, int]:
    """The rank of each stage."""
    return {stage: rank for rank, stages in enumerate(placement) for stage in stages}


def loop_placement(ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Stage `chunk * ranks + rank`, as in Megatron-LM and looped BFS."""
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def v_placement(ranks: int, chunks: int = 2) -> tuple[tuple[int, ...], ...]:
    """Chunk 0 down the ranks, chunk 1 up again, and so on: consecutive stages at a turn share a rank and need only a
    local transfer.
    """
    return tuple(
        tuple(chunk * ranks + (ranks - 1 - rank if chunk % 2 else rank) for chunk in range(chunks))
        for rank in range(ranks)
    )


def peak_live(actions: Iterable[Action]) -> int:
    """A rank's peak of live activations: pairs whose F has run and whose W or BW has not, without those between O and
    L; 0 without backwards.
    """
    live = peak = 0
    has_backward = False
    for action in actions:
        last = action.kind in (WEIGHT, FULL_BACKWARD)
        live += (action.kind in (FORWARD, LOAD)) - (last or action.kind == OFFLOAD)
        peak = max(peak, live)
        has_backward = has_backward or last
    return peak if has_backward else 0
