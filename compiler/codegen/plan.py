"""Partitioned graph and schedule → plan: checked instructions of each rank, and what each stage needs and keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import asdict, evolve

from partita.compiler.analysis.in_flight import (
    CollectiveLifetime,
    buffer,
    collective_extra_bytes,
    communicating,
    expanded,
    lent,
    memory_behind,
    posted,
)
from partita.compiler.analysis.liveness import (
    live_bytes,
    roots,
    shared,
    transient_peak_bytes,
    unread_results,
    working_set,
)
from partita.compiler.codegen.functions import StageFunctions, receives, sends
from partita.compiler.graph import Node, Parameter, Value, producers_of
from partita.compiler.instructions import Channel, Compute, Instruction, Message, PostSend, Traffic, Transfer
from partita.compiler.layout import REPLICATED, stored_form, tensor_type
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.groups import ANCHOR
from partita.compiler.ops.optimizer import EMA
from partita.compiler.passes.cut import PartitionedGraph, StageGraph, forms, message_of
from partita.compiler.passes.early_collectives import EarlyCollectives
from partita.compiler.passes.shard.shard import ParameterLayouts
from partita.compiler.passes.update import OuterUpdate, ParameterUpdate, UpdateGraph
from partita.compiler.program import (
    ESTIMATE,
    AccumulatorRecord,
    InputPart,
    InputRecord,
    ParameterRecord,
    RankPlan,
    StageNeeds,
    StagePlan,
    StateRecord,
    StepPlan,
    TiedTransfer,
    older_names,
)
from partita.compiler.schedules.communication import communicate
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.state import Partitioned
from partita.compiler.streams import communicators
from partita.dsl.types import Type


def functions_of(partitioned: PartitionedGraph, schedule: Schedule, compiled: bool = False) -> list[StageFunctions]:
    """The functions of all stages; `compiled`: uses torch.compile."""
    kinds = {action.kind for actions in schedule.actions for action in actions}
    return [StageFunctions(partitioned, stage, kinds, compiled) for stage in partitioned.stages]


def plan_step(state: Partitioned, schedule: Schedule) -> StepPlan:
    """The plan of one kind of step, with the order of every rank's actions.

    Raises Refused if the schedule violates an invariant (E0501 to E0504).
    """
    joint, partitioned, update, mesh = state.joint, state.partitioned, state.update, state.mesh
    train, training, on_host, mapped = state.train, state.training, state.on_host, state.mapped
    _check_ends(partitioned)
    check_schedule(schedule)
    instructions = communicate(schedule, partitioned.messages)
    check_program(instructions)
    tied = _tied(update, schedule)
    streams = communicators(mesh, {each.transfer.channel for each in tied})
    names = (*(each.name for each in update.parameters), *(each.name for each in update.buffers))
    written = set(names) if training and train.late else set[str]()
    reduce = dict(update.reduce)
    needs: dict[tuple[int, str], StageNeeds] = {}
    stages = []
    of_stages = functions_of(partitioned, schedule, state.compiled)
    for functions, form in zip(of_stages, forms(partitioned, update.reduce), strict=True):
        like = form, schedule.last_kind(functions.stage.index)
        if like not in needs:
            own = functions.stage.index
            needs[like] = _needs(functions, like[1], reduce.get(own, ()), update.totals[own], not state.device.gpu)
        stages.append(_stage(functions.stage, schedule, needs[like]))
    ranks = tuple(
        _rank_plan(rank, schedule, stages, update, instructions[rank], tied, set(reduce), written)
        for rank in range(schedule.ranks)
    )
    sends = [i.transfer for list_ in instructions for i in list_ if isinstance(i, PostSend)]
    stage_sets = partitioned.stage_sets()
    updates = {each.name: each for each in update.parameters}
    outer = {each.name: each for each in update.outer}
    groups = state.replicas_per_rank * mesh.groups
    delay, paired = (train.delay, train.paired) if training else (0, False)
    return StepPlan(
        name=joint.name,
        inputs=tuple(
            InputRecord(each.name, type, each.value.type, each.limit, each.span, each.ignored)
            for each in joint.inputs
            for type in (_of_groups(stored_form(each.value.type, REPLICATED, joint.own_sizes)[0], state.batch, groups),)
        ),
        batch=state.batch,
        microbatches=schedule.microbatches,
        slices=schedule.slices,
        batches=state.batches,
        mesh=mesh,
        parameters=tuple(
            _parameter_record(
                parameter,
                state.sharded.parameters[parameter.name],
                stage_sets[parameter.name],
                updates.get(parameter.name),
                outer.get(parameter.name),
                older_names(delay, paired),
                mesh.sizes,
                parameter.name in on_host,
                parameter.name in mapped,
            )
            for parameter in partitioned.graph.parameters
            if parameter.name in stage_sets  # evaluation may not use one
        ),
        stages=tuple(stages),
        ranks=ranks,
        channels=_traffic((*sends, *(each.transfer for each in tied))),
        step_metrics=tuple(name for name, _, _ in update.step_metrics),
        guards=partitioned.graph.guards,
        schedule=schedule,
        replicas_per_rank=state.replicas_per_rank,
        delay=delay,
        paired=paired,
        captured=training and train.graphs,
        streams=streams,
    )


def _of_groups(type: Type, batch: str, groups: int) -> Type:
    """The type of an input of all groups, from that of one."""
    return type.resized(batch, type.axis(batch).size * groups) if type.has(batch) else type


def _traffic(transfers: Iterable[Transfer]) -> dict[Channel, Traffic]:
    """What a step sends on each channel."""
    by_channel: dict[Channel, list[int]] = {}
    for each in transfers:
        by_channel.setdefault(each.channel, []).append(each.message.bytes)
    return {channel: Traffic(len(sizes), sum(sizes)) for channel, sizes in sorted(by_channel.items())}


def _check_ends(partitioned: PartitionedGraph) -> None:
    """Both ends of every message have the same type (part of invariant 3)."""
    ends: dict[str, dict[Message, Type]] = {"send": {}, "receive": {}}
    for stage in partitioned.stages:
        ends["send"].update((message_of(node), node.inputs[0].type) for node, _ in sends(stage.nodes))
        ends["receive"].update((message_of(node), op.type) for node, op in receives(stage.nodes))
    assert ends["send"] == ends["receive"], "the ends of a message differ"


def _parameter_record(
    parameter: Parameter,
    layouts: ParameterLayouts,
    stages: tuple[int, ...],
    update: ParameterUpdate | None,
    outer: OuterUpdate | None,
    older: Sequence[str],
    sizes: dict[str, int],
    host: bool,
    mapped: bool,
) -> ParameterRecord:
    companions = zip(outer.state_names, outer.states, strict=True) if outer else ()
    named = zip(update.state_names, update.states, strict=True) if update else ()
    return ParameterRecord(
        parameter.name,
        parameter.master,
        layouts.param,
        layouts.state,
        parameter.initial,
        parameter.fans,
        stages,
        tuple(
            StateRecord(name, tensor_type(state.type, state.layout, sizes), name == EMA, state.host)
            for name, state in named
        ),
        host,
        mapped,
        (
            *(
                StateRecord(name, tensor_type(state.type, state.layout, sizes), name == ANCHOR, state.host)
                for name, state in companions
            ),
            *(
                StateRecord(name, parameter.master, host=host and name == ESTIMATE)
                for name in older
                if update is not None
            ),
        ),
    )


def _needs(
    functions: StageFunctions, last_kind: str, reduce: Sequence[Node], totals: Sequence[Value], adds: bool
) -> StageNeeds:
    """The memory of a stage whose gradients are reduced from its last action on, of this kind."""
    stage = functions.stage
    forward, backward = functions.groups["F"], functions.groups["B"]
    saved, kept = functions.saved, functions.kept
    around = {"F": (set(), saved), "B": (saved, kept), "W": (kept, set()), "BW": (saved, set())}
    flights = {
        node: posted(node, adds) for node in (*forward, *functions.groups["BW"]) if isinstance(node.op, Collective)
    }
    behind = memory_behind(stage.nodes, flights)
    peaks = {}
    gathering = opening = in_flight = reducing = reduced = 0
    for kind in functions.kinds:
        live_in, left = around[kind]
        nodes = functions.groups[kind]
        before = {*live_in, *(node.output for node, _ in receives(nodes))}
        after = {*left, *(node.inputs[0] for node, _ in sends(nodes))}
        units = expanded(functions.units(nodes, after), flights)
        peaks[kind] = transient_peak_bytes(units, before, after, stage.nodes, behind)
        if kind == "F" and functions.gathered.collectives:
            sent, waiting = _waiting(functions, units, adds)
            gathering = sum(each.type.bytes for each in sent)
            peak = working_set(waiting, after, {*before, *sent}, behind)
            opening = peak - live_bytes(before, stage.nodes, behind)
        if reduce and kind == last_kind:
            ahead = functions.reduced(kind, reduce, totals)
            flying = {node: posted(node, adds) for node in ahead.in_flight}
            nodes = _closing(functions, kind, ahead, flying, adds)
            left = {*ahead.made, *(value for each in flying.values() for value in each.flight)}
            views, sums = roots(reduce), {each.value for each in stage.accumulators}
            left = {value for value in left if views.get(value, value) not in sums}
            after |= left
            closing = expanded(functions.units(nodes, after), flights)
            ends = (*stage.nodes, *reduce)
            held = memory_behind(ends, {**flights, **flying})  # a part of a total holds all of it
            peaks["C"] = transient_peak_bytes(closing, before, after, ends, held)
            in_flight = live_bytes(left, ends, held)
            rest = communicating((*ahead.others, *ahead.follow), adds, totals, flying.items())
            results = unread_results(reduce)
            reducing = working_set([[[node]] for node in rest.nodes], results, left, rest.behind)
            reduced = rest.left(results) + live_bytes(ahead.made, ())
    return StageNeeds(
        saved=live_bytes(saved, forward, behind),
        kept=live_bytes(kept, (*forward, *backward), behind),
        offloaded=live_bytes(stage.offloaded, forward),
        shared={"F": shared(forward), "B": shared(functions.groups["BW"])},
        peaks=peaks,
        gathering=gathering,
        opening=opening,
        in_flight=in_flight,
        reducing=reducing,
        reduced=reduced,
    )


def _stage(stage: StageGraph, schedule: Schedule, needs: StageNeeds) -> StagePlan:
    rank, chunk = schedule.position(stage.index)
    return StagePlan(
        index=stage.index,
        rank=rank,
        chunk=chunk,
        parameters=tuple(p.name for p in stage.parameters),
        full_inputs=tuple(InputPart(each.name, None, each.value.layout) for each in stage.inputs if each.batch is None),
        inputs=tuple(
            InputPart(each.name, each.batch, each.value.layout) for each in stage.inputs if each.batch is not None
        ),
        accumulators=tuple(
            AccumulatorRecord(each.name, each.value.type, each.parameter, each.maximum, each.value.layout, each.term)
            for each in stage.accumulators
        ),
        **asdict(needs, recurse=False),
    )


def _waiting(
    functions: StageFunctions, units: list[list[list[Node]]], adds: bool
) -> tuple[list[Value], list[list[list[Node]]]]:
    """F of a step's first microbatch, as far as memory goes: the buffers of what is sent to gather, which are there
    when it begins; and its units, with waits before the runs that read what is gathered.

    What is received is counted where constants are, as the results. While these are copied from it, it is there twice.
    What is made from these holds them until it is made.
    """
    follow = functions.gathered.follow
    gathers = [*functions.gathered.collectives, *(node for node in follow if isinstance(node.op, Collective))]
    makers = producers_of((*gathers, *follow))
    sizes = {node: collective_extra_bytes(node, adds) for node in gathers}
    masters = {each.value for each in functions.stage.parameters if each.value.type.dtype == each.master.dtype}
    behind = roots(functions.stage.nodes)

    def operands(node: Node) -> int:
        """Bytes of operands that are made for it, and stay as they are sent as they are."""
        return sum(value.type.bytes for value in lent(node, adds) if behind.get(value, value) not in masters)

    sent = {node: buffer("sent", node, in_flight + operands(node)) for node, (in_flight, _) in sizes.items()}
    received = {node: buffer("received", node, more) for node, (_, more) in sizes.items()}
    ready: set[Node] = set()

    def waits(values: Iterable[Value]) -> Iterator[Node]:
        for node in (makers[value] for value in values if value in makers):
            if node not in ready:
                ready.add(node)
                yield from waits(node.inputs)
                copied = [received[makers[value]] for value in node.inputs if makers.get(value) in received]
                if node in sent:
                    yield evolve(node, inputs=(sent[node], *copied), outputs=(received[node],))
                elif not node.op.is_view and copied:
                    yield evolve(node, op=gathers[0].op, inputs=tuple(copied), outputs=())

    # Further collectives start at once, with what they gather.
    runs = [[[wait] for node in follow if isinstance(node.op, Collective) for wait in waits(node.inputs)]]
    for run in units:
        runs += [[[wait] for unit in run for node in unit for wait in waits(node.inputs)], run]
    runs.append([[wait] for node in (*gathers, *follow) for wait in waits(node.outputs)])
    return list(sent.values()), [run for run in runs if run]


def _closing(
    functions: StageFunctions, kind: str, ahead: EarlyCollectives, flying: Mapping[Node, CollectiveLifetime], adds: bool
) -> list[Node]:
    """The last action of a stage, as far as memory goes: with collectives, some of which stay in flight, and with waits
    before copies of what others make.
    """
    waits: dict[Value, CollectiveLifetime] = {}
    order: dict[Node, None] = {}
    for node in functions.closing(kind, ahead):
        for each in (waits[value] for value in node.inputs if value in waits):
            order.update(dict.fromkeys(each.end))
        if node in flying:
            order[flying[node].start] = None
        elif node in ahead.collectives:
            own = posted(node, adds)
            order[own.start] = None
            waits.update(dict.fromkeys(node.outputs, own))
        else:
            order[node] = None
    return list(order)


def _tied(update: UpdateGraph, schedule: Schedule) -> list[TiedTransfer]:
    """Sends of every total to each other rank that holds what it updates, in one global order."""
    tied: list[TiedTransfer] = []
    counts: dict[Channel, int] = {}
    for (stage, accumulator, rank), (destination, value) in tied_totals(update, schedule).items():
        channel = Channel(schedule.rank_of(stage), rank, "tied")
        message = Message(value.name, stage, destination, "tied", value.type.bytes)
        index = counts.get(channel, 0)
        counts[channel] = index + 1
        transfer = Transfer(channel, message, 0, index)
        tied.append(TiedTransfer(transfer, stage, accumulator, value.type))
    return tied


def tied_totals(update: UpdateGraph, schedule: Schedule) -> dict[tuple[int, str, int], tuple[int, Value]]:
    """The totals that other ranks need: by stage, accumulator and rank, the stage that needs it there, and the total.

    A statistic goes once to a rank, whichever buffers it updates there.
    """
    tied: dict[tuple[int, str, int], tuple[int, Value]] = {}
    needed = [(each.stages, each.totals) for each in update.parameters]
    needed += [(each.stages, each.totals) for each in update.buffers]
    for stages, totals in needed:
        holders: dict[int, int] = {}
        for stage in stages:
            holders.setdefault(schedule.rank_of(stage), stage)
        for stage, accumulator, value in totals:
            for rank, destination in holders.items():
                if rank != schedule.rank_of(stage):
                    tied.setdefault((stage, accumulator, rank), (destination, value))
    return tied


def _rank_plan(
    rank: int,
    schedule: Schedule,
    stages: Sequence[StagePlan],
    update: UpdateGraph,
    instructions: tuple[Instruction, ...],
    tied: Sequence[TiedTransfer],
    reduced: set[int],
    written: set[str],
) -> RankPlan:
    own = [stages[index] for index in schedule.placement[rank]]
    receives = tuple(each for each in tied if each.transfer.channel.destination == rank)
    totals = [(stage.index, each.name) for stage in own for each in stage.accumulators]
    totals += [(each.stage, each.accumulator) for each in receives]
    assert len(set(totals)) == len(totals), f"accumulators of one name: {totals}"
    parameters = tuple(dict.fromkeys(name for stage in own for name in stage.parameters))
    return RankPlan(
        rank=rank,
        stages=tuple(schedule.placement[rank]),
        instructions=instructions,
        reductions=_reductions(instructions, reduced),
        parameters=parameters,
        sends=tuple(each for each in tied if each.transfer.channel.source == rank),
        receives=receives,
        totals=tuple(totals),
        step_metrics=tuple(
            i for i, (_, _, stage) in enumerate(update.step_metrics) if stage in schedule.placement[rank]
        ),
        copied=tuple(name for name in parameters if name in written),
    )


def _reductions(instructions: Sequence[Instruction], reduced: set[int]) -> dict[int, tuple[int, ...]]:
    """By position of an instruction, the stages whose last action it is and that have accumulators to reduce."""
    last: dict[int, int] = {}
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Compute) and instruction.stage in reduced:
            last[instruction.stage] = i
    reductions: dict[int, tuple[int, ...]] = {}
    for stage, i in last.items():
        reductions[i] = (*reductions.get(i, ()), stage)
    return reductions
