"""The invariants of streams and events: concurrent operations of a device never conflict, and no waits are cyclic.

8. Every event is the end of an earlier instruction. A posted operation is not on the compute stream, and starts after
   the instructions before it on that stream, which have produced the data to read, and have last used the memory to
   write. When compute continues after a wait, the awaited operation has ended: then its results may be read, and its
   memory may be reused. The transfers of a channel are on one stream, in order. Memory is allocated and freed in the
   order of the compute stream, so no memory is reused before its last reader on any stream, or read before it is
   written. At the end compute has waited for all posted operations: a list of instructions can be captured as a graph.
9. No cycle of waits between ranks, with the order of operations on a stream, events, and NCCL's rules: a send or a
   receive occupies its stream until its peer arrives, and the transfers of a channel run in order.
10. No such cycle even if every host waits, in each action, until its device has completed all enqueued operations, as
   when an allocation fails and memory is freed, or CUDA loads a kernel at its first launch. Operations that are
   enqueued out of the order of the list are enqueued later, and operations of one stream stay in order.

Communicators of collectives, which the functions of stages start and wait for, have a stream of their own each, so
that they are in nobody's way; that all ranks of a group start them in the same order is shown where invariant 2 is
(`partita.compiler.schedules.invariants`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

from attrs import define, evolve, field

from partita.compiler.instructions import COMPUTE, Channel, Compute, Instruction, PostReceive, PostSend
from partita.compiler.schedules.invariants import INVARIANTS, Problems, problem, raise_first
from partita.compiler.streams import START, Launch, enqueued
from partita.dsl.diagnostic import Refused, refuse

Programs = Sequence[Sequence[Instruction]]
Launches = Sequence[Sequence[Launch]]


def check_launches(programs: Programs, launches: Launches, communicators: Mapping[str, str]) -> None:
    """Checks invariants 8 to 10 of the instructions of all ranks, which satisfy the others.

    Raises Refused: E0501 for invariant 8, E0502 for a cycle of waits.
    """
    raise_first(_own_streams(launches, communicators))
    for rank, (program, own) in enumerate(zip(programs, launches, strict=True)):
        raise_first(_ordered(rank, program, own))
    # What runs if hosts wait runs if they do not, for that takes nothing but waits away.
    waiting = _Device.run(programs, list(map(with_waiting_host, programs, launches)))
    if waiting:
        devices = _Device.run(programs, launches)
        raise _stuck(devices, 9) if devices else _stuck(waiting, 10)


def _own_streams(launches: Launches, communicators: Mapping[str, str]) -> Problems:
    owners = {COMPUTE: "what computes"}
    owners |= {launch.stream: "instructions" for own in launches for launch in own if launch.stream != COMPUTE}
    for name, stream in communicators.items():
        if stream in owners:
            yield problem("E0501", 8, f"{name} are on stream `{stream}`, which is that of {owners[stream]}")
        owners[stream] = name


def _ordered(rank: int, program: Sequence[Instruction], launches: Sequence[Launch]) -> Problems:
    """Invariant 8 within a rank. `ended[s]` of an instruction is how many operations of stream s have ended when it
    ends.
    """
    if len(launches) != len(program):
        yield problem("E0501", 8, f"rank {rank} has {len(program)} instructions, of which {len(launches)} are enqueued")
        return
    streams = {stream: i for i, stream in enumerate(dict.fromkeys((COMPUTE, *(each.stream for each in launches))))}
    # What computes has one operation before the first instruction.
    start = [1] + [0] * (len(streams) - 1)
    tails = [start if stream == COMPUTE else [0] * len(streams) for stream in streams]
    ended: dict[int, list[int]] = {}
    places: dict[int, tuple[int, int]] = {}  # stream, and position on it
    posts: dict[Instruction, int] = {}
    lines: dict[Channel, str] = {}
    # How many operations of the compute stream precede each instruction: memory is allocated and freed in that order.
    computed = [1, *accumulate((each.stream == COMPUTE for each in program), initial=1)][1:]
    for i in enqueued(launches):
        instruction, launch = program[i], launches[i]
        stream = streams[launch.stream]
        before = tails[stream]
        for event in launch.after:
            if event == START:
                before = list(map(max, before, start))
                continue
            if event >= i or event not in ended:
                yield problem("E0501", 8, f"rank {rank} waits for event {event} before {instruction}, which is later")
                return
            before = list(map(max, before, ended[event]))
        if instruction.stream == COMPUTE:
            if launch.stream != COMPUTE or launch.behind is not None:
                where = f"on stream `{launch.stream}`" if launch.behind is None else "out of its turn"
                yield problem("E0501", 8, f"rank {rank} has {instruction} {where}")
            if instruction.post is not None:
                at, position = places.get(posts.get(instruction.post, i), (0, len(program)))
                if before[at] <= position:
                    yield problem("E0501", 8, f"rank {rank} goes on at {instruction} before it has ended")
        else:
            posts[instruction] = i
            if launch.stream == COMPUTE:
                yield problem("E0501", 8, f"rank {rank} has {instruction} on the stream of what computes")
            elif before[0] < computed[i]:
                yield problem("E0501", 8, f"rank {rank} has {instruction} before what computes ahead of it has ended")
            if isinstance(instruction, (PostSend, PostReceive)):
                line = lines.setdefault(instruction.transfer.channel, launch.stream)
                if line != launch.stream:
                    yield problem("E0501", 8, f"rank {rank} has {instruction} on another stream than those before it")
        own = list(before)
        places[i] = stream, tails[stream][stream]
        own[stream] = tails[stream][stream] + 1
        tails[stream] = own
        ended[i] = own
    for name, stream in streams.items():
        if tails[0][stream] < tails[stream][stream]:
            yield problem("E0501", 8, f"rank {rank} ends its list before stream `{name}` has ended")


@define(eq=False)
class _Device:
    """A rank's device: what is left to do on each stream."""

    program: Sequence[Instruction]
    launches: Sequence[Launch]
    queues: dict[str, deque[int]] = field(factory=dict)
    ended: set[int] = field(factory=lambda: {START})

    def __attrs_post_init__(self) -> None:
        for i in enqueued(self.launches):
            self.queues.setdefault(self.launches[i].stream, deque()).append(i)

    def end(self, i: int) -> None:
        """End what is first on its stream."""
        first = self.queues[self.launches[i].stream].popleft()
        assert first == i
        self.ended.add(i)

    @staticmethod
    def run(programs: Programs, launches: Launches) -> Sequence[_Device]:
        """Run all queues; returns the devices if any is blocked. The order does not matter: what runs never blocks
        anything else.
        """
        devices = [_Device(*each) for each in zip(programs, launches, strict=True)]
        arrived: dict[tuple[Channel, int], tuple[int, int]] = {}
        ready = list(range(len(devices)))
        while ready:
            rank = ready.pop()
            moved = True
            while moved:
                moved = False
                for queue in devices[rank].queues.values():
                    while queue and (others := devices[rank].step(queue[0], rank, devices, arrived)) is not None:
                        ready += others
                        moved = True
        return devices if any(queue for device in devices for queue in device.queues.values()) else ()

    def step(
        self, i: int, rank: int, devices: Sequence[_Device], arrived: dict[tuple[Channel, int], tuple[int, int]]
    ) -> Sequence[int] | None:
        """End what is first on its stream, if it can, and its peer's; returns the peer's rank, if it has one."""
        if not self.ended.issuperset(self.launches[i].after):
            return None
        instruction = self.program[i]
        if not isinstance(instruction, (PostSend, PostReceive)):
            self.end(i)
            return ()
        other, j = arrived.setdefault((instruction.transfer.channel, instruction.transfer.index), (rank, i))
        if other == rank:
            return None  # its peer has not come
        self.end(i)
        devices[other].end(j)
        return (other,)


