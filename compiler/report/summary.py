"""The summary of a compiled program: what `partita compile` prints, in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import asdict, frozen

from partita.compiler.analysis.memory import HOST, PARTS, MemoryReport, memory_report
from partita.compiler.analysis.time import Prediction, predict
from partita.compiler.analysis.traffic import Traffic, cost, traffic
from partita.compiler.costs.nodes import product_flops
from partita.compiler.graph import Phase, without_iterations
from partita.compiler.instructions import Message
from partita.compiler.layout import stored_form
from partita.compiler.mesh import Mesh
from partita.compiler.ops.four_bits import CODES, FOUR_BITS, FourBits, matrix_of
from partita.compiler.passes.padded import padded_sizes
from partita.compiler.passes.shard.defaults import default_layouts
from partita.compiler.passes.shard.reasons import undivided
from partita.compiler.program import ParameterRecord
from partita.compiler.report.shares import MatrixShare, matrix_shares
from partita.compiler.schedules.timeline import Timeline
from partita.compiler.state import Compilation
from partita.dsl.grouping import grouped
from partita.dsl.reprs import Pictured, Shortened, count, outline
from partita.dsl.types import Type


@frozen(eq=False, repr=False)
class StageSummary(Shortened):
    """One stage: where it runs, its iterations, its parameters, and the predicted seconds of F, B and W. In bytes, what
    a microbatch keeps from F (`saved`), and what of it the host's memory keeps (`offloaded`), for so many microbatches
    of a step (`offloads`).
    """

    index: int
    rank: int
    chunk: int
    iterations: tuple[str, ...]
    parameters: int
    tied: tuple[str, ...]
    seconds: dict[str, float]
    saved: int
    offloaded: int = 0
    offloads: int = 0


@frozen(eq=False, repr=False)
class RuleSummary(Shortened):
    """A rule of the optimizer: its parameters without iteration numbers, their elements, and the bytes of their
    optimizer states, of all ranks together and each once. `left` are those that it leaves to a later rule, by why.
    """

    rule: str
    parameters: tuple[str, ...]
    elements: int
    state: int
    left: tuple[tuple[str, tuple[str, ...]], ...] = ()


@frozen(eq=False)
class Summary(Pictured):
    """The program in numbers. `memory` has one report per pipeline rank. `padded` are the axes that are padded, with
    their sizes before and after, for which products take `waste` times as many FLOPs more. `flat` are the parameters,
    by mesh axes, that are stored flat, and `undivided` those that a rule would store sharded, but that no axis divides
    and that cannot be flat. `recomputed` are the calls and iterations that `recompute auto` has chosen; `shares` who
    works on whole matrices in the update; `tables` the parameters of which a step reads and writes only the rows that
    it looks up, with the axis of these rows.
    """

    name: str
    mesh: Mesh
    stages: tuple[StageSummary, ...]
    parameters: int
    memory: tuple[MemoryReport, ...]
    collectives: tuple[Traffic, ...]
    transfers: tuple[dict[str, Any], ...]
    tied: tuple[dict[str, Any], ...]
    padded: tuple[tuple[str, int, int], ...]
    flat: tuple[tuple[str, tuple[str, ...]], ...]
    undivided: tuple[tuple[str, tuple[str, ...]], ...]
    recomputed: tuple[str, ...]
    rules: tuple[RuleSummary, ...]
    shares: tuple[MatrixShare, ...]
    tables: tuple[tuple[str, str], ...]
    waste: float
    prediction: Prediction
    times: tuple[tuple[str, float], ...]

    def __repr__(self) -> str:
        facts = (count(self.ranks, "rank"), count(len(self.stages), "stage"), count(self.parameters, "parameter"))
        return outline("Summary of", self.name, facts)

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return self.mesh.ranks

    @property
    def peak_memory(self) -> tuple[int, ...]:
        """The memory bound in bytes, one per pipeline rank."""
        return tuple(each.total for each in self.memory)

    @property
    def timeline(self) -> Timeline:
        """The predicted timeline of the microbatches."""
        return self.prediction.timeline

    def as_json(self) -> dict[str, Any]:
        """The object of `compile --json`, a stable format."""
        prediction = self.prediction
        columns = [self.memory[self.mesh.pipe_rank(rank)] for rank in range(self.ranks)]
        return {
            "name": self.name,
            "ranks": self.ranks,
            "stages": [
                {
                    "stage": s.index,
                    "rank": s.rank,
                    "chunk": s.chunk,
                    "turns": list(s.iterations),
                    "parameters": s.parameters,
                    "tied": list(s.tied),
                    "seconds": s.seconds,
                    "saved": s.saved,
                    "offloaded": s.offloaded,
                    "offloads": s.offloads,
                }
                for s in self.stages
            ],
            "parameters": self.parameters,
            "peak_memory": [each.total for each in columns],
            "peak_in": [each.during for each in columns],
            "memory": {part: [getattr(each, part) for each in columns] for part in (*PARTS, HOST)},
            "collectives": collectives_json(self.collectives),
            "transfers": list(self.transfers),
            "tied": list(self.tied),
            "padded": {axis: sizes for axis, *sizes in self.padded},
            "flat": {axes: list(names) for axes, names in self.flat},
            "undivided": {axis: list(names) for axis, names in self.undivided},
            "recomputed": list(self.recomputed),
            "optimizer": [
                {
                    "rule": each.rule,
                    "parameters": list(each.parameters),
                    "elements": each.elements,
                    "state": each.state,
                    "left": {why: list(names) for why, names in each.left},
                }
                for each in self.rules
            ],
            "matrices": [asdict(each) for each in self.shares],
            "tables": dict(self.tables),
            "bubble": self.timeline.bubble,
            "makespan": self.timeline.makespan,
            "step_time": prediction.step_time,
            f"{prediction.unit}_per_second": prediction.rate,
            "mfu": prediction.mfu,
            "exposed_communication": prediction.exposed_communication,
            "host_copies": prediction.copying,
            "exposed_host_copies": prediction.exposed_copies,
            "seconds": dict(self.times),
        }


def collectives_json(records: Iterable[Traffic]) -> list[dict[str, Any]]:
    """One object for each kind, mesh axis, phase and source line, in source order."""
    phases = list(Phase)

    def key(each: Traffic) -> tuple[str, int, int, str, str]:
        file, line = (each.span.source.name, each.span.line) if each.span else ("", 0)
        return file, line, phases.index(each.phase), each.axis, each.kind

    return [
        {
            "kind": kind,
            "axis": axis,
            "phase": phases[phase].name.lower(),
            **cost(group).as_json(),
            "file": file or None,
            "line": line or None,
        }
        for (file, line, phase, axis, kind), group in sorted(grouped(records, key).items(), key=lambda pair: pair[0])
    ]


def summarize(state: Compilation) -> Summary:
    """The summary of a finished compilation."""
    plan = state.plan  # the program's, by parts of parameters where ranks hold parts
    prediction = predict(state)
    names = {each.name: each.part.name if each.part else each.name for each in state.partitioned.graph.parameters}
    own_sizes = state.joint.own_sizes
    sizes = {p.name: elements_of(p, stored_form(p.type, p.layout, own_sizes)[0]) for p in plan.parameters}
    tied = {p.name for p in plan.parameters if len(p.stages) > 1}
    stages = []
    for stage in plan.stages:
        nodes = state.partitioned.stages[stage.index].nodes
        stages.append(
            StageSummary(
                stage.index,
                stage.rank,
                stage.chunk,
                _iterations([node.scope for node in nodes if node.phase is Phase.FORWARD]),
                sum(sizes[name] for name in stage.parameters),
                tuple(names[name] for name in stage.parameters if name in tied),
                {kind: prediction.costs.action(stage.index, kind) for kind in ("F", "B", "W")},
                stage.saved,
                stage.offloaded,
                plan.offloads(stage.index),
            )
        )
    return Summary(
        plan.name,
        state.mesh,
        tuple(stages),
        sum(sizes.values()),
        tuple(memory_report(state, rank) for rank in plan.ranks),
        traffic(state),
        transfers(state),
        tied_transfers(state),
        tuple((axis, own_sizes[axis], size) for axis, size in padded_sizes(state.joint).items()),
        *_not_by_axes(state),
        tuple(sorted(state.again, key=lambda path: [(len(part), part) for part in path.split(".")])),
        _rules(state),
        matrix_shares(state),
        tuple({without_iterations(name): over for name, over in state.tables.over.items()}.items())
        if state.training
        else (),
        _waste(state),
        prediction,
        state.times,
    )


def elements_of(parameter: ParameterRecord, type: Type) -> int:
    """The elements of a parameter; of a matrix in four bits those in its codes, and none in what stands beside."""
    if parameter.initial.name != FOUR_BITS:
        return type.elements
    form, part, _ = FourBits.of(parameter.initial)
    return type.elements * form.whole.elements // form.codes.elements if part == CODES else 0


def _waste(state: Compilation) -> float:
    """The FLOPs of products with padding, by how much of those without they are more."""
    if not state.joint.own_sizes or not state.flops:
        return 0.0
    return product_flops(state.undivided or state.joint) * state.replicas_per_rank * state.mesh.groups / state.flops - 1


def transfers(state: Compilation) -> tuple[dict[str, Any], ...]:
    """The messages between pipeline ranks, sent for each microbatch."""
    program = state.program
    return tuple(
        _transfer(message, program.replicas_per_rank * program.microbatches)
        for message in state.partitioned.messages
        if message.direction in ("forward", "backward")
        and program.stages[message.source].rank != program.stages[message.destination].rank
    )


def tied_transfers(state: Compilation) -> tuple[dict[str, Any], ...]:
    """Gradient totals of tied parameters, sent once a step to each other pipeline rank that has the parameter."""
    return tuple(
        _transfer(each.transfer.message, state.program.replicas_per_rank)
        for rank in state.program.ranks
        for each in rank.sends
    )


def _transfer(message: Message, count: int) -> dict[str, Any]:
    return {
        "value": message.value,
        "from": message.source,
        "to": message.destination,
        "direction": message.direction,
        "bytes": message.bytes,
        "count": count,
    }


def _rules(state: Compilation) -> tuple[RuleSummary, ...]:
    """The rules of the optimizer, in order."""
    summaries = []
    for rule in state.train.optimizer.rules:
        own = [each for each in state.plan.parameters if state.rules.get(matrix_of(each.name, each.initial)) is rule]
        names = dict.fromkeys(without_iterations(matrix_of(each.name, each.initial)) for each in own)
        elements = sum(elements_of(each, each.type) for each in own)
        stored = sum(tensor.type.bytes for each in own for tensor in each.states)
        left: dict[str, dict[str, None]] = {}
        for name, unfit in state.unfit.items():
            for why in (each.why for each in unfit if each.rule is rule):
                left.setdefault(why, {})[without_iterations(name)] = None
        by_reason = tuple((why, tuple(them)) for why, them in left.items())
        summaries.append(RuleSummary(str(rule), tuple(names), elements, stored, by_reason))
    return tuple(summaries)


ByAxes = tuple[tuple[str, tuple[str, ...]], ...]


def _not_by_axes(state: Compilation) -> tuple[ByAxes, ByAxes]:
    """The parameters that are stored flat, by mesh axes, and those that no axis divides, by mesh axis."""
    defaults = default_layouts(state.spec, state.mesh)
    flat: dict[str, dict[str, None]] = {}
    replicated: dict[str, dict[str, None]] = {}
    for name in (each.name for each in state.step.parameters if not each.buffer):
        layouts = state.sharded.parameters[name]
        kind, layout = ("state", layouts.state) if name in state.updates else ("param", layouts.param)
        if layout.flat is not None:
            flat.setdefault(", ".join(layout.over(layout.flat.axis)), {})[without_iterations(name)] = None
        for mesh_axis in undivided(defaults, kind, name, layout):
            replicated.setdefault(mesh_axis, {})[without_iterations(name)] = None

    def listed(by_axes: dict[str, dict[str, None]]) -> ByAxes:
        return tuple((axes, tuple(names)) for axes, names in by_axes.items())

    return listed(flat), listed(replicated)


def _iterations(scopes: list[str]) -> tuple[str, ...]:
    """The outermost iterations of a stage: `layer.3`."""
    iterations: dict[str, None] = {}
    for scope in scopes:
        parts = scope.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                iterations[".".join(parts[1 : i + 1])] = None
                break
    return tuple(iterations)
