"""The timeline of one step, predicted by the simulator or measured in a run."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from partita.compiler.instructions import Channel, Transfer
from partita.compiler.schedules.schedule import FORWARD, FULL_BACKWARD, LOAD, OFFLOAD, WEIGHT, Action, peak_live
from partita.dsl.reprs import Pictured, Shortened


@frozen(repr=False)
class Interval(Shortened):
    """One action of a rank (copies included), or one transfer from a rank, in seconds from the start of the step."""

    rank: int
    work: Action | Transfer
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


@frozen(repr=False)
class Timeline(Shortened, Pictured):
    """The actions of every rank and the transfers of every channel, in execution order.

    `critical_path` is a chain of actions and transfers from the start of the step to its last action, each starting
    when the previous one ends. `copies` are those of every rank between its memory and the host's, by when they start;
    they run beside the actions. Measured timelines have none.
    """

    actions: tuple[tuple[Interval, ...], ...] = field(repr=False)
    transfers: Mapping[Channel, tuple[Interval, ...]] = field(repr=False)
    critical_path: tuple[Interval, ...] = field(repr=False)
    copies: tuple[tuple[Interval, ...], ...] = field(default=(), repr=False)

    @property
    def makespan(self) -> float:
        """Seconds until the last action ends."""
        return max((line[-1].end for line in self.actions if line), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds for which each rank computes."""
        return tuple(sum(interval.duration for interval in line) for line in self.actions)

    @property
    def cost(self) -> float:
        """The longest time that any rank is occupied, from the start of its first action to the end of its last."""
        return max((line[-1].end - line[0].start for line in self.actions if line), default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of time lost, (cost − m·T) / cost, where m·T is the busiest rank's work: microbatches times its
        time for one. Rounding errors below zero are clamped.
        """
        return max(0.0, (self.cost - max(self.busy)) / self.cost) if self.cost else 0.0

    @property
    def idle(self) -> float:
        """The share of the time in which ranks do not compute, in the mean over all."""
        return max(0.0, 1 - sum(self.busy) / len(self.busy) / self.cost) if self.cost else 0.0

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Each rank's peak of live activations, in (chunk, microbatch) pairs."""
        if self.copies:
            return tuple(max(count for _, count in self.live(rank)) for rank in range(len(self.actions)))
        return tuple(
            peak_live(interval.work for interval in line if isinstance(interval.work, Action)) for line in self.actions
        )

    def live(self, rank: int) -> list[tuple[float, int]]:
        """The live activations of a rank over time, in (chunk, microbatch) pairs: (seconds, the number from then on).

        A pair is live from the start of its F to the end of its last backward action, but not from the end of a copy to
        the host's memory to the start of the one back. An evaluation, whose F save nothing, has none.
        """
        changes = []
        for interval in (*self.actions[rank], *(self.copies[rank] if self.copies else ())):
            kind = interval.work.kind if isinstance(interval.work, Action) else ""
            if kind in (FORWARD, LOAD):
                changes.append((interval.start, 1))
            elif kind in (WEIGHT, FULL_BACKWARD, OFFLOAD):
                changes.append((interval.end, -1))
        counts, now = [(0.0, 0)], 0
        for time, change in sorted(changes) if any(change < 0 for _, change in changes) else ():
            now += change
            counts.append((time, now))
        return counts
