"""Instructions and costs → timeline: simulates the same lists that the ranks execute.

A transfer starts once both ends have posted it and the previous one on its channel has completed; it occupies the
channel, not the ranks. A copy between a rank's memory and the host's starts once it is posted and the previous one in
its direction has completed; it occupies that direction of the link, not the rank. Every time is the maximum of earlier
times plus a cost, so the result does not depend on the order in which ranks are simulated, and one pass over the
instructions suffices. The ranks deadlock if and only if the happens-before relation has a cycle, whatever the costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from attrs import define, field, frozen

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
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, FULL_BACKWARD, WEIGHT, Action
from partita.compiler.schedules.timeline import Interval, Timeline
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.reprs import Shortened


@frozen(repr=False)
class Costs(Shortened):
    """Seconds of an action, by stage and kind; of a message's transfer; and of an overlapped `pair` of a forward and a
    full backward, by their stages (default: their sum; never less than either). A rank is busy for `post` seconds with
    each message that it sends or receives. The first action of a stage does not end before the stage is `ready`, in
    seconds from the start. `copy` are the seconds of a copy of what a stage keeps of a microbatch to the host's memory,
    or back.
    """

    action: Callable[[int, str], float]
    transfer: Callable[[Message], float]
    pair: Callable[[int, int], float] | None = None
    post: float = 0.0
    ready: Mapping[int, float] = field(factory=dict)
    copy: Callable[[int], float] = lambda stage: 0.0


def equal_costs(
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    transfer: float = 0.0,
    pair: float | None = None,
) -> Costs:
    """The same costs for every stage and transfer; a full backward takes `backward` + `weight`."""
    seconds = {
        FORWARD: forward,
        BACKWARD: backward,
        WEIGHT: weight,
        FULL_BACKWARD: backward + weight,
    }
    together = None if pair is None else lambda forward, backward: pair
    return Costs(lambda stage, kind: seconds[kind], lambda each: transfer, together)


class _Node(NamedTuple):
    """An action or transfer, its rank, start and end, and what it waited for (`cause`)."""

    work: Action | Transfer
    rank: int
    start: float
    end: float
    cause: _Node | None

    @property
    def interval(self) -> Interval:
        return Interval(self.rank, self.work, self.start, self.end)


@define(eq=False)
class _Line:
    """A channel: when, and after which node, each end posted its transfers; `through` are the completed ones."""

    sent: list[tuple[float, _Node | None]] = field(factory=list)
    received: list[tuple[float, _Node | None]] = field(factory=list)
    through: list[_Node] = field(factory=list)

    def advance(self, transfer: Transfer, seconds: Callable[[Message], float]) -> None:
        """Completes a transfer that both ends have posted; it starts after the previous one on the channel."""
        latest = max(self.sent[transfer.index], self.received[transfer.index], key=_time)
        if self.through and self.through[-1].end > latest[0]:
            latest = (self.through[-1].end, self.through[-1])
        start, cause = latest
        end = start + seconds(transfer.message)
        self.through.append(_Node(transfer, transfer.channel.source, start, end, cause))


def _time(post: tuple[float, _Node | None]) -> float:
    return post[0]


def simulate(programs: Sequence[Sequence[Instruction]], costs: Costs) -> Timeline:
    """The timeline of the ranks' instructions, which must match one to one and in order on each channel.

    Raises Refused (E0502) with the cycle if ranks deadlock.
    """
    lines: dict[Channel, _Line] = {}
    for program in programs:
        for instruction in program:
            if type(instruction) is PostSend:
                lines.setdefault(instruction.transfer.channel, _Line())
    clocks: list[float] = [0.0] * len(programs)
    causes: list[_Node | None] = [None] * len(programs)
    positions = [0] * len(programs)
    nodes: list[list[_Node]] = [[] for _ in programs]
    copies: list[dict[Action, _Node]] = [{} for _ in programs]
    linked: dict[tuple[int, str], _Node] = {}  # the last copy of a rank in a direction
    seconds: dict[tuple[int, str], float] = {}
    opening = dict(costs.ready)  # of stages that have not begun

    # A rank runs until it waits for a transfer that the other end has not posted; that post wakes it.
    ready = list(reversed(range(len(programs))))
    stuck: dict[tuple[Channel, int], int] = {}
    while ready:
        rank = ready.pop()
        program = programs[rank]
        clock, cause = clocks[rank], causes[rank]
        position = positions[rank]
        while position < len(program):
            instruction = program[position]
            if type(instruction) is Compute:
                action = instruction.action
                key = (instruction.stage, action.kind)
                if key not in seconds:
                    seconds[key] = costs.action(*key)
                end = clock + seconds[key]
                if opening and instruction.stage in opening:
                    end = max(end, opening.pop(instruction.stage))
                if instruction.joined and costs.pair is not None:
                    # The pair runs from the start of its forward; the backward ends with it.
                    first = program[position - 1]
                    assert isinstance(first, Compute)
                    end = nodes[rank][-1].start + costs.pair(first.stage, instruction.stage)
                cause = _Node(action, rank, clock, end, cause)
                nodes[rank].append(cause)
                clock = end
            elif type(instruction) is PostCopy:
                action, last = instruction.action, linked.get((rank, instruction.action.kind))
                start, before = (clock, cause) if last is None or last.end <= clock else (last.end, last)
                node = _Node(action, rank, start, start + costs.copy(instruction.stage), before)
                linked[rank, action.kind] = copies[rank][action] = node
            elif type(instruction) is WaitCopy:
                node = copies[rank][instruction.action]
                if node.end > clock:
                    clock, cause = node.end, node
            else:
                transfer = instruction.transfer  # type: ignore[union-attr]
                channel, index = transfer.channel, transfer.index
                line = lines[channel]
                if type(instruction) is PostSend or type(instruction) is PostReceive:
                    own, other = (
                        (line.sent, line.received) if type(instruction) is PostSend else (line.received, line.sent)
                    )
                    assert index == len(own), f"rank {rank}: {instruction} is out of order"
                    clock += costs.post
                    own.append((clock, cause))
                    if index < len(other):
                        line.advance(transfer, costs.transfer)
                        if (channel, index) in stuck:
                            ready.append(stuck.pop((channel, index)))
                elif index < len(line.through):
                    node = line.through[index]
                    if node.end > clock:
                        clock, cause = node.end, node
                else:
                    assert (channel, index) not in stuck, f"rank {rank}: {instruction} is not posted"
                    stuck[channel, index] = rank
                    break
            position += 1
        positions[rank], clocks[rank], causes[rank] = position, clock, cause
    if stuck:
        raise deadlock(programs, positions)
    return Timeline(
        tuple(tuple(node.interval for node in own) for own in nodes),
        {channel: tuple(node.interval for node in line.through) for channel, line in sorted(lines.items())},
        _critical_path(nodes),
        tuple(tuple(node.interval for node in own.values()) for own in copies) if any(copies) else (),
    )


def _critical_path(nodes: Sequence[Sequence[_Node]]) -> tuple[Interval, ...]:
    last = [own[-1] for own in nodes if own]
    node: _Node | None = max(last, key=lambda each: each.end) if last else None
    path = []
    while node is not None:
        path.append(node.interval)
        node = node.cause
    return tuple(reversed(path))


def deadlock(programs: Sequence[Sequence[Instruction]], positions: Sequence[int]) -> Refused:
    """The diagnostic (E0502) for ranks stuck at these positions; it describes a cycle among them."""
    waits: dict[int, tuple[int, str]] = {}
    for rank, (program, position) in enumerate(zip(programs, positions, strict=True)):
        if position == len(program):
            continue
        wait = program[position]
        assert isinstance(wait, (WaitSend, WaitReceive)), wait
        transfer = wait.transfer
        channel = transfer.channel
        what = f"`{transfer.message.value}` of microbatch {transfer.microbatch}"
        if isinstance(wait, WaitReceive):
            other = channel.source
            place = _after(programs[other], programs[other].index(PostSend(transfer)))
            text = f"waits for {what}, which rank {other} sends {place}"
        else:
            other = channel.destination
            place = _before(programs[other], programs[other].index(PostReceive(transfer)))
            text = f"waits until rank {other} takes {what}, which it is ready for {place}"
        waits[rank] = other, f"rank {rank}, {_before(program, position)}, {text} ({channel})"
    rank = next(iter(waits))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = waits[rank][0]
    cycle = path[path.index(rank) :]
    return refuse(
        "E0502",
        f"deadlock: ranks {', '.join(map(str, cycle))} wait for each other",
        notes=(*(waits[each][1] for each in cycle), "invariant 2: no cyclic waits between ranks"),
        help="run the action that is waited for before the one that waits",
    )


def _before(program: Sequence[Instruction], position: int) -> str:
    """Describes a position by the next action."""
    following = (each for each in program[position:] if isinstance(each, Compute))
    return next((f"before {each.action}" for each in following), "at the end")


def _after(program: Sequence[Instruction], position: int) -> str:
    """Describes a position by the last action before it."""
    preceding = (each for each in reversed(program[:position]) if isinstance(each, Compute))
    return next((f"after {each.action}" for each in preceding), "at the start")