def with_waiting_host(program: Sequence[Instruction], launches: Sequence[Launch]) -> list[Launch]:
    """The launches of a rank whose host waits in each action for what it has enqueued before: the action then is behind
    that, and what is enqueued later is behind the action.
    """
    updated, awaited, last = list(launches), list[int](), START
    for i in enqueued(launches):
        if isinstance(program[i], Compute):
            updated[i] = evolve(updated[i], after=(*updated[i].after, *awaited))
            awaited, last = [], i
        elif launches[i].stream != COMPUTE:
            updated[i] = evolve(updated[i], after=(*updated[i].after, last))
            awaited.append(i)
    return updated


def _stuck(devices: Sequence[_Device], invariant: int) -> Refused:
    """The diagnostic (E0502) for operations that wait for each other."""
    notes = []
    for rank, device in enumerate(devices):
        for stream, queue in device.queues.items():
            if queue:
                first = queue[0]
                missing = [str(device.program[i]) for i in device.launches[first].after if i not in device.ended]
                behind = f"is behind {' and '.join(missing)}" if missing else "waits for its peer"
                notes.append(f"rank {rank}: first on stream `{stream}`, {device.program[first]} {behind}")
    return refuse(
        "E0502",
        "deadlock: what is first on its stream waits for what is behind it on another",
        notes=(*notes[:8], INVARIANTS[invariant]),
        help="put them on streams of their own" if invariant == 9 else "post what is received earlier",
    )
