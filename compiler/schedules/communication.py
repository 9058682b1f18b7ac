"""Schedule and messages → instructions: compute actions with the posts and waits of transfers and copies inserted.

- A message between stages of the same rank is a local transfer and needs no instruction.
- A channel's order is the order in which its sender produces; the receiver posts in exactly that order.
- A receive is posted one action before its consumer, or earlier if the channel's order requires it,
  and waited for right before its consumer. Earlier, too, where its sender could not go on if the hosts of all ranks
  waited in each action for what they have given their devices (invariant 10).
- A send is posted right after the action that produces it. A channel has D buffers at its sender: a send is waited for
  before the D-th send after it is posted, and the last ones at the end of the step.
- A copy to the host's memory is posted behind its F, and waited for where the schedule says O. One back is posted where
  the schedule says L, and waited for right before the backward action.

D is the smallest of 2, 4, 8, … for which no rank would wait for a buffer if all actions took equally long and
transfers were free. Then the happens-before relation is acyclic whenever it is with unbounded buffers: an execution in
which every buffer is free strictly before it is needed satisfies all waits. (A smaller D may be acyclic too, but in
interleaved schedules, where a chunk's output waits at its receiver until the next chunk runs, it stalls the sender.)
All of this is linear in the number of instructions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from attrs import define, field

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
from partita.compiler.schedules.offload import without_copies
from partita.compiler.schedules.schedule import (
    BACKWARD,
    FORWARD,
    FULL_BACKWARD,
    LOAD,
    OFFLOAD,
    WEIGHT,
    Action,
    Schedule,
    ranks_of,
)

# The direction of the messages that an action receives before it runs and sends afterwards.
DIRECTION = {FORWARD: "forward", BACKWARD: "backward", FULL_BACKWARD: "backward"}

_EQUAL_DURATIONS = {FORWARD: 1, BACKWARD: 1, WEIGHT: 1, FULL_BACKWARD: 2}


def default_messages(stages: int, training: bool = True) -> tuple[Message, ...]:
    """The messages between adjacent stages of any pipeline: activations forward, and gradients backward."""
    activations = [Message("activation", s, s + 1, "forward") for s in range(stages - 1)]
    gradients = [Message("gradient", s + 1, s, "backward") for s in range(stages - 1)]
    return (*activations, *(gradients if training else ()))


@define
class _Line:
    """A channel's transfers in order, each with the positions of its producer and its consumer in their ranks' actions,
    and of the action before which its receive is posted.
    """

    channel: Channel
    transfers: list[Transfer] = field(factory=list)
    produced: list[int] = field(factory=list)
    consumed: list[int] = field(factory=list)
    posted: list[int] = field(factory=list)
    enqueued: list[int] = field(factory=list)  # behind how many of the receiver's actions, where hosts run ahead
    buffers: int = 2

    def post(self, joined: frozenset[int]) -> None:
        """Choose where receives are posted, and where they are enqueued: behind the next action, unless that waits."""
        earliest = last = max(self.consumed) + 1
        for consumed in reversed(self.consumed):
            earliest = min(earliest, max(0, consumed - 1))
            earliest -= earliest - 1 in joined
            last = min(last, earliest + 1, consumed)
            self.posted.append(earliest)
            self.enqueued.append(last)
        self.posted.reverse()
        self.enqueued.reverse()

    def enqueue(self, number: int, actions: int) -> None:
        """Enqueue a receive, and so those before it, behind so many actions at the latest."""
        position = max(0, actions - 1)
        for i in range(number, -1, -1):
            if self.enqueued[i] <= actions and self.posted[i] <= position:
                break
            self.enqueued[i] = min(self.enqueued[i], actions)
            self.posted[i] = min(self.posted[i], position)

    def receives(self) -> Iterator[tuple[int, PostReceive]]:
        """The receives, and the actions before which they are posted."""
        for i, transfer in enumerate(self.transfers):
            yield self.posted[i], PostReceive(transfer, at_once=self.enqueued[i] == 0 < self.consumed[i])


def communicate(
    schedule: Schedule, messages: Sequence[Message], *, overlap: bool = False
) -> tuple[tuple[Instruction, ...], ...]:
    """Each rank's instructions for the microbatches of one step.

    `messages` may skip stages; several between the same two stages are sent in the order given. The schedule must have
    passed `partita.compiler.schedules.invariants.check_schedule`.

    With `overlap` (for the simulator), each of the schedule's `pairs` runs as one unit: both actions receive before the
    first and send after the second, and buffers are unbounded.
    """
    schedule, copies = without_copies(schedule)
    joined = schedule.pairs if overlap and schedule.pairs else (frozenset[int](),) * schedule.ranks
    outputs, inputs, lines = _transfers(schedule, messages, joined)
    for line in lines:
        line.post(joined[line.channel.destination])
    if overlap:
        for line in lines:
            line.buffers = len(line.transfers)
    else:
        _receive_in_time(schedule, outputs, inputs, lines)
        _give_buffers(schedule, inputs, lines)
    posts: list[dict[int, list[PostReceive]]] = [{} for _ in schedule.actions]
    buffers = {}
    for line in lines:
        buffers[line.channel] = (line.transfers, line.buffers)
        for position, post in line.receives():
            posts[line.channel.destination].setdefault(position, []).append(post)

    programs = []
    for rank, actions in enumerate(schedule.actions):
        program: list[Instruction] = []
        stages, around = schedule.placement[rank], _Copies(actions, copies[rank], joined[rank])
        for i, action in enumerate(actions):
            program.extend(posts[rank].get(i, ()))
            program.extend(kind(each, stages[each.chunk]) for kind, each in around.before(i))
            program.extend(WaitReceive(transfer) for _, _, transfer in inputs[rank].get(i, ()))
            program.append(Compute(action, stages[action.chunk], i - 1 in joined[rank]))
            for transfer in outputs[rank].get(i, ()):
                transfers, depth = buffers[transfer.channel]
                if transfer.index >= depth:
                    program.append(WaitSend(transfers[transfer.index - depth]))
                program.append(PostSend(transfer))
            program.extend(PostCopy(each, stages[each.chunk]) for each in around.behind(i))
        for channel, (transfers, depth) in buffers.items():
            if channel.source == rank:
                program.extend(WaitSend(transfer) for transfer in transfers[-depth:])
        programs.append(tuple(program))
    return tuple(programs)


class _Copies:
    """Where a rank's copies are posted and waited for; `given` are those of the schedule, by the position of the action
    that they come before. Joined actions wait for them before the first, and post them after the second.
    """

    def __init__(
        self, actions: Sequence[Action], copies: Mapping[int, Sequence[Action]], joined: frozenset[int]
    ) -> None:
        self.given = copies
        pairs = {(each.kind, each.chunk, each.microbatch) for line in copies.values() for each in line}
        self.offloads: dict[int, list[Action]] = {}
        self.awaited: dict[int, list[Action]] = {}
        backwards = set()
        for i, action in enumerate(actions if copies else ()):
            key = action.chunk, action.microbatch
            if action.kind == FORWARD and (OFFLOAD, *key) in pairs:
                self.offloads.setdefault(i + (i in joined), []).append(Action(OFFLOAD, *key))
            elif action.kind in (BACKWARD, FULL_BACKWARD) and (LOAD, *key) in pairs and key not in backwards:
                backwards.add(key)
                self.awaited.setdefault(i - (i - 1 in joined), []).append(Action(LOAD, *key))

    def before(self, position: int) -> Iterator[tuple[type[PostCopy] | type[WaitCopy], Action]]:
        """What is posted and waited for before an action."""
        for each in self.given.get(position, ()):
            yield (WaitCopy if each.kind == OFFLOAD else PostCopy), each
        for each in self.awaited.get(position, ()):
            yield WaitCopy, each

    def behind(self, position: int) -> Sequence[Action]:
        """What is posted behind an action."""
        return self.offloads.get(position, ())


def peak_in_flight(program: Sequence[Instruction]) -> int:
    """The peak bytes that a rank's transfers hold, each from post to wait."""
    live_bytes = peak = 0
    for instruction in program:
        if isinstance(instruction, (PostSend, PostReceive)):
            live_bytes += instruction.transfer.message.bytes
            peak = max(peak, live_bytes)
        elif isinstance(instruction, (WaitSend, WaitReceive)):
            live_bytes -= instruction.transfer.message.bytes
    return peak


