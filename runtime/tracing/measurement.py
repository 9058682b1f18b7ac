"""From the marks of all ranks to timelines: what ran when, and what the simulator predicts from the same costs.

The input is a program and the `Marks` of every rank. The output is a timeline of each recorded step, and the one that
the simulator predicts from the measured costs. Both cover a full step, from when a rank requests its batch to when its
parameters are updated. In addition to the schedule's actions a rank has P (batch and prologue), R (exposed reductions),
S (statistics: norms, loss and metrics) and U (update).

Costs are means over the middle half of the steps by duration: means, because the length of a step is a sum of such
durations, and the middle half, because single steps are disturbed.

- An action costs its function and the posts around it. Collectives along the mesh belong to the action that waits for
  them.
- The time of a transfer only shows if its receiver was already waiting when both ends had posted it: from there to the
  end of the wait. A wait that began later gives no information, and one measured from its own start would include the
  sender's delay. The cost is the mean over such transfers of the same message, or else of the same size; transfers that
  nobody ever waited for cost nothing.
- Each rank begins its step, and its update, as late after the first one as it did in the run.

Ranks of one machine share a clock. Those of other machines are shifted, step by step, so that the sum over all ranks
ends at the same time everywhere: accurate to about the latency of a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from statistics import median

import numpy as np
from attrs import define, evolve, field, frozen

from partita.compiler.instructions import (
    Channel,
    Compute,
    Instruction,
    Message,
    PostCopy,
    PostReceive,
    PostSend,
    Transfer,
    WaitCopy,
    WaitReceive,
    WaitSend,
)
from partita.compiler.mesh import Mesh
from partita.compiler.program import Program
from partita.compiler.schedules.schedule import Action
from partita.compiler.schedules.simulator import Costs, simulate
from partita.compiler.schedules.timeline import Interval, Timeline
from partita.dsl.grouping import grouped
from partita.runtime.tracing.stopwatch import BEGUN, EXCHANGED, FINISHED, READY, REDUCED, SUMMED, UPDATED, Marks

# A rank's own actions in a step, in addition to the schedule's.
PROLOGUE, REDUCE, STATISTICS, UPDATE = (Action(kind, 0, 0) for kind in "PRSU")


@frozen(eq=False)
class Step:
    """One recorded step, which began `start` seconds after the first recorded one; its timeline starts at 0."""

    number: int
    start: float
    timeline: Timeline = field(repr=False)


@frozen(eq=False)
class Measurement:
    """A measured run. `seconds` is the median step time, `typical` the step closest to it, and `simulated` the timeline
    predicted from the measured costs. Timelines have a row for each rank of the mesh.
    """

    steps: tuple[Step, ...]
    simulated: Timeline
    seconds: float
    typical: Step

    @property
    def difference(self) -> float:
        """By how much the simulated step is longer than the measured one, relative to the latter."""
        return self.simulated.makespan / self.seconds - 1


def measure(program: Program, marks: Sequence[Marks]) -> Measurement:
    """Evaluate the marks of all ranks of the program's mesh."""
    steps = marks[0].steps
    assert all(own.steps == steps for own in marks), "ranks have recorded different steps"
    times = [_aligned(own, marks[0]) for own in marks]
    starts = np.min([own[:, BEGUN] for own in times], axis=0)
    ranks = [_RankTimes(program, rank, own - starts[:, None]) for rank, own in enumerate(times)]
    durations = np.max([rank.times[:, UPDATED] for rank in ranks], axis=0)
    quarter = len(steps) // 4
    middle = np.argsort(durations, kind="stable")[quarter : len(steps) - quarter]
    sent = _transfers(ranks)
    costs = _transfer_costs(sent, middle)
    measured = tuple(
        Step(number, float(starts[i] - starts[0]), _measured(ranks, sent, costs, i)) for i, number in enumerate(steps)
    )
    seconds = median(durations.tolist())
    typical = min(measured, key=lambda step: abs(step.timeline.makespan - seconds))
    return Measurement(measured, _simulated(ranks, costs, middle), seconds, typical)


def _aligned(marks: Marks, first: Marks) -> np.ndarray:
    """A rank's marks in seconds, on the clock of the first rank. In the first step all ranks wait for the statistics,
    also where later ones need not.
    """
    times = marks.times
    if marks.clock != first.clock:
        times = times + (first.times[0, SUMMED] - times[0, SUMMED])
    return np.asarray(times - first.times[0, BEGUN]) / 1e9


