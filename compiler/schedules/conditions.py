"""What a search for a schedule knows: what actions and transfers cost, and what memory there is.

A microbatch's F on a stage keeps `forward` until its B, and from then on `weight` until its W; a whole backward leaves
nothing. What a rank holds so must stay within its limit after every action. Any unit will do: bytes, or multiples of
one microbatch's activations (M_B, as the papers on zero bubbles write).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import frozen

from partita.compiler.instructions import BACK, ONWARD, Message
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, WEIGHT, WHOLE_BACKWARD, Action
from partita.compiler.simulator import Costs

Placement = tuple[tuple[int, ...], ...]

# Sums of a rank's memory may differ from their limit by rounding.
SLACK = 1e-9


@frozen
class Memory:
    """The limit of each rank, and what a microbatch keeps on each stage after F and after B."""

    limit: tuple[float, ...]
    forward: tuple[float, ...]
    weight: tuple[float, ...]

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

    actions = (by_stage(kind) for kind in (FORWARD, BACKWARD, WEIGHT, WHOLE_BACKWARD))
    return Prices(*actions, tuple(ways[ONWARD]), tuple(ways[BACK]))