_Outputs = list[dict[int, list[Transfer]]]
_Inputs = list[dict[int, list[tuple[int, int, Transfer]]]]


def _transfers(
    schedule: Schedule, messages: Sequence[Message], joined: Sequence[frozenset[int]]
) -> tuple[_Outputs, _Inputs, list[_Line]]:
    """For each rank and position, what is sent after the action there and what must be received before it (with its
    producer's rank and position); and the channels in a fixed order. Joined actions receive everything before the first
    and send everything after the second.
    """
    rank_of = ranks_of(schedule.placement)
    sent: dict[tuple[int, str], list[int]] = {}
    received: dict[tuple[int, str], list[int]] = {}
    channels: dict[int, Channel] = {}
    for number, message in enumerate(messages):
        source, destination = rank_of[message.source], rank_of[message.destination]
        if source != destination:
            channels[number] = Channel(source, destination, message.direction)
            sent.setdefault((message.source, message.direction), []).append(number)
            received.setdefault((message.destination, message.direction), []).append(number)
    lines = {channel: _Line(channel) for channel in sorted(set(channels.values()))}

    outputs: _Outputs = [{} for _ in schedule.actions]
    arrivals: dict[tuple[int, int], tuple[int, int, Transfer]] = {}
    for rank, actions in enumerate(schedule.actions):
        for i, action in enumerate(actions):
            stage = schedule.placement[rank][action.chunk]
            end = i + (i in joined[rank])
            for number in sent.get((stage, DIRECTION.get(action.kind, "")), ()):
                line = lines[channels[number]]
                transfer = Transfer(line.channel, messages[number], action.microbatch, len(line.transfers))
                line.transfers.append(transfer)
                line.produced.append(end)
                line.consumed.append(-1)
                outputs[rank].setdefault(end, []).append(transfer)
                arrivals[number, action.microbatch] = rank, end, transfer

    inputs: _Inputs = [{} for _ in schedule.actions]
    for rank, actions in enumerate(schedule.actions):
        for i, action in enumerate(actions):
            stage = schedule.placement[rank][action.chunk]
            begin = i - (i - 1 in joined[rank])
            for number in received.get((stage, DIRECTION.get(action.kind, "")), ()):
                arrival = arrivals[number, action.microbatch]
                lines[channels[number]].consumed[arrival[2].index] = begin
                inputs[rank].setdefault(begin, []).append(arrival)
    assert all(-1 not in line.consumed for line in lines.values()), "an action is missing: invariant 1"
    return outputs, inputs, list(lines.values())


