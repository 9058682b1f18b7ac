"""Evaluates the claims of a file's `expect` blocks on its compiled program.

A claim compares a measure, a number from the program's summary, to a limit. `MEASURES` says how each is computed, what
contributes most to it when a claim fails, and what may help. Each tensor in a bucket counts as one collective. If
layers differ, the one with the most collectives counts, so an upper bound holds for every layer.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attrs import frozen

from partita.compiler.analysis.memory import PARTS, TRAINING, largest
from partita.compiler.analysis.traffic import EACH_MICROBATCH, Traffic
from partita.compiler.passes.place import iteration_of
from partita.compiler.report.causes import tensor_text
from partita.compiler.report.summary import Summary, summarize
from partita.compiler.schedules.schedule import Action
from partita.compiler.state import Compilation
from partita.dsl.config import builtins
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.grouping import grouped
from partita.dsl.spec import Claim
from partita.dsl.syntax.units import BYTES, PLAIN, RATIO, SECONDS, written

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}
# The number of largest contributions that are named.
MAX_NAMED = 3


@frozen(eq=False)
class Outcome:
    """A claim and its measure's value in a program. If it fails, `notes` name the largest contributions; `help` says
    what changes the value.
    """

    claim: Claim
    value: float
    holds: bool
    notes: tuple[str, ...]
    help: str

    @property
    def text(self) -> str:
        """The claim as written in the file."""
        return self.claim.span.text

    @property
    def shown(self) -> str:
        """The value as the language writes it, with enough digits to differ from the limit."""
        dimension = builtins.MEASURES[self.claim.measure].limit.dimension
        texts = (
            (written(self.value, dimension, digits), written(self.claim.limit, dimension, digits))
            for digits in range(3, 17)
        )
        return next((value for value, limit in texts if value != limit), written(self.value, dimension))

    def diagnostic(self, code: str) -> Diagnostic:
        """The diagnostic of a failed claim."""
        message = f"`{self.text}` does not hold: it is {self.shown}"
        return Diagnostic(code, message, self.claim.span, self.notes, self.help)

    def as_json(self) -> dict[str, Any]:
        """An object of `compile --json`, a stable format."""
        return {
            "measure": self.claim.measure,
            "argument": list(self.claim.argument),
            "comparison": self.claim.comparison,
            "limit": self.claim.limit,
            "value": self.value,
            "holds": self.holds,
        }


def outcomes(state: Compilation, summary: Summary) -> tuple[Outcome, ...]:
    """The outcome of each claim of a file, in order."""
    results = []
    for claim in state.spec.expect:
        measure = MEASURES[claim.measure]
        value = measure.value(state, summary, *claim.argument)
        holds = COMPARISONS[claim.comparison](value, claim.limit)
        notes = () if holds else tuple(measure.notes(state, summary, *claim.argument))
        results.append(Outcome(claim, value, holds, notes, measure.help))
    return tuple(results)


def failures(results: Iterable[Outcome], code: str = "E0705") -> tuple[Diagnostic, ...]:
    """A diagnostic for each claim that fails."""
    return tuple(each.diagnostic(code) for each in results if not each.holds)


def claim_warnings(state: Compilation) -> tuple[Diagnostic, ...]:
    """Warnings (W0701) for failed claims of a program that is run regardless."""
    return failures(outcomes(state, summarize(state)), "W0701") if state.spec.expect else ()


# ---------------------------------------------------------------- values


def layers(state: Compilation, records: Iterable[Traffic]) -> dict[str, list[Traffic]]:
    """The collectives of each layer's forward and backward pass, per microbatch. Layers are the iterations of outermost
    repeats; a model without repeats is one layer.
    """
    graph = state.partitioned.graph
    repeats = graph.repeats
    within = [each for each in records if each.phase in EACH_MICROBATCH]
    if not repeats:
        return {graph.name: within}
    iterations = grouped(within, lambda each: iteration_of(each.parameter or each.scope, repeats))
    return {iteration: group for iteration, group in iterations.items() if iteration is not None}


def _busiest_layer(state: Compilation, summary: Summary, *argument: str) -> tuple[str, list[Traffic]]:
    """The first layer with the most collectives along a mesh axis, optionally of one kind only."""
    *kind, axis = argument
    along = [each for each in summary.collectives if each.axis == axis and (not kind or each.kind == kind[0])]
    by_layer = layers(state, along)
    return max(by_layer.items(), key=lambda item: len(item[1]), default=("", []))


def _collectives(state: Compilation, summary: Summary, *argument: str) -> float:
    return len(_busiest_layer(state, summary, *argument)[1])


@frozen
class _Sent:
    """What a pipeline rank sends in a step. `what` names the value, or the source line that causes it."""

    rank: int
    bytes: float
    what: str


def _sent(state: Compilation, summary: Summary, axis: str) -> list[_Sent]:
    """What the rank that sends most along a mesh axis sends: collectives or, along the pipeline axis, messages."""
    if axis == state.mesh.pipe:
        ranks = {stage.index: stage.rank for stage in summary.stages}
        sent = [
            _Sent(ranks[each["from"]], each["bytes"] * each["count"], tensor_text(each["value"]))
            for each in (*summary.transfers, *summary.tied)
        ]
    else:
        groups = state.groups
        # What the file calls one axis, replica groups share out.
        parts = {axis, state.mesh.replica_axis} if groups is not None and groups.along == axis else {axis}
        sent = [_Sent(each.rank, each.bytes, _place(each)) for each in summary.collectives if each.axis in parts]
    by_rank = grouped(sent, lambda each: each.rank)
    return max(by_rank.values(), key=lambda own: sum(each.bytes for each in own), default=[])


def _bytes(state: Compilation, summary: Summary, axis: str) -> float:
    return sum(each.bytes for each in _sent(state, summary, axis))


# ---------------------------------------------------------------- largest contributions


def _memory_notes(state: Compilation, summary: Summary) -> Iterator[str]:
    rank = max(range(len(summary.memory)), key=lambda rank: summary.memory[rank].total)
    report = summary.memory[rank]
    parts = sorted(PARTS, key=lambda part: -getattr(report, part))
    shown = ", ".join(f"{part} {written(getattr(report, part), BYTES)}" for part in parts if getattr(report, part))
    yield f"{_rank(summary, rank)}, {report.moment}: {shown}"
    tensors = largest(state, state.plan.ranks[rank], parts[0])
    if tensors and (report.during == TRAINING or parts[0] != "activations"):  # those are of training
        yield f"most of its {parts[0]}: {_most(tensors.items(), BYTES)}"


def _bubble_notes(state: Compilation, summary: Summary) -> Iterator[str]:
    timeline = summary.timeline
    busiest, idlest = (end(range(len(timeline.busy)), key=lambda rank: timeline.busy[rank]) for end in (max, min))
    idle = 1 - timeline.busy[idlest] / timeline.cost if timeline.cost else 0.0
    yield (
        f"{_rank(summary, busiest)} is busy the longest, {written(timeline.busy[busiest], SECONDS)} of "
        f"{written(timeline.cost, SECONDS)}; {_rank(summary, idlest)} waits the longest, {written(idle, RATIO)}"
    )
    chain = [
        (f"{each.work.kind} on rank {each.rank}" if isinstance(each.work, Action) else "transfers", each.duration)
        for each in timeline.critical_path
    ]
    if chain:
        yield f"the critical path: {_most(chain, SECONDS)}"


def _step_notes(state: Compilation, summary: Summary) -> Iterator[str]:
    prediction = summary.prediction
    stage = max(summary.stages, key=lambda each: sum(each.seconds.values()))
    figures = ", ".join(f"{kind} {written(value, SECONDS)}" for kind, value in stage.seconds.items())
    step, makespan = (written(each, SECONDS) for each in (prediction.step_time, prediction.timeline.makespan))
    yield (
        f"of {step}, microbatches take {makespan}; "
        f"bubble {written(prediction.timeline.bubble, RATIO)}, exposed communication "
        f"{written(prediction.exposed_communication, RATIO)}"
    )
    yield f"stage {stage.index} takes the longest: {figures}, for each of {state.microbatches} microbatches"


def _exposed_notes(state: Compilation, summary: Summary) -> Iterator[str]:
    by_rank = grouped(summary.collectives, lambda each: each.rank).values()
    own = max(by_rank, key=lambda own: sum(each.seconds for each in own), default=[])
    if own:
        axes = _most(((f"along {each.axis}", each.seconds) for each in own), SECONDS)
        yield f"collectives of {_rank(summary, own[0].rank)}, overlapped or not: {axes}"
    yield from _lines(((_place(each), each.seconds) for each in own), SECONDS)


def _count_notes(state: Compilation, summary: Summary, *argument: str) -> Iterator[str]:
    layer, collectives = _busiest_layer(state, summary, *argument)
    kinds = Counter(f"{each.phase.name.lower()} {each.kind}" for each in collectives)
    if collectives:
        yield f"{layer}: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}"
    yield from _lines((_place(each), 1) for each in collectives)


def _bytes_notes(state: Compilation, summary: Summary, axis: str) -> Iterator[str]:
    sent = _sent(state, summary, axis)
    if sent:
        yield f"{_rank(summary, sent[0].rank)} sends the most"
    yield from _lines(((each.what, each.bytes) for each in sent), BYTES)


def _lines(weighed: Iterable[tuple[str, float]], dimension: str = PLAIN) -> Iterator[str]:
    """The largest contributions, one per line."""
    for what, weight in _heaviest(weighed):
        yield f"{written(weight, dimension)} by {what}"


def _most(weighed: Iterable[tuple[str, float]], dimension: str) -> str:
    """The largest contributions in one line: `gpt.wte 73.7MiB, gpt.wpe 3MiB`."""
    return ", ".join(f"{what} {written(weight, dimension)}" for what, weight in _heaviest(weighed))


def _heaviest(weighed: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    sums: dict[str, float] = {}
    for what, weight in weighed:
        sums[what] = sums.get(what, 0.0) + weight
    return sorted(sums.items(), key=lambda each: -each[1])[:MAX_NAMED]


def _place(record: Traffic) -> str:
    """The line that causes a collective: "gpt.par:16, `let v = dot(h, wv, over = embed)`"."""
    if record.span is None:
        return "no source line"
    return f"{record.span.source.name}:{record.span.line}, `{record.span.source.line(record.span.line).strip()}`"


def _rank(summary: Summary, rank: int) -> str:
    return f"rank {rank} of the pipeline" if len(summary.memory) > 1 else "each rank"


# ---------------------------------------------------------------- the table


@frozen(eq=False)
class Measure:
    """How a measure's value is computed (in plain units), what contributes most to it, and what helps."""

    value: Callable[..., float]
    notes: Callable[..., Iterable[str]]
    help: str


