"""`partita schedule NAME --stages P --microbatches M`: a schedule without a program, with times and memory as numbers.

For comparing schedules: the timeline that the compiler would predict for a program with these costs. Times and memory
are those of one microbatch on one rank, in any unit; each chunk of the rank, and each slice of the microbatch, has an
equal share of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from partita.cli.argument_types import count, number, numbers
from partita.cli.command import UsageError
from partita.cli.stage_times import StageTimes, stage_times
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.conditions import Conditions, Memory
from partita.compiler.schedules.generator import SCHEDULES, own_arguments, size_of
from partita.compiler.schedules.hardware_queues import queues
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.offload import with_copies
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.simulator import simulate
from partita.compiler.schedules.vocab_parallel import part_messages
from partita.dsl.advice.report import Report, nearest
from partita.dsl.config.builtins import BOUND
from partita.dsl.config.overrides import PLACE
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.load import load_text
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import parse_expression
from partita.dsl.syntax.source import Source

if TYPE_CHECKING:
    from partita.compiler.schedules.schedule import Schedule
    from partita.compiler.schedules.simulator import Costs
    from partita.compiler.schedules.timeline import Timeline
    from partita.dsl.spec import Call

Numbers = Mapping[str, float]

TIMES = StageTimes()
MEMORY: Numbers = {"F": 1.0, "W": 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options for a schedule without a file."""
    group = parser.add_argument_group("a schedule without a program", "FILE is then a schedule's name, or a call of it")
    group.add_argument("--stages", "--ranks", type=count, metavar="P", help="number of pipeline ranks")
    group.add_argument("--microbatches", type=count, metavar="M", help="number of microbatches")
    group.add_argument("--chunks", type=count, metavar="V", help="stages per rank, if the schedule takes it")
    what = (
        "times of one microbatch on one rank, and of a transfer; FB=: of an overlapped forward and full backward; "
        "S= and T=: of the passes over its part of a shared vocabulary; "
        "copy=: of a copy of what it keeps to the host's memory, and of one back; "
        "or a JSON file with them, where a list has one for each stage"
    )
    group.add_argument("--times", type=stage_times, default=TIMES, metavar="F=1,B=1,W=1,comm=0", help=what)
    group.add_argument("--memory-limit", type=number, metavar="X", help="memory for microbatches on each rank")
    what = "memory of one microbatch on a rank from F to B, and from B to W"
    group.add_argument("--memory", type=_memory, default=MEMORY, metavar="F=1,W=1", help=what)


def requested(arguments: argparse.Namespace) -> bool:
    """Whether a schedule without a program is requested. Raises UsageError if the request is wrong."""
    sizes = {"--stages": arguments.stages, "--microbatches": arguments.microbatches}
    others = {"--chunks": arguments.chunks, "--memory-limit": arguments.memory_limit}
    others |= {"--times": arguments.times is not TIMES, "--memory": arguments.memory is not MEMORY}
    options = [name for name, value in {**sizes, **others}.items() if value]
    generator, is_call = SCHEDULES.get(_name(arguments)), "(" in arguments.file
    if Path(arguments.file).exists():
        if options:
            raise UsageError(
                f"{arguments.file} is a file: {', '.join(options)} are for a schedule without one, by its name"
            )
        return False
    if generator is None:  # the schedule that is meant is said where it is loaded
        return bool(options) or is_call or nearest(_name(arguments), SCHEDULES) is not None
    # A schedule that is written in a file states its own size.
    written = generator.written is not None and is_call
    supplied = _arguments(arguments)
    missing = [] if written else [name for name, size in sizes.items() if size is None and name[2:] not in supplied]
    if missing:
        raise UsageError(f"a schedule without a program needs {' and '.join(missing)}")
    return True


