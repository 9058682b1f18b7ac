"""Whether the streams of a GPU may share the queues through which its hardware gets operations.

A device has up to 32 queues (`CUDA_DEVICE_MAX_CONNECTIONS`), by default 8. Streams share one where there are more. The
hardware takes operations from a queue in order: one that has to wait, for an event or for what is before it on its own
stream, keeps all behind it from starting, those of other streams as well. In the worst case all streams share one. That
no rank then waits for itself through another is no invariant, but holds
of a step of all schedules that have a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field

from partita.compiler.instructions import COMPUTE, Instruction, PostReceive, PostSend, Transfer
from partita.compiler.schedules.stream_invariants import Launches, Programs, with_waiting_host
from partita.compiler.streams import START, Launch, enqueued, launches_of


def queues(programs: Programs, launches: Launches | None = None) -> int:
    """How many queues a rank needs for its actions and transfers: one if all get to the end even if they share it, and
    hosts wait in each action for what they have enqueued; or else one for each stream.
    """
    launches = launches or [launches_of(own) for own in programs]
    devices = [
        _Device(program, with_waiting_host(program, own)) for program, own in zip(programs, launches, strict=True)
    ]
    posted: dict[Transfer, tuple[_Device, int]] = {}
    while any([device.start(posted) for device in devices]):  # noqa: C419 (all of them)
        pass
    if all(not device.waiting for device in devices):
        return 1
    return max(len({each.stream for each in (*own, Launch(COMPUTE))}) for own in launches)


@define(eq=False)
class _Device:
    """A rank's device: what is `waiting` in its queue, the next at the end, and what has ended."""

    program: Sequence[Instruction]
    launches: Sequence[Launch]
    before: Mapping[int, int] = field(init=False)  # on the same stream
    waiting: list[int] = field(init=False)
    ended: set[int] = field(factory=lambda: {START})

    def __attrs_post_init__(self) -> None:
        order = enqueued(self.launches)
        last: dict[str, int] = {}
        self.before = {}
        for i in order:
            self.before[i] = last.get(self.launches[i].stream, START)
            last[self.launches[i].stream] = i
        self.waiting = order[::-1]

    def start(self, posted: dict[Transfer, tuple[_Device, int]]) -> bool:
        """Start what can start; a transfer ends when both of its ends are `posted`. Whether anything did."""
        count = len(self.waiting)
        while self.waiting:
            i = self.waiting[-1]
            if not self.ended.issuperset((self.before[i], *self.launches[i].after)):
                break
            self.waiting.pop()
            instruction = self.program[i]
            if not isinstance(instruction, (PostSend, PostReceive)):
                self.ended.add(i)
                continue
            peer, j = posted.setdefault(instruction.transfer, (self, i))
            if peer is not self:
                self.ended.add(i)
                peer.ended.add(j)
        return len(self.waiting) < count