# ---------------------------------------------------------------- ranks and their instructions


class _RankTimes:
    """A rank of the mesh: everything it does in a step as instructions, each with the marks before and after it.

    `times[i, j]` is mark j of step i. Channels are between ranks of the mesh. Stages are numbered so that no two ranks
    share one: each rank has its own costs.
    """

    def __init__(self, program: Program, rank: int, times: np.ndarray) -> None:
        record = program.ranks[program.mesh.pipe_rank(rank)]
        count = times.shape[1]
        assert count == len(record.instructions) + READY + 1 - REDUCED, "marks of another program"
        reduced, exchanged, finished = (count + mark for mark in (REDUCED, EXCHANGED, FINISHED))
        self.number = rank
        self.times = times
        self.first = first = rank * len(program.stages)
        self.program: list[tuple[Instruction, int, int]] = [(Compute(PROLOGUE, first), BEGUN, READY)]
        for position, instruction in enumerate(record.instructions, READY):
            if isinstance(instruction, (PostCopy, WaitCopy)):
                continue  # copies overlap with compute; their times are not recorded
            if isinstance(instruction, Compute):
                own: Instruction = evolve(instruction, stage=first + instruction.stage)
            else:
                own = evolve(instruction, transfer=_of_rank(instruction.transfer, rank, program.mesh))
            self.program.append((own, position, position + 1))
        self.program.append((Compute(REDUCE, first), reduced - 1, reduced))
        sends = [_of_rank(each.transfer, rank, program.mesh) for each in record.sends]
        receives = [_of_rank(each.transfer, rank, program.mesh) for each in record.receives]
        self.program += [(PostReceive(each), reduced, reduced) for each in receives]
        self.program += [(PostSend(each), reduced, reduced) for each in sends]
        self.program += [(WaitReceive(each), reduced, exchanged) for each in receives]
        self.program += [(WaitSend(each), reduced, exchanged) for each in sends]
        self.program.append((Compute(STATISTICS, first), exchanged, finished))

    def actions(self, step: int) -> Iterator[Interval]:
        """The intervals in which the rank computed in a step."""
        times = self.times[step].tolist()
        for instruction, before, after in self.program:
            if isinstance(instruction, Compute):
                yield Interval(self.number, instruction.action, times[before], times[after])
        yield Interval(self.number, UPDATE, times[SUMMED], times[UPDATED])

    def costs(self, steps: np.ndarray) -> dict[tuple[int, str], float]:
        """Mean seconds of an action by stage and kind; the prologue's from the start of the step."""
        times = self.times[steps].mean(axis=0).tolist()
        durations: dict[tuple[int, str], list[float]] = {}
        posts = 0.0
        for instruction, before, after in self.program:
            seconds = times[after] - times[before]
            if isinstance(instruction, Compute):
                key = instruction.stage, instruction.action.kind
                own = durations.setdefault(key, [])
                own.append(seconds + posts)
                posts = 0.0
            elif isinstance(instruction, PostSend):
                own[-1] += seconds
            elif isinstance(instruction, PostReceive):
                posts += seconds
        means = {key: sum(each) / len(each) for key, each in durations.items()}
        means[self.first, PROLOGUE.kind] = times[READY]
        return means


def _of_rank(transfer: Transfer, rank: int, mesh: Mesh) -> Transfer:
    """A transfer between pipeline ranks, as one between ranks of the mesh, at the coordinates of `rank`."""
    channel = transfer.channel
    source, destination = (mesh.peer(rank, end) for end in (channel.source, channel.destination))
    return evolve(transfer, channel=Channel(source, destination, channel.direction))


# ---------------------------------------------------------------- transfers


@define(eq=False)
class _Sent:
    """A transfer, by step: when each end had posted it, when its receiver's wait for it began, and by when it was
    complete: the end of that wait, or of the wait for a later one of the channel.

    `share` is its part, by bytes, of what was waited for: tied totals are waited for together.
    """

    transfer: Transfer
    posts: list[np.ndarray] = field(factory=list)
    begun: np.ndarray = field(init=False)
    ended: np.ndarray = field(init=False)
    share: float = 1.0

    @property
    def ready(self) -> np.ndarray:
        """When both ends had posted it. A short transfer may complete before its post returns."""
        return np.asarray(np.minimum(np.max(self.posts, axis=0), self.ended))

    @property
    def awaited(self) -> np.ndarray:
        """Whether the receiver was already waiting when the transfer could begin."""
        return np.asarray(self.begun <= self.ready)


