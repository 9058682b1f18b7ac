"""Attributes a program's communication: collectives by source line, and by iteration of each repeat.

From the records of `partita.compiler.analysis.traffic` it derives, for each line, the collectives that it causes
(joined over iterations that do the same); and for each outermost repeat, what an iteration communicates per microbatch
and per step: the numbers in which papers compare layouts ("two all-gathers and two reduce-scatters forward").
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from attrs import asdict, frozen

from partita.compiler.analysis.traffic import EACH_MICROBATCH, Cost, Traffic, cost, traffic
from partita.compiler.graph import Phase, without_iterations
from partita.compiler.layout import Layout
from partita.compiler.mesh import Mesh
from partita.compiler.passes.place import iteration_of
from partita.compiler.report.summary import tied_transfers, transfers
from partita.compiler.state import Compilation
from partita.dsl.grouping import grouped
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

ORDER = {phase: i for i, phase in enumerate(Phase)}


@frozen(eq=False)
class TensorTraffic:
    """A tensor in a collective, which occurs alike in `places` iterations and stages. One rank sends `each` bytes of it
    at a time; `cost` is that of all in a step.
    """

    kind: str
    axis: str
    phase: Phase
    tensor: str
    type: Type
    source: Layout
    target: Layout
    places: int
    each: float
    cost: Cost

    def as_json(self) -> dict[str, Any]:
        """As an object of `explain --json`."""
        return {
            "kind": self.kind,
            "axis": self.axis,
            "phase": self.phase.name.lower(),
            "tensor": self.tensor,
            "type": str(self.type),
            "from": str(self.source),
            "to": str(self.target),
            "places": self.places,
            "bytes_each": round(self.each),
            **self.cost.as_json(),
        }


@frozen(eq=False)
class Cause:
    """A source line and the collectives that it causes (None: no line does)."""

    span: Span | None
    moved: tuple[TensorTraffic, ...]


@frozen
class Share:
    """Collectives of one kind in an iteration: `count` tensors, of which one rank sends `bytes` in total. `of` is
    "activations" or "parameters" (including their gradients).
    """

    phase: str
    kind: str
    axis: str
    of: str
    count: int
    bytes: float

    def as_json(self) -> dict[str, Any]:
        """As an object of `explain --json`."""
        return asdict(self) | {"bytes": round(self.bytes)}


@frozen(eq=False)
class Iteration:
    """What an iteration of a repeat communicates per microbatch and per step; the same for all iteration `numbers`."""

    repeat: str
    numbers: tuple[int, ...]
    microbatch: tuple[Share, ...]
    step: tuple[Share, ...]


@frozen(eq=False)
class Communication:
    """All communication of a step. `statistics` is the number of scalars all-reduced at its end: loss, metrics, squared
    gradient norms.
    """

    name: str
    mesh: Mesh
    microbatches: int
    causes: tuple[Cause, ...]
    axes: tuple[tuple[str, Cost], ...]
    iterations: tuple[Iteration, ...]
    transfers: tuple[dict[str, Any], ...]
    statistics: int

    def as_json(self) -> dict[str, Any]:
        """The object of `explain --json`, a stable format."""
        return {
            "name": self.name,
            "ranks": self.mesh.ranks,
            "mesh": dict(self.mesh.axes),
            "microbatches": self.microbatches,
            "lines": [
                {
                    "file": cause.span.source.name if cause.span else None,
                    "line": cause.span.line if cause.span else None,
                    "text": cause.span.source.line(cause.span.line).strip() if cause.span else None,
                    "collectives": [each.as_json() for each in cause.moved],
                }
                for cause in self.causes
            ],
            "axes": {axis: sums.as_json() for axis, sums in self.axes},
            "turns": [
                {
                    "repeat": iteration.repeat,
                    "turns": list(iteration.numbers),
                    "microbatch": [share.as_json() for share in iteration.microbatch],
                    "step": [share.as_json() for share in iteration.step],
                }
                for iteration in self.iterations
            ],
            "transfers": list(self.transfers),
            "statistics": self.statistics,
        }


def communication(state: Compilation) -> Communication:
    """All communication of a compiled program, by cause."""
    records = traffic(state)
    repeats = state.partitioned.graph.repeats
    by_axis = grouped(records, lambda each: each.axis)
    return Communication(
        state.partitioned.graph.name,
        state.mesh,
        state.microbatches,
        causes(records),
        tuple((axis, cost(by_axis[axis])) for axis in state.mesh.sharding if axis in by_axis),
        iterations(records, repeats),
        (*transfers(state), *tied_transfers(state)),
        len(state.update.step_metrics),
    )


def causes(records: Iterable[Traffic]) -> tuple[Cause, ...]:
    """The records by line, in source order; those without a line come last."""

    def line(each: Traffic) -> tuple[bool, str, int]:
        return (False, each.span.source.name, each.span.line) if each.span else (True, "", 0)

    by_line = grouped(records, line)
    return tuple(Cause(by_line[key][0].span, traffic_of(by_line[key])) for key in sorted(by_line))


def traffic_of(records: Iterable[Traffic]) -> tuple[TensorTraffic, ...]:
    """Records in the order of a step, joined where they differ only in their iteration."""

    def alike(each: Traffic) -> tuple[int, str, str, str, Type, Layout, Layout]:
        phase, tensor = ORDER[each.phase], tensor_text(each.tensor)
        return phase, each.axis, each.kind, tensor, each.type, each.source, each.target

    rows = grouped(records, alike)
    tensors = []
    for key in sorted(rows, key=lambda key: key[0]):
        _, axis, kind, tensor, type, source, target = key
        first = rows[key][0]
        each = first.bytes / first.count
        tensors.append(
            TensorTraffic(kind, axis, first.phase, tensor, type, source, target, len(rows[key]), each, cost(rows[key]))
        )
    return tuple(tensors)


def tensor_text(name: str) -> str:
    """A tensor's name for display: without iterations and stages, and of a gradient total or an update the parameter's
    name.
    """
    match = re.fullmatch(r"(?:total|new)\((.*)\)(?:@\d+)?(?:~\d+)?", name)
    return without_iterations(match[1] if match else name)


# ---------------------------------------------------------------- iterations


def iterations(records: Iterable[Traffic], repeats: dict[str, str]) -> tuple[Iteration, ...]:
    """What each iteration of the outermost repeats communicates, grouping iterations that do the same."""
    by_iteration = grouped(records, lambda each: iteration_of(each.parameter or each.scope, repeats))
    profiles: dict[tuple[str, tuple[Share, ...], tuple[Share, ...]], list[int]] = {}
    for iteration, group in by_iteration.items():
        if iteration is None:
            continue
        repeat, _, number = iteration.rpartition(".")
        within = [each for each in group if each.phase in EACH_MICROBATCH]
        outside = [each for each in group if each.phase not in EACH_MICROBATCH]
        profiles.setdefault((repeat, _shares(within), _shares(outside)), []).append(int(number))
    return tuple(Iteration(repeat, tuple(sorted(numbers)), *shares) for (repeat, *shares), numbers in profiles.items())


def _shares(records: Iterable[Traffic]) -> tuple[Share, ...]:
    """Counts by phase (B and W as one), mesh axis and kind; activations also by size, which parameters are not."""

    def key(each: Traffic) -> tuple[int, bool, str, str, float]:
        phase = Phase.BACKWARD if each.phase is Phase.WEIGHT else each.phase
        size = 0.0 if each.parameter else each.bytes / each.count
        return ORDER[phase], each.parameter is not None, each.axis, each.kind, size

    rows = grouped(records, key)
    return tuple(
        Share(
            list(Phase)[phase].name.lower(),
            kind,
            axis,
            "parameters" if parameter else "activations",
            len(rows[phase, parameter, axis, kind, size]),
            sum(each.bytes / each.count for each in rows[phase, parameter, axis, kind, size]),
        )
        for phase, parameter, axis, kind, size in sorted(rows)
    )
