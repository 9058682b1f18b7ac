"""What causes a program's communication: its collectives by source line, and those of one turn of each repeat.

Comes in: the records of `partita.compiler.analysis.traffic`. Goes out: for each line what is moved because of it, turns
of repeats that do the same joined; and for each outermost repeat what a turn of it moves for each microbatch and once a
step: the figures in which papers compare layouts ("two all-gathers and two reduce-scatters forward").
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from attrs import asdict, frozen

from partita.compiler.analysis.traffic import EACH_MICROBATCH, Cost, Traffic, cost, grouped, traffic
from partita.compiler.graph import Phase, without_turns
from partita.compiler.layout import Layout
from partita.compiler.lowering.placement import turn_of
from partita.compiler.mesh import Mesh
from partita.compiler.report.summary import tied_transfers, transfers
from partita.compiler.state import Compilation
from partita.dsl.source import Span
from partita.dsl.types import Type

ORDER = {phase: i for i, phase in enumerate(Phase)}


@frozen(eq=False)
class Moved:
    """A tensor that a collective moves, in as many `places` (turns, stages) as do the same. `each` is what one rank
    sends of it at a time, in bytes, `cost` what all of that is in a step."""

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
    """A source line and the collectives that are there because of it (None: because of no line)."""

    span: Span | None
    moved: tuple[Moved, ...]


@frozen
class Share:
    """Collectives of one kind in a turn: `count` tensors for each microbatch (or once a step, at its ends), of which
    one rank sends `bytes` together. `of` says whether they are activations, or parameters and their gradients."""

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
class Turn:
    """A turn of a repeat, as all `numbers` of its turns are: what it moves for each microbatch, and once a step."""

    repeat: str
    numbers: tuple[int, ...]
    microbatch: tuple[Share, ...]
    step: tuple[Share, ...]


@frozen(eq=False)
class Communication:
    """All communication of a step. `statistics` is the number of figures that are added over all ranks at its end:
    loss, metrics, squares of gradients."""

    name: str
    mesh: Mesh
    microbatches: int
    causes: tuple[Cause, ...]
    axes: tuple[tuple[str, Cost], ...]
    turns: tuple[Turn, ...]
    transfers: tuple[dict[str, Any], ...]
    statistics: int

    def as_json(self) -> dict[str, Any]:
        """The stable object of `explain --json`."""
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
                    "repeat": turn.repeat,
                    "turns": list(turn.numbers),
                    "microbatch": [share.as_json() for share in turn.microbatch],
                    "step": [share.as_json() for share in turn.step],
                }
                for turn in self.turns
            ],
            "transfers": list(self.transfers),
            "statistics": self.statistics,
        }


def communication(state: Compilation) -> Communication:
    """All communication of a compiled program, by cause."""
    records = traffic(state)
    repeats = {scope.path: scope.name for scope in state.partitioned.graph.scopes if scope.repeat}
    by_axis = grouped(records, lambda each: each.axis)
    return Communication(
        state.partitioned.graph.name,
        state.mesh,
        state.microbatches,
        causes(records),
        tuple((axis, cost(by_axis[axis])) for axis in state.mesh.sharding if axis in by_axis),
        turns(records, repeats),
        (*transfers(state), *tied_transfers(state)),
        len(state.update.statistics),
    )


def causes(records: Iterable[Traffic]) -> tuple[Cause, ...]:
    """The records by line, in source order; those that no line causes come last."""

    def line(each: Traffic) -> tuple[bool, str, int]:
        return (False, each.span.source.name, each.span.line) if each.span else (True, "", 0)

    by_line = grouped(records, line)
    return tuple(Cause(by_line[key][0].span, moved_of(by_line[key])) for key in sorted(by_line))


def moved_of(records: Iterable[Traffic]) -> tuple[Moved, ...]:
    """Records joined where all but the turn is the same, in the order of a step."""

    def alike(each: Traffic) -> tuple[int, str, str, str, Type, Layout, Layout]:
        phase, tensor = ORDER[each.phase], tensor_text(each.tensor)
        return phase, each.axis, each.kind, tensor, each.type, each.source, each.target

    rows = grouped(records, alike)
    found = []
    for key in sorted(rows, key=lambda key: key[0]):
        _, axis, kind, tensor, type, source, target = key
        first = rows[key][0]
        each = first.bytes / first.count
        found.append(
            Moved(kind, axis, first.phase, tensor, type, source, target, len(rows[key]), each, cost(rows[key]))
        )
    return tuple(found)


def tensor_text(name: str) -> str:
    """A tensor's name for people: without turns, or the stage that sums a gradient; an update's, its parameter's."""
    found = re.fullmatch(r"(?:total|new)\((.*)\)(?:@\d+)?(?:~\d+)?", name)
    return without_turns(found[1] if found else name)


# ---------------------------------------------------------------- turns


def turns(records: Iterable[Traffic], repeats: dict[str, str]) -> tuple[Turn, ...]:
    """What a turn of each outermost repeat moves; turns that move the same stand together."""
    by_turn = grouped(records, lambda each: turn_of(each.parameter or each.scope, repeats))
    profiles: dict[tuple[str, tuple[Share, ...], tuple[Share, ...]], list[int]] = {}
    for turn, found in by_turn.items():
        if turn is None:
            continue
        repeat, _, number = turn.rpartition(".")
        within = [each for each in found if each.phase in EACH_MICROBATCH]
        outside = [each for each in found if each.phase not in EACH_MICROBATCH]
        profiles.setdefault((repeat, _shares(within), _shares(outside)), []).append(int(number))
    return tuple(Turn(repeat, tuple(sorted(numbers)), *shares) for (repeat, *shares), numbers in profiles.items())


def _shares(records: Iterable[Traffic]) -> tuple[Share, ...]:
    """Counts by phase (B and W are the backward pass), kind and mesh axis; activations by their size, and what belongs
    to parameters together."""

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
