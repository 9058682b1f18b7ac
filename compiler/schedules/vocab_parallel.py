"""Schedules of pipelines whose ranks share the vocabulary: passes over its parts, among those of the stages.

Every rank holds a part of the output layer and of the embedding. These parts are stages in addition to the pipeline's
own: the input parts come before the first stage and the output parts after the last one, and the loss stage after
these. F of the output parts is the pass S of Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism
(arXiv 2411.05288), and their backward, with that of the loss stage, the pass T. The last stage waits for T of all
ranks; as in the paper's first algorithm, whose two exchanges lie between F and B of the last stage, every rank keeps
two more microbatches in flight, and nobody waits.

The orders of the stages stay as their schedule gives them. The other passes are inserted where they are ready, as
simulated with the costs of this pipeline: first those that other ranks wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

from attrs import define, evolve, field

from partita.compiler.instructions import Message
from partita.compiler.schedules.schedule import (
    BACKWARD,
    FORWARD,
    FULL_BACKWARD,
    WEIGHT,
    Action,
    Schedule,
    SharedVocabulary,
    peak_live,
)

# The microbatches by which F of the input parts is ahead of the first stage.
AHEAD = 2


def part_messages(spread: SharedVocabulary, training: bool = True) -> tuple[Message, ...]:
    """What any such pipeline sends in addition to what its stages send each other."""
    ways = []
    for rank in range(spread.ranks):
        if spread.outputs:
            ways += [(spread.stages - 1, spread.output(rank)), (spread.output(rank), spread.loss)]
        if spread.inputs:
            ways.append((spread.input(rank), 0))
    forward = [Message("part", source, destination, "forward") for source, destination in ways]
    backward = [Message("gradient of part", source, destination, "backward") for destination, source in ways]
    return (*forward, *(backward if training else ()))


def with_spread(
    schedule: Schedule,
    spread: SharedVocabulary,
    seconds: Callable[[int, str], float],
    slack: int = 2,
    passes: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """A schedule of a pipeline's stages with the passes of its parts; `seconds` are those of an action of a stage.

    Backwards come after so many more microbatches' forwards as `slack` says. `passes` gives S and T, one right after
    the other, a fixed place on each rank: after so many of its actions, for every microbatch.
    """
    chunks = schedule.chunks
    delayed = schedule
    if spread.outputs and schedule.training:
        delayed = evolve(schedule, actions=tuple(_delayed(each, slack * chunks) for each in schedule.actions))
    orders = _Insertion(delayed, spread, seconds, passes if spread.outputs and schedule.training else None).run()
    pairs = []
    for old, new, firsts in zip(schedule.actions, orders, schedule.pairs, strict=False):
        joined = {(old[i], old[i + 1]) for i in firsts}
        pairs.append(frozenset(i for i in range(len(new) - 1) if (new[i], new[i + 1]) in joined))
    return evolve(
        schedule,
        placement=spread.placement(schedule.placement),
        actions=orders,
        bound=tuple(map(peak_live, orders)),
        pairs=tuple(pairs) if any(pairs) else (),
        spread=spread,
    )


def _delayed(actions: Sequence[Action], more: int) -> tuple[Action, ...]:
    """The order with every other action after so many `more` forwards than before it."""
    forwards = [each for each in actions if each.kind == FORWARD]
    order: list[Action] = []
    before = placed = 0
    for each in actions:
        if each.kind == FORWARD:
            before += 1
            continue
        target = min(len(forwards), before + more)
        order += [*forwards[placed:target], each]
        placed = max(placed, target)
    return (*order, *forwards[placed:])


# An action of a stage on a microbatch.
Work = tuple[str, int, int]


@define(eq=False)
class _Line:
    """Actions that a rank runs in this order, in preference to those of lines with a higher `priority`."""

    priority: int
    actions: Sequence[Work]
    position: int = 0

    @property
    def head(self) -> Work | None:
        return self.actions[self.position] if self.position < len(self.actions) else None


@define(eq=False)
class _Insertion:
    """The simulation that merges each rank's lines of actions."""

    schedule: Schedule
    spread: SharedVocabulary
    seconds: Callable[[int, str], float]
    passes: Sequence[Sequence[int]] | None
    ends: dict[Work, float] = field(factory=dict)
    waiting: dict[Work, set[int]] = field(factory=dict)

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """The orders of all ranks."""
        ranks = self.spread.ranks
        lines = [self._lines(rank) for rank in range(ranks)]
        chunk_of = [
            {stage: chunk for chunk, stage in enumerate(line)}
            for line in self.spread.placement(self.schedule.placement)
        ]
        free = [0.0] * ranks
        orders: list[list[Action]] = [[] for _ in range(ranks)]
        # The head of a line stands in it once: with many microbatches it would be offered as often as others are run.
        queue: list[tuple[float, int, int]] = []
        queued: set[tuple[int, int]] = set()

        def push(start: float, priority: int, rank: int) -> None:
            queued.add((priority, rank))
            heappush(queue, (start, priority, rank))

        def offer(rank: int) -> None:
            for line in lines[rank]:
                head = line.head
                if head is None or (line.priority, rank) in queued:
                    continue
                ready = self._ready(head, rank)
                if ready is not None:
                    push(max(ready, free[rank]), line.priority, rank)

        for rank in range(ranks):
            offer(rank)
        while queue:
            start, priority, rank = heappop(queue)
            queued.remove((priority, rank))
            line = lines[rank][priority]
            now = max(start, free[rank])
            if now > start:
                push(now, priority, rank)
                continue
            kind, stage, microbatch = work = line.actions[
                line.position
            ]  # as it was queued: lines go on from here alone
            line.position += 1
            free[rank] = self.ends[work] = now + self.seconds(stage, kind)
            orders[rank].append(Action(kind, chunk_of[rank][stage], microbatch))
            for other in (rank, *sorted(self.waiting.pop(work, ()))):
                offer(other)
        assert all(line.head is None for own in lines for line in own), "the orders of the stages wait for each other"
        return tuple(map(tuple, orders))

    def _lines(self, rank: int) -> list[_Line]:
        """The lines of a rank: first the loss, then T, S, the input parts, and the stages."""
        schedule, spread = self.schedule, self.spread
        split = any(each.kind == WEIGHT for each in schedule.actions[rank])
        whole = (BACKWARD, WEIGHT) if split else (FULL_BACKWARD,)
        each, back = range(schedule.microbatches), self._backwards()
        backward = whole if schedule.training else ()
        lines = []
        if spread.outputs:
            if spread.stages - 1 in schedule.placement[rank]:
                lines.append([(kind, spread.loss, m) for m in back for kind in (FORWARD, *backward)])
            else:
                lines.append([])
            lines.append([(kind, spread.output(rank), m) for m in back for kind in backward])
            lines.append([(FORWARD, spread.output(rank), m) for m in each])
        else:
            lines += [[], [], []]
        if spread.inputs:
            lines.append([(FORWARD, spread.input(rank), m) for m in each])
            lines.append([(kind, spread.input(rank), m) for m in back for kind in backward])
        else:
            lines += [[], []]
        stages = schedule.placement[rank]
        own = [(a.kind, stages[a.chunk], a.microbatch) for a in schedule.actions[rank]]
        if self.passes is not None:
            own, lines[1], lines[2] = self._placed(rank, own, whole), [], []
        lines.append(own)
        return [_Line(priority, actions) for priority, actions in enumerate(lines)]

    def _backwards(self) -> Sequence[int]:
        """The microbatches in the order of the last stage's backwards."""
        if not self.schedule.training:
            return range(self.schedule.microbatches)
        rank, chunk = self.schedule.position(self.spread.stages - 1)
        own = (each for each in self.schedule.actions[rank] if each.chunk == chunk)
        return [each.microbatch for each in own if each.kind in (BACKWARD, FULL_BACKWARD)]

    def _placed(self, rank: int, own: Sequence[Work], backward: Sequence[str]) -> list[Work]:
        """A rank's own actions with S and T at their places."""
        assert self.passes is not None
        after: dict[int, list[Work]] = {}
        for m, position in enumerate(self.passes[rank]):
            after.setdefault(position, []).extend((kind, self.spread.output(rank), m) for kind in (FORWARD, *backward))
        return [work for i in range(len(own) + 1) for work in (*after.get(i, ()), *own[i : i + 1])]

    def _ready(self, work: Work, rank: int) -> float | None:
        """When what an action waits for has ended; None, and the rank is told later, if that is not known yet."""
        latest = 0.0
        for options in self._needs(*work):
            ended = next((self.ends[each] for each in options if each in self.ends), None)
            if ended is None:
                for each in options:
                    self.waiting.setdefault(each, set()).add(rank)
                return None
            latest = max(latest, ended)
        return latest

    def _needs(self, kind: str, stage: int, m: int) -> Iterator[tuple[Work, ...]]:
        """What an action waits for: one of each of these."""
        spread = self.spread
        parts = range(spread.ranks)

        def back(of: int) -> tuple[Work, ...]:
            return (BACKWARD, of, m), (FULL_BACKWARD, of, m)

        if stage in spread.first:
            if kind == FORWARD:
                if m >= AHEAD:
                    yield ((FORWARD, 0, m - AHEAD),)
            else:
                yield back(0)
        elif stage < spread.stages:
            if kind == FORWARD:
                if stage:
                    yield ((FORWARD, stage - 1, m),)
                elif spread.inputs:
                    yield from (((FORWARD, spread.input(part), m),) for part in parts)
            elif kind != WEIGHT:
                if stage < spread.stages - 1:
                    yield back(stage + 1)
                elif spread.outputs:
                    yield from (back(spread.output(part)) for part in parts)
                else:
                    yield ((FORWARD, stage, m),)
        elif stage == spread.loss:
            if kind == FORWARD:
                yield from (((FORWARD, spread.output(part), m),) for part in parts)
        else:
            yield ((FORWARD, spread.stages - 1, m),) if kind == FORWARD else back(spread.loss)
