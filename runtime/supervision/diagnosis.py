"""Why a run has stalled, or what a rank was doing when it died: in words, from the positions of all ranks.

Every rank waits for some others, or works. A rank that is behind and works (or is stopped, or dead) is the one that the
rest wait for: it is named first, with its action, then those that wait for it. Ranks are not queried: their flight
recorders tell how far they are, and the program tells what that means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import frozen

from partita.compiler.instructions import Compute, PostCopy, PostReceive, PostSend, WaitCopy, WaitReceive, WaitSend
from partita.compiler.program import Program
from partita.compiler.schedules.schedule import OFFLOAD
from partita.runtime.tracing import flight
from partita.runtime.tracing.flight import Position

# What follows a step's instructions, by the marks taken after it (see `partita.runtime.tracing.stopwatch`).
ENDINGS = (
    "reducing gradients",
    "exchanging gradients of tied parameters",
    "computing the statistics",
    "all-reducing the statistics",
    "updating parameters",
)
REDUCING, EXCHANGING, SUMMING = 0, 1, 3
# Conditions of a rank.
DEAD, STOPPED, SILENT = "dead", "stopped", "silent"
MAX_WAITING = 4  # waiting ranks that are named one by one
# Activities of all ranks together, outside of steps, and their purpose.
TOGETHER = {flight.AGREEING: "to agree on a checkpoint", flight.CONNECTING: "to connect to them"}


@frozen
class State:
    """A rank, what it does in words, the ranks that it waits for, and its condition if it is stopped or dead."""

    position: Position
    doing: str
    place: str
    waits_for: tuple[int, ...]
    condition: str = ""

    @property
    def rank(self) -> int:
        """The rank."""
        return self.position.rank


@frozen(eq=False)
class Diagnosis:
    """Interprets positions by a run's programs. `conditions` are by rank."""

    training: Program
    evaluation: Program | None = None

    def states(self, positions: Iterable[Position], conditions: Mapping[int, str] | None = None) -> list[State]:
        """What every rank does."""
        known = {position.rank: position for position in positions}
        return [self._state(position, known, (conditions or {}).get(rank, "")) for rank, position in known.items()]

    def lines(self, states: Sequence[State]) -> list[str]:
        """The ranks that hold the run up, and those that wait for them; a line each."""
        blamed = blame(states)
        lines = [f"rank {each.rank} {self._doing(each)}{each.place}" for each in blamed]
        names = {each.rank for each in blamed}
        waiting = [each for each in states if each.rank not in names and each.waits_for]
        waiting.sort(key=lambda each: (not names & set(each.waits_for), each.rank))
        lines += [f"rank {each.rank} {self._doing(each)}{each.place}" for each in waiting[:MAX_WAITING]]
        if len(waiting) > MAX_WAITING:
            lines.append(f"{len(waiting) - MAX_WAITING} other ranks wait")
        return lines

    def as_json(self, states: Sequence[State], words: Mapping[int, str] = MappingProxyType({})) -> list[dict[str, Any]]:
        """All that is known, each rank's last actions with the seconds since they ended, what of NCCL's operations its
        device had not done, and what it said last.
        """
        return [
            {
                "rank": each.rank,
                "process": each.position.process,
                "condition": each.condition,
                "step": each.position.step,
                "doing": each.doing + each.place,
                "seconds": each.position.seconds,
                "waits_for": list(each.waits_for),
                "history": self._history(each.position),
                **({"undone": each.position.undone.splitlines()} if each.position.undone else {}),
                **({"said": words[each.rank]} if each.rank in words else {}),
            }
            for each in states
        ]

    # ------------------------------------------------------------ one rank

    @staticmethod
    def _doing(state: State) -> str:
        if state.condition == SILENT:
            return "does not answer, nor does any other rank of its machine"
        if state.condition == DEAD:
            return state.doing.replace("waits", "waited", 1) if state.waits_for else f"was {state.doing}"
        condition = f"is {state.condition}, " if state.condition else ""
        verb = "" if condition or state.doing.startswith("waits") else "is "
        return f"{condition}{verb}{state.doing} for {state.position.seconds:.0f} s"

    def _program(self, position: Position) -> Program:
        if position.activity == flight.EVALUATING and self.evaluation is not None:
            return self.evaluation
        return self.training

    def _state(self, position: Position, known: Mapping[int, Position], condition: str) -> State:
        if position.activity not in (flight.TRAINING, flight.EVALUATING):
            return self._outside_steps(position, known, condition)
        program = self._program(position)
        rank, mesh = position.rank, program.mesh
        record = program.ranks[mesh.pipe_rank(rank)]
        index = position.marks - 2
        column = {r for axis in mesh.sharding for r in mesh.group(rank, axis)}
        own = (position.turn, position.marks, position.collectives)
        beside = tuple(
            other.rank
            for other in known.values()
            if other.rank in column and (other.turn, other.marks, other.collectives) < own
        )
        if index < 0:
            return State(position, "at the start", self._step(position), beside, condition)
        if index < len(record.instructions):
            return self._instruction(position, known, program, index, beside, condition)
        ending = index - len(record.instructions)
        if ending >= len(ENDINGS):
            return State(position, "between steps", self._step(position), (), condition)
        waits: tuple[int, ...] = ()
        if ending == SUMMING:
            # Pipeline ranks have different marks: a rank is behind if it is not summing yet, whatever its count.
            waits = tuple(o.rank for o in known.values() if o.rank != rank and not self._past(o, position, SUMMING))
        elif ending == EXCHANGING:
            peers = {mesh.peer(rank, each.transfer.channel.source) for each in record.receives}
            peers |= {mesh.peer(rank, each.transfer.channel.destination) for each in record.sends}
            waits = tuple(
                r for r in sorted(peers - {rank}) if r in known and not self._past(known[r], position, EXCHANGING)
            )
        elif ending == REDUCING:
            waits = beside
        return State(position, ENDINGS[ending], self._step(position), waits, condition)

    def _outside_steps(self, position: Position, known: Mapping[int, Position], condition: str) -> State:
        """The state of a rank outside of steps; it waits for others only in an activity of all ranks together."""
        doing, waits = flight.ACTIVITIES[position.activity], list[int]()
        if position.activity in TOGETHER:
            waits = [other.rank for other in known.values() if other.turn < position.turn]
        if waits:
            doing = f"waits for other ranks, {TOGETHER[position.activity]}"
        return State(position, doing, self._step(position), tuple(waits), condition)

    def _past(self, other: Position, own: Position, ending: int) -> bool:
        """Whether another rank has reached `ending` in this rank's step."""
        program = self._program(own)
        record = program.ranks[program.mesh.pipe_rank(other.rank)]
        return self._reached(other, own, 2 + len(record.instructions) + ending)

    def _instruction(
        self,
        position: Position,
        known: Mapping[int, Position],
        program: Program,
        index: int,
        beside: tuple[int, ...],
        condition: str,
    ) -> State:
        rank, mesh = position.rank, program.mesh
        step = self._step(position)
        instruction = program.ranks[mesh.pipe_rank(rank)].instructions[index]
        if isinstance(instruction, Compute):
            action = instruction.action
            function = program.function(mesh.pipe_rank(rank), index)
            doing = f"in {action.kind} of microbatch {action.microbatch} of stage {instruction.stage}"
            lines = source_lines(program.source, function) if function else ""
            communicates = function is not None and "= yield " in body(program.source, function)
            return State(position, doing, f"{step}{lines}", beside if communicates else (), condition)
        if isinstance(instruction, (PostCopy, WaitCopy)):
            where = "to the host" if instruction.action.kind == OFFLOAD else "from the host"
            verb = "starting to copy" if isinstance(instruction, PostCopy) else "waiting for the copy of"
            what = f"what stage {instruction.stage} keeps of microbatch {instruction.action.microbatch}"
            return State(position, f"{verb} {what} {where}", step, (), condition)
        transfer = instruction.transfer
        what = f"`{transfer.message.value}` of microbatch {transfer.microbatch}"
        if isinstance(instruction, (PostSend, PostReceive)):
            verb = "posting the send of" if isinstance(instruction, PostSend) else "posting the receive of"
            return State(position, f"{verb} {what}", step, (), condition)
        channel = transfer.channel
        assert isinstance(instruction, (WaitReceive, WaitSend))
        arrives = isinstance(instruction, WaitReceive)
        pipe_rank = channel.source if arrives else channel.destination
        other = mesh.peer(rank, pipe_rank)
        post = PostSend(transfer) if arrives else PostReceive(transfer)
        posted = program.ranks[pipe_rank].instructions.index(post) + 2  # marks of a rank past the post
        if other in known and self._reached(known[other], position, posted + 1):
            doing = f"takes {what} from rank {other}" if arrives else f"hands {what} to rank {other}"
            return State(position, f"at the wait that {doing}", step, (), condition)
        doing = f"waits for {what} from rank {other}" if arrives else f"waits until rank {other} takes {what}"
        return State(position, doing, step, (other,), condition)

    @staticmethod
    def _reached(other: Position, own: Position, marks: int) -> bool:
        """Whether another rank has taken `marks` marks of this rank's step."""
        return other.marks >= marks if other.turn == own.turn else other.turn > own.turn

    @staticmethod
    def _step(position: Position) -> str:
        if position.activity == flight.TRAINING:
            return f" (step {position.step})"
        if position.activity == flight.EVALUATING:
            return f" (batch {-position.step} of an evaluation)"
        return f" (after step {position.step})" if position.step > 0 else ""

    def _history(self, position: Position) -> list[dict[str, Any]]:
        """The instructions of this step that the recorder still has, the last first."""
        if position.activity not in (flight.TRAINING, flight.EVALUATING):
            return []
        program = self._program(position)
        instructions = program.ranks[program.mesh.pipe_rank(position.rank)].instructions
        history = []
        # The last mark ended what precedes the current position; mark 2 ended only the prologue.
        for back, age in enumerate(position.ages):
            index = position.marks - 3 - back
            if index < 0:
                break
            if index < len(instructions):
                history.append({"did": str(instructions[index]), "ended_seconds_ago": age})
        return history


