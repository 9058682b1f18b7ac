"""The statements of one body, checked in order: what they bind, and the steps that they become.

Statements after a wrong one are still checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from partita.dsl import limits, spec
from partita.dsl.advice.corrected_values import call_of, named
from partita.dsl.advice.report import suggestion
from partita.dsl.check.buffers import Buffers
from partita.dsl.check.expressions import Expressions
from partita.dsl.check.instances import Instances
from partita.dsl.check.known import CheckContext
from partita.dsl.check.loops import Loops
from partita.dsl.config.builtins import INITIAL, SAMPLED, Signature
from partita.dsl.diagnostic import refuse
from partita.dsl.functions.signatures import Constant, Tensor
from partita.dsl.names.declarations import unreserved
from partita.dsl.names.scope import UNKNOWN, Binding, Scope, Unknown, Value
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import RESERVED
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.units import Quantity
from partita.dsl.types import DTYPES, FLOATS, INTEGERS, Axis, Type

# Keys of the records that a run writes; a metric of such a name would hide them.
RECORDED = (
    *("step", "learning_rate", "grad_norm", "tokens_per_second", "rows_per_second", "eval_loss"),
    *("step_seconds", "unix_time", "peak_memory", "peak_memory_by_rank", "mfu", "learning_rates"),
    *("sample", "slow_ranks", "skipped", "bad", "rows", "rewound_to"),
)

# Statements of models alone, and the error of one elsewhere.
AT_TOP: Mapping[type, str] = {tree.Loss: "E0221", tree.Metric: "E0222", tree.Output: "E0226"}

# What is meant by a number as an initial value; any other is a standard deviation.
INITIAL_OF = {"0": "zeros()", "0.0": "zeros()", "1": "ones()", "1.0": "ones()"}


class BodyChecker:
    """Checks the statements of one body, and of the repeats in it."""

    def __init__(self, known: CheckContext, scope: Scope, body: Sequence[tree.Statement], top: bool = False) -> None:
        self.known, self.scope, self.top = known, scope, top
        self.report = known.report
        self.expressions = Expressions(known, scope, body)
        self.metrics: list[tuple[str, Value]] = []
        self.buffers = Buffers(scope, self.expressions, known.report)
        self.instances = Instances(known, scope, self.expressions.number_of)
        self.loops = Loops(scope, self.expressions, known.report, self.inside)
        self.outputs: list[tuple[tree.Output, dict[str, Binding]]] = []  # each with what names mean there
        self.loss: tuple[Value, Span] | None = None
        self.losses: list[str] = []  # with names
        self.has_loss = False
        self.failed = False
        self.twice: set[str] = set()  # declared twice, hence ambiguous
        self._reserve_segments(body)

    def _reserve_segments(self, body: Sequence[tree.Statement]) -> None:
        """Parameters, buffers and samples get their names as path segments; calls and repeats take what is left."""
        for statement in body:
            if not isinstance(statement, tree.Param | tree.Buffer | tree.Sample):
                continue
            for name in statement.names:
                if name.text in self.scope.segments:
                    notes = [f"the first is at {self.scope.segments[name.text].place}"]
                    self.report.error("E0217", f"`{name.text}` is declared twice here", name.span, notes)
                    self.twice.add(name.text)
                else:
                    self.scope.segments[name.text] = name.span

    def inputs(self, inputs: Sequence[tree.Input], numbers: Sequence[Quantity] | None = None) -> tuple[str, ...]:
        """Bind the inputs; returns the names of the tensors. Only blocks have `numbers`."""
        values = iter(numbers or ())
        for declaration in inputs:
            if declaration.name.text in self.scope.bindings:
                self.report.error("E0217", f"input `{declaration.name.text}` is declared twice", declaration.name.span)
                self.twice.add(declaration.name.text)
            if declaration.type is None:
                self._number(declaration, None if numbers is None else next(values))
                continue
            type = self.type(declaration.type)
            value = Value(len(self.scope.types), type or Type("f32"))
            self.scope.types.append(value.type)
            self.scope.inputs += 1
            known = type is not None and declaration.name.text not in self.twice
            self.scope.bind(declaration.name.text, value if known else UNKNOWN, declaration.name.span)
            self.known.bound(declaration.name, value if known else UNKNOWN)
        return tuple(declaration.name.text for declaration in inputs if not declaration.is_number)

    def _number(self, declared: tree.Input, value: Quantity | None) -> None:
        """An input that is a number, with the value of a call."""
        name = declared.name
        if value is None:
            message = f"`{name.text}` is a number, and inputs of models and ops are tensors"
            self.report.error("E0212", message, declared.span, help="only blocks take numbers; a file has `const`")
        self.bind(name, UNKNOWN if value is None else Constant(value, name.text, name.span), "input")

    def type(self, written: tree.TensorType) -> Type | None:
        """The type of a declaration; None after reporting errors."""
        axes: list[Axis] = []
        errors, complete = self.report.errors, True
        dtype = written.dtype.text if written.dtype else "f32"
        if written.dtype is not None and dtype not in DTYPES:
            help = suggestion(dtype, DTYPES)
            self.report.error("E0207", f"unknown dtype `{dtype}`", written.dtype.span, help=help)
        for name in written.axes:
            with self.report:
                axis = self.expressions.axis(name)
                if axis is not None and any(axis.name == other.name for other in axes):
                    second = f"{axis.name}_"
                    while second in self.known.axes.entries:
                        second += "_"
                    help = f"declare `axis {second} = {axis.name}`, and write `{second}` here"
                    help += f"; after a product, `rename(y, {second} -> {axis.name})` gives the axis back its name"
                    raise refuse("E0216", f"axis `{axis.name}` appears twice in this type", name.span, help=help)
                complete = complete and axis is not None
                axes += [axis] if axis else []
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
                case tree.Loss() | tree.Metric() | tree.Output() if not self.top:
                    message = f"`{type(statement).__name__.lower()}` must be at the top level of a model"
                    self.report.error(AT_TOP[type(statement)], message, statement.span)
                case tree.Let():
                    self.let(statement)
                case tree.Param():
                    self.param(statement)
                case tree.Buffer():
                    self.buffer(statement)
                case tree.Sample():
                    self.sample(statement)
                case tree.Share():
                    with self.report:
                        self.instances.share(statement)
                case tree.Copy():
                    with self.report:
                        self.instances.copy(statement)
                case tree.Repeat():
                    self.failed = not self.loops.repeat(statement) or self.failed
                case tree.Scan():
                    self.failed = not self.loops.scan(statement) or self.failed
                case tree.Keep():
                    self.keep(statement)
                case tree.Loss():
                    self.set_loss(statement)
                case tree.Update():
                    self.failed = not self.buffers.update(statement) or self.failed
                case tree.Metric():
                    self.metric(statement)
                case tree.Output():
                    self.output(statement)
            self.failed = self.failed or self.report.errors > errors

    def inside(self, scope: Scope, statements: Sequence[tree.Statement]) -> bool:
        """Check the statements of a loop in their own scope; whether it is known what they mean."""
        checker = BodyChecker(self.known, scope, statements)
        checker.statements(statements)
        return not checker.failed

    def bind(self, name: tree.Name, meaning: Value | Constant | Unknown, kind: str) -> None:
        """Bind a name, and record it for the warning about unused names."""
        if name.text in RESERVED and kind not in ("let", "input"):  # no rule names these
            # Said once; what is read under that name is then not known, rather than not bound.
            if self.scope.find(name.text) is None:
                unreserved(name, self.report)
            self.scope.bind(name.text, UNKNOWN, name.span)
        else:
            self.scope.bind(name.text, UNKNOWN if name.text in self.twice else meaning, name.span)
            self.known.bound(name, meaning, kind)

    def let(self, statement: tree.Let) -> None:
        """`let names = values`. All values are computed before the first name is bound."""
        names, values = statement.names, statement.values
        if len(values) == 1:
            results = self.expressions.several(values[0], len(names), names[0].text if len(names) == 1 else None)
        elif len(values) == len(names):
            found = [self.expressions.one(value, name.text) for value, name in zip(values, names, strict=True)]
            known = [each for each in found if each is not None]
            results = known if len(known) == len(found) else None
        else:
            count = "1 name" if len(names) == 1 else f"{len(names)} names"
            self.report.error("E0219", f"{count} for {len(values)} values", statement.span)
            results = None
        seen: set[str] = set()
        for name in names:
            if name.text in seen:
                self.report.error("E0217", f"`{name.text}` is bound twice here", name.span)
            seen.add(name.text)
        if results is None:
            self.failed = True
        for i, name in enumerate(names):
            meaning: Value | Constant | Unknown = UNKNOWN
            if results is not None:
                result = results[i]
                meaning = Value(result.value, result.type) if isinstance(result, Tensor) else result
            self.bind(name, meaning, "let")

    def param(self, statement: tree.Param) -> None:
        """`param names: type ~ initial`."""
        type = self.float_type(statement.type, "a parameter")
        call = self.distribution(statement.initial, INITIAL, "initial value")
        values = self.declare(statement.names, "param", spec.Parameter, type, call)
        self.buffers.parameters.update((each.number, each.type) for each in values)

    def buffer(self, statement: tree.Buffer) -> None:
        """`buffer names: type ~ initial`."""
        type = self.type(statement.type)
        call = self.distribution(statement.initial, INITIAL, "initial value")
        sound = self.buffers.is_sound(statement, type, call)
        values = self.declare(
            statement.names, "buffer", partial(spec.Parameter, buffer=True), type if sound else None, call
        )
        self.buffers.types.update((each.number, each.type) for each in values)

    def sample(self, statement: tree.Sample) -> None:
        """`sample names: type ~ distribution`."""
        call = self.distribution(statement.initial, SAMPLED, "distribution")
        drawn = statement.initial.name.text if isinstance(statement.initial, tree.Call) else ""
        if drawn != "integers":
            type = self.float_type(statement.type, "a sample", "`integers(n)` draws from 0 to n − 1")
        else:
            type = self.type(statement.type)
            if type is not None and type.dtype not in INTEGERS:
                help = f"`i64{statement.type.span.text.removeprefix(type.dtype)}`"
                self.report.error("E0205", f"`integers` are no {type.dtype}", statement.type.span, help=help)
                type = None
        self.declare(statement.names, "sample", spec.Sample, type, call)

    def declare(
        self,
        names: Sequence[tree.Name],
        kind: str,
        step: Callable[[str, Type, spec.Call, Span], spec.Parameter | spec.Sample],
        type: Type | None,
        call: spec.Call | None,
    ) -> list[Value]:
        """Make a step for each name, of a type and with a distribution; returns the values, none of what is unsound."""
        values = []
        for name in names:
            meaning: Value | Unknown = UNKNOWN
            if type is not None and call is not None:
                (meaning,) = self.scope.add(step(name.text, type, call, name.span), [type])
                values.append(meaning)
            self.bind(name, meaning, kind)
        return values

    def float_type(self, written: tree.TensorType, what: str, help: str | None = None) -> Type | None:
        """A type that must be floating-point; None after reporting errors, with some help."""
        type = self.type(written)
        if type is not None and type.dtype not in FLOATS:
            self.report.error("E0205", f"{what} must be a float tensor, not {type.dtype}", written.span, help=help)
            return None
        return type

    def distribution(
        self, written: tree.Expression, signatures: Mapping[str, Signature], what: str
    ) -> spec.Call | None:
        """The call after `~`."""
        call = tree.bare(written)
        if isinstance(call, tree.Call) and (centered := _centered(call)) is not None:
            message = f"`{call.name.text}` lies around 0, and takes 1 argument"
            self.report.error("E0209", message, call.span, help=f"write `{centered}`")
            return None
        if isinstance(call, tree.Call):
            return self.known.settings.call(call, signatures, what, self.expressions.number_of)
        name = tree.single(written)
        help = f"write `{call_of(signatures[name.text])}`" if name is not None and name.text in signatures else None
        if isinstance(call, tree.String):
            help = named(call, signatures)
        if isinstance(call, tree.Number):
            known = INITIAL_OF.get(call.text, "") if signatures is INITIAL else ""
            help = f"write `{known or f'normal({call.text})'}`"
        self.report.error("E0306", "expected a call such as `normal(0.02)`", written.span, help=help)
        return None

    def keep(self, statement: tree.Keep) -> None:
        """`keep value as name`."""
        name = statement.name
        if not unreserved(name, self.report):
            return
        if self.scope.kept is None:
            message = "`keep` is a statement of a `repeat`: it keeps a value of each iteration"
            self.scope.bind(name.text, UNKNOWN, name.span)
            help = "`let`, elsewhere; after a `scan`, what it carries has all positions"
            self.report.error("E0230", message, statement.span, help=help)
        elif name.text in self.scope.kept or self.scope.find(name.text) is not None:
            self.report.error("E0217", f"`{name.text}` is bound already", name.span, help="another name")
        else:
            tensor = self.expressions.tensor(statement.value)
            if tensor is None:
                self.failed = True
            else:
                value = Value(tensor.value, tensor.type)
                self.scope.kept[name.text] = value, name.span
                self.known.bound(name, value, "let")

    def set_loss(self, statement: tree.Loss) -> None:
        """`loss value`, or one of several with names, which add up to the loss."""
        name = statement.name
        if self.has_loss and (name is None or not self.losses):
            message = "a second `loss`: a model has one, or several with names"
            self.report.error("E0221", message, statement.span, help="add them up, or name each: `loss first = …`")
            return
        self.has_loss = True
        if name is not None:
            self.losses.append(name.text)
        tensor = self.expressions.tensor(statement.value, None if name is None else name.text)
        if tensor is None:
            self.failed = True
        elif tensor.type.axes or not tensor.type.is_float:
            help = f"`mean({tensor.text})`" if tensor.type.is_float else None
            self.report.error("E0221", "the loss must be a scalar float", tensor.span, [str(tensor)], help)
        else:
            value = Value(tensor.value, tensor.type)
            if name is not None:
                self._record(name, value)
            if self.loss is not None:
                both = self.loss[0].number, value.number
                (value,) = self.scope.add(spec.Apply("add", both, {}, value.type, statement.span, None), [value.type])
            self.loss = value, statement.value.span

    def metric(self, statement: tree.Metric) -> None:
        """`metric name = value`."""
        tensor = self.expressions.tensor(statement.value, statement.name.text)
        if tensor is None:
            self.failed = True
        elif tensor.type.axes or tensor.type.dtype == "bool":
            help = f"`mean({tensor.text})`" if tensor.type.is_float else None
            self.report.error("E0222", "a metric must be a scalar", tensor.span, [str(tensor)], help)
        else:
            self._record(statement.name, Value(tensor.value, tensor.type))

    def _record(self, name: tree.Name, value: Value) -> None:
        """Record a number of each step by a name."""
        if not unreserved(name, self.report):
            return
        if name.text in RECORDED:
            message = f"`{name.text}` is recorded of every run: a metric cannot have that name"
            self.report.error("E0222", message, name.span, help=f"`metric my_{name.text} = …`")
        elif name.text in (known for known, _ in self.metrics):
            self.report.error("E0222", f"there is already a metric `{name.text}`", name.span, help="another name")
        self.metrics.append((name.text, value))

    def output(self, statement: tree.Output) -> None:
        """`output name = value`: checked at the end, so that its steps follow those of the training."""
        name = statement.name
        if unreserved(name, self.report):
            if name.text in (known.name.text for known, _ in self.outputs):
                self.report.error("E0226", f"there is already an output `{name.text}`", name.span)
            self.outputs.append((statement, dict(self.scope.bindings)))

    def checked_outputs(self) -> list[tuple[str, Value]]:
        """The outputs, with the names of each as they were where it stands."""
        outputs: list[tuple[str, Value]] = []
        for statement, bindings in self.outputs:
            self.scope.bindings = bindings
            tensor = self.expressions.tensor(statement.value, statement.name.text)
            if tensor is None:
                self.failed = True
            else:
                outputs.append((statement.name.text, Value(tensor.value, tensor.type)))
        return outputs


def _centered(call: tree.Call) -> str | None:
    """`normal(0.02)` for `normal(0, 0.02)`, and `uniform(0.1)` for `uniform(-0.1, 0.1)`; None if it is neither."""
    name, texts = call.name.text, [each.value.span.text for each in call.arguments if each.name is None]
    if len(texts) != 2 or (name, texts[0]) not in (("normal", "0"), ("normal", "0.0"), ("uniform", f"-{texts[1]}")):
        return None
    return f"{name}({texts[1]})"
