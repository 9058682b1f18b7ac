"""A body under construction: its numbered values, its names, and what it captures from the enclosing body.

While a body is being built, its captured values have the numbers -1, -2, …, because their count is known only at the
end; `finish` renumbers all values as `partita.dsl.spec` describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, field, frozen

from partita.dsl import spec
from partita.dsl.functions.signatures import Constant
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.units import Quantity
from partita.dsl.types import Type


@frozen(eq=False)
class Checked:
    """A type-checked body. `depth` is its nesting depth and `nodes` its number of steps, both when expanded."""

    body: spec.Body
    depth: int
    nodes: int

    @property
    def results(self) -> tuple[Type, ...]:
        """The types of a block's results, which are all tensors."""
        return tuple(self.body.types[operand] for operand in self.body.results if isinstance(operand, int))


@frozen(eq=False)
class Value:
    """A tensor that a name is bound to, by its number in the body."""

    number: int
    type: Type


@frozen(eq=False)
class SharedBlock:
    """A block that is shared under a name, over axes, with its parameters alone as a body; or a copy of one, whose
    calls update nothing.
    """

    block: str
    substitution: Substitution
    parameters: spec.Body
    copied: bool = False


@frozen(eq=False)
class Kept:
    """The values of a name that each iteration of a repeat has kept, in order."""

    values: tuple[Value, ...]


class Unknown:
    """The meaning of a name whose definition is wrong, so that one error does not cause others."""


UNKNOWN = Unknown()
Meaning: TypeAlias = Value | Kept | Constant | Unknown


@frozen(eq=False)
class Binding:
    """What a name means, and where it was bound."""

    name: str
    meaning: Meaning
    span: Span