def build_schedule(arguments: argparse.Namespace) -> tuple[Schedule, Timeline, int]:
    """The schedule, its timeline, and the queues of a GPU that it needs. Raises Refused if it cannot be made, or
    violates an invariant or the limit.
    """
    call = _call(arguments)
    chunks, microbatches = size_of(call)
    if arguments.chunks is not None and "chunks" not in call.arguments:
        chunks = arguments.chunks
    if arguments.microbatches not in (None, microbatches):
        message = f"`{arguments.file}` has {microbatches} microbatches, not {arguments.microbatches}"
        raise refuse("E0505", message, call.span)
    written = SCHEDULES[call.name].written
    ranks = arguments.stages or (written(call).ranks if written is not None else 1)
    stages = ranks * chunks
    problem = arguments.times.problem(ranks, chunks)
    if problem is not None:
        raise refuse("E0505", f"--times: {problem}", call.span)
    slices = call.arguments.get("slices") or 1
    costs = _shared(arguments.times.costs(ranks, chunks), slices)
    memory = None
    if arguments.memory_limit is not None:
        after_f, after_b = ((arguments.memory[key] / chunks / slices,) * stages for key in ("F", "W"))
        memory = Memory((arguments.memory_limit,) * ranks, after_f, after_b)
    messages = default_messages(stages)
    conditions = Conditions(costs, messages, None if memory is None else lambda placement: memory)
    own = own_arguments(call)
    if own.pop(BOUND.name, None) is not None:
        raise refuse("E0505", "a schedule without a program has no bytes: use --memory-limit", call.span)
    schedule = make(call.name, ranks, chunks, microbatches, conditions=conditions, span=call.span, **own)
    spread, budget = arguments.times.spread(ranks, chunks), memory
    schedule = SCHEDULES[call.name].shared(schedule, spread, costs.action)
    if spread is not None:
        messages += part_messages(spread)
        if memory is not None:  # it is that of the stages: S and T leave nothing
            left = (0.0,) * (spread.total - stages)
            budget = evolve(memory, forward=memory.forward + left, weight=memory.weight + left)
    overlap = arguments.times.FB is not None
    if arguments.times.copy is not None:
        check_schedule(schedule)
        copies = {stage: time / slices for stage, time in arguments.times.copies(ranks, chunks).items()}
        schedule = with_copies(schedule, copies, simulate(communicate(schedule, messages, overlap=overlap), costs))
    check_schedule(schedule)
    programs = communicate(schedule, messages, overlap=overlap)
    check_program(programs)
    if budget is not None:
        _hold(schedule, budget)
    return schedule, simulate(programs, costs), queues(programs)


def _name(arguments: argparse.Namespace) -> str:
    """The name of the schedule that FILE is or calls."""
    return str(arguments.file).partition("(")[0].strip()


def _arguments(arguments: argparse.Namespace) -> set[str]:
    """The arguments of the schedule that are in its call, or follow it; all of them if the call cannot be read."""
    keys = {each.partition("=")[0] for each in arguments.overrides}
    if "(" not in arguments.file:
        return keys
    names = SCHEDULES[_name(arguments)].names
    written = parse_expression(Source(PLACE, arguments.file), Report(), 0, len(arguments.file))
    if not isinstance(written, tree.Call):
        return {*keys, *names}
    return keys | {each.name.text if each.name else name for each, name in zip(written.arguments, names, strict=False)}


def _call(arguments: argparse.Namespace) -> Call:
    """The call of the schedule, with the options applied."""
    name = _name(arguments)
    accepted = SCHEDULES[name].names if name in SCHEDULES else ()
    overrides = [f"one.{each}" for each in arguments.overrides]
    for key in ("microbatches", "chunks"):
        value = getattr(arguments, key)
        if value is not None and key in accepted:
            overrides.append(f"one.{key}={value}")
    written = arguments.file if "(" in arguments.file else f"{arguments.file}()"
    spec, diagnostics = load_text(f"schedule one = {written}", PLACE, overrides, PLACE)
    if spec is None or spec.schedule is None:
        raise Refused([each for each in diagnostics if each.severity == "error"])
    return spec.schedule.call


def _shared(costs: Costs, slices: int) -> Costs:
    """The costs of a slice, of those of a microbatch."""
    if slices == 1:
        return costs
    return evolve(
        costs,
        action=lambda stage, kind: costs.action(stage, kind) / slices,
        transfer=lambda message: costs.transfer(message) / slices,
        copy=lambda stage: costs.copy(stage) / slices,
    )


def _hold(schedule: Schedule, memory: Memory) -> None:
    """Refuse (E0504) a schedule that exceeds the memory limit."""
    for rank, (actions, stages) in enumerate(zip(schedule.actions, schedule.placement, strict=True)):
        peak = memory.peak(actions, stages)
        if not memory.holds(rank, peak):
            amount, limit = memory.text(peak), memory.text(memory.limit[rank])
            message = f"rank {rank} of schedule `{schedule.name}` needs {amount}, but the limit is {limit}"
            searched = ", ".join(f"`{each.name}`" for each in SCHEDULES.values() if each.bounded)
            help = f"{searched} searches within the limit" if searched else None
            raise refuse("E0504", message, help=help)


def _memory(text: str) -> Numbers:
    """Memory by kind of action, such as `F=1,W=0.4`; others keep their defaults."""
    return {**MEMORY, **numbers(text, MEMORY)}
