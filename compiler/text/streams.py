"""The textual form of the launches of ranks: their instructions, the stream of each, and the events it waits for.

    communicator along data on along data
    rank 0
    0 compute F0.0 of stage 0 on compute
    1 post-send number 0 on channel 0->1 forward, microbatch 0, stage 0 to 1, 32 B, tiny.x on 0->1 forward after 0
    2 wait-send number 0 on channel 0->1 forward, microbatch 0, stage 0 to 1, 32 B, tiny.x on compute after 1

Events are the ends of instructions, by their numbers; `start` is the point at which the compute stream has reached
the first one. An instruction that the host enqueues out of turn ends with `behind` and the number of the instruction
after which it is enqueued; a receive that must not be is `at once`. If each list is captured as a graph, the first
line is `captured`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from partita.compiler.instructions import (
    Channel,
    Compute,
    Direction,
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
from partita.compiler.program import Program
from partita.compiler.schedules.schedule import Action
from partita.compiler.streams import START, Launch

# By rank: its instructions, and how each is enqueued.
Enqueued = Sequence[tuple[Sequence[Instruction], Sequence[Launch]]]

OF_TRANSFER: Mapping[str, type[PostSend | WaitSend | PostReceive | WaitReceive]] = {
    "post-send": PostSend,
    "wait-send": WaitSend,
    "post-receive": PostReceive,
    "wait-receive": WaitReceive,
}
OF_ACTION: Mapping[str, type[PostCopy | WaitCopy]] = {"post-copy": PostCopy, "wait-copy": WaitCopy}
CAPTURED = "captured"
_NAMES = {kind: name for kinds in (OF_TRANSFER, OF_ACTION) for name, kind in kinds.items()}

_LINE = re.compile(r"(\d+) (\S+) (.*) on (.+?)(?: after ((?:start|\d+)(?:, \d+)*))?(?: behind (\d+))?")
_TRANSFER = re.compile(
    r"number (\d+) on channel (\d+)->(\d+) (\w+), microbatch (\d+), stage (\d+) to (\d+), (\d+) B, (.*?)( at once)?"
)
_ACTION = re.compile(r"([A-Z]+)(\d+)\.(\d+) of stage (\d+)( joined)?")
_COMMUNICATOR = re.compile(r"communicator (.*) on (.*)")


def streams_text(program: Program) -> str:
    """What all ranks of a program enqueue, and the streams of the other communicators, as text."""
    lines = [CAPTURED] if program.captured else []
    lines += [f"communicator {name} on {stream}" for name, stream in program.streams.items()]
    for rank in program.ranks:
        lines.append(f"rank {rank.rank}")
        for i, (instruction, launch) in enumerate(zip(rank.instructions, rank.launches, strict=True)):
            lines.append(f"{i} {_instruction(instruction)} {launch}")
    return "\n".join(lines) + "\n"


def parse_streams(text: str) -> tuple[Enqueued, dict[str, str], bool]:
    """Parses what ranks enqueue, the streams of the other communicators, and whether it is captured: the text leaves
    out nothing, and a program can be written by hand. Raises ValueError with the offending line.
    """
    ranks: list[tuple[list[Instruction], list[Launch]]] = []
    communicators: dict[str, str] = {}
    lines = text.splitlines()
    captured = lines[:1] == [CAPTURED]
    for line in lines[captured:]:
        if match := _COMMUNICATOR.fullmatch(line):
            communicators[match[1]] = match[2]
        elif line == f"rank {len(ranks)}":
            ranks.append(([], []))
        else:
            instruction, launch = _parsed(line, len(ranks[-1][0]) if ranks else -1)
            ranks[-1][0].append(instruction)
            ranks[-1][1].append(launch)
    return ranks, communicators, captured


def _instruction(instruction: Instruction) -> str:
    if isinstance(instruction, Compute):
        return f"compute {instruction.action} of stage {instruction.stage}" + " joined" * instruction.joined
    name = _NAMES[type(instruction)]
    if isinstance(instruction, (PostCopy, WaitCopy)):
        return f"{name} {instruction.action} of stage {instruction.stage}"
    each = instruction.transfer
    message = each.message
    return (
        f"{name} number {each.index} on channel {each.channel}, microbatch {each.microbatch}, "
        f"stage {message.source} to {message.destination}, {message.bytes} B, {message.value}"
        + " at once"
        * (isinstance(instruction, PostReceive) and instruction.at_once)
    )


def _parsed(line: str, number: int) -> tuple[Instruction, Launch]:
    match = _LINE.fullmatch(line)
    if match is None or int(match[1]) != number:
        raise ValueError(f"not an instruction: {line}")
    _, name, what, stream, after, behind = match.groups()
    events = (START if each == "start" else int(each) for each in after.split(", ")) if after else ()
    launch = Launch(stream, tuple(events), int(behind) if behind else None)
    if name in OF_TRANSFER and (each := _TRANSFER.fullmatch(what)):
        index, source, destination, microbatch, first, second, size = map(int, each.group(1, 2, 3, 5, 6, 7, 8))
        direction = cast(Direction, each[4])
        message = Message(each[9], first, second, direction, size)
        transfer = Transfer(Channel(source, destination, direction), message, microbatch, index)
        return (PostReceive(transfer, at_once=True) if each[10] else OF_TRANSFER[name](transfer)), launch
    if each := _ACTION.fullmatch(what):
        action, stage = Action(each[1], int(each[2]), int(each[3])), int(each[4])
        if name == "compute":
            return Compute(action, stage, each[5] is not None), launch
        if name in OF_ACTION:
            return OF_ACTION[name](action, stage), launch
    raise ValueError(f"not an instruction: {line}")