def _transfers(ranks: Iterable[_RankTimes]) -> dict[Channel, list[_Sent]]:
    """All transfers of a step, by channel and in its order."""
    transfers: dict[Transfer, _Sent] = {}
    together: dict[tuple[Channel, int], list[_Sent]] = {}
    for rank in ranks:
        for instruction, before, after in rank.program:
            if isinstance(instruction, (Compute, PostCopy, WaitCopy)):
                continue
            sent = transfers.setdefault(instruction.transfer, _Sent(instruction.transfer))
            if isinstance(instruction, (PostSend, PostReceive)):
                sent.posts.append(rank.times[:, after])
            elif isinstance(instruction, WaitReceive):
                sent.begun, sent.ended = rank.times[:, before], rank.times[:, after]
                together.setdefault((instruction.transfer.channel, after), []).append(sent)
    for group in together.values():
        whole = sum(each.transfer.message.bytes for each in group)
        for each in group if len(group) > 1 else ():
            each.share = each.transfer.message.bytes / whole
    order = sorted(transfers.values(), key=lambda each: (each.transfer.channel, each.transfer.index))
    channels = grouped(order, lambda sent: sent.transfer.channel)
    for line in channels.values():
        for sent, later in reversed(list(pairwise(line))):
            sent.ended = np.minimum(sent.ended, later.ended)
    return channels


def _transfer_costs(sent: Mapping[Channel, Sequence[_Sent]], steps: np.ndarray) -> dict[Message, float]:
    """Mean seconds of each message's transfer."""
    by_message: dict[Message, list[float]] = {}
    by_size: dict[int, list[float]] = {}
    for each in chain.from_iterable(sent.values()):
        message = each.transfer.message
        seconds = ((each.ended - each.ready) * each.share)[steps][each.awaited[steps]].tolist()
        by_message.setdefault(message, []).extend(seconds)
        by_size.setdefault(message.bytes, []).extend(seconds)
    costs = {}
    for message, seconds in by_message.items():
        seconds = seconds or by_size[message.bytes]
        costs[message] = sum(seconds) / len(seconds) if seconds else 0.0
    return costs


# ---------------------------------------------------------------- timelines


def _measured(
    ranks: Sequence[_RankTimes], sent: Mapping[Channel, Sequence[_Sent]], costs: Mapping[Message, float], step: int
) -> Timeline:
    """The timeline of a step. If nobody waited for a transfer, its end is estimated from its cost."""
    transfers = {}
    for channel, line in sent.items():
        intervals: list[Interval] = []
        for each in line:
            start, end = float(each.ready[step]), float(each.ended[step])
            if intervals:
                start = max(start, intervals[-1].end)
            if each.share < 1 or not each.awaited[step]:
                end = min(end, start + costs[each.transfer.message])
            intervals.append(Interval(channel.source, each.transfer, start, end))
        transfers[channel] = tuple(intervals)
    return Timeline(tuple(tuple(rank.actions(step)) for rank in ranks), transfers, ())


def _simulated(ranks: Sequence[_RankTimes], transfer_costs: Mapping[Message, float], steps: np.ndarray) -> Timeline:
    """The simulated timeline of a step. The sum over all ranks is a barrier between statistics and updates."""
    costs: dict[tuple[int, str], float] = {}
    for rank in ranks:
        costs.update(rank.costs(steps))
    timeline = simulate(
        [[instruction for instruction, _, _ in rank.program] for rank in ranks],
        Costs(lambda stage, kind: costs[stage, kind], lambda message: transfer_costs[message]),
    )
    finished = timeline.makespan
    last = np.max([rank.times[steps, FINISHED] for rank in ranks], axis=0)
    actions = []
    for rank, line in zip(ranks, timeline.actions, strict=True):
        times = rank.times[steps]
        prologue = evolve(line[0], start=float(times[:, BEGUN].mean()))
        start = finished + float((times[:, SUMMED] - last).mean())
        end = start + float((times[:, UPDATED] - times[:, SUMMED]).mean())
        actions.append((prologue, *line[1:], Interval(rank.number, UPDATE, start, end)))
    return Timeline(tuple(actions), timeline.transfers, ())
