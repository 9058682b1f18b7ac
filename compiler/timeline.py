"""What runs when: the timeline of one step, predicted by the simulator or measured in a run."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from partita.compiler.instructions import Channel, Transfer
from partita.compiler.schedules.schedule import Action, peak_live
from partita.dsl.brief import shortened


@frozen
class Interval:
    """One action of a rank, or one transfer from a rank, in seconds from the start of the step."""

    rank: int
    work: Action | Transfer
    start: float
    end: float

    __repr__ = shortened

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


@frozen
class Timeline:
    """The actions of every rank and the transfers of every channel, in the order in which they run.

    `critical_path` is the chain of actions and transfers, each beginning when the one before it ends, from
    the start of the step to its last action: what would have to get shorter for the step to get shorter.
    """

    actions: tuple[tuple[Interval, ...], ...] = field(repr=False)
    transfers: Mapping[Channel, tuple[Interval, ...]] = field(repr=False)
    critical_path: tuple[Interval, ...] = field(repr=False)

    __repr__ = shortened

    @property
    def makespan(self) -> float:
        """Seconds until the last action has ended."""
        return max((line[-1].end for line in self.actions if line), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(interval.duration for interval in line) for line in self.actions)

    @property
    def cost(self) -> float:
        """The longest time that any rank is occupied, from its first action's start to its last one's end."""
        return max((line[-1].end - line[0].start for line in self.actions if line), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of time lost, (cost − m·T) / cost; m·T, microbatches times the busiest rank's time for one, is that
        rank's whole work. What rounding makes less than nothing is nothing.
        """
        return max(0.0, (self.cost - max(self.busy)) / self.cost) if self.cost else 0.0

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Each rank's peak of live activations, in (chunk, microbatch) pairs."""
        return tuple(
            peak_live(interval.work for interval in line if isinstance(interval.work, Action)) for line in self.actions
        )
