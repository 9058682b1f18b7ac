"""The most memory that a rank's tensors need, in bytes, temporaries included, from the static programs of a run.

The peak is that of the greatest moment of a step, or of an evaluation, in addition to what is always held:

    always        this rank's shards of masters and optimizer states, for each of its replica groups, and what
                  these are averaged with; copies of them if updates do not wait for the norm; gradient accumulators,
                  also those of earlier steps of which updates are still to be made, and what these are reduced to;
                  received totals of tied parameters, what its stages compute with for a whole step (casts of masters,
                  gathered parameters), tables that kernels cache, and what the libraries of a GPU work in
    beforehand    a large parameter gets its initial values piece by piece, which lie in the host's memory; nothing but
                  parameters and states is there then
    start         full batches of the inputs, and what is gathered for the stages; the rest of their constants is made
    microbatches  the inputs; what microbatches in flight keep, with the working set of the function that runs, and
                  without what lies in the host's memory, from where the copy there is complete to where the one back
                  starts;
                  messages, from where they are made or received into a buffer to where they are read or sent;
                  gradients as they are reduced
    end           the inputs, which the caller of the step still holds; the reduced gradients, and then the working
                  set of the update, or of the average of groups

An evaluation has the moments of a step without an update, beside what training keeps between its steps: all that is
always held, but for what its stages compute with, and on a CPU the batch of its last step. It needs more than a step
where its microbatches are larger, which are those of all groups together, and are not cut into slices. What its own
totals take is always held, too.

So have the programs that write the answers of `rollouts`: beside what training keeps, what is kept of all texts (keys
and values of all their positions), the last steps' batches, and a step of one of the programs.

A step that is captured as a graph (`graphs`) has memory of its own for all that begins after the inputs are there and
ends before the update; it keeps that.

A collective in flight also holds copies of what it sends and receives, and over Gloo, where the ranks do the addition,
the parts and their sum. Of what is gathered ahead of a step, and of reductions of gradients, all are in flight at once;
others belong to the function that runs, from where they start to where their result is read.

The bound is broken down by purpose (`PARTS`), as it is at the greatest moment:

    parameters    masters, and what stages compute with for a whole step
    gradients     accumulators, received totals, reduced gradients
    state         the optimizer's
    activations   what microbatches in flight keep, and the working set of the function that runs
    buffers       everything else: inputs, messages, what is gathered ahead, tables, the working set of the update, what
                  libraries work in

What lies in the host's memory (`offload`) is not part of it, and counted apart, as if the device had its own memory. Of
what microbatches keep there, it is for as many of each stage as are there at once, from where the copy there starts to
where the one back ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, starmap
from math import ceil

from attrs import evolve, frozen

from partita.compiler.analysis.in_flight import collective_extra_bytes, communicating, lent
from partita.compiler.analysis.liveness import (
    device_bytes,
    host_bytes,
    line_by_line,
    live_bytes,
    roots,
    strided,
    tables,
    unread_results,
    working_set,
)
from partita.compiler.analysis.traffic import outer_nodes, update_nodes
from partita.compiler.graph import Node, Parameter, Phase, Value, without_iterations
from partita.compiler.instructions import Compute, Message, PostCopy, PostReceive, WaitCopy, WaitSend
from partita.compiler.layout import local_type
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Send
from partita.compiler.passes.cut import StageGraph, message_of
from partita.compiler.passes.decode import STATE as KEPT
from partita.compiler.passes.early_collectives import split_early_collectives
from partita.compiler.program import SLAB, InputPart, ParameterRecord, RankPlan, StateRecord
from partita.compiler.schedules.communication import DIRECTION, peak_in_flight
from partita.compiler.schedules.schedule import LOAD, OFFLOAD
from partita.compiler.state import Scheduled
from partita.dsl.check.language_model import ROLLOUTS
from partita.dsl.reprs import Shortened
from partita.dsl.types import BYTES

TRAINING, EVALUATION = "training", "evaluation"
# Where the peak of a run may be but in its steps.
ELSEWHERE = {EVALUATION: "in an evaluation", ROLLOUTS: "where answers are written"}
# For tensors of a few elements: statistics, the step number, constants. There are about a dozen.
_NUMBERS = 1 << 10


@frozen(repr=False)
class MemoryReport(Shortened):
    """Bytes of a rank at its greatest `moment`, by purpose; and what it keeps in the memory of its `host`. The moment
    is one `during` training, an evaluation, or the writing of answers to train on.
    """

    moment: str
    parameters: int
    gradients: int
    state: int
    activations: int
    buffers: int
    host: int = 0
    during: str = TRAINING

    @property
    def total(self) -> int:
        """The bound of the device's memory."""
        return self.parameters + self.gradients + self.state + self.activations + self.buffers

    def __add__(self, other: MemoryReport) -> MemoryReport:
        """Both at once, at the moment of the other."""
        sums = {part: getattr(self, part) + getattr(other, part) for part in PARTS}
        return evolve(other, **sums)


