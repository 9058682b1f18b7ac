"""What a rank's tensors need at most, in bytes, from the static program, temporary ones included.

A step has three moments, and the peak is the greatest of them, beside what is always there:

    always        this rank's parts of masters, optimizer states and gradient accumulators, totals that it is sent, and
                  what its stages compute with for a whole step (casts of masters, gathered parameters), and tables
                  that kernels keep
    its start     whole batches of the inputs, and a stage's constants, made anew beside those of the step before
    microbatches  the inputs; what microbatches in flight keep, with the working set of the function that runs;
                  messages, from where they are made or a buffer waits for them to where they are read or have been
                  sent; gradients as they are reduced
    its end       the reduced gradients, and the working set of the update

A collective in flight holds what it sends and gets once more: of all, the greatest is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from partita.compiler.communication import DIRECTION, peak_in_flight
from partita.compiler.emission.memory import held, line_by_line, roots, tables, working_set
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.instructions import Compute, Message, PostReceive, WaitSend
from partita.compiler.layout import local_type
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Send
from partita.compiler.ops.optimizer import Update
from partita.compiler.partition.cut import StageGraph, message_of
from partita.compiler.program import InputPart, RankProgram
from partita.compiler.report.traffic import update_nodes

if TYPE_CHECKING:  # the compiler's own pass for schedules asks for memory
    from partita.compiler.pipeline import Compilation

# For tensors of one number or a few: statistics, a step's number, constants. There are a dozen.
_NUMBERS = 1 << 10


def peak_memory(state: Compilation, rank: RankProgram) -> int:
    """The bound of each rank that runs the program of a pipeline rank."""
    assert state.partitioned is not None
    assert state.update is not None
    stages = [state.partitioned.stages[index] for index in rank.stages]
    reduce = {index: list(nodes) for index, nodes in state.update.reduce if index in rank.stages}
    reduced = {index: _made(nodes) for index, nodes in reduce.items()}
    update = update_nodes(state, rank)
    inputs = _inputs(state, rank)
    start = inputs + max((_constants(stage, remade=True) for stage in stages), default=0)
    during = inputs + _microbatches(state, rank, reduced)
    # Updates work in place: their results are parameter and state.
    in_place = [evolve(node, outputs=()) if isinstance(node.op, Update) else node for node in update]
    end = sum(reduced.values()) + working_set(line_by_line(in_place), ())
    groups = [*(stage.nodes for stage in stages), *reduce.values(), update]
    return _always(state, rank, stages) + max(start, during, end) + _largest_buffer(groups)


def room(state: Compilation, rank: RankProgram, limit: float) -> float:
    """Bytes that a limit leaves on a rank for what microbatches in flight keep: at any moment between the first and the
    last of them, whatever function runs.
    """
    assert state.partitioned is not None
    assert state.program is not None
    assert state.update is not None
    stages = [state.partitioned.stages[index] for index in rank.stages]
    reduce = {index: list(nodes) for index, nodes in state.update.reduce if index in rank.stages}
    beside = _always(state, rank, stages) + _inputs(state, rank) + peak_in_flight(rank.instructions)
    beside += max(peak for index in rank.stages for peak in state.program.stages[index].peaks.values())
    beside += sum(map(_made, reduce.values()))
    groups = [*(stage.nodes for stage in stages), *reduce.values(), update_nodes(state, rank)]
    return limit - beside - _largest_buffer(groups)


def _always(state: Compilation, rank: RankProgram, stages: Sequence[StageGraph]) -> int:
    assert state.program is not None
    program, sizes = state.program, state.mesh.sizes
    total = 0
    for name in rank.parameters:
        record = program.parameter(name)
        total += local_type(record.type, record.layout, sizes).bytes
        total += local_type(record.type, record.state_layout, sizes).bytes * len(record.states)
    total += sum(each.type.bytes for index in rank.stages for each in program.stages[index].accumulators)
    total += sum(each.type.bytes for each in rank.receives)
    total += _NUMBERS + tables(node for stage in stages for node in stage.nodes)
    return total + sum(_constants(stage) for stage in stages)


def _constants(stage: StageGraph, remade: bool = False) -> int:
    """What a stage computes with for a whole step, beside its masters; or all that making it holds."""
    prologue = [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
    read = {value for node in stage.nodes if node.phase is not Phase.PROLOGUE for value in node.inputs}
    casts = [p.value for p in stage.parameters if p.value.type.dtype != p.master.dtype]
    kept = {value for node in prologue for value in node.outputs if value in read}
    total = sum(value.type.bytes for value in casts if remade or value in read)
    return total + (working_set(line_by_line(prologue), kept) if remade else held(kept, prologue))


def _inputs(state: Compilation, rank: RankProgram) -> int:
    """The parts of a whole batch that a rank reads."""
    assert state.program is not None
    program = state.program
    types = {each.name: each.type for each in program.inputs}
    parts: dict[InputPart, int] = {}
    for index in rank.stages:
        for part in (*program.stages[index].inputs, *program.stages[index].whole_inputs):
            type, times = types[part.name], 1
            if part.batch is not None:
                times = program.microbatches
                type = type.resized(part.batch, type.axis(part.batch).size // times)
            parts[evolve(part, slot=None)] = times * local_type(type, part.layout, state.mesh.sizes).bytes
    return sum(parts.values())


def _microbatches(state: Compilation, rank: RankProgram, reduced: dict[int, int]) -> int:
    """The greatest moment between the first and the last microbatch."""
    assert state.program is not None
    sizes = _messages(state)
    arriving: Counter[tuple[int, str]] = Counter()
    leaving: Counter[tuple[int, str]] = Counter()
    for message, size in sizes.items():
        arriving[message.destination, message.direction] += size
        leaving[message.source, message.direction] += size
    now = peak = 0
    for i, instruction in enumerate(rank.instructions):
        if isinstance(instruction, Compute):
            stage, kind = state.program.stages[instruction.stage], instruction.action.kind
            before = now
            now += {"F": stage.saved, "B": stage.kept - stage.saved, "W": -stage.kept, "BW": -stage.saved}[kind]
            if kind in DIRECTION:
                now += leaving[instruction.stage, DIRECTION[kind]] - arriving[instruction.stage, DIRECTION[kind]]
            peak = max(peak, max(before, now) + stage.peaks.get(kind, 0))
        elif isinstance(instruction, PostReceive):
            now += sizes[instruction.transfer.message]
        elif isinstance(instruction, WaitSend):
            now -= sizes[instruction.transfer.message]
        now += sum(reduced.get(index, 0) for index in rank.reductions.get(i, ()))
        peak = max(peak, now)
    return peak


def _messages(state: Compilation) -> dict[Message, int]:
    """What lives with a message at either end: a tensor of its own, or one of which it shows a part."""
    assert state.partitioned is not None
    found = {}
    for stage in state.partitioned.stages:
        behind = roots(stage.nodes)
        for node in stage.nodes:
            if isinstance(node.op, Send):
                (value,) = node.inputs
                found[message_of(node)] = max(value.type.bytes, behind.get(value, value).type.bytes)
    return found


def _largest_buffer(groups: Iterable[Sequence[Node]]) -> int:
    """The most that one collective sends and gets."""
    sizes = [
        sum(value.type.bytes for value in (*node.inputs, *node.outputs))
        for nodes in groups
        for node in nodes
        if isinstance(node.op, Collective)
    ]
    return max(sizes, default=0)


def _made(nodes: Sequence[Node]) -> int:
    """Bytes that are left of the results of nodes: those that no other of them reads."""
    read: set[Value] = {value for node in nodes for value in node.inputs}
    return sum(value.type.bytes for node in nodes for value in node.outputs if value not in read)
