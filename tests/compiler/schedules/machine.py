"""An oracle for laws, communication and simulator that shares no code with them: a machine that executes
instructions under rendezvous, whatever may happen next being chosen by chance. Channels move what the sender
posted next, whatever the receiver thinks it gets; a rank that computes without what it needs is found out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

from partita.compiler.instructions import (
    Channel,
    Compute,
    Instruction,
    Message,
    PostReceive,
    PostSend,
    WaitReceive,
    WaitSend,
)

Programs = Sequence[Sequence[Instruction]]

NEEDED = {"F": (), "B": ("F",), "W": ("F", "B"), "BW": ("F",)}
PARTS = {"F": {"F"}, "B": {"B"}, "W": {"W"}, "BW": {"B", "W"}}
DIRECTION = {"F": "forward", "B": "backward", "BW": "backward"}


class Stuck(Exception):
    """No rank can go on."""


class Wrong(Exception):
    """A rank computes or sends what it cannot have."""


class Machine:
    def __init__(self, programs: Programs, messages: Sequence[Message] = ()) -> None:
        self.programs = programs
        self.messages = messages
        self.position = [0] * len(programs)
        self.sent: dict[Channel, list] = defaultdict(list)
        self.received: dict[Channel, list] = defaultdict(list)
        self.through: dict[Channel, int] = defaultdict(int)
        # (stage, message direction, microbatch) computed on a rank; (message, microbatch) arrived at its
        # stage.
        self.made: set[tuple[int, int, str, int]] = set()
        self.arrived: set[tuple[Message, int]] = set()
        self.ran: dict[int, list[tuple[str, int]]] = defaultdict(list)

    def execute(self, seed: int) -> None:
        """Run all ranks to their ends. Raises Stuck or Wrong."""
        random = Random(seed)
        while True:
            ranks = [rank for rank in range(len(self.programs)) if self.runnable(rank)]
            channels = [c for c in self.sent if min(len(self.sent[c]), len(self.received[c])) > self.through[c]]
            if not ranks and not channels:
                break
            choice = random.choice([*ranks, *channels])
            if isinstance(choice, int):
                self.step(choice)
            else:
                self.transfer(choice)
        if any(at < len(program) for at, program in zip(self.position, self.programs, strict=True)):
            raise Stuck
        if any(len(self.sent[c]) != len(self.received[c]) for c in {*self.sent, *self.received}):
            raise Wrong("a transfer is left over")

    def runnable(self, rank: int) -> bool:
        if self.position[rank] == len(self.programs[rank]):
            return False
        instruction = self.programs[rank][self.position[rank]]
        if isinstance(instruction, (WaitSend, WaitReceive)):
            return self.through[instruction.transfer.channel] > instruction.transfer.index
        return True

    def transfer(self, channel: Channel) -> None:
        index = self.through[channel]
        if self.sent[channel][index] != self.received[channel][index]:
            raise Wrong(f"{channel}: {self.received[channel][index]} is sent {self.sent[channel][index]}")
        self.arrived.add(self.sent[channel][index])
        self.through[channel] += 1

    def step(self, rank: int) -> None:
        instruction = self.programs[rank][self.position[rank]]
        self.position[rank] += 1
        if isinstance(instruction, Compute):
            self.compute(rank, instruction.stage, instruction.action.kind, instruction.action.microbatch)
        elif isinstance(instruction, (PostSend, PostReceive)):
            message, m = instruction.transfer.message, instruction.transfer.microbatch
            if isinstance(instruction, PostSend):
                if self.messages and (rank, message.source, message.direction, m) not in self.made:
                    raise Wrong(f"rank {rank}: {instruction} before it is made")
                self.sent[instruction.transfer.channel].append((message, m))
            else:
                self.received[instruction.transfer.channel].append((message, m))

    def compute(self, rank: int, stage: int, kind: str, m: int) -> None:
        what = f"rank {rank}: {kind} of stage {stage}, microbatch {m}"
        ran = {part for each, n in self.ran[stage] if n == m for part in PARTS[each]}
        if ran & PARTS[kind]:
            raise Wrong(f"{what}: a second time")
        if not ran >= set(NEEDED[kind]):
            raise Wrong(f"{what}: only {ran} has run")
        for message in self.messages:
            if message.destination == stage and message.direction == DIRECTION.get(kind):
                handed_over = (rank, message.source, message.direction, m) in self.made
                if not handed_over and (message, m) not in self.arrived:
                    raise Wrong(f"{what}: without {message.value} of stage {message.source}")
        if kind in DIRECTION:
            self.made.add((rank, stage, DIRECTION[kind], m))
        self.ran[stage].append((kind, m))


def accumulations(programs: Programs, messages: Sequence[Message], seed: int) -> dict[int, list[int]]:
    """The microbatches that each stage's gradients sum, in order, in an execution chosen by the seed."""
    machine = Machine(programs, messages)
    machine.execute(seed)
    return {stage: [m for kind, m in ran if kind in ("W", "BW")] for stage, ran in machine.ran.items()}
