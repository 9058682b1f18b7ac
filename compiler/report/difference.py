"""What is different in one program from another: their measures, parameters, collectives by the line that causes them,
messages, claims and schedules. What is the same is not said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from attrs import asdict, frozen

from partita.compiler.graph import without_iterations
from partita.compiler.report.claims import MEASURES, outcomes
from partita.compiler.report.summary import Summary, collectives_json
from partita.compiler.schedules.forms.text import write
from partita.compiler.state import Compilation
from partita.compiler.text.graph import call_text
from partita.dsl.config import builtins
from partita.dsl.syntax.units import BYTES, written

# Of these less is worse.
MORE_IS_BETTER = ("tokens_per_second", "mfu")


@frozen
class Difference:
    """Of a `kind` of things, `what` is different: a number of a unit, or a text; None where there is no such thing. The
    `place` is a line of the second file, or of the first where only that has it.
    """

    kind: str
    what: str
    before: float | str | None
    after: float | str | None
    unit: str = ""
    place: str | None = None

    @property
    def growth(self) -> float | None:
        """By which share of what it was before a number grows; none if there is no such share."""
        if isinstance(self.before, str) or isinstance(self.after, str) or not self.before or self.after is None:
            return None
        return self.after / self.before - 1

    @property
    def worse(self) -> float:
        """By which share a measure is worse."""
        if self.growth is None:
            return float("inf") if isinstance(self.after, float | int) and self.after > 0 else 0.0
        return -self.growth if self.what in MORE_IS_BETTER else self.growth

    def shown(self, value: float | str | None) -> str:
        """A value as text."""
        if value is None or isinstance(value, str):
            return value or ""
        return written(value, self.unit, 4) if self.unit else f"{value:,}"

    def as_json(self) -> dict[str, Any]:
        """An object of `diff --json`."""
        return asdict(self)


@frozen(eq=False)
class Numbers:
    """A program and its summary."""

    state: Compilation
    summary: Summary


Value: TypeAlias = "tuple[float | str, str, str | None]"  # with its unit and place
Found: TypeAlias = Mapping[str, Value]  # by what it is of


def differences(before: Numbers, after: Numbers) -> Iterator[Difference]:
    """Yields all, in the order of `KINDS`."""
    for kind, find in KINDS.items():
        old, new = dict(find(before)), dict(find(after))
        if kind == "collective":
            _drop_moved(old, new)
        for what in dict.fromkeys((*new, *old)):
            one, other = old.get(what), new.get(what)
            _, unit, place = other or one or ("", "", None)
            if one is None or other is None or one[0] != other[0]:
                yield Difference(kind, what, one and one[0], other and other[0], unit, place)


def _drop_moved(old: dict[str, Value], new: dict[str, Value]) -> None:
    """Drop collectives that are the same, but that another line causes them."""
    for what in [each for each in old if each not in new]:
        same = (
            each
            for each in new
            if each not in old and each.partition(":")[0] == what.partition(":")[0] and new[each][0] == old[what][0]
        )
        moved = next(same, None)
        if moved is not None:
            del old[what], new[moved]


def measures(numbers: Numbers) -> Found:
    """What claims may be about, of the whole program and along each mesh axis."""
    state, summary = numbers.state, numbers.summary
    found: dict[str, Value] = {}
    for name, measure in builtins.MEASURES.items():
        unit = measure.limit.dimension
        if not measure.takes:
            found[name] = MEASURES[name].value(state, summary), unit, None
        elif name == "bytes":
            axes = (axis for axis in state.mesh.sizes if state.mesh.sizes[axis] > 1)
            found |= {f"bytes({axis})": (MEASURES[name].value(state, summary, axis), unit, None) for axis in axes}
    return found


def _program(numbers: Numbers) -> Found:
    state, summary = numbers.state, numbers.summary
    mesh = " × ".join(f"{name} {size}" for name, size in state.mesh.sizes.items()) or "one rank"
    facts: dict[str, float | str] = {
        "mesh": mesh,
        "stages": len(summary.stages),
        "schedule": call_text(state.schedule_call.call),
        "precision": state.train.precision,
        "parameters": summary.parameters,
    }
    return {name: (value, "", None) for name, value in facts.items()}


def _parameters(numbers: Numbers) -> Found:
    parameters = numbers.state.partitioned.graph.parameters
    return {
        without_iterations(each.name): (str(each.master), "", each.span.place if each.span else None)
        for each in parameters
    }


def _collectives(numbers: Numbers) -> Found:
    """By kind, mesh axis, phase, and the text of the line, which stays where lines above it are added."""
    spans = {
        (each.span.source.name, each.span.line): each.span.source.line(each.span.line).strip()
        for each in numbers.summary.collectives
        if each.span is not None
    }
    sums: dict[str, tuple[int, int, str | None]] = {}  # of equal lines together
    for each in collectives_json(numbers.summary.collectives):
        line = spans.get((each["file"], each["line"]), "")
        place = f"{each['file']}:{each['line']}" if each["file"] else None
        what = f"{each['kind']} over {each['axis']}, {each['phase']}: {line}"
        count, size, _ = sums.get(what, (0, 0, None))
        sums[what] = count + each["count"], size + each["bytes"], place
    return {what: (f"{count}, {written(size, BYTES, 4)}", "", place) for what, (count, size, place) in sums.items()}


def _messages(numbers: Numbers) -> Found:
    return {
        f"{each['direction']}: {each['value']}": (f"{each['count']} of {written(each['bytes'], BYTES, 4)}", "", None)
        for each in numbers.summary.transfers
    }


def _claims(numbers: Numbers) -> Found:
    found = outcomes(numbers.state, numbers.summary)
    return {
        each.text: (f"{'holds' if each.holds else 'fails'}: {each.shown}", "", each.claim.span.place) for each in found
    }


def _schedules(numbers: Numbers) -> Found:
    """The actions of each pipeline rank."""
    lines = [line for line in write(numbers.state.schedule).splitlines() if line[:1] in "FBWOL"]
    return {f"rank {number}": (line, "", None) for number, line in enumerate(lines)}


KINDS: dict[str, Callable[[Numbers], Found]] = {
    "program": _program,
    "measure": measures,
    "claim": _claims,
    "parameter": _parameters,
    "collective": _collectives,
    "message": _messages,
    "schedule": _schedules,
}