# What the functions of a microbatch consist of.
PHASES = {
    "F": (Phase.FORWARD,),
    "B": (Phase.BACKWARD,),
    "W": (Phase.WEIGHT,),
    "BW": (Phase.BACKWARD, Phase.WEIGHT),
}
PARTS = ("parameters", "gradients", "state", "activations", "buffers")
HOST = "host"


def peak_memory(state: Scheduled, rank: RankPlan) -> int:
    """The memory bound of each rank that runs the program of a pipeline rank, one of `state.plan.ranks`."""
    return memory_report(state, rank).total


def memory_report(state: Scheduled, rank: RankPlan) -> MemoryReport:
    """The memory bound of each rank that runs the program of a pipeline rank, by purpose: with the evaluation of the
    run, if `state` knows it.
    """
    always = _always(state, rank)
    first = MemoryReport("before the first step", 0, 0, 0, 0, max(0, _beginning(state, rank) - always.total))
    inside, ends = _step(state, rank)
    moments = [always + each for each in (first, *inside, *ends)]
    if state.evaluation is not None:
        evaluation, own = state.evaluation, state.evaluation.plan.ranks[rank.rank]
        waiting = max(each.total for each in inside) if state.plan.captured else _whole_batch(state)
        resident = _between(state, rank) + MemoryReport("", _computed_with(evaluation, own), 0, 0, 0, waiting)
        read = MemoryReport("as a batch is read", 0, 0, 0, 0, _parts(evaluation, own) + _whole_batch(evaluation))
        inside, ends = _step(evaluation, own)
        moments += [
            evolve(resident + each, moment=f"{each.moment}, in an evaluation", during=EVALUATION)
            for each in (read, *inside, *ends)
        ]
    if state.writes is not None:
        moments += _writing(state, rank, [(each, each.plan.ranks[rank.rank]) for each in state.writes.compiled])
    return evolve(max(moments, key=lambda each: each.total), host=_on_host(state, rank))


def _writing(
    state: Scheduled, rank: RankPlan, programs: Sequence[tuple[Scheduled, RankPlan]]
) -> Iterator[MemoryReport]:
    """The moments at which answers are written, by programs which share what they keep of texts."""
    kept = {name: size for each in programs for name, size in stored(*each)[0].items() if name.startswith(KEPT)}
    own = sum(kept.values()) + tables(chain.from_iterable(_nodes(*each) for each in programs))
    sums = sum(_sums(*each) for each in programs)
    resident = _between(state, rank) + MemoryReport("", 0, sums, 0, 0, own + 2 * _whole_batch(state))
    for each in programs:
        inside, ends = _step(*each)
        for moment in (*inside, *ends):
            yield evolve(
                resident + MemoryReport("", _computed_with(*each), 0, 0, 0, 0) + moment,
                moment=f"{moment.moment}, as answers are written",
                during=ROLLOUTS,
            )


def _step(state: Scheduled, rank: RankPlan) -> tuple[Sequence[MemoryReport], Sequence[MemoryReport]]:
    """The moments of a step without what is always held: those before the update, which may be captured; and others."""
    stages = _stages(state, rank)
    inputs = _inputs(state, rank)
    making = max((_constants(stage, peak=True) - _constants(stage) for stage in stages), default=0)
    activations, reducing, messages = max(_among(state, rank), key=sum)
    reduced, *ends = _ends(state, rank)
    inside = (
        MemoryReport("as a step begins", making, 0, 0, 0, _gathering(state, rank)),
        MemoryReport("among the microbatches", 0, reducing, 0, activations, messages),
        reduced,
    )
    if state.plan.captured:
        graph = max(each.total for each in inside)
        ends = [evolve(each, activations=max(0, graph - each.gradients)) for each in ends]
    with_inputs = partial(map, lambda each: evolve(each, buffers=inputs + each.buffers))
    return tuple(with_inputs(inside)), tuple(with_inputs(ends))


