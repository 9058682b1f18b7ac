"""Slow ranks: which ranks hold up the others, in which action, and at what cost.

A rank adds up, by action, how long it worked in its steps, without its waits: for messages, and within actions for
collectives. That takes one clock read per instruction and no communication; when the ranks meet anyway for an
evaluation or a checkpoint, and at the end, they exchange their sums.

A rank is slow if it worked longer than its peers, the ranks that run the same stages on other data. A rank without such
peers is compared with all others, scaled by the predicted time of each. Its cost per step is the time by which it was
longer, but at most what its peers have waited meanwhile. Ranks that share too few cores take turns on them, so none of
these is slow.

On a GPU these are host times: reading and launching. Waiting for the device does not count as work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any
from zlib import crc32

import torch
from attrs import asdict, frozen

from partita.compiler.instructions import Compute
from partita.compiler.program import Program, RankProgram
from partita.runtime.context import Context
from partita.runtime.declared import waits
from partita.runtime.supervision.capacity import cores, quota
from partita.runtime.supervision.cores import usable
from partita.runtime.tracing.flight import machine
from partita.runtime.transports.transport import Transport, awaited

# What a rank does in a step besides the schedule's actions, in the order of its marks: before them, and after them.
BATCH, PROLOGUE, REDUCE, STATISTICS, UPDATE, REPORT = (
    "reading its batch", "the prologue", "reducing gradients", "the statistics", "the update", "reporting the step",
)  # fmt: skip
WAIT = ""
BEFORE, AFTER = (BATCH, PROLOGUE), (REDUCE, WAIT, STATISTICS, WAIT, UPDATE, REPORT)
MIN_STEPS = 20  # needed to take means
SLOWER, SLOWER_ALONE = 1.5, 2.0  # times its peers' time; for a rank without peers
MIN_COST, MIN_SECONDS = 0.1, 1e-3  # of a step's time; per step


@frozen
class Straggler:
    """A slow rank: the action in which it lost the most, its own and its peers' mean time per step in it, and the share
    of all steps' time that the rank cost.
    """

    rank: int
    action: str
    seconds: float
    peers: float
    cost: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow and cost the run {100 * self.cost:.0f}% of its time: {self.action} takes "
            f"{_text(self.seconds)} per step, {_text(self.peers)} on its peers"
        )

    def as_json(self) -> dict[str, Any]:
        """Its form in the metrics."""
        return asdict(self)


def _text(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def actions_of(record: RankProgram) -> list[str]:
    """What a pipeline rank does before each mark of a step; WAIT if it waits."""
    own = [
        f"{each.action.kind} of stage {each.stage}" if isinstance(each, Compute) else WAIT
        for each in record.instructions
    ]
    return [*BEFORE, *own, *AFTER]


class StragglerDetector:
    """One rank's times by action. `begin` a step, then `mark` the end of each action."""

    def __init__(self, program: Program, rank: int, context: Context) -> None:
        self.program, self.rank, self.context = program, rank, context
        actions = actions_of(program.ranks[program.mesh.pipe_rank(rank)])
        if context.device.type == "cuda":  # the update begins by waiting for the device
            actions[actions.index(UPDATE)] = WAIT
        self._names = _names(program, rank)
        self._positions = [self._names.index(each) if each else len(self._names) for each in actions]
        self._sums = [0] * (len(self._names) + 1)
        self._steps = 0
        self._last = self._waited = self._next = 0
        self._first = True

    def begin(self) -> None:
        """Begin a step."""
        self._last, self._waited, self._next = perf_counter_ns(), self.context.waited, 0

    def mark(self) -> None:
        """Mark the end of the step's next action."""
        now, waited = perf_counter_ns(), self.context.waited
        sums, waiting = self._sums, waited - self._waited
        sums[self._positions[self._next]] += now - self._last - waiting
        sums[-1] += waiting
        self._last, self._waited = now, waited
        self._next += 1

    def end(self) -> None:
        """End a step. The first of a run does not count: it allocates and connects."""
        if self._first:
            self._first = False
            self._sums = [0] * len(self._sums)
        else:
            self._steps += 1

    @waits("ranks compare their times where they meet anyway, for an evaluation or a checkpoint")
    def told(self, transport: Transport) -> Generator[None, None, Sums]:
        """Exchange the ranks' sums since the last exchange; returns those of all."""
        width = max(len(_names(self.program, rank)) for rank in range(self.program.mesh.ranks)) + 4
        row = torch.zeros(width, dtype=torch.float64)
        own = [*_cores(), self._steps, self._sums[-1] / 1e9, *(each / 1e9 for each in self._sums[:-1])]
        row[: len(own)] = torch.tensor(own, dtype=torch.float64)
        self._sums, self._steps = [0] * len(self._sums), 0
        (table,) = yield from awaited(transport.gather_over_ranks(row.to(self.context.device)))
        table = table.cpu()
        return Sums(self.program, table[:, 2:], table[:, :2])


