"""The statements of one body, checked in order: what they bind, and the steps that they become.

A name bound before a `repeat` and rebound inside is carried from iteration to iteration and keeps its type; all other
values that the repeat uses from outside are captured. Statements after a wrong one are still checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.dsl import constants, limits, spec, tree
from partita.dsl.axes import positive_integer
from partita.dsl.buffers import Buffers
from partita.dsl.builtins import INITIAL, SAMPLED, Signature
from partita.dsl.declarations import unreserved
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.expressions import Expressions
from partita.dsl.functions import Constant, Tensor
from partita.dsl.known import CheckContext
from partita.dsl.report import suggestion
from partita.dsl.scope import UNKNOWN, Binding, Checked, Scope, Unknown, Value
from partita.dsl.source import Span
from partita.dsl.types import DTYPES, FLOATS, Axis, Type
from partita.dsl.walk import rebound

# Keys of the records that a run writes; a metric of such a name would hide them.
RECORDED = (
    *("step", "learning_rate", "grad_norm", "tokens_per_second", "eval_loss"),
    *("step_seconds", "unix_time", "peak_memory", "peak_memory_by_rank", "mfu"),
)


class BodyChecker:
    """Checks the statements of one body, and of the repeats in it."""

    def __init__(self, known: CheckContext, scope: Scope, body: Sequence[tree.Statement], top: bool = False) -> None:
        self.known, self.scope, self.top = known, scope, top
        self.report = known.report
        self.expressions = Expressions(known, scope, body)
        self.metrics: list[tuple[str, Value]] = []
        self.buffers = Buffers(scope, self.expressions, known.report)
        self.outputs: list[tuple[tree.Output, dict[str, Binding]]] = []  # each with what names mean there
        self.loss: tuple[Value, Span] | None = None
        self.has_loss = False
        self.failed = False
        self.twice: set[str] = set()  # declared twice, hence ambiguous
        self._reserve_segments(body)

    def _reserve_segments(self, body: Sequence[tree.Statement]) -> None:
        """Parameters, buffers and samples get their names as path segments; calls and repeats take what is left."""
        for statement in body:
            names = (
                statement.names
                if isinstance(statement, tree.Param | tree.Buffer)
                else (statement.name,)
                if isinstance(statement, tree.Sample)
                else ()
            )
            for name in names:
                if name.text in self.scope.segments:
                    notes = [f"the first is at {self.scope.segments[name.text].place}"]
                    self.report.error("E0217", f"`{name.text}` is declared twice here", name.span, notes)
                    self.twice.add(name.text)
                else:
                    self.scope.segments[name.text] = name.span

    def inputs(self, inputs: Sequence[tree.Input]) -> tuple[str, ...]:
        """Bind the inputs; returns their names."""
        for given in inputs:
            if not unreserved(given.name, self.report):
                continue
            if given.name.text in self.scope.bindings:
                self.report.error("E0217", f"input `{given.name.text}` is declared twice", given.name.span)
                self.twice.add(given.name.text)
            type = self.type(given.type)
            value = Value(len(self.scope.types), type or Type("f32"))
            self.scope.types.append(value.type)
            self.scope.inputs += 1
            known = type is not None and given.name.text not in self.twice
            self.scope.bind(given.name.text, value if known else UNKNOWN, given.name.span)
            self.known.bound(given.name, value if known else UNKNOWN)
        return tuple(given.name.text for given in inputs)

    def type(self, written: tree.TensorType) -> Type | None:
        """The type of a declaration; None after reporting errors."""
        axes: list[Axis] = []
        errors, complete = self.report.errors, True
        dtype = written.dtype.text if written.dtype else "f32"
        if written.dtype is not None and dtype not in DTYPES:
            help = suggestion(dtype, DTYPES)
            self.report.error("E0207", f"unknown dtype `{dtype}`", written.dtype.span, help=help)
        for name in written.axes:
            try:
                axis = self.expressions.axis(name)
                if axis is not None and any(axis.name == other.name for other in axes):
                    raise refuse("E0216", f"axis `{axis.name}` appears twice in this type", name.span)
                complete = complete and axis is not None
                axes += [axis] if axis else []
            except Refused as refused:
                self.report.refused(refused)
        if self.report.errors > errors or not complete:
            return None
        type = Type(dtype, tuple(axes))
        if type.elements > limits.ELEMENTS:
            message = f"a tensor of {type.elements:,} elements"
            self.report.error("E0007", message, written.span, help=f"at most 2^{limits.ELEMENTS.bit_length() - 1}")
            return None
        return type

    # ------------------------------------------------------------ statements

    def statements(self, statements: Sequence[tree.Statement]) -> None:
        """Check statements in order."""
        for statement in statements:
            self.known.spend(statement.span)
            errors = self.report.errors
            match statement:
                case tree.Let():
                    self.let(statement)
                case tree.Param():
                    self.param(statement)
                case tree.Buffer():
                    self.buffer(statement)
                case tree.Sample():
                    self.sample(statement)
                case tree.Repeat():
                    self.repeat(statement)
                case tree.Scan():
                    self.scan(statement)
                case tree.Loss():
                    self.set_loss(statement)
                case tree.Update():
                    self.failed = not self.buffers.update(statement) or self.failed
                case tree.Metric():
                    self.metric(statement)
                case tree.Output():
                    self.output(statement)
            self.failed = self.failed or self.report.errors > errors

    def bind(self, name: tree.Name, meaning: Value | Constant | Unknown, kind: str) -> None:
        """Bind a name, and record it for the warning about unused names."""
        if unreserved(name, self.report):
            self.scope.bind(name.text, UNKNOWN if name.text in self.twice else meaning, name.span)
            self.known.bindings.setdefault((id(name.span.source), name.span.start), (kind, name))
            self.known.bound(name, meaning)

    def let(self, statement: tree.Let) -> None:
        """`let names = value`."""
        names = statement.names
        found = self.expressions.several(statement.value, len(names), names[0].text if len(names) == 1 else None)
        seen: set[str] = set()
        for name in names:
            if name.text in seen:
                self.report.error("E0217", f"`{name.text}` is bound twice here", name.span)
            seen.add(name.text)
        if found is None:
            self.failed = True
        for i, name in enumerate(names):
            meaning: Value | Constant | Unknown = UNKNOWN
            if found is not None:
                result = found[i]
                meaning = Value(result.value, result.type) if isinstance(result, Tensor) else result
            self.bind(name, meaning, "let")

    def param(self, statement: tree.Param) -> None:
        """`param names: type ~ initial`."""
        type = self.float_type(statement.type, "a parameter")
        call = self.distribution(statement.initial, INITIAL, "initial value")
        for name in statement.names:
            meaning: Value | Unknown = UNKNOWN
            if type is not None and call is not None:
                step = spec.Parameter(name.text, type, call, name.span)
                (meaning,) = self.scope.add(step, [type])
            self.bind(name, meaning, "param")

    def buffer(self, statement: tree.Buffer) -> None:
        """`buffer names: type ~ initial`."""
        type = self.type(statement.type)
        call = self.distribution(statement.initial, INITIAL, "initial value")
        sound = self.buffers.is_sound(statement, type, call)
        for name in statement.names:
            meaning: Value | Unknown = UNKNOWN
            if sound and type is not None and call is not None:
                step = spec.Parameter(name.text, type, call, name.span, buffer=True)
                (meaning,) = self.scope.add(step, [type])
                self.buffers.types[meaning.number] = type
            self.bind(name, meaning, "buffer")

    def sample(self, statement: tree.Sample) -> None:
        """`sample name: type ~ distribution`."""
        type = self.float_type(statement.type, "a sample")
        call = self.distribution(statement.distribution, SAMPLED, "distribution")
        meaning: Value | Unknown = UNKNOWN
        if type is not None and call is not None:
            step = spec.Sample(statement.name.text, type, call, statement.name.span)
            (meaning,) = self.scope.add(step, [type])
        self.bind(statement.name, meaning, "sample")

    def float_type(self, written: tree.TensorType, what: str) -> Type | None:
        """A type that must be floating-point; None after reporting errors."""
        type = self.type(written)
        if type is not None and type.dtype not in FLOATS:
            self.report.error("E0205", f"{what} must be a float tensor, not {type.dtype}", written.span)
            return None
        return type

    def distribution(
        self, written: tree.Expression, signatures: Mapping[str, Signature], what: str
    ) -> spec.Call | None:
        """The call after `~`."""
        call = tree.bare(written)
        if isinstance(call, tree.Call):
            return self.known.settings.call(call, signatures, what, self.expressions.number_of)
        name = tree.single(written)
        help = f"write `{name.text}(…)`" if name is not None and name.text in signatures else None
        self.report.error("E0306", "expected a call such as `normal(0.02)`", written.span, help=help)
        return None

    def set_loss(self, statement: tree.Loss) -> None:
        """`loss value`."""
        if not self.top:
            self.report.error("E0221", "`loss` must be at the top level of a model", statement.span)
            return
        if self.has_loss:
            self.report.error("E0221", "a second `loss`: a model has only one", statement.span, help="add them up")
            return
        self.has_loss = True
        found = self.expressions.tensor(statement.value)
        if found is None:
            self.failed = True
        elif found.type.axes or not found.type.is_float:
            help = f"`mean({found.text})`" if found.type.is_float else None
            self.report.error("E0221", "the loss must be a scalar float", found.span, [str(found)], help)
        else:
            self.loss = Value(found.value, found.type), statement.value.span

    def metric(self, statement: tree.Metric) -> None:
        """`metric name = value`."""
        name = statement.name
        if not self.top:
            self.report.error("E0222", "`metric` must be at the top level of a model", statement.span)
            return
        if not unreserved(name, self.report):
            return
        if name.text in RECORDED or name.text in (known for known, _ in self.metrics):
            self.report.error("E0222", f"there is already a metric `{name.text}`", name.span)
        found = self.expressions.tensor(statement.value, name.text)
        if found is None:
            self.failed = True
        elif found.type.axes or found.type.dtype == "bool":
            help = f"`mean({found.text})`" if found.type.is_float else None
            self.report.error("E0222", "a metric must be a scalar", found.span, [str(found)], help)
        else:
            self.metrics.append((name.text, Value(found.value, found.type)))

    def output(self, statement: tree.Output) -> None:
        """`output name = value`: checked at the end, so that its steps follow those of the training."""
        name = statement.name
        if not self.top:
            self.report.error("E0226", "`output` must be at the top level of a model", statement.span)
        elif unreserved(name, self.report):
            if name.text in (known.name.text for known, _ in self.outputs):
                self.report.error("E0226", f"there is already an output `{name.text}`", name.span)
            self.outputs.append((statement, dict(self.scope.bindings)))

    def checked_outputs(self) -> list[tuple[str, Value]]:
        """The outputs, with the names of each as they were where it stands."""
        found: list[tuple[str, Value]] = []
        for statement, bindings in self.outputs:
            self.scope.bindings = bindings
            tensor = self.expressions.tensor(statement.value, statement.name.text)
            if tensor is None:
                self.failed = True
            else:
                found.append((statement.name.text, Value(tensor.value, tensor.type)))
        return found

    # ------------------------------------------------------------ repeats

    def repeat(self, statement: tree.Repeat) -> None:
        """`repeat count as name { body }`: names bound before and rebound inside are carried."""
        count = self.count(statement.count)
        if not unreserved(statement.name, self.report):
            return
        before = self.bound_before(statement.body)
        types = {name: _carried_type(binding) for name, binding in before.items()}
        inner = Scope(self.scope, self.scope.substitution, [type or Type("f32") for type in types.values()])
        checker = BodyChecker(self.known, inner, statement.body)
        for number, (carried_name, type) in enumerate(types.items()):
            meaning = Value(number, type) if type else UNKNOWN
            inner.bind(carried_name, meaning, before[carried_name].span)
        checker.statements(statement.body)
        results = self.carried_results(inner, before, types)
        segment = self.scope.segment(statement.name.text)
        self.scope.segments[segment] = statement.name.span
        nodes = (count or 1) * inner.nodes
        if nodes > limits.STEPS and not checker.failed:
            message = f"this repeat has {nodes:,} steps when it is expanded"
            self.report.error("E0008", message, statement.count.span, help=f"at most {limits.STEPS:,}")
            checker.failed = True
        if count is None or results is None or checker.failed:
            self.failed = True
            for carried_name, binding in before.items():
                self.scope.bind(carried_name, UNKNOWN, binding.span)
            return
        checked = inner.finish(tuple(before), results)
        carried = tuple(_carried_operand(binding) for binding in before.values())
        carried_types = [type for type in types.values() if type is not None]
        step = spec.Repeat(
            statement.name.text,
            segment,
            count,
            checked.body,
            carried,
            inner.captured,
            tuple(before),
            statement.span,
        )
        values = self.scope.add(step, carried_types, nodes, checked.depth + 1)
        for carried_name, value in zip(before, values, strict=True):
            self.scope.bind(carried_name, value, inner.bindings[carried_name].span)

    def bound_before(self, body: Sequence[tree.Statement]) -> dict[str, Binding]:
        """The names that a body rebinds, as they are bound before it."""
        before: dict[str, Binding] = {}
        for name in rebound(body):
            found = self.scope.find(name.text)
            if found is not None and name.text not in before:
                self.expressions.mark_read(found)
                before[name.text] = found
        return before

    def scan(self, statement: tree.Scan) -> None:
        """`scan axis { body }`: as `repeat`, but names carried have the axis afterwards, and those of the outside are
        seen at one position of it.
        """
        before = self.bound_before(statement.body)
        try:
            axis = self.expressions.axis(statement.axis)
        except Refused as refused:
            self.report.refused(refused)
            axis = None
        body = self.scanned(statement, axis, before) if axis is not None else None
        if axis is None or body is None:
            self.failed = True
            for name, binding in before.items():
                self.scope.bind(name, UNKNOWN, binding.span)
            return
        checked, captured, bound = body
        carried = tuple(_carried_operand(binding) for binding in before.values())
        step = spec.Scan(axis, statement.backward, checked.body, carried, captured, tuple(before), statement.axis.span)
        types = (_carried_type(binding) for binding in before.values())
        made = [Type(type.dtype, (axis, *type.axes)) for type in types if type is not None]
        for name, value in zip(before, self.scope.add(step, made, checked.nodes, checked.depth + 1), strict=True):
            self.scope.bind(name, value, bound[name].span)

    def scanned(
        self, statement: tree.Scan, axis: Axis, before: Mapping[str, Binding]
    ) -> tuple[Checked, tuple[int, ...], Mapping[str, Binding]] | None:
        """The body of a scan, what it captures, and its bindings; None after reporting errors."""
        types = {name: _carried_type(binding) for name, binding in before.items()}
        given = [type or Type("f32") for type in types.values()]
        inner = Scope(self.scope, self.scope.substitution, given, axis.name)
        # The parts of the body belong to the enclosing scope.
        inner.segments, inner.counts = self.scope.segments, self.scope.counts
        checker = BodyChecker(self.known, inner, statement.body)
        for number, (name, type) in enumerate(types.items()):
            inner.bind(name, Value(number, type) if type else UNKNOWN, before[name].span)
        checker.statements(statement.body)
        results = self.carried_results(inner, before, types)
        if results is None or checker.failed or not self.scannable(statement, axis, before, types):
            return None
        checked = inner.finish(tuple(before), results)
        return (checked, inner.captured, inner.bindings) if self.without(checked.body, axis, statement) else None

    def scannable(
        self, statement: tree.Scan, axis: Axis, before: Mapping[str, Binding], types: Mapping[str, Type | None]
    ) -> bool:
        """Whether a scan carries something, without its axis and not too large with it. Reports errors."""
        errors = self.report.errors
        if not before:
            message = f"this scan of `{axis.name}` carries nothing: no name bound before it is rebound inside"
            help = "bind its first value before the scan: `let h = zeros([…])`"
            self.report.error("E0227", message, statement.axis.span, help=help)
        for name, type in types.items():
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
                message = f"a value inside has axis `{axis.name}`, which is scanned: there is one position of it"
                help = "make it before the scan, and use it inside; or rename the axis"
                self.report.error("E0227", message, place, help=help)
                return False
        return True

    def count(self, written: tree.Expression) -> int | None:
        """The number of iterations; None after reporting errors."""
        try:
            quantity = constants.evaluate(written, self.expressions.number_of)
            return positive_integer(quantity, written, "the count of a `repeat`")
        except Refused as refused:
            self.report.refused(refused)
            return None

    def carried_results(
        self, inner: Scope, before: Mapping[str, Binding], types: Mapping[str, Type | None]
    ) -> list[spec.Operand] | None:
        """The carried values after an iteration; None if one is unknown or changed its type."""
        results: list[spec.Operand] = []
        complete = True
        for name, type in types.items():
            after = inner.bindings[name]
            self.expressions.mark_read(after)
            meaning = after.meaning
            if type is None and isinstance(before[name].meaning, Constant):
                message = f"`{name}` cannot be carried from iteration to iteration: it is boolean"
                self.report.error("E0220", message, after.span)
            if type is None or isinstance(meaning, Unknown):
                complete = False
            elif isinstance(meaning, Constant):
                if type.axes or not type.is_float or isinstance(meaning.value, bool):
                    self._changed(name, type, "a number", after, before[name])
                    complete = False
                else:
                    results.append(meaning.literal("f32"))
            elif meaning.type.dtype != type.dtype or set(meaning.type.names) != set(type.names):
                self._changed(name, type, str(meaning.type), after, before[name])
                complete = False
            else:
                results.append(meaning.number)
        return results if complete else None

    def _changed(self, name: str, type: Type, now: str, after: Binding, before: Binding) -> None:
        notes = [f"before: {type}   (bound at {before.span.place})", f"after an iteration: {now}"]
        help = "give the new value another name, or convert it back to that type"
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