def _beginning(state: Scheduled, rank: RankPlan) -> int:
    """Bytes of parameters and states as they get their initial values."""
    masters, states = (sum(part.values()) for part in stored(state, rank))
    records = [each for each in state.plan.parameters if each.name in rank.parameters and not each.host]
    types = [local_type(each.type, each.layout, state.mesh.sizes) for each in records]
    # In f32 at least.
    slabs = (max(BYTES["f32"], BYTES[type.dtype]) * min(type.elements, SLAB) for type in types)
    return masters + states + (0 if state.device.gpu else max(slabs, default=0))


def _on_host(state: Scheduled, rank: RankPlan) -> int:
    """Bytes in the host's memory: masters and states that are no files, masters in the dtype that computes, on a GPU
    copies of what their updates and averages read and make, and what microbatches in flight keep there.
    """
    mapped = {record.name for record in state.plan.parameters if record.mapped}
    total = sum(size for part in stored(state, rank, host=True) for name, size in part.items() if name not in mapped)
    casts = {each.name: each.value for stage in _stages(state, rank) for each in stage.parameters if _cast(each)}
    total += sum(host_bytes(value) for value in casts.values())
    total += sum(copies(state, rank, host=True)) + microbatches_on_host(state, rank)
    if not state.device.gpu:
        return total
    in_flight = {value for _, value in state.update.in_flight(rank.stages)}
    ends = (update_nodes(state, rank), in_flight), (outer_nodes(state, rank), ())
    return total + max(starmap(_moved_to_host, ends))


def _moved_to_host(nodes: Sequence[Node], in_flight: Collection[Value]) -> int:
    """The working set in the host's memory of nodes of the end of a step, at which copies are `in_flight` there."""
    moved = [node for node in nodes if any(value.host for value in (*node.inputs, *node.outputs))]
    return working_set(line_by_line(moved), in_flight, in_flight, roots(moved), size=host_bytes)


def microbatches_on_host(state: Scheduled, rank: RankPlan) -> int:
    """Bytes in the host's memory for what microbatches in flight keep. Each stage of a rank uses its own again, for as
    many of them as are there at once.
    """
    now, peaks = Counter[int](), Counter[int]()
    for each in rank.instructions if state.schedule.copies else ():
        if isinstance(each, PostCopy) and each.action.kind == OFFLOAD:
            now[each.stage] += 1
            peaks[each.stage] = max(peaks[each.stage], now[each.stage])
        elif isinstance(each, WaitCopy) and each.action.kind == LOAD:
            now[each.stage] -= 1
    return sum(count * state.plan.stages[stage].offloaded for stage, count in peaks.items())


def _ends(state: Scheduled, rank: RankPlan) -> tuple[MemoryReport, ...]:
    """What is held at the end of a step, without inputs and what is always held."""
    reductions = [state.plan.stages[index] for own in rank.reductions.values() for index in own]  # as they begin
    sums, flying = (sum(sizes) for sizes in _late(state, rank))
    peak = now = flying
    for stage in reductions:
        now -= stage.in_flight
        peak = max(peak, now + stage.reducing)
        now += stage.reduced
    if state.plan.delay:  # it waits for those of an earlier step, which are counted as always there
        peak = flying + max(0, peak - max(sums, flying))
    outer = outer_nodes(state, rank)
    return (
        MemoryReport("as gradients are reduced", 0, min(sums, peak), 0, 0, max(0, peak - sums)),
        MemoryReport("at the update", 0, sums, 0, 0, _running(state, update_nodes(state, rank))),
        *([MemoryReport("as groups are averaged", 0, sums, 0, 0, _running(state, outer))] if outer else ()),
    )


def _late(state: Scheduled, rank: RankPlan) -> tuple[list[int], list[int]]:
    """Bytes of the gradients of a rank, by stage: when they are reduced, and while reductions are in flight."""
    stages = [state.plan.stages[index] for index in rank.stages]
    return [stage.reduced for stage in stages], [stage.in_flight for stage in stages]


def _running(state: Scheduled, nodes: Sequence[Node]) -> int:
    """The working set of nodes of the end of a step, with their collectives."""
    function = communicating(nodes, not state.device.gpu, unread_results(nodes))
    reductions = chain.from_iterable(own for _, own in state.update.reduce)
    return working_set(line_by_line(function.nodes), (), (), function.behind, apart=strided((*reductions, *nodes)))


