"""Plan → Program: emits the source and lays out the frames."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import asdict

from partita.compiler.codegen.emit import KINDS, StageEmitter, stage_function
from partita.compiler.codegen.functions import receives, sends
from partita.compiler.codegen.plan import functions_of
from partita.compiler.codegen.statements import Return
from partita.compiler.codegen.writer import Module, Probe, Writer
from partita.compiler.graph import Parameter, inputs_of
from partita.compiler.instructions import Message
from partita.compiler.ops.op import TORCH_DTYPES, Argument
from partita.compiler.passes.cut import PartitionedGraph, message_of
from partita.compiler.passes.update import UpdateGraph
from partita.compiler.program import LocalTransfer, Program, RankPlan, RankProgram, StagePlan, StageProgram, StepPlan
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.schedules.stream_invariants import check_launches
from partita.compiler.streams import launches_of
from partita.dsl.types import Type

# Arguments of a rank's functions.
FINISH, FACTOR, UPDATE, OUTER = ("t", "c"), ("s", "c"), ("m", "t", "v", "k", "c"), ("m", "v", "c")


def assemble(
    plan: StepPlan,
    partitioned: PartitionedGraph,
    update: UpdateGraph,
    compiled: bool = False,
    probe: Probe | None = None,
) -> Program:
    """The program of a plan. With `compiled`, it uses torch.compile; a `probe` observes its values.

    Raises Refused if what ranks enqueue violates an invariant (E0501, E0502).
    """
    launches = [launches_of(rank.instructions) for rank in plan.ranks]
    check_launches([rank.instructions for rank in plan.ranks], launches, plan.streams)
    # A repeat may be called `stage0`, and its functions are named after it.
    entries = ["factor", *(stage_function(stage.index, kind) for stage in plan.stages for kind in KINDS)]
    module = Module(partitioned.graph.name, probe, compiled, entries)
    on_host = {each.name for each in plan.parameters if each.host}
    reduce = dict(update.reduce)
    emitters = []
    for functions in functions_of(partitioned, plan.schedule, compiled):
        index = functions.stage.index
        emitter = StageEmitter(module, functions, _casts(functions.stage.parameters, on_host))
        in_flight = [value for _, value in update.in_flight([index])]
        emitter.emit(reduce.get(index, ()), update.totals[index], plan.schedule.last_kind(index), in_flight)
        emitters.append(emitter)
    stages = tuple(
        _stage_program(stage, emitter, emitters, plan.schedule)
        for stage, emitter in zip(plan.stages, emitters, strict=True)
    )
    ranks = tuple(
        RankProgram(
            **asdict(rank, recurse=False),
            launches=own,
            finish=_emit_finish(rank, module, update),
            update=_emit_update(rank, module, update, on_host) if update.parameters or update.buffers else None,
            outer=_emit_outer(rank, module, update) if update.outer else None,
        )
        for rank, own in zip(plan.ranks, launches, strict=True)
    )
    factor = _emit_factor(module, update) if update.clip else None
    whole = {**asdict(plan, recurse=False), "stages": stages, "ranks": ranks}
    return Program(**whole, source=module.source, factor=factor)


def _casts(parameters: Sequence[Parameter], on_host: Collection[str]) -> Mapping[str, str]:
    """By parameter, how its value is made of its master `{}`, unless it is that: in the dtype in which the stage
    computes, and on the device, unless it is copied there before each use.
    """
    casts = {}
    for p in parameters:
        dtype = TORCH_DTYPES[p.value.type.dtype] if p.value.type.dtype != p.master.dtype else ""
        if p.value.host:
            casts[p.name] = f"kernels.cast_on_host({{}}, {dtype}, c)" if dtype else "{}"
        else:
            casts[p.name] = _on_device(f"{{}}.to({dtype})" if dtype else "{}", p.name in on_host)
    return casts


def _on_device(text: str, host: bool) -> str:
    """A tensor on the device, of one that may lie in the host's memory."""
    return f"kernels.to_device({text}, c)" if host else text


def _stage_program(
    plan: StagePlan, emitter: StageEmitter, emitters: Sequence[StageEmitter], schedule: Schedule
) -> StageProgram:
    of, stage = emitter.of, emitter.stage
    sent: dict[Message, int] = {}
    received: dict[Message, tuple[int, Type]] = {}
    local_transfers: list[LocalTransfer] = []
    for node, send in sends(stage.nodes):
        message = message_of(node)
        slot = emitter.slots.slot(node.inputs[0])
        if schedule.rank_of(send.destination) == plan.rank:
            other = emitters[send.destination]
            target = next(n.output for n, _ in receives(other.stage.nodes) if message_of(n) == message)
            kind = "F" if send.direction == "forward" else "B"
            local_transfers.append(LocalTransfer(kind, slot, send.destination, other.slots.slot(target)))
        else:
            sent[message] = slot
    for node, receive in receives(stage.nodes):
        if schedule.rank_of(receive.source) != plan.rank:
            received[message_of(node)] = (emitter.slots.slot(node.output), node.output.type)
    read_later, read_by_weight = inputs_of(of.groups["BW"]), inputs_of(of.groups["W"])
    released = {
        emitter.slots.slot(node.inputs[0])
        for node, send in sends(stage.nodes)
        if node.inputs[0] not in (read_later if send.direction == "forward" else read_by_weight)
    }
    return StageProgram(
        **asdict(plan, recurse=False),
        input_slots=tuple(emitter.slots.slot(each.value) for each in stage.inputs if each.batch is not None),
        frame=len(emitter.slots.of),
        sends=sent,
        receives=received,
        local_transfers=tuple(local_transfers),
        released=frozenset(released),
        copied=tuple(emitter.slots.slot(value) for value in stage.offloaded),
        functions=emitter.functions,
    )


