"""The buffers of one body, and their updates; and what becomes of parameters after theirs."""

from __future__ import annotations

from partita.dsl import spec
from partita.dsl.advice.corrected_calls import named
from partita.dsl.advice.report import Report, suggestion
from partita.dsl.check.expressions import Expressions
from partita.dsl.functions.signatures import Tensor
from partita.dsl.names.scope import Binding, Scope, Unknown, Value
from partita.dsl.syntax import tree
from partita.dsl.types import FLOATS, INTEGERS, Type


class Buffers:
    """Checks the buffers that a body declares and updates. `types` are theirs, by number, and `parameters` those of the
    parameters that it declares.
    """

    def __init__(self, scope: Scope, expressions: Expressions, report: Report) -> None:
        self.scope, self.expressions, self.report = scope, expressions, report
        self.types: dict[int, Type] = {}
        self.parameters: dict[int, Type] = {}

    def is_sound(self, statement: tree.Buffer, type: Type | None, initial: spec.Call | None) -> bool:
        """Whether a buffer has numbers, and begins with numbers of its dtype; reports it if not."""
        if type is None or initial is None:
            return False
        if type.dtype not in (*FLOATS, *INTEGERS):
            self.report.error("E0205", f"a buffer has numbers, not {type.dtype}", statement.type.span)
            return False
        numbers = [value for value in initial.arguments.values() if not isinstance(value, str)]
        constant = all(value == int(value) for value in numbers)
        if type.dtype in INTEGERS and not (initial.name in ("zeros", "ones", "constant", "file") and constant):
            help = "integer buffers are initialized by `zeros()`, `ones()`, `constant(3)` or `file(…)`"
            message = f"`{initial.name}` cannot initialize {type.dtype}"
            self.report.error("E0205", message, statement.initial.span, help=help)
            return False
        return True

    def update(self, statement: tree.Update) -> bool:
        """Check `update name = value`, or `after update name = value`; whether it is known what it means."""
        name = statement.name
        types = self.parameters if statement.after else self.types
        value = self.expressions.tensor(statement.value)
        bound = self.scope.find(name.text)
        number = bound.meaning.number if bound is not None and isinstance(bound.meaning, Value) else None
        if bound is None or (number not in types and not isinstance(bound.meaning, Unknown)):
            self._refuse_target(statement, bound, number)
            return False
        first = next((each for each in self.scope.updates if each.buffer == number), None)
        if first is not None:
            notes = [f"the first is at {first.span.place}"]
            help = "it has one value after the step: say it in one `update`"
            self.report.error("E0225", f"`{name.text}` is updated twice", name.span, notes, help)
            return False
        if value is None or number is None or not self._fits(name.text, value, types[number]):
            return False
        self.expressions.mark_read(bound)
        self.scope.updates.append(spec.Update(number, value.value, statement.value.span, statement.after))
        return True

    def _fits(self, name: str, value: Tensor, type: Type) -> bool:
        """Whether a value has the dtype and the axes of its buffer; reports it if not."""
        notes = [str(value), f"{name}: {type}"]
        if value.type.dtype != type.dtype:
            help = f"`cast({value.text}, {type.dtype})`"
            message = f"`{name}` is {type.dtype}, and this is {value.type.dtype}"
            self.report.error("E0205", message, value.span, notes, help)
            return False
        if set(value.type.names) != set(type.names):
            missing = [axis for axis in type.names if not value.type.has(axis)]
            extra = [axis for axis in value.type.names if not type.has(axis)]
            function = f"{'mean' if value.type.is_float else 'sum'}({value.text}, over = {named(extra)})"
            help = f"`{function}`" if extra else f"`expand({value.text}, {named(missing)})`"
            self.report.error("E0204", f"the update of `{name}` does not have its axes", value.span, notes, help)
            return False
        return True

    def _refuse_target(self, statement: tree.Update, bound: Binding | None, number: int | None) -> None:
        """Report that what an update names is no buffer of this body, or after that of parameters none of these."""
        name, types = statement.name, self.parameters if statement.after else self.types
        kind, declared = ("parameter", "param") if statement.after else ("buffer", "buffer")
        if bound is not None and bound.name in self.scope.bindings and number in {*self.types, *self.parameters}:
            other, word = ("buffer", "update") if statement.after else ("parameter", "after update")
            help = f"`{word} {name.text} = …`"
            message = f"`{name.text}` is a {other}"
            self.report.error("E0225", message, name.span, [f"it is declared at {bound.span.place}"], help)
            return
        if bound is None:
            known = self.scope.bindings.values()
            names = [each.name for each in known if getattr(each.meaning, "number", None) in types]
            help = suggestion(name.text, names) or f"`{declared} {name.text}: … ~ zeros()` declares one in this body"
            self.report.error("E0225", f"unknown {kind} `{name.text}`", name.span, (), help)
            return
        notes = [f"`{name.text}` is bound at {bound.span.place}"]
        message = f"`{name.text}` is not a {kind} here"
        help = f"`{declared} {name.text}: … ~ zeros()` declares one; a `let` of that name hides it"
        if bound.name not in self.scope.bindings:
            message = f"`{name.text}` is bound outside this `repeat`"
            help = f"a {kind} is updated once a step, in the body that declares it"
        self.report.error("E0225", message, name.span, notes, help)