def at_end(state: Scheduled, rank: RankPlan) -> int:
    """Bytes of a rank at the end of a step, without inputs and what is always held."""
    return max(each.total for each in _ends(state, rank))


def resident_bytes(state: Scheduled, rank: RankPlan) -> int:
    """Bytes of a rank while microbatches run, without what those in flight keep and the function that runs."""
    resident = _always(state, rank).total + _inputs(state, rank) + peak_in_flight(rank.instructions)
    # What is gathered for one stage may still be under way while another runs many microbatches.
    stages = [state.plan.stages[index] for index in rank.stages]
    gathering = sum(stage.gathering for stage in stages) if len(stages) > 1 else 0
    return resident + gathering


def largest(state: Scheduled, rank: RankPlan, part: str) -> dict[str, int]:
    """Bytes of a part by tensor, summed over the iterations of a repeat: of parameters, their masters; of activations,
    what one microbatch keeps. Buffers have no names.
    """
    totals: Counter[str] = Counter()
    if part in ("parameters", "state"):
        for name, size in stored(state, rank)[part == "state"].items():
            totals[without_iterations(name)] += size
    for index in rank.stages:
        if part == "gradients":
            for each in state.plan.stages[index].accumulators:
                totals[without_iterations(each.parameter or each.name)] += each.type.bytes
        elif part == "activations":
            nodes = state.partitioned.stages[index].nodes
            behind = roots(nodes)
            produced = {value for node in nodes if node.phase is Phase.FORWARD for value in node.outputs}
            later = {value for node in nodes if node.phase in (Phase.BACKWARD, Phase.WEIGHT) for value in node.inputs}
            for value in {behind.get(value, value) for value in produced & later}:
                totals[without_iterations(value.name)] += value.type.bytes
    return dict(totals)


def headroom(state: Scheduled, rank: RankPlan, limit: float) -> float:
    """Bytes that a limit leaves on a rank for what microbatches in flight keep: at any moment between the first and the
    last of them, whichever function runs.
    """
    peaks = [peak for index in rank.stages for peak in state.plan.stages[index].peaks.values()]
    # A stage's gradients are reduced while another stage still runs microbatches.
    reducing = sum(_late(state, rank)[1]) if len(rank.stages) > 1 else 0
    return limit - resident_bytes(state, rank) - max(peaks, default=0) - reducing


def _stages(state: Scheduled, rank: RankPlan) -> list[StageGraph]:
    return [state.partitioned.stages[index] for index in rank.stages]


def _always(state: Scheduled, rank: RankPlan) -> MemoryReport:
    return _between(state, rank) + MemoryReport("always", _computed_with(state, rank), 0, 0, 0, 0)


def _computed_with(state: Scheduled, rank: RankPlan) -> int:
    """Bytes of what a rank's stages compute with for a whole step, beyond masters."""
    return sum(map(_constants, _stages(state, rank)))


def _between(state: Scheduled, rank: RankPlan) -> MemoryReport:
    """What is held between steps, and for all of each."""
    masters, states = (sum(part.values()) for part in stored(state, rank))
    copied = copies(state, rank)
    programs = [(state, rank)]
    if state.evaluation is not None:
        programs.append((state.evaluation, state.evaluation.plan.ranks[rank.rank]))
    late = state.plan.delay * max(map(sum, _late(state, rank))) + _nothing_yet(state, rank)
    return MemoryReport(
        "between steps",
        masters + copied[0],
        late + sum(_sums(*each) for each in programs),
        states + copied[1],
        0,
        _NUMBERS + workspace(state) + tables(chain.from_iterable(_nodes(*each) for each in programs)),
    )


def _nothing_yet(state: Scheduled, rank: RankPlan) -> int:
    """Bytes of the zeros that first steps have for gradients of steps before them; where gradients are reduced, what
    they are reduced to is counted.
    """
    if not state.plan.delay:
        return 0
    stages = [state.partitioned.stages[index] for index in rank.stages]
    sums = {each.value for stage in stages for each in stage.accumulators if each.parameter}
    return sum(each.type.bytes for index in rank.stages for each in state.update.totals[index] if each in sums)


