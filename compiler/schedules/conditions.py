"""The inputs of a schedule search: costs of actions and transfers, and memory limits.

A microbatch's F on a stage keeps `forward` until its B, which keeps `weight` until its W; a full backward keeps
nothing. What a rank holds must stay within its limit after every action. The unit is arbitrary: bytes, or multiples of
one microbatch's activations (M_B in the zero bubble papers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from attrs import frozen

from partita.compiler.instructions import Message
from partita.compiler.schedules.schedule import (
    BACKWARD,
    FORWARD,
    FULL_BACKWARD,
    LOAD,
    OFFLOAD,
    WEIGHT,
    Action,
    Schedule,
    SharedVocabulary,
    ranks_of,
)
from partita.compiler.schedules.simulator import Costs

Placement = tuple[tuple[int, ...], ...]

# Relative tolerance for rounding, when sums are compared with a limit.
SLACK = 1e-9


@frozen
class Memory:
    """Each rank's limit, and what a microbatch keeps on each stage after F and after B; `unit` is for messages."""

    limit: tuple[float, ...]
    forward: tuple[float, ...]
    weight: tuple[float, ...]
    unit: str = ""

    def text(self, amount: float) -> str:
        """An amount as text."""
        return f"{amount:,.0f} {self.unit}" if self.unit else f"{amount:g}"

    def changes(self, stage: int) -> dict[str, float]:
        """The change of a rank's memory by each kind of action of a stage."""
        forward, weight = self.forward[stage], self.weight[stage]
        copied = {OFFLOAD: -forward, LOAD: forward}  # all of it
        return {FORWARD: forward, BACKWARD: weight - forward, WEIGHT: -weight, FULL_BACKWARD: -forward, **copied}

    def peak(self, actions: Iterable[Action], stages: Sequence[int]) -> float:
        """The most that a rank holds after any action; `stages` are its stages by chunk."""
        changes = {
            (chunk, kind): change for chunk, stage in enumerate(stages) for kind, change in self.changes(stage).items()
        }
        live = peak = 0.0
        for action in actions:
            live += changes[action.chunk, action.kind]
            peak = max(peak, live)
        return peak

    def fits(self, schedule: Schedule) -> bool:
        """Whether a schedule fits in the memory of every rank."""
        ranks = enumerate(zip(schedule.actions, schedule.placement, strict=True))
        return all(self.holds(rank, self.peak(actions, stages)) for rank, (actions, stages) in ranks)

    def one(self, stages: Sequence[int]) -> float:
        """The most that one microbatch keeps on a rank with these stages."""
        return sum(max(self.forward[stage], self.weight[stage]) for stage in stages)

    def holds(self, rank: int, amount: float) -> bool:
        """Whether a rank can hold this amount."""
        return amount <= self.limit[rank] * (1 + SLACK)

    def most(self, rank: int, each: float) -> float:
        """How many pieces of this size a rank can hold."""
        return self.limit[rank] * (1 + SLACK) // each if each > 0 else float("inf")


@frozen
class Conditions:
    """Costs, the messages between stages, and the memory of the ranks for a placement of stages (None: unlimited).

    Where ranks share an axis, the costs and messages are also those of its stages (`spread`). What is searched for is
    the order of the pipeline's own; memory is what these may use.
    """

    costs: Costs
    messages: tuple[Message, ...]
    memory: Callable[[Placement], Memory] | None = None
    spread: SharedVocabulary | None = None


@frozen
class StageTimes:
    """Seconds of actions, by stage, and of transfers between adjacent stages, by the lower stage (zero within a rank).
    Messages that skip stages are not counted.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    whole: tuple[float, ...]
    send_forward: tuple[float, ...]
    send_backward: tuple[float, ...]

    def from_first(self) -> list[float]:
        """For each stage, the seconds from the start of the first stage's F to the start of its own."""
        return [0.0, *accumulate(map(sum, zip(self.forward, self.send_forward, strict=False)))]

    def to_first(self) -> list[float]:
        """For each stage, the seconds from the end of its own B to the end of the first stage's."""
        return [0.0, *accumulate(map(sum, zip(self.backward, self.send_backward, strict=False)))]

    @property
    def joint(self) -> bool:
        """Whether BW is faster than B and W on some stage, for example because W hides B's collectives."""
        apart = map(sum, zip(self.backward, self.weight, strict=True))
        return any(whole < each * (1 - SLACK) for whole, each in zip(self.whole, apart, strict=True))


def prices(conditions: Conditions, placement: Sequence[Sequence[int]]) -> StageTimes:
    """The prices for a placement of stages on ranks."""
    rank_of = ranks_of(placement)
    count = len(rank_of)
    transfers = {"forward": [0.0] * (count - 1), "backward": [0.0] * (count - 1)}
    for message in conditions.messages:
        first, second = sorted((message.source, message.destination))
        neighbors = second == first + 1 and second < count
        if neighbors and rank_of[first] != rank_of[second] and message.direction in transfers:
            transfers[message.direction][first] += conditions.costs.transfer(message)

    def by_stage(kind: str) -> tuple[float, ...]:
        return tuple(conditions.costs.action(stage, kind) for stage in range(count))

    forward, backward, weight, whole = map(by_stage, (FORWARD, BACKWARD, WEIGHT, FULL_BACKWARD))
    return StageTimes(forward, backward, weight, whole, tuple(transfers["forward"]), tuple(transfers["backward"]))
