"""Partitioned graph and schedule → Program: source emitted, frames laid out, instructions made and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from partita.compiler.communication import communicate
from partita.compiler.emission.emit import StageEmitter
from partita.compiler.emission.memory import beside, held
from partita.compiler.emission.writer import Module, Probe, Writer
from partita.compiler.graph import Graph, Node, Parameter
from partita.compiler.instructions import (
    ONWARD,
    TIED,
    Channel,
    Compute,
    Instruction,
    Message,
    PostSend,
    Traffic,
    Transfer,
)
from partita.compiler.laws import check_program, check_schedule
from partita.compiler.mesh import Mesh
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.op import TORCH_DTYPES, Argument, as_tensor
from partita.compiler.partition.buckets import BUCKET_BYTES, bucketed, by_depth
from partita.compiler.partition.cut import Partitioned, message_of
from partita.compiler.partition.update import ParameterUpdate, UpdateGraph
from partita.compiler.program import (
    AccumulatorRecord,
    HandOver,
    InputPart,
    InputRecord,
    ParameterRecord,
    Program,
    RankProgram,
    StageProgram,
    TiedTransfer,
)
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.sharding.shard import ParameterLayouts
from partita.dsl.types import Type

# Arguments of a rank's functions.
FINISH, UPDATE = "t, c", "m, t, v, s, c"


def assemble(
    whole: Graph,
    partitioned: Partitioned,
    layouts: Mapping[str, ParameterLayouts],
    update: UpdateGraph,
    schedule: Schedule,
    batch: str,
    mesh: Mesh,
    rounds: int = 1,
    probe: Probe | None = None,
    compiled: bool = False,
) -> Program:
    """The program of one kind of step. `whole` is the graph over the whole batch, for the inputs' types.

    The step goes over so many `rounds` of the schedule, each with a batch of its own. A `probe` watches its functions.
    With `compiled`, torch compiles them.

    Raises Refused where the schedule breaks a law (E0501 to E0504).
    """
    _check_ends(partitioned)
    check_schedule(schedule)
    instructions = communicate(schedule, partitioned.messages)
    check_program(instructions)
    module = Module(partitioned.graph.name, probe, compiled)
    emitters = []
    kinds = {action.kind for actions in schedule.actions for action in actions}
    for stage in partitioned.stages:
        emitter = StageEmitter(module, partitioned, stage, _casts(stage.parameters), kinds)
        emitter.emit()
        emitters.append(emitter)
    for index, nodes in update.reduce:
        emitters[index].emit_reductions(nodes, update.totals[index])
    stages = tuple(_stage_program(emitter, emitters, schedule, partitioned) for emitter in emitters)
    tied = _tied(update, schedule)
    ranks = tuple(
        _rank_program(rank, module, schedule, stages, update, instructions[rank], tied)
        for rank in range(schedule.ranks)
    )
    sends = [i.transfer for list_ in instructions for i in list_ if isinstance(i, PostSend)]
    stage_sets = partitioned.stage_sets()
    updates = {each.name: each for each in update.parameters}
    return Program(
        name=whole.name,
        inputs=tuple(InputRecord(each.name, each.value.type, each.limit, each.span) for each in whole.inputs),
        batch=batch,
        microbatches=schedule.microbatches,
        rounds=rounds,
        mesh=mesh,
        parameters=tuple(
            _parameter_record(
                parameter, layouts[parameter.name], stage_sets[parameter.name], updates.get(parameter.name)
            )
            for parameter in partitioned.graph.parameters
            if parameter.name in stage_sets  # evaluation may have no use for one
        ),
        stages=stages,
        ranks=ranks,
        channels=_traffic((*sends, *(each.transfer for each in tied))),
        statistics=tuple(name for name, _, _ in update.statistics),
        guards=partitioned.graph.guards,
        schedule=schedule,
        source=module.source,
    )


def _traffic(transfers: Iterable[Transfer]) -> dict[Channel, Traffic]:
    """What a step sends on each channel."""
    found: dict[Channel, list[int]] = {}
    for each in transfers:
        found.setdefault(each.channel, []).append(each.message.bytes)
    return {channel: Traffic(len(sizes), sum(sizes)) for channel, sizes in sorted(found.items())}


def _check_ends(partitioned: Partitioned) -> None:
    """Both ends of every message carry the same type (the type part of law 3)."""
    ends: dict[str, dict[Message, Type]] = {"send": {}, "receive": {}}
    for stage in partitioned.stages:
        for node in stage.nodes:
            if isinstance(node.op, Send):
                ends["send"][message_of(node)] = node.inputs[0].type
            elif isinstance(node.op, Receive):
                ends["receive"][message_of(node)] = node.op.type
    assert ends["send"] == ends["receive"], "the ends of a message differ"


def _casts(parameters: Sequence[Parameter]) -> Mapping[str, str]:
    """Text that turns a master into what the stage computes with, where dtypes differ."""
    return {
        p.name: f".to({TORCH_DTYPES[p.value.type.dtype]})" for p in parameters if p.value.type.dtype != p.master.dtype
    }


def _parameter_record(
    parameter: Parameter, layouts: ParameterLayouts, stages: tuple[int, ...], update: ParameterUpdate | None
) -> ParameterRecord:
    states = tuple(value.name.split("(", 1)[0] for value in update.states) if update else ()
    return ParameterRecord(
        parameter.name,
        parameter.master,
        layouts.param,
        layouts.state,
        parameter.initial,
        parameter.fans,
        stages,
        states,
    )


def _stage_program(
    emitter: StageEmitter, emitters: Sequence[StageEmitter], schedule: Schedule, partitioned: Partitioned
) -> StageProgram:
    stage = emitter.stage
    rank, chunk = schedule.home(stage.index)
    sends: dict[Message, int] = {}
    receives: dict[Message, tuple[int, Type]] = {}
    hand_overs: list[HandOver] = []
    for node in stage.nodes:
        if isinstance(node.op, Send):
            message = message_of(node)
            other = emitters[node.op.destination]
            slot = emitter.slots.slot(node.inputs[0])
            if schedule.home(node.op.destination)[0] == rank:
                target = next(
                    n.output for n in other.stage.nodes if isinstance(n.op, Receive) and message_of(n) == message
                )
                kind = "F" if node.op.direction == ONWARD else "B"
                hand_overs.append(HandOver(kind, slot, node.op.destination, other.slots.slot(target)))
            else:
                sends[message] = slot
        elif isinstance(node.op, Receive) and schedule.home(node.op.source)[0] != rank:
            receives[message_of(node)] = (emitter.slots.slot(node.output), node.output.type)
    forward, backward = emitter.groups["F"], emitter.groups["B"]
    read_later = {v for node in emitter.groups["BW"] for v in node.inputs}
    read_by_weight = {v for node in emitter.groups["W"] for v in node.inputs}
    literal = emitter.literal
    saved = {v for node in forward for v in node.outputs} & read_later - literal
    kept = {v for node in (*forward, *backward) for v in node.outputs} & read_by_weight - literal
    released = {
        emitter.slots.slot(node.inputs[0])
        for node in stage.nodes
        if isinstance(node.op, Send)
        and node.inputs[0] not in (read_later if node.op.direction == ONWARD else read_by_weight)
    }
    peaks = {}
    for kind, there, left in (("F", (), saved), ("B", saved, kept), ("W", kept, ()), ("BW", saved, ())):
        if kind in emitter.functions:
            nodes = emitter.groups[kind]
            before = {*there, *(node.output for node in nodes if isinstance(node.op, Receive))}
            after = {*left, *(node.inputs[0] for node in nodes if isinstance(node.op, Send))}
            peaks[kind] = beside(emitter.units(kind, after), before, after, stage.nodes)
    return StageProgram(
        index=stage.index,
        rank=rank,
        chunk=chunk,
        parameters=tuple(p.name for p in stage.parameters),
        whole_inputs=tuple(InputPart(each.name, None, None, each.value.layout) for each in emitter.whole_inputs()),
        inputs=tuple(
            InputPart(each.name, emitter.slots.slot(each.value), each.batch, each.value.layout)
            for each in stage.inputs
            if each.batch is not None
        ),
        frame=len(emitter.slots.of),
        sends=sends,
        receives=receives,
        hand_overs=tuple(hand_overs),
        released=frozenset(released),
        accumulators=tuple(
            AccumulatorRecord(each.name, each.value.type, each.parameter, each.maximum) for each in stage.accumulators
        ),
        functions=emitter.functions,
        saved=held(saved, forward),
        kept=held(kept, (*forward, *backward)),
        peaks=peaks,
    )


def _tied(update: UpdateGraph, schedule: Schedule) -> list[TiedTransfer]:
    """Every total of a tied parameter to every other rank that holds the parameter, in one global order."""
    tied: list[TiedTransfer] = []
    counts: dict[Channel, int] = {}
    for each in update.parameters:
        holders: dict[int, int] = {}
        for stage in each.stages:
            holders.setdefault(schedule.home(stage)[0], stage)
        for stage, value in each.totals:
            source = schedule.home(stage)[0]
            for rank, destination in holders.items():
                if rank == source:
                    continue
                channel = Channel(source, rank, TIED)
                message = Message(value.name, stage, destination, TIED, value.type.bytes)
                index = counts.get(channel, 0)
                counts[channel] = index + 1
                transfer = Transfer(channel, message, 0, index)
                tied.append(TiedTransfer(transfer, stage, each.name, value.type))
    return tied


def _rank_program(
    rank: int,
    module: Module,
    schedule: Schedule,
    stages: Sequence[StageProgram],
    update: UpdateGraph,
    instructions: tuple[Instruction, ...],
    tied: Sequence[TiedTransfer],
) -> RankProgram:
    own = [stages[index] for index in schedule.placement[rank]]
    mine = {stage.index for stage in own}
    parameters = tuple(dict.fromkeys(name for stage in own for name in stage.parameters))
    receives = tuple(each for each in tied if each.transfer.channel.destination == rank)
    totals = [(stage.index, each.name) for stage in own for each in stage.accumulators]
    totals += [(each.stage, each.accumulator) for each in receives]
    assert len(set(totals)) == len(totals), f"accumulators of one name: {totals}"
    finish = _emit_finish(rank, module, mine, update, totals)
    entries = tuple(i for i, (_, _, stage) in enumerate(update.statistics) if stage in mine)
    name = None
    if update.parameters:
        name = _emit_update(rank, module, parameters, update, totals)
    return RankProgram(
        rank,
        tuple(schedule.placement[rank]),
        instructions,
        _reductions(instructions, stages),
        parameters,
        tuple(each for each in tied if each.transfer.channel.source == rank),
        receives,
        tuple(totals),
        entries,
        finish,
        name,
    )


def _reductions(instructions: Sequence[Instruction], stages: Sequence[StageProgram]) -> dict[int, tuple[int, ...]]:
    """Where each stage that has something to reduce has run for the last time."""
    last: dict[int, int] = {}
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Compute) and "R" in stages[instruction.stage].functions:
            last[instruction.stage] = i
    found: dict[int, tuple[int, ...]] = {}
    for stage, i in last.items():
        found[i] = (*found.get(i, ()), stage)
    return found


def _totals(writer: Writer, update: UpdateGraph, totals: Sequence[tuple[int, str]]) -> None:
    """Name the totals that parameters' updates read."""
    positions = {key: i for i, key in enumerate(totals)}
    for each in update.parameters:
        for stage, value in each.totals:
            if (stage, each.name) in positions:
                writer.texts[value] = Argument(f"t[{positions[stage, each.name]}]", value.type)


