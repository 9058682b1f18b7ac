"""Instructions → launches: on which stream of its device an instruction of a rank runs, and which events it waits for.

A rank has a queue of operations for each *stream*. Its host enqueues its instructions in order, and runs ahead; the
device takes the operations of one stream one after the other, those of different streams in any order or at once. The
end of an instruction is an *event*, which operations of other streams can wait for. So streams and events alone decide
the order of two operations: that is how CUDA and NCCL work.

- All computation, and every wait, is on one stream, `compute`. The memory of tensors is allocated and freed in its
  order.
- Each end of a channel has a stream of its own, since a send or a receive occupies its stream until its peer arrives;
  so do copies in each direction. A posted operation waits for the instructions before it on `compute`, which have
  produced the data to send, and have last used the memory to receive into.
- A wait runs after the operation it waits for.
- A receive gets its memory where it is posted, and is enqueued after the next action; on the device it can still
  overlap with that action. If the host has to wait for the device in that action, as when an allocation fails and
  memory is freed, or a kernel is loaded, it does not wait for the receive.

Communicators that other instructions do not post on have a stream of their own, too: the collectives along a mesh axis,
which the functions of stages start and wait for, and at the end of a step the totals of tied parameters and the sums
over all ranks. They start after the preceding instructions on `compute`, and the waits for them are on `compute`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from partita.compiler.instructions import COMPUTE, Channel, Compute, Instruction, PostReceive, Transfer, WaitReceive
from partita.compiler.mesh import Mesh

SUMS = "sums"
START = -1  # the event that the compute stream has reached the first instruction


@frozen(cache_hash=True)
class Launch:
    """How an instruction is enqueued: on a `stream`, after the operations that are already on it and events
    (`after`): ends of earlier instructions of the rank, by their positions, or `START`. The host enqueues it in its
    turn, or later: once it has enqueued the instruction `behind`.
    """

    stream: str
    after: tuple[int, ...] = ()
    behind: int | None = None

    def __str__(self) -> str:
        after = f" after {', '.join(map(event_text, self.after))}" if self.after else ""
        return f"on {self.stream}{after}" + (f" behind {self.behind}" if self.behind is not None else "")


def event_text(event: int) -> str:
    """An event as text."""
    return "start" if event == START else str(event)


def launches_of(instructions: Sequence[Instruction]) -> tuple[Launch, ...]:
    """How the instructions of a rank are enqueued."""
    posted: dict[Instruction, int] = {}
    launches: list[Launch] = []
    last = START  # on `compute`
    later = _behind_next_action(instructions)
    for i, instruction in enumerate(instructions):
        stream, post = instruction.stream, instruction.post
        if stream != COMPUTE:
            posted[instruction] = i
            launches.append(Launch(stream, (last,), later.get(i)))
            continue
        after = () if post is None or post not in posted else (posted[post],)
        launches.append(Launch(stream, after))
        last = i
    return tuple(launches)


def _behind_next_action(instructions: Sequence[Instruction]) -> dict[int, int]:
    """The receives that are enqueued behind the next action, and that action. Those of a channel stay in order."""
    behind: dict[int, int] = {}
    awaited: dict[Transfer, int] = {}
    first: dict[Channel, int] = {}  # of the later receives of a channel, where the first is enqueued
    action = len(instructions)
    for i in reversed(range(len(instructions))):
        instruction = instructions[i]
        if isinstance(instruction, Compute):
            action = i
        elif isinstance(instruction, WaitReceive):
            awaited[instruction.transfer] = i
        elif isinstance(instruction, PostReceive):
            channel = instruction.transfer.channel
            in_turn = action <= first.get(channel, len(instructions))
            if in_turn and action < awaited.get(instruction.transfer, i) and not instruction.at_once:
                behind[i] = action
            first[channel] = behind.get(i, i)
    return behind


def enqueued(launches: Sequence[Launch]) -> list[int]:
    """The instructions in the order in which the host enqueues them."""
    return sorted(range(len(launches)), key=lambda i: (i, -1) if (at := launches[i].behind) is None else (at, i))


def communicators(mesh: Mesh, channels: Iterable[Channel]) -> dict[str, str]:
    """The stream of each communicator on which no instruction posts: of the mesh axes, of these channels, and of the
    sums over all ranks, by its name.
    """
    names = (*(along(axis) for axis in mesh.sharding), *sorted(map(str, channels)), SUMS)
    return {name: name for name in names}


def along(axis: str) -> str:
    """The name of the communicators along a mesh axis."""
    return f"along {axis}"


def of_channel(stream: str) -> bool:
    """Whether a stream is that of an end of a channel."""
    return "->" in stream