def _totals(writer: Writer, update: UpdateGraph, totals: Sequence[tuple[int, str]]) -> None:
    """Names the totals that updates read."""
    positions = {key: i for i, key in enumerate(totals)}
    for each in update.parameters:
        for stage, name, value in each.totals:
            if (stage, name) in positions:
                writer.names.texts[value] = Argument(f"t[{positions[stage, name]}]", value.type)
    for buffer in update.buffers:
        for stage, name, value in buffer.totals:
            if (stage, name) in positions:
                writer.names.texts[value] = Argument(f"t[{positions[stage, name]}]", value.type)


def _emit_finish(rank: RankPlan, module: Module, update: UpdateGraph) -> str:
    writer = Writer(FINISH, probe=module.probe)
    _totals(writer, update, rank.totals)
    positions = {key: i for i, key in enumerate(rank.totals)}
    mine = set(rank.stages)
    metrics = [value for _, value, stage in update.step_metrics if stage in mine]
    for accumulator, stage in update.sums:
        if stage in mine:
            text = f"t[{positions[stage, accumulator.name]}]"
            writer.names.texts[accumulator.value] = Argument(text, accumulator.value.type)
    writer.block(update.statistic_nodes(mine), set(metrics))
    writer.add(Return(tuple(metrics), always=True))
    name = f"rank{rank.rank}_finish"
    module.add(name, FINISH, writer.body(), f"Statistics that rank {rank.rank} makes.")
    return name


def _emit_factor(module: Module, update: UpdateGraph) -> str:
    writer = Writer(FACTOR, probe=module.probe)
    first = len(update.step_metrics) - len(update.norms)
    for i, value in enumerate(update.norms):
        writer.names.texts[value] = Argument(f"s[{first + i}]", value.type)
    factor = update.clip[-1].output
    writer.block(update.clip, {factor})
    writer.add(Return((factor,)))
    module.add("factor", FACTOR, writer.body(), "By what clipping multiplies gradients, at most 1.")
    return "factor"


def _emit_update(rank: RankPlan, module: Module, update: UpdateGraph, on_host: Collection[str]) -> str:
    writer = Writer(UPDATE, probe=module.probe)
    _totals(writer, update, rank.totals)
    # Behind the totals, stage by stage.
    in_flight = [value for stage in rank.stages for _, value in update.in_flight([stage])]
    for i, value in enumerate(in_flight, len(rank.totals)):
        writer.names.texts[value] = Argument(f"t[{i}]", value.type)
    if update.clip:
        writer.names.texts[update.clip[-1].output] = Argument("k", update.clip[-1].output.type)
    states = 0
    order = {name: i for i, name in enumerate(rank.parameters)}
    masters = [(each.parameter, each.value) for each in update.masters]
    for name, value in (*masters, *((each.name, each.master) for each in update.buffers)):
        if name in order:
            text = _on_device(f"m[{order[name]}]", name in on_host)
            writer.names.texts[value] = Argument(text, value.type)
    writer.block(update.buffer_updates(order.keys()), set())
    for each in sorted((u for u in update.parameters if u.name in order), key=lambda u: order[u.name]):
        writer.names.texts[each.master] = Argument(f"m[{order[each.name]}]", each.master.type)
        for value in each.states:
            writer.names.texts[value] = Argument(f"v[{states}]", value.type)
            states += 1
    writer.block(update.parameter_updates(rank.parameters), set())
    writer.block(update.after_updates(order.keys()), set())
    name = f"rank{rank.rank}_update"
    module.add(name, UPDATE, writer.body() or ["pass"], f"The optimizer of rank {rank.rank}, in place.")
    return name


def _emit_outer(rank: RankPlan, module: Module, update: UpdateGraph) -> str:
    """`m` has the copies of all parameters of the rank's first group, then those of the next."""
    writer = Writer(OUTER, probe=module.probe)
    order = {name: i for i, name in enumerate(rank.parameters)}
    states = 0
    for each in sorted((u for u in update.outer if u.name in order), key=lambda u: order[u.name]):
        for member, value in enumerate(each.masters):
            text = f"m[{member * len(order) + order[each.name]}]"
            writer.names.texts[value] = Argument(text, value.type)
        for value in each.states:
            writer.names.texts[value] = Argument(f"v[{states}]", value.type)
            states += 1
    writer.block(update.outer_updates(order.keys()), set())
    name = f"rank{rank.rank}_outer"
    module.add(name, OUTER, writer.body() or ["pass"], f"The average of the groups of rank {rank.rank}, in place.")
    return name
