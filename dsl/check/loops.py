"""`repeat` and `scan`: bodies that run several times, and the names that they carry from one time to the next.

A name bound before and rebound inside is carried, and keeps its type; all other values that a body uses from outside
are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

from attrs import evolve

from partita.dsl import limits, spec
from partita.dsl.advice.report import Report, nearest
from partita.dsl.check import constants
from partita.dsl.check.axes import positive_integer
from partita.dsl.check.expressions import MADE_BEFORE, Expressions
from partita.dsl.diagnostic import refuse
from partita.dsl.functions.signatures import Constant, Origin
from partita.dsl.names.declarations import unreserved
from partita.dsl.names.origins import origin
from partita.dsl.names.scope import UNKNOWN, Binding, Kept, Scope, Unknown, Value
from partita.dsl.syntax import tree
from partita.dsl.syntax.units import Quantity
from partita.dsl.syntax.walk import nodes
from partita.dsl.types import Axis, Type

# Checks statements in a scope of their own; whether it is known what they mean.
Check: TypeAlias = Callable[[Scope, Sequence[tree.Statement]], bool]


class Loops:
    """Checks the repeats and scans of one body; `check` checks the statements in them."""

    def __init__(self, scope: Scope, expressions: Expressions, report: Report, check: Check) -> None:
        self.scope, self.expressions, self.report, self.check = scope, expressions, report, check

    def repeat(self, statement: tree.Repeat) -> bool:
        """Check `repeat count as name { body }`; whether it is known what it means."""
        count = self.count(statement.count)
        if not unreserved(statement.name, self.report):
            return False
        before = self.bound_before(statement.body)
        inner, results = self.numbered(statement, before, 0)
        segment = self.scope.segment(statement.name.text)
        self.scope.segments[segment] = statement.name.span
        nodes = (count or 1) * max(1, inner.nodes)
        if nodes > limits.STEPS and results is not None:
            message = f"this repeat has {nodes:,} steps when it is expanded"
            self.report.error("E0008", message, statement.count.span, help=f"at most {limits.STEPS:,}")
            results = None
        if count is None or results is None:
            self.forget(before, statement.body)
            return False
        kept = dict(inner.kept or {})
        checked = inner.finish(tuple(before), results)
        if not before and not kept and self.unused(statement, inner, checked.body):
            return False
        bodies = self.bodies(statement, count, before, checked.body)
        if bodies is None:
            self.forget(before, statement.body)
            return False
        step = spec.Repeat(
            statement.name.text,
            segment,
            count,
            bodies,
            tuple(map(_carried_operand, before.values())),
            inner.captured,
            tuple(before),
            statement.span,
            tuple(kept),
        )
        types = [type for type in map(_carried_type, before.values()) if type is not None]
        types += [value.type for value, _ in kept.values() for _ in range(count)]
        values = self.bind_after(step, types, nodes, checked.depth + 1, inner)
        for number, (name, (_, span)) in enumerate(kept.items()):
            self.scope.bind(name, Kept(tuple(values[number * count : (number + 1) * count])), span)
        return True

    def numbered(
        self, statement: tree.Repeat, before: Mapping[str, Binding], number: int
    ) -> tuple[Scope, list[spec.Operand] | None]:
        """Check an iteration of a repeat, in which the repeat's name is its number, unless that name means something
        else there.
        """
        inner, name = self.entered(before), statement.name
        inner.kept = {}
        if self.scope.find(name.text) is None:
            inner.bind(name.text, Constant(Quantity(Fraction(number)), name.text, name.span), name.span)
        results = self.iteration(inner, statement.body, before)
        if results is not None:
            results += [value.number for value, _ in inner.kept.values()]
        return inner, results

    def bodies(
        self, statement: tree.Repeat, count: int, before: Mapping[str, Binding], first: spec.Body
    ) -> tuple[spec.Body, ...] | None:
        """The body of each iteration, if the first one has read its number; None after reporting errors (E0229)."""
        bodies = [first]
        is_read = self.expressions.is_read(Binding(statement.name.text, UNKNOWN, statement.name.span))
        for number in range(1, count if is_read else 1):
            with self.report.noting(f"where `{statement.name.text}` is {number}"):
                inner, results = self.numbered(statement, before, number)
            if results is None:
                return None
            bodies.append(inner.finish(tuple(before), results).body)
            for one, other in spec.pairs(first, bodies[-1]):
                if isinstance(one, spec.Repeat) and isinstance(other, spec.Repeat) and one.count != other.count:
                    name = statement.name.text
                    message = f"`{one.name}` has {one.count} turns where `{name}` is 0, and {other.count} where "
                    message += f"it is {number}: all iterations have the same parameters and types"
                    self.report.error("E0229", message, one.span, help="write repeats one after the other")
                    return None
        return tuple(bodies)

    def unused(self, statement: tree.Repeat, inner: Scope, body: spec.Body) -> bool:
        """Whether a repeat with parameters ends with a name that nothing reads, computed from one outside that it was
        probably meant to be. Reports an error (E0408).
        """
        last = statement.body[-1] if statement.body else None
        trained = list(spec.parameters(body))
        if not isinstance(last, tree.Let) or len(last.names) != 1 or not trained or any(p.buffer for p in trained):
            return False
        (name,) = last.names
        binding = inner.bindings[name.text]
        if not isinstance(binding.meaning, Value) or self.expressions.is_read(binding):
            return False
        for each in nodes(*last.values):
            read = tree.single(each) if isinstance(each, tree.Path) else None
            outer = self.scope.find(read.text) if read is not None and read.text not in inner.bindings else None
            meaning = outer.meaning if outer is not None else None
            if read is not None and isinstance(meaning, Value) and meaning.type == binding.meaning.type:
                message = f"`{name.text}` is not used, and each iteration leaves `{read.text}` as it was"
                notes = ["the parameters of this repeat do not reach the loss"]
                help = f"write `{read.text}`, which is carried from one iteration to the next"
                self.report.error("E0408", message, name.span, notes, help)
                return True
        return False

    def scan(self, statement: tree.Scan) -> bool:
        """Check `scan axis { body }`: as `repeat`, but names carried have the axis afterwards, and those of the outside
        are seen at one position of it.
        """
        before = self.bound_before(statement.body)
        axis: Axis | None = None
        with self.report:
            axis = self.expressions.axis(statement.axis)
        if axis is None:
            self.forget(before)
            return False
        sound = self.scannable(statement, axis, before)
        inner = self.entered(before, axis.name)
        if not sound:
            for name, binding in before.items():
                inner.bind(name, UNKNOWN, binding.span)
        # The parts of the body belong to the enclosing scope.
        inner.segments, inner.counts = self.scope.segments, self.scope.counts
        results = self.iteration(inner, statement.body, before)
        if results is None or not sound:
            self.forget(before)
            return False
        checked = inner.finish(tuple(before), results)
        if not self.without(checked.body, axis, statement):
            self.forget(before)
            return False
        carried = tuple(map(_carried_operand, before.values()))
        names = tuple(before)
        head = evolve(statement.span, end=statement.axis.span.end)
        step = spec.Scan(axis, statement.backward, checked.body, carried, inner.captured, names, head)
        types = [type for type in map(_carried_type, before.values()) if type is not None]
        stacked = [Type(type.dtype, (axis, *type.axes)) for type in types]
        self.bind_after(step, stacked, max(1, checked.nodes), checked.depth + 1, inner)
        return True

    def bind_after(
        self, step: spec.Repeat | spec.Scan, types: Sequence[Type], nodes: int, depth: int, inner: Scope
    ) -> list[Value]:
        """Append a loop, and bind the names that it carries to its results. Returns the others."""
        values = self.scope.add(step, types, nodes, depth)
        for name, value in zip(step.names, values, strict=False):
            self.scope.bind(name, value, inner.bindings[name].span)
        return values[len(step.names) :]

    def bound_before(self, body: Sequence[tree.Statement]) -> dict[str, Binding]:
        """The names that a body rebinds, as they are bound before it."""
        before: dict[str, Binding] = {}
        for name in (name for each in nodes(*body) if isinstance(each, tree.Let) for name in each.names):
            binding = self.scope.find(name.text)
            if binding is not None and name.text not in before:
                self.expressions.mark_read(binding)
                before[name.text] = binding
        return before

    def forget(self, before: Mapping[str, Binding], body: Sequence[tree.Statement] = ()) -> None:
        """Carried names mean nothing known after a loop that is wrong, nor do those that its `body` keeps."""
        for each in body:
            if isinstance(each, tree.Keep):
                self.scope.bind(each.name.text, UNKNOWN, each.name.span)
        for name, binding in before.items():
            self.scope.bind(name, UNKNOWN, binding.span)

    def entered(self, before: Mapping[str, Binding], scanned: str | None = None) -> Scope:
        """The scope of a body, whose inputs are the carried values."""
        types = [_carried_type(binding) for binding in before.values()]
        inner = Scope(self.scope, self.scope.substitution, [type or Type("f32") for type in types], scanned)
        for number, (type, binding) in enumerate(zip(types, before.values(), strict=True)):
            inner.bind(binding.name, Value(number, type) if type else UNKNOWN, binding.span)
        return inner

    def iteration(
        self, inner: Scope, body: Sequence[tree.Statement], before: Mapping[str, Binding]
    ) -> list[spec.Operand] | None:
        """Check a body in its scope. The carried values after it; None if something in it is unknown."""
        known = self.check(inner, body)
        results = self.carried_results(inner, before)
        return results if known else None

    def scannable(self, statement: tree.Scan, axis: Axis, before: Mapping[str, Binding]) -> bool:
        """Whether a scan carries something, without its axis and not too large with it. Reports errors."""
        errors = self.report.errors
        if not before:
            message = f"this scan of `{axis.name}` carries nothing: no name bound before it is rebound inside"
            help = "bind its first value before the scan: `let h = zeros([…])`"
            self.report.error("E0227", message, statement.axis.span, help=help)
        for name, binding in before.items():
            type = _carried_type(binding)
            if type is not None and type.has(axis.name):
                message = f"`{name}` is carried along `{axis.name}`, and has that axis before the scan"
                help = f"start from one without it, such as `max({name}, over = {axis.name})`, under another name"
                self.report.error("E0227", message, statement.axis.span, [f"before: {type}"], help)
            elif type is not None and type.elements * axis.size > limits.ELEMENTS:
                message = f"a tensor of {type.elements * axis.size:,} elements: `{name}` at all positions"
                self.report.error("E0007", message, statement.axis.span)
        return self.report.errors == errors

    def without(self, body: spec.Body, axis: Axis, statement: tree.Scan) -> bool:
        """Whether no value in the body of a scan has its axis. Reports an error."""
        bodies = [(body, statement.axis.span)]
        while bodies:
            each, place = bodies.pop()
            for step in each.steps:
                if isinstance(step, spec.CallBlock | spec.Repeat | spec.Scan):
                    bodies.append((step.body, step.span if each is body else place))
            if each.updates:
                message = f"a buffer is updated in a scan: `{axis.name}` has {axis.size} positions, and a step has one"
                help = "update it after the scan, by what the scan carries"
                self.report.error("E0227", message, each.updates[0].span, help=help)
                return False
            if any(type.has(axis.name) for type in each.types):
                message = f"a tensor in this scan has its axis `{axis.name}`, of which the body sees one position"
                self.report.error("E0227", message, place, help=MADE_BEFORE)
                return False
        return True

    def count(self, written: tree.Expression) -> int | None:
        """The number of iterations; None after reporting errors."""
        name = tree.single(written)
        with self.report:
            if name is not None and self.scope.find(name.text) is None and not nearest(name.text, self.scope.names()):
                raise refuse(
                    "E0201", f"unknown name `{name.text}`", name.span, help=f"declare it: `const {name.text} = 4`"
                )
            quantity = constants.evaluate(written, self.expressions.number_of)
            return positive_integer(quantity, written, "the count of a `repeat`")
        return None

    def carried_results(self, inner: Scope, before: Mapping[str, Binding]) -> list[spec.Operand] | None:
        """The carried values after an iteration; None if one is unknown or changed its type."""
        results: list[spec.Operand] = []
        complete = True
        for name, binding in before.items():
            type, after = _carried_type(binding), inner.bindings[name]
            self.expressions.mark_read(after)
            meaning = after.meaning
            if isinstance(binding.meaning, Kept):
                message = f"`{name}` is what the iterations of a repeat have kept, and cannot be bound anew"
                self.report.error("E0220", message, after.span, help="give the new value another name")
            if type is None and isinstance(binding.meaning, Constant):
                message = f"`{name}` cannot be carried from iteration to iteration: it is boolean"
                self.report.error("E0220", message, after.span)
            if type is None or isinstance(meaning, Unknown | Kept):
                complete = False
            elif isinstance(meaning, Constant):
                if type.axes or not type.is_float or isinstance(meaning.value, bool):
                    self._changed(name, type, "a number", after, binding)
                    complete = False
                else:
                    results.append(meaning.literal("f32"))
            elif meaning.type.dtype != type.dtype or set(meaning.type.names) != set(type.names):
                differing = sorted(set(meaning.type.names) ^ set(type.names))
                axis_origin = origin(inner, meaning.number, differing[0]) if differing else None
                self._changed(name, type, str(meaning.type), after, binding, axis_origin)
                complete = False
            else:
                results.append(meaning.number)
        return results if complete else None

    def _changed(
        self, name: str, type: Type, now: str, after: Binding, before: Binding, axis_origin: Origin | None = None
    ) -> None:
        notes = [f"before: {type}   (bound at {before.span.place})", f"after an iteration: {now}"]
        notes += [str(axis_origin)] if axis_origin is not None else []
        help = "give the new value another name, or convert it back to that type"
        help = (axis_origin.help if axis_origin is not None else None) or help
        self.report.error("E0220", f"`{name}` changes its type from one iteration to the next", after.span, notes, help)


def _carried_type(binding: Binding) -> Type | None:
    """The type of a carried name (a number becomes a scalar); None if it is boolean or unknown."""
    meaning = binding.meaning
    if isinstance(meaning, Value):
        return meaning.type
    if isinstance(meaning, Constant) and not isinstance(meaning.value, bool):
        return Type("f32")
    return None


def _carried_operand(binding: Binding) -> spec.Operand:
    meaning = binding.meaning
    if isinstance(meaning, Constant):
        return meaning.literal("f32")
    assert isinstance(meaning, Value)
    return meaning.number