def blame(states: Sequence[State]) -> list[State]:
    """The ranks that hold the others up: the dead and the stopped, otherwise one that works while others wait for it.

    If the ranks wait for each other in a cycle, all of them.
    """
    for conditions in ((DEAD, STOPPED), (SILENT,)):
        if ill := [each for each in states if each.condition in conditions]:
            return ill
    by_rank = {each.rank: each for each in states}
    working = [each for each in states if not each.waits_for]
    awaited = {rank for each in states for rank in each.waits_for}
    if blamed := [each for each in working if each.rank in awaited]:
        return sorted(blamed, key=lambda each: (-each.position.seconds, each.rank))[:1]
    if working:
        return sorted(working, key=lambda each: (-each.position.seconds, each.rank))[:1]
    return [by_rank[rank] for rank in sorted(by_rank)]


def body(source: str, function: str) -> str:
    """The text of an emitted function, and of those it calls."""
    start = source.index(f"\ndef {function}(")
    end = source.find("\ndef ", start + 1)
    own = source[start : end if end >= 0 else len(source)]
    called = dict.fromkeys(re.findall(r"= (?:yield from )?(\w+)\(c, ", own))
    return own + "".join(body(source, name) for name in called)


def source_lines(source: str, function: str) -> str:
    """The lines of the user's file that a function computes: ` (gpt.par:31 to 44)`."""
    places: dict[str, list[int]] = {}
    for file, line in re.findall(r"  # (.+):(\d+)$", body(source, function), re.M):
        places.setdefault(file, []).append(int(line))
    if not places:
        return ""
    file, lines = max(places.items(), key=lambda item: len(item[1]))
    return f" ({file}:{min(lines)}" + (f" to {max(lines)})" if max(lines) > min(lines) else ")")
