"""Instructions → launches: on which stream of its device each instruction of a rank runs, and behind which events.

A rank has a queue of operations for each *stream*. Its host enqueues its instructions in order, and runs ahead; the
device takes the operations of one stream one after the other, those of different streams in any order or at once. The
end of an instruction is an *event*, which operations of other streams can be behind. So the order of two operations is
what streams and events say, and nothing else: that is how CUDA and NCCL work.

- What computes, and every wait, is on one stream, `compute`. The memory of tensors is given and taken in its order.
- Each end of a channel has a stream of its own, since a send or a receive occupies its stream until its peer comes;
  so have copies in each direction. What is posted is behind what `compute` has before it: that made what is sent, and
  used the memory that is received into.
- A wait is behind what it waits for.

Communicators that other instructions do not post on have a stream of their own, too: the collectives along a mesh axis,
which the functions of stages start and wait for, and at the end of a step the totals of tied parameters and the sums
over all ranks. What starts them is behind what `compute` has before it, and what waits for them is on `compute`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from partita.compiler.instructions import COMPUTE, Channel, Instruction
from partita.compiler.mesh import Mesh

SUMS = "sums"
START = -1  # the event that what computes has got to the first instruction


@frozen(cache_hash=True)
class Launch:
    """How an instruction is enqueued: on a `stream`, behind what is there already and behind the events `after`, which
    are the ends of earlier instructions of the rank, by their positions, or `START`.
    """

    stream: str
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"on {self.stream}" + (f" after {', '.join(map(event_text, self.after))}" if self.after else "")


def event_text(event: int) -> str:
    """An event as text."""
    return "start" if event == START else str(event)


def launches_of(instructions: Sequence[Instruction]) -> tuple[Launch, ...]:
    """How the instructions of a rank are enqueued."""
    posted: dict[Instruction, int] = {}
    found: list[Launch] = []
    last = START  # on `compute`
    for i, instruction in enumerate(instructions):
        stream, post = instruction.stream, instruction.post
        if stream != COMPUTE:
            posted[instruction] = i
            found.append(Launch(stream, (last,)))
            continue
        behind = () if post is None or post not in posted else (posted[post],)
        found.append(Launch(stream, behind))
        last = i
    return tuple(found)


def communicators(mesh: Mesh, channels: Iterable[Channel]) -> dict[str, str]:
    """The stream of each communicator on which no instruction posts: of the mesh axes, of these channels, and of the
    sums over all ranks, by its name.
    """
    names = (*(along(axis) for axis in mesh.sharding), *sorted(map(str, channels)), SUMS)
    return {name: name for name in names}


def along(axis: str) -> str:
    """The name of the communicators along a mesh axis."""
    return f"along {axis}"
