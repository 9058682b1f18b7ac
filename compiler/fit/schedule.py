"""Makes the schedule of a program with its costs and, if it is searched for, within its memory.

The limit of a rank for microbatches in flight is its memory (the device's, or the schedule's own argument) minus
everything else that it holds, counted on a program of the same stages that runs one microbatch after the other. The
program with the schedule found is then counted as a whole; if it still exceeds the limit (because of transfers in
flight, say), the search is repeated with that much less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from attrs import evolve

from partita.compiler.analysis.memory import headroom, peak_memory
from partita.compiler.analysis.time import copy_seconds, costs_of
from partita.compiler.codegen.plan import plan_step
from partita.compiler.passes.offload import activation_paths
from partita.compiler.schedules.communication import communicate
from partita.compiler.schedules.conditions import Conditions, Memory, Placement
from partita.compiler.schedules.forward_only import FORWARD_ONLY
from partita.compiler.schedules.generator import SCHEDULES, Generator, own_arguments
from partita.compiler.schedules.invariants import check_schedule
from partita.compiler.schedules.offload import with_copies
from partita.compiler.schedules.one_by_one import one_by_one
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.schedules.simulator import simulate
from partita.compiler.state import Partitioned, Scheduled, extended
from partita.dsl.config.builtins import BOUND
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.syntax.source import Span

# How often a search is repeated because its program needs more memory than estimated.
_ATTEMPTS = 4


def planned_with(state: Partitioned, schedule: Schedule) -> Scheduled:
    """The plan with a schedule, and the copies of what stages offload. Raises Refused if the schedule breaks an
    invariant (E0501 to E0504), or has copies of its own of what is not offloaded (E0505).
    """
    schedule, warnings = _with_copies(state, schedule)
    plan = plan_step(state, schedule)
    return extended(Scheduled, state, schedule=schedule, plan=plan, warnings=(*state.warnings, *warnings))


def _with_copies(state: Partitioned, schedule: Schedule) -> tuple[Schedule, tuple[Diagnostic, ...]]:
    """Insert offload (O) and load (L) actions for stages that offload activations; warn (W0301) if none fits, since
    the rule then has no effect.
    """
    copies = copy_seconds(state)
    if not copies and not schedule.copies:
        return schedule, ()
    check_schedule(schedule)
    if not copies:
        message = f"`{schedule.name}` has copies to the host's memory (O and L), but the layout offloads nothing"
        span = schedule.spans[0][0] if schedule.spans else state.schedule_call.call.span
        raise refuse("E0505", message, span, help="`offload all`, or the name of a block or repeat, in the layout")
    if not schedule.training or schedule.copies:
        return schedule, ()
    timeline = simulate(communicate(schedule, state.partitioned.messages), costs_of(state))
    schedule = with_copies(schedule, copies, timeline)
    if schedule.copies:
        return schedule, ()
    rules = [rule for rule in state.offload_rules if activation_paths(state.partitioned.graph, rule)]
    message = "nothing is offloaded: backward passes follow their forwards too soon for copies to the host and back"
    help = "remove the rule; it takes a schedule with several microbatches in flight"
    return schedule, tuple(Diagnostic("W0301", message, rule.span, help=help) for rule in rules[:1])


def scheduled(state: Partitioned) -> Scheduled:
    """A partitioned program with its schedule; for evaluation, the forward-only order of its stages.

    Raises Refused: E0505, E0506 for what the schedule does not support, E0501 to E0504 if it breaks an invariant.
    """
    call = state.schedule_call.call
    span = call.span or state.schedule_call.span
    size = state.pipeline.ranks, state.pipeline.chunks, state.batch_parts
    if not state.training:
        return planned_with(
            state, _shared(state, FORWARD_ONLY, make(FORWARD_ONLY, *size, span=span, placement=state.placement))
        )
    generator, own = SCHEDULES[call.name], own_arguments(call)
    if not generator.conditional:
        return planned_with(state, _shared(state, generator, make(generator, *size, span=span, **own)))
    conditions = Conditions(costs_of(state), state.partitioned.messages, spread=state.spread)
    if not generator.bounded:
        return planned_with(
            state, _shared(state, generator, make(generator, *size, conditions=conditions, span=span, **own))
        )
    limit = float(own.pop(BOUND.name, state.device.memory))
    return _searched(state, generator, partial(make, generator, *size, span=span, **own), conditions, limit, span)


def _shared(state: Partitioned, generator: Generator, schedule: Schedule) -> Schedule:
    """The schedule with the passes over what all ranks share."""
    costs = cache(partial(costs_of, state))  # few programs share anything
    return generator.shared(schedule, state.spread, lambda stage, kind: costs().action(stage, kind))


def _searched(
    state: Partitioned,
    generator: Generator,
    generate: Callable[..., Schedule],
    conditions: Conditions,
    limit: float,
    span: Span | None,
) -> Scheduled:
    """The schedule, from `generate` within a memory limit, with which no rank exceeds `limit`."""
    beside = cache(lambda placement: _beside(state, generator, placement))

    def within(bytes: float) -> Callable[[Placement], Memory]:
        def memory(placement: Placement) -> Memory:
            baseline = beside(placement)
            return evolve(baseline, limit=tuple(bytes + each for each in baseline.limit))

        return memory

    left = limit
    for _ in range(_ATTEMPTS):
        schedule = generate(conditions=evolve(conditions, memory=within(left)))
        trial = planned_with(state, _shared(state, generator, schedule))
        excess = max(peak_memory(trial, rank) for rank in trial.plan.ranks) - limit
        if excess <= 0:
            return trial
        left -= excess
    message = (
        f"schedule `{state.schedule_call.call.name}` found no order that needs at most {limit:,.0f} bytes on each rank"
    )
    raise refuse("E0505", message, span, help="allow more memory, or `recompute` more")


def _beside(state: Partitioned, generator: Generator, placement: Placement) -> Memory:
    """What microbatches keep on each stage; and, as each rank's limit, the room that a limit of zero leaves: negative,
    by all that it holds in addition to microbatches in flight. Of these, passes over what all ranks share take more.
    """
    alone = one_by_one(placement, state.microbatches)
    shared = _shared(state, generator, alone)
    trial = planned_with(state, shared)
    memory = Memory(
        tuple(headroom(trial, rank, 0) for rank in trial.plan.ranks),
        tuple(float(stage.saved) for stage in trial.plan.stages),
        tuple(float(stage.kept) for stage in trial.plan.stages),
        "bytes",
    )
    peaks = [
        [memory.peak(*each) for each in zip(schedule.actions, schedule.placement, strict=True)]
        for schedule in (shared, alone)
    ]
    return evolve(memory, limit=tuple(left - both + one for left, both, one in zip(memory.limit, *peaks, strict=True)))