def _emit_finish(
    rank: int,
    module: Module,
    mine: set[int],
    update: UpdateGraph,
    totals: Sequence[tuple[int, str]],
) -> str:
    writer = Writer(FINISH, probe=module.probe)
    _totals(writer, update, totals)
    positions = {key: i for i, key in enumerate(totals)}
    wanted = [value for _, value, stage in update.statistics if stage in mine]
    for accumulator, stage in update.sums:
        if stage in mine:
            text = f"t[{positions[stage, accumulator.name]}]"
            writer.texts[accumulator.value] = Argument(text, accumulator.value.type)
    writer.block(update.statistic_nodes(mine), set(wanted), {})
    texts = []
    for value in wanted:
        texts.append(as_tensor(writer.argument(value)).text)
    body = [*writer.body(), f"return ({', '.join(texts)}{',' if texts else ''})"]
    name = f"rank{rank}_finish"
    module.add(name, FINISH, body, f"Statistics that rank {rank} makes.")
    return name


def _emit_update(
    rank: int,
    module: Module,
    parameters: Sequence[str],
    update: UpdateGraph,
    totals: Sequence[tuple[int, str]],
) -> str:
    writer = Writer(UPDATE, probe=module.probe)
    _totals(writer, update, totals)
    first = len(update.statistics) - len(update.norms)
    for i, value in enumerate(update.norms):
        writer.texts[value] = Argument(f"s[{first + i}]", value.type)
    writer.block(update.clip, {node.output for node in update.clip}, {})
    states = 0
    held_ = set(parameters)
    nodes: list[Node] = []
    order = {name: i for i, name in enumerate(parameters)}
    for each in sorted((u for u in update.parameters if u.name in held_), key=lambda u: order[u.name]):
        writer.texts[each.master] = Argument(f"m[{order[each.name]}]", each.master.type)
        for value in each.states:
            writer.texts[value] = Argument(f"v[{states}]", value.type)
            states += 1
        nodes += [*each.finish, *each.update]
    writer.block(bucketed(by_depth(nodes), BUCKET_BYTES), set(), {})
    name = f"rank{rank}_update"
    module.add(name, UPDATE, writer.body() or ["pass"], f"The optimizer of rank {rank}, in place.")
    return name