def _cores() -> tuple[int, int]:
    """A number that all processes have who share the cores of this one; and how many cores it may use."""
    shared = (machine(),) if quota() is not None else (machine(), *usable())
    return crc32(repr(shared).encode()), cores()


def _crowded(shared: Sequence[Sequence[float]]) -> frozenset[int]:
    """The ranks that share cores with more ranks than there are."""
    counts = Counter(place for place, _ in shared)
    return frozenset(rank for rank, (place, number) in enumerate(shared) if counts[place] > number)


def _names(program: Program, rank: int) -> list[str]:
    """The distinct actions of a rank."""
    actions = actions_of(program.ranks[program.mesh.pipe_rank(rank)])
    return [each for each in dict.fromkeys(actions) if each]


@frozen(eq=False)
class Sums:
    """A row for each rank: the number of steps, seconds waited, and seconds of each of its actions; and its `cores`."""

    program: Program
    table: torch.Tensor
    cores: torch.Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.program, self.table + other.table, self.cores)

    def slow(self, predicted: Sequence[float]) -> tuple[Straggler, ...]:
        """The slow ranks, the costliest first. `predicted` are the seconds per step of each pipeline rank."""
        steps = float(self.table[0, 0])
        if steps < MIN_STEPS:
            return ()
        crowded = _crowded(self.cores.tolist())
        stragglers = (self._judged(rank, predicted) for rank in range(len(self.table)) if rank not in crowded)
        return tuple(sorted((each for each in stragglers if each is not None), key=lambda each: -each.cost))

    def _judged(self, rank: int, predicted: Sequence[float]) -> Straggler | None:
        mesh = self.program.mesh
        means = (self.table[:, 1:] / self.table[0, 0]).tolist()
        stage = mesh.pipe_rank(rank)
        others = [each for each in range(mesh.ranks) if each != rank]
        alike = [each for each in others if mesh.pipe_rank(each) == stage]
        peers, threshold = (alike, SLOWER) if alike else (others, SLOWER_ALONE)
        if not peers:
            return None
        # Scales a peer's time to the stages of this rank.
        scales = {each: 1.0 if alike else predicted[stage] / predicted[mesh.pipe_rank(each)] for each in peers}
        own = sum(means[rank][1:])
        usual = median(sum(means[each][1:]) * scales[each] for each in peers)
        lost = min(own - usual, median(means[each][0] for each in peers))
        cost = lost / max(sum(each) for each in means)
        if own < threshold * usual or lost < MIN_SECONDS or cost < MIN_COST:
            return None
        action, seconds, theirs = max(
            self._compared(rank, peers, scales, means, bool(alike)), key=lambda each: each[1] - each[2]
        )
        return Straggler(rank, action, seconds, theirs, cost)

    def _compared(
        self, rank: int, peers: Sequence[int], scales: dict[int, float], means: Sequence[Sequence[float]], alike: bool
    ) -> Iterator[tuple[str, float, float]]:
        """Each of a rank's actions with its own and its peers' time; by kind if the peers run other stages."""
        tables = {each: dict(zip(_names(self.program, each), means[each][1:], strict=False)) for each in (rank, *peers)}
        if not alike:
            tables = {each: _by_kind(table) for each, table in tables.items()}
        for action, seconds in tables[rank].items():
            usual = median(tables[each].get(action, 0.0) * scales[each] for each in peers)
            yield action if alike else _of(self.program, rank, action), seconds, usual


def _by_kind(table: dict[str, float]) -> dict[str, float]:
    """Sum `F of stage 1` and `F of stage 3` into `F`."""
    totals: dict[str, float] = {}
    for action, seconds in table.items():
        kind = action.partition(" of stage ")[0]
        totals[kind] = totals.get(kind, 0.0) + seconds
    return totals


def _of(program: Program, rank: int, kind: str) -> str:
    """A kind of action with the stages of a rank."""
    names = [each for each in _names(program, rank) if each.partition(" of stage ")[0] == kind]
    if names == [kind]:
        return kind
    stages = ", ".join(map(str, sorted(int(each.partition(" of stage ")[2]) for each in names)))
    return f"{kind} of stage{'s' if len(names) > 1 else ''} {stages}"
