"""The moments of a run at which it may be struck, seen from outside: by recorders, and by names of checkpoints."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import cache

from partita.compiler.instructions import Compute, PostReceive, PostSend, WaitReceive, WaitSend
from partita.compiler.program import Program
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.manifest import NAME
from partita.runtime.supervision.diagnosis import ENDINGS
from partita.runtime.tracing.flight import ACTIVITIES, CONNECTING, ENDED, EVALUATING, STARTING, TRAINING, Position
from tests.fault_injection.processes import TIMEOUT
from tests.fault_injection.runs import STEPS, Run, planned

# What a rank may be doing, and how far a save may be.
ACTIONS = {
    "pipeline": ("F", "B", "send", "receive", "statistics", "update", "between steps", "evaluating"),
    "zero3": ("F", "B", "reducing", "statistics", "update", "between steps", "evaluating"),
}
SAVES = ("begun", "marked", "manifest", "committed")
# Before the first step, and after the last: as the recorder has it.
EDGES = tuple(ACTIVITIES[each] for each in (STARTING, CONNECTING, ENDED))
LOOK_SECONDS = 0.0002  # less than any moment lasts; without a pause the test would take a core from the run
_plan = cache(planned)


def program_of(layout: str, position: Position) -> Program:
    """What a rank runs."""
    plan = _plan(layout)
    if position.activity == EVALUATING:
        assert plan.evaluation is not None
        assert plan.evaluation.program is not None
        return plan.evaluation.program
    return plan.program


def doing(layout: str, position: Position) -> tuple[str, str]:
    """What a rank is doing: in one word of `ACTIONS`, and what a message about it must say."""
    if position.activity not in (TRAINING, EVALUATING):
        return ACTIVITIES[position.activity], ACTIVITIES[position.activity]
    program = program_of(layout, position)
    record = program.ranks[program.mesh.pipe_rank(position.rank)]
    index = position.marks - 2
    if index < 0:
        return "start", "at the start"
    if index >= len(record.instructions):
        ending = index - len(record.instructions)
        if ending >= len(ENDINGS):
            return "between steps", "between steps"
        return {0: "reducing", 2: "statistics", 3: "statistics", 4: "update"}.get(ending, "tied"), ENDINGS[ending]
    instruction = record.instructions[index]
    if isinstance(instruction, Compute):
        action = instruction.action
        words = f"in {action.kind} of microbatch {action.microbatch} of stage {instruction.stage}"
        return "B" if action.kind == "BW" else action.kind, words
    assert isinstance(instruction, PostSend | WaitSend | PostReceive | WaitReceive)
    words = f"`{instruction.transfer.message.value}` of microbatch {instruction.transfer.microbatch}"
    return "send" if isinstance(instruction, PostSend | WaitSend) else "receive", words


def reached(run: Run, victim: int, moment: str, step: int) -> bool:
    """Whether the moment is there: from a step on, the victim does this, or the save has come so far."""
    if moment in SAVES:
        if moment == "committed":
            return any(each >= step for each in steps_in(run.checkpoints))
        names = run.partial()
        late = any(int(each) >= step for name in names for each in re.findall(r"step-(\d+)", name))
        wanted = {"begun": lambda: True, "manifest": lambda: NAME in names, "marked": lambda: "rank-1.json" in names}
        return late and wanted[moment]()
    position = run.position(victim)
    if position is None:
        return False
    if moment == "evaluating":
        return position.activity == EVALUATING and bool(steps_in(run.checkpoints))
    return position.activity != EVALUATING and position.step >= step and doing(run.layout, position)[0] == moment


def await_moment(run: Run, victim: int, moment: str, step: int) -> Iterator[set[int]]:
    """Wait for a moment, or for the last steps if it never comes; yields the commits seen on the way, now and then."""
    end = time.monotonic() + TIMEOUT
    while not reached(run, victim, moment, step):
        position = run.position(victim)
        if position is not None and position.step >= STEPS - 1 and moment != ACTIVITIES[ENDED]:
            run.story.append(f"{moment} was missed")
            return
        assert run.process is not None
        if moment == ACTIVITIES[ENDED] and run.process.poll() is not None:
            run.story.append(f"{moment} was missed")
            return
        assert run.process.poll() is None, f"the run has ended before {moment} of step {step}"
        assert time.monotonic() < end, f"waited in vain for {moment} of step {step}"
        yield set(steps_in(run.checkpoints))
        time.sleep(LOOK_SECONDS)