def _sums(state: Scheduled, rank: RankPlan) -> int:
    """Bytes of what a rank adds up, and receives to be added."""
    own = sum(
        (1 + state.plan.delay if each.parameter else 1) * each.type.bytes
        for index in rank.stages
        for each in state.plan.stages[index].accumulators
    )
    return own + sum(each.type.bytes for each in rank.receives)


def _nodes(state: Scheduled, rank: RankPlan) -> Iterator[Node]:
    """All that a rank does in a step."""
    return chain(*(stage.nodes for stage in _stages(state, rank)), update_nodes(state, rank))


def workspace(state: Scheduled) -> int:
    """Bytes that a GPU's libraries keep, a graph its own; and what torch takes as it tries the kernels it compiles."""
    libraries = (2 if state.plan.captured else 1) * state.device.workspace
    return libraries + (state.device.cache if state.compiles else 0)


def stored(state: Scheduled, rank: RankPlan, host: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that a rank keeps of each parameter's master, and of its optimizer states, by parameter name: on the device
    or in the host's memory.
    """
    sizes, known = state.mesh.sizes, {record.name: record for record in state.plan.parameters}
    records = [known[name] for name in dict.fromkeys(rank.parameters)]

    def kept(record: ParameterRecord, states: Iterable[StateRecord]) -> int:
        own = (each for each in states if each.host == host)
        return sum(local_type(each.type, record.stored(each), sizes).bytes for each in own)

    replicas_per_rank = state.plan.replicas_per_rank
    # What is estimated of an update has states of its own.
    times = 2 if state.plan.paired else replicas_per_rank
    return (
        {
            each.name: (replicas_per_rank if each.companions else 1) * local_type(each.type, each.layout, sizes).bytes
            for each in records
            if each.host == host
        },
        {each.name: times * kept(each, each.states) + kept(each, each.companions) for each in records},
    )


def copies(state: Scheduled, rank: RankPlan, host: bool = False) -> tuple[int, int]:
    """Bytes of the copies that a rank keeps, where updates are made before their step is validated: of masters and of
    optimizer states, on the device or in the host's memory.
    """
    masters, states = stored(state, rank, host)
    return (
        sum(size for name, size in masters.items() if name in rank.copied),
        sum(size for name, size in states.items() if name in rank.copied),
    )


def _constants(stage: StageGraph, peak: bool = False) -> int:
    """What a stage computes with for a whole step, beyond its masters; or (`peak`) the peak of making it."""
    prologue = [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
    read = {value for node in stage.nodes if node.phase is not Phase.PROLOGUE for value in node.inputs}
    casts = [each.value for each in stage.parameters if _cast(each) and not each.value.host]
    constants = {value for node in prologue for value in node.outputs if value in read}
    total = sum(value.type.bytes for value in casts if peak or value in read)
    return total + (working_set(line_by_line(prologue), constants) if peak else live_bytes(constants, prologue))


def _cast(parameter: Parameter) -> bool:
    """Whether what computes is a copy of the master in another dtype."""
    return parameter.value.type.dtype != parameter.master.dtype


def _inputs(state: Scheduled, rank: RankPlan) -> int:
    """What a rank holds of a batch: its shards, and in training the batch (`_whole_batch`), until the step ends."""
    return _parts(state, rank) + (_whole_batch(state) if state.training else 0)


def _whole_batch(state: Scheduled) -> int:
    """Bytes of a full batch as it was read, which on a CPU every rank holds: floats in f32 at least."""
    types = [each.type for each in state.plan.inputs]
    sizes = (each.elements * max(BYTES["f32"] if each.is_float else 0, BYTES[each.dtype]) for each in types)
    return 0 if state.device.gpu else ceil(sum(sizes) / state.plan.batches)


def _parts(state: Scheduled, rank: RankPlan) -> int:
    """The shards that a rank reads of a batch; of what is not cut into microbatches, of all batches of a step."""
    program = state.plan
    types = {each.name: each.computed for each in program.inputs}
    parts: dict[InputPart, int] = {}
    for index in rank.stages:
        for part in (*program.stages[index].inputs, *program.stages[index].full_inputs):
            type, times = types[part.name], 1
            if part.batch is not None:
                times = program.batch_parts
                rows = int(type.axis(part.batch).size / program.batches)
                type = type.resized(part.batch, rows // times)
            parts[part] = times * local_type(type, part.layout, state.mesh.sizes).bytes
    return sum(parts.values())


def _among(state: Scheduled, rank: RankPlan) -> Iterator[tuple[int, int, int]]:
    """Between the first and the last microbatch: what is kept, with the working set of what runs; gradients being
    reduced; messages, with what is gathered.
    """
    slices = state.slices
    sizes = _messages(state, rank)
    arriving: Counter[tuple[int, str]] = Counter()
    leaving: Counter[tuple[int, str]] = Counter()
    for message, size in sizes.items():
        arriving[message.destination, message.direction] += size
        leaving[message.source, message.direction] += size
    activations = reducing = 0
    # What the slices of a part of the batch share is there from the first F, or the first B, to the last function.
    runs: Counter[tuple[int, int]] = Counter()
    last = {
        (each.stage, each.action.microbatch // slices): i
        for i, each in enumerate(rank.instructions)
        if isinstance(each, Compute)
    }
    unopened = {index: state.plan.stages[index].gathering for index in rank.stages}
    messages = sum(unopened.values())
    yield activations, reducing, messages
    for i, instruction in enumerate(rank.instructions):
        begun = rank.reductions.get(i, ())
        if isinstance(instruction, Compute):
            stage, kind = state.plan.stages[instruction.stage], instruction.action.kind
            if instruction.stage in unopened:  # it waits for all that was gathered for it
                messages -= unopened.pop(instruction.stage)
                yield activations + stage.shared["F"] + stage.opening, reducing, messages
            working = stage.peaks.get("C" if begun else kind, 0)
            part = instruction.stage, instruction.action.microbatch // slices
            runs[part] += 1
            if kind == "F" and runs[part] == 1:
                activations += stage.shared["F"]
            elif kind in DIRECTION and runs[part] == slices + 1:
                activations += stage.shared["B"]
            yield activations + working, reducing, messages
            activations += {"F": stage.saved, "B": stage.kept - stage.saved, "W": -stage.kept, "BW": -stage.saved}[kind]
            if last[part] == i:
                activations -= sum(stage.shared.values())
            if kind in DIRECTION:
                messages += leaving[instruction.stage, DIRECTION[kind]] - arriving[instruction.stage, DIRECTION[kind]]
            reducing += sum(state.plan.stages[index].in_flight for index in begun)
            yield activations + working, reducing, messages
        elif isinstance(instruction, PostCopy) and instruction.action.kind == LOAD:
            activations += state.plan.stages[instruction.stage].offloaded
            yield activations, reducing, messages
        elif isinstance(instruction, WaitCopy) and instruction.action.kind == OFFLOAD:
            activations -= state.plan.stages[instruction.stage].offloaded
        elif isinstance(instruction, PostReceive):
            messages += sizes[instruction.transfer.message]
            yield activations, reducing, messages
        elif isinstance(instruction, WaitSend):
            messages -= sizes[instruction.transfer.message]


def _messages(state: Scheduled, rank: RankPlan) -> dict[Message, int]:
    """Bytes held for each message of a rank at either end: its tensor, or the one that this is a view of."""
    sizes = {}
    stages = set(rank.stages)
    sources = {each.source for each in state.partitioned.messages if stages & {each.source, each.destination}}
    for stage in (state.partitioned.stages[index] for index in sorted(sources)):
        behind = roots(stage.nodes)
        for node in stage.nodes:
            if isinstance(node.op, Send):
                (value,) = node.inputs
                sizes[message_of(node)] = max(value.type.bytes, behind.get(value, value).type.bytes)
    return sizes


def _gathering(state: Scheduled, rank: RankPlan) -> int:
    """Bytes, besides the results, for what is gathered for the stages, all at once: what is sent; and of what the
    prologue itself waits for, what arrives.
    """
    total, adds = sum(state.plan.stages[index].gathering for index in rank.stages), not state.device.gpu
    for stage in _stages(state, rank):
        prologue = [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
        read = {value for node in stage.nodes if node.phase is not Phase.PROLOGUE for value in node.inputs}
        masters = {parameter.value for parameter in stage.parameters}
        waited = [
            node for node in split_early_collectives(prologue, masters, read).others if isinstance(node.op, Collective)
        ]
        sizes = [collective_extra_bytes(node, adds) for node in waited]
        total += sum(in_flight for in_flight, _ in sizes) + max((more for _, more in sizes), default=0)
        total += sum(device_bytes(value) for node in waited for value in lent(node, adds) if value not in masters)
    return total