def _receive_in_time(schedule: Schedule, outputs: _Outputs, inputs: _Inputs, lines: Sequence[_Line]) -> None:
    """Posts receives earlier where ranks would get stuck if each host waited, before it enqueues an action, until all
    that it has sent is received.

    Where all are stuck, some rank has all that its next action needs, or the schedule deadlocks anyway; so it waits for
    sends, and goes on once their receives are enqueued. What is received then has been sent: nobody waits for more.
    """
    by_channel = {line.channel: line for line in lines}
    progress = [0] * schedule.ranks

    def missing(rank: int) -> list[Transfer]:
        """What a rank has sent that is not received."""
        return [
            each
            for each in outputs[rank].get(progress[rank] - 1, ())
            if progress[each.channel.destination] < by_channel[each.channel].enqueued[each.index]
        ]

    def has_inputs(rank: int) -> bool:
        return all(progress[source] > position for source, position, _ in inputs[rank].get(progress[rank], ()))

    neighbors: list[set[int]] = [set() for _ in progress]
    for channel in by_channel:
        neighbors[channel.source].add(channel.destination)
        neighbors[channel.destination].add(channel.source)
    ready, stuck = set(range(schedule.ranks)), set[int]()
    while ready or stuck:
        if not ready:
            rank = min(stuck)
            for each in missing(rank):
                by_channel[each.channel].enqueue(each.index, progress[each.channel.destination])
            ready.add(rank)
        rank = ready.pop()
        before = progress[rank]
        while progress[rank] < len(schedule.actions[rank]) and has_inputs(rank) and not missing(rank):
            progress[rank] += 1
        stuck.discard(rank)
        if progress[rank] < len(schedule.actions[rank]) and has_inputs(rank):
            stuck.add(rank)
        if progress[rank] > before:
            ready |= neighbors[rank]


def _give_buffers(schedule: Schedule, inputs: _Inputs, lines: Sequence[_Line]) -> None:
    """Chooses each channel's number of buffers from the ends of actions at equal durations and with unbounded buffers;
    what one action sends on a channel has room there, as what is sent behind it would wait for the receiver of the
    first, who may wait for what is sent behind it.

    A schedule that deadlocks anyway keeps unbounded buffers, so that the reported cycle is caused by the schedule.
    """
    ends = _ends(schedule, inputs)
    for line in lines:
        receiver, sender = ends[line.channel.destination], ends[line.channel.source]
        if len(receiver) <= max(line.posted) or len(sender) <= max(line.produced):
            line.buffers = len(line.transfers)
            continue
        free = [receiver[position - 1] if position else 0 for position in line.posted]
        needed = [sender[position] for position in line.produced]
        burst = max(Counter(line.produced).values())  # of one action
        while line.buffers < burst or any(a >= b for a, b in zip(free, needed[line.buffers :], strict=False)):
            line.buffers *= 2


def _ends(schedule: Schedule, inputs: _Inputs) -> list[list[int]]:
    """When each action ends at equal durations, up to where ranks deadlock, if they do."""
    ends: list[list[int]] = [[] for _ in schedule.actions]
    waiting: dict[tuple[int, int], list[int]] = {}
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        own, actions = ends[rank], schedule.actions[rank]
        time = own[-1] if own else 0
        while len(own) < len(actions):
            i = len(own)
            for source, position, _ in inputs[rank].get(i, ()):
                if len(ends[source]) <= position:
                    waiting.setdefault((source, position), []).append(rank)
                    break
                time = max(time, ends[source][position])
            else:
                time += _EQUAL_DURATIONS[actions[i].kind]
                own.append(time)
                ready.extend(waiting.pop((rank, i), ()))
                continue
            break
    return ends
