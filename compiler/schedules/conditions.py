"""What a search for a schedule knows: what actions and transfers cost, and what memory there is.

A microbatch's F on a stage keeps `forward` until its B, and from then on `weight` until its W; a whole backward leaves
nothing. What a rank holds so must stay within its limit after every action. Any unit will do: bytes, or multiples of
one microbatch's activations (M_B, as the papers on zero bubbles write).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from attrs import frozen

from partita.compiler.instructions import BACK, ONWARD, Message
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, WEIGHT, WHOLE_BACKWARD, Action, Schedule
from partita.compiler.simulator import Costs

Placement = tuple[tuple[int, ...], ...]

# Sums of a rank's memory may differ from their limit by rounding.
SLACK = 1e-9


@frozen
class Memory:
    """The limit of each rank, and what a microbatch keeps on each stage after F and after B; `unit` is for messages."""

    limit: tuple[float, ...]
    forward: tuple[float, ...]
    weight: tuple[float, ...]
    unit: str = ""

    def text(self, amount: float) -> str:
        """An amount, for messages."""
        return f"{amount:,.0f} {self.unit}" if self.unit else f"{amount:g}"

    def changes(self, stage: int) -> dict[str, float]:
        """What each kind of action of a stage adds to what its rank holds."""
        forward, weight = self.forward[stage], self.weight[stage]
        return {FORWARD: forward, BACKWARD: weight - forward, WEIGHT: -weight, WHOLE_BACKWARD: -forward}

    def peak(self, actions: Iterable[Action], stages: Sequence[int]) -> float:
        """The most that a rank holds after any of its actions; `stages` are its stages by chunk."""
        changes = {
            (chunk, kind): change for chunk, stage in enumerate(stages) for kind, change in self.changes(stage).items()
        }
        held = peak = 0.0
        for action in actions:
            held += changes[action.chunk, action.kind]
            peak = max(peak, held)
        return peak

    def fits(self, schedule: Schedule) -> bool:
        """Whether every rank holds what a schedule asks it to."""
        ranks = enumerate(zip(schedule.actions, schedule.placement, strict=True))
        return all(self.holds(rank, self.peak(actions, stages)) for rank, (actions, stages) in ranks)

    def one(self, stages: Sequence[int]) -> float:
        """What one microbatch keeps at most on a rank with these stages."""
        return sum(max(self.forward[stage], self.weight[stage]) for stage in stages)

    def holds(self, rank: int, amount: float) -> bool:
        """Whether a rank can hold this much."""
        return amount <= self.limit[rank] * (1 + SLACK)

    def most(self, rank: int, each: float) -> float:
        """How many pieces of one size a rank can hold."""
        return self.limit[rank] * (1 + SLACK) // each if each > 0 else float("inf")


@frozen
class Conditions:
    """Costs, the messages between stages, and the memory that ranks have with their stages so placed; None: as much as
    it takes.
    """

    costs: Costs
    messages: tuple[Message, ...]
    memory: Callable[[Placement], Memory] | None = None


@frozen
class Prices:
    """The seconds of a pipeline's stages and of the ways between them, as numbers: by stage for actions, by the stage
    before for `onward` and `back` (none within a rank). What messages skip stages is not counted.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    whole: tuple[float, ...]
    onward: tuple[float, ...]
    back: tuple[float, ...]

    def onto(self) -> list[float]:
        """For each stage, the way of a forward from the start of the first stage's to that of its own."""
        return [0.0, *accumulate(map(sum, zip(self.forward, self.onward, strict=False)))]

    def home(self) -> list[float]:
        """For each stage, the way of a gradient from the end of its own B to that of the first stage's."""
        return [0.0, *accumulate(map(sum, zip(self.backward, self.back, strict=False)))]

    @property
    def joint(self) -> bool:
        """Whether a whole backward takes less than its B and W somewhere: where W hides B's collectives, say."""
        apart = map(sum, zip(self.backward, self.weight, strict=True))
        return any(whole < each * (1 - SLACK) for whole, each in zip(self.whole, apart, strict=True))


def prices(conditions: Conditions, placement: Sequence[Sequence[int]]) -> Prices:
    """The numbers for a placement of stages on ranks."""
    home = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    count = len(home)
    ways = {ONWARD: [0.0] * (count - 1), BACK: [0.0] * (count - 1)}
    for message in conditions.messages:
        first, second = sorted((message.source, message.destination))
        if second == first + 1 and home[first] != home[second] and message.direction in ways:
            ways[message.direction][first] += conditions.costs.transfer(message)

    def by_stage(kind: str) -> tuple[float, ...]:
        return tuple(conditions.costs.action(stage, kind) for stage in range(count))

    forward, backward, weight, whole = map(by_stage, (FORWARD, BACKWARD, WEIGHT, WHOLE_BACKWARD))
    return Prices(forward, backward, weight, whole, tuple(ways[ONWARD]), tuple(ways[BACK]))