_FASTER = "more microbatches, another schedule or layout; `partita compile` and `schedule` show where the time goes"
_LESS_SENT = "`partita explain` shows the tensors, and which rule of the layout causes them"
MEASURES = {
    "peak_memory": Measure(
        lambda state, summary: max(summary.peak_memory),
        _memory_notes,
        "`shard param`, `shard state`, `recompute`, more ranks or fewer microbatches in flight need less",
    ),
    "bubble": Measure(
        lambda state, summary: summary.timeline.bubble,
        _bubble_notes,
        "more microbatches, more `chunks`, or a schedule that splits the backward pass: `zb_h1`, `auto`",
    ),
    "step_time": Measure(lambda state, summary: summary.prediction.step_time, _step_notes, _FASTER),
    "tokens_per_second": Measure(lambda state, summary: summary.prediction.rate, _step_notes, _FASTER),
    "mfu": Measure(lambda state, summary: summary.prediction.mfu, _step_notes, _FASTER),
    "exposed_communication": Measure(
        lambda state, summary: summary.prediction.exposed_communication, _exposed_notes, _LESS_SENT
    ),
    "bytes": Measure(_bytes, _bytes_notes, _LESS_SENT),
    "collectives": Measure(_collectives, _count_notes, _LESS_SENT),
    "count": Measure(_collectives, _count_notes, _LESS_SENT),
}