class Scope:
    """The body of a block, a model, a repeat or a scan, while it is checked. Values of enclosing bodies are seen
    without the axis that is `scanned`.
    """

    def __init__(
        self,
        outer: Scope | None,
        substitution: Mapping[str, str],
        inputs: Iterable[Type] = (),
        scanned: str | None = None,
    ) -> None:
        self.outer, self.substitution, self.scanned = outer, substitution, scanned
        self.types = list(inputs)
        self.inputs = len(self.types)
        self.steps: list[spec.Step] = []
        self.updates: list[spec.Update] = []
        self.bindings: dict[str, Binding] = {}
        self.segments: dict[str, Span] = {}
        self.instances: dict[str, SharedBlock | None] = {}  # None: of a block that is wrong
        self.depth, self.nodes = 1, 0
        self.counts: dict[str, int] = {}
        self.kept: dict[str, tuple[Value, Span]] | None = None  # what an iteration of a repeat keeps; None elsewhere
        self._captured: dict[int, int] = {}  # number in the outer body -> number here
        self._captured_as: list[tuple[str, Type]] = []

    def bind(self, name: str, meaning: Meaning, span: Span) -> None:
        """Bind a name from here on."""
        self.bindings[name] = Binding(name, meaning, span)

    def find(self, name: str) -> Binding | None:
        """The binding of a name; a value of an enclosing body is captured."""
        binding = self.bindings.get(name)
        if binding is not None or self.outer is None:
            return binding
        binding = self.outer.find(name)
        if binding is not None and isinstance(binding.meaning, Value):
            return evolve(binding, meaning=self._capture(name, binding.meaning))
        if binding is not None and isinstance(binding.meaning, Kept):
            # All of them, whichever are read: so every iteration of a repeat captures the same ones.
            named = enumerate(binding.meaning.values)
            kept = tuple(self._capture(f"{name}.{number}", value) for number, value in named)
            return evolve(binding, meaning=Kept(kept))
        return binding

    def _capture(self, name: str, value: Value) -> Value:
        here = self._captured.get(value.number)
        type = value.type.without([self.scanned]) if self.scanned is not None else value.type
        if here is None:
            here = self._captured[value.number] = -1 - len(self._captured)
            self._captured_as.append((name, type))
        return Value(here, type)

    def shared(self, name: str) -> tuple[int, SharedBlock | None] | None:
        """What is shared under a name, and how many bodies outside."""
        scope: Scope | None = self
        levels = 0
        while scope is not None:
            if name in scope.instances:
                return levels, scope.instances[name]
            scope, levels = scope.outer, levels + 1
        return None

    def scans(self) -> set[str]:
        """The axes of which a value here is seen at one position: those of the scans that this body is in."""
        outer = self.outer.scans() if self.outer is not None else set()
        return outer if self.scanned is None else outer | {self.scanned}

    def names(self) -> set[str]:
        """All names in scope."""
        return set(self.bindings) | (self.outer.names() if self.outer is not None else set())

    def add(self, step: spec.Step, results: Sequence[Type], nodes: int = 1, depth: int = 1) -> list[Value]:
        """Append a step; returns its results."""
        self.steps.append(step)
        self.nodes += nodes
        self.depth = max(self.depth, depth)
        first = len(self.types)
        self.types.extend(results)
        return [Value(first + i, type) for i, type in enumerate(results)]

    def segment(self, name: str) -> str:
        """A free path segment for a call or a repeat: the name, or the first free one of `name_2`, `name_3`, …"""
        segment = name
        while segment in self.segments:
            self.counts[name] = self.counts.get(name, 1) + 1
            segment = f"{name}_{self.counts[name]}"
        return segment

    @property
    def captured(self) -> tuple[int, ...]:
        """The captured values, by their numbers in the enclosing body."""
        return tuple(self._captured)

    def finish(self, inputs: tuple[str, ...], results: Sequence[spec.Operand]) -> Checked:
        """The body, renumbered: the named inputs, the captured values, then the results of the steps."""
        count, captured = self.inputs, len(self._captured)

        def renumbered(operand: spec.Operand) -> spec.Operand:
            if isinstance(operand, spec.Literal):
                return operand
            if operand < 0:
                return count - 1 - operand
            return operand if operand < count else operand + captured

        def whole(operand: int) -> int:
            number = renumbered(operand)
            assert isinstance(number, int)
            return number

        steps: list[spec.Step] = []
        for step in self.steps:
            if captured and isinstance(step, spec.Apply):
                step = evolve(step, operands=tuple(map(renumbered, step.operands)))
            elif captured and isinstance(step, spec.CallBlock):
                step = evolve(step, arguments=tuple(map(renumbered, step.arguments)))
            elif captured and isinstance(step, spec.Repeat | spec.Scan):
                carried = tuple(map(renumbered, step.carried))
                step = evolve(step, carried=carried, captured=tuple(map(whole, step.captured)))
            steps.append(step)
        inputs = (*inputs, *(name for name, _ in self._captured_as))
        types = (*self.types[:count], *(type for _, type in self._captured_as), *self.types[count:])
        updates = tuple(evolve(each, buffer=whole(each.buffer), value=whole(each.value)) for each in self.updates)
        body = spec.Body(inputs, tuple(steps), tuple(map(renumbered, results)), types, updates)
        return Checked(body, self.depth, self.nodes)


Substitution: TypeAlias = tuple[tuple[str, str], ...]


@frozen
class Instance:
    """A block with its axis substitution (sorted, without identities) and the numbers that it is given: the unit that
    is checked once.
    """

    block: str
    substitution: Substitution = field(default=())
    numbers: tuple[Quantity, ...] = field(default=())


def composed(outer: Mapping[str, str], arrows: Iterable[tuple[str, str]]) -> Substitution:
    """A callee's substitution: the arrows of the call, composed with the caller's `outer`, which callees inherit."""
    together = dict(outer)
    for left, right in arrows:
        together[left] = outer.get(right, right)
    return tuple(sorted((left, right) for left, right in together.items() if left != right))
