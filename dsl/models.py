"""Blocks and models → typed bodies in single-assignment form (`partita.dsl.spec.Body`).

A block's body is checked once for each set of axes that it is called over, callees before callers, so that neither
deep chains nor exponential nesting of calls cost more than what is written. Every declared block is checked over its
own axes too. Errors do not cascade: what depends on something wrong is silently unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from partita.dsl import constants, limits, spec, tree
from partita.dsl.axes import Axes, positive_integer
from partita.dsl.builtins import INITIAL, SAMPLED, Signature
from partita.dsl.declarations import Declarations, unreserved
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.expressions import Expressions
from partita.dsl.functions import Constant, Tensor
from partita.dsl.report import Full, Report, suggestion
from partita.dsl.scope import UNKNOWN, Binding, Checked, Instance, Scope, Unknown, Value, composed
from partita.dsl.settings import Settings
from partita.dsl.source import Span
from partita.dsl.types import DTYPES, FLOATS, Axis, Type

# Keys of the lines that a run writes; a metric of that name would hide them.
RECORDED = ("step", "learning_rate", "grad_norm", "tokens_per_second", "eval_loss")


@frozen
class CallSite:
    """A call of a block as written: the callee, its arrows, and where."""

    block: str
    arrows: tuple[tuple[str, str], ...]
    span: Span


class Models:
    """Checks the blocks and models of a file."""

    def __init__(self, declarations: Declarations, axes: Axes, report: Report) -> None:
        self.declarations, self.axes, self.report = declarations, axes, report
        self.settings = Settings(report, axes.entries, axes.used)
        self.checked: dict[Instance, Checked | None] = {}
        self.called: set[str] = set()
        self.work = 0
        self.bindings: dict[tuple[int, int], tuple[str, tree.Name]] = {}  # place -> what was bound there
        self.read: set[tuple[int, int]] = set()
        self._sites: dict[str, tuple[CallSite, ...]] = {}
        self.mentioned: dict[str, frozenset[str]] = {}  # block -> the axes it is written over

    # ------------------------------------------------------------ order of checking

    def block(self, instance: Instance) -> None:
        """Check a block over certain axes, after those that it calls."""
        stack: list[tuple[Instance, Iterator[tuple[CallSite, Instance]]]] = []
        entered: dict[str, None] = {}

        def enter(instance: Instance) -> None:
            entered[instance.block] = None
            stack.append((instance, iter(self.calls(instance))))

        if instance not in self.checked:
            enter(instance)
        while stack:
            current, pending = stack[-1]
            for site, callee in pending:
                if callee.block in entered:
                    names = list(entered)
                    cycle = " calls ".join([*names[names.index(callee.block) :], callee.block])
                    self.report.error("E0218", f"block `{callee.block}` calls itself", site.span, [cycle])
                    self.checked[callee] = None
                elif callee not in self.checked:
                    enter(callee)
                    break
            else:
                stack.pop()
                del entered[current.block]
                self._note_axes(current.block)
                if current not in self.checked:
                    self.checked[current] = self._block(current)

    def _note_axes(self, block: str) -> None:
        """Collect the axes that a block and what it calls are written over."""
        if block not in self.mentioned:
            own = set(_mentions(self.declarations.blocks[block], self.axes))
            for site in self.sites(block):
                own |= self.mentioned.get(site.block, frozenset())
            self.mentioned[block] = frozenset(own)

    def calls(self, instance: Instance) -> list[tuple[CallSite, Instance]]:
        """The blocks that a block calls, each over its axes."""
        outer = dict(instance.substitution)
        return [(site, Instance(site.block, composed(outer, site.arrows))) for site in self.sites(instance.block)]

    def sites(self, block: str) -> tuple[CallSite, ...]:
        """The calls of blocks in a block, as written."""
        if block not in self._sites:
            declared = self.declarations.blocks[block]
            written = [*_expressions(declared.body), *declared.results.values]
            self._sites[block] = tuple(self._calls_in(written))
        return self._sites[block]

    def _calls_in(self, written: Sequence[tree.Expression]) -> Iterator[CallSite]:
        for expression in _walk(written):
            if isinstance(expression, tree.Call) and expression.name.text in self.declarations.blocks:
                arrows = []
                for argument in expression.arguments:
                    if isinstance(argument.value, tree.Arrow):
                        left, right = tree.single(argument.value.left), tree.single(argument.value.right)
                        if left is not None and right is not None:
                            arrows.append((left.text, right.text))
                yield CallSite(expression.name.text, tuple(arrows), expression.name.span)

    def spend(self, span: Span) -> None:
        """Count an expression that is checked. Reports and raises Full when there are too many."""
        self.work += 1
        if self.work > limits.CHECKED:
            message = "the blocks are called over too many different axes to be checked"
            self.report.error("E0008", message, span)
            raise Full

    # ------------------------------------------------------------ blocks and models

    def _block(self, instance: Instance) -> Checked | None:
        block = self.declarations.blocks[instance.block]
        errors = self.report.errors
        scope = Scope(None, dict(instance.substitution))
        checker = BodyChecker(self, scope, block.body)
        names = checker.inputs(block.inputs)
        checker.statements(block.body)
        results: list[spec.Operand] = []
        known = True
        for value in block.results.values:
            found = checker.expressions.tensor(value)
            known = known and found is not None
            if found is not None:
                results.append(found.value)
        if not known or self.report.errors > errors or checker.failed:
            return None
        return self._within_limits(scope.finish(names, results), block.name)

    def model(self, model: tree.Model) -> spec.Model | None:
        """Check a model, after the blocks that it calls; None after reporting what is wrong."""
        for site in self._calls_in(list(_expressions(model.body))):
            self.block(Instance(site.block, composed({}, site.arrows)))
        errors = self.report.errors
        scope = Scope(None, {})
        checker = BodyChecker(self, scope, model.body, top=True)
        names = checker.inputs(model.inputs)
        checker.statements(model.body)
        if not checker.has_loss:
            help = "end it with `loss cross_entropy(…)` or another scalar"
            self.report.error("E0221", f"model `{model.name.text}` has no `loss`", model.name.span, help=help)
        if self.report.errors > errors or checker.loss is None or checker.failed:
            return None
        results = [checker.loss[0].number, *(value.number for _, value in checker.metrics)]
        checked = self._within_limits(scope.finish(names, results), model.name)
        if checked is None:
            return None
        loss, *metrics = [result for result in checked.body.results if isinstance(result, int)]
        return spec.Model(
            model.name.text,
            checked.body,
            loss,
            checker.loss[1],
            tuple((name, number) for (name, _), number in zip(checker.metrics, metrics, strict=True)),
            model.name.span,
            checked.nodes,
        )

    def _within_limits(self, checked: Checked, name: tree.Name) -> Checked | None:
        if checked.depth > limits.SCOPES:
            message = f"`{name.text}` has more than {limits.SCOPES} blocks and repeats within each other"
            self.report.error("E0005", message, name.span)
            return None
        if checked.nodes > limits.STEPS:
            message = f"`{name.text}` has {checked.nodes:,} steps when its repeats are expanded"
            self.report.error("E0008", message, name.span, help=f"at most {limits.STEPS:,}")
            return None
        return checked


class BodyChecker:
    """Checks the statements of one body, and of the repeats in it."""

    def __init__(self, models: Models, scope: Scope, body: Sequence[tree.Statement], top: bool = False) -> None:
        self.models, self.scope, self.top = models, scope, top
        self.report = models.report
        self.expressions = Expressions(models, scope, body)
        self.metrics: list[tuple[str, Value]] = []
        self.loss: tuple[Value, Span] | None = None
        self.has_loss = False
        self.failed = False
        self._reserve_segments(body)

    def _reserve_segments(self, body: Sequence[tree.Statement]) -> None:
        """Parameters and samples keep their names; calls and repeats take what is left."""
        for statement in body:
            names = (
                statement.names
                if isinstance(statement, tree.Param)
                else (statement.name,)
                if isinstance(statement, tree.Sample)
                else ()
            )
            for name in names:
                if name.text in self.scope.segments:
                    notes = [f"the first is at {self.scope.segments[name.text].place}"]
                    self.report.error("E0217", f"`{name.text}` is declared twice here", name.span, notes)
                else:
                    self.scope.segments[name.text] = name.span

    def inputs(self, inputs: Sequence[tree.Input]) -> tuple[str, ...]:
        """Bind the inputs; returns their names."""
        for given in inputs:
            if not unreserved(given.name, self.report):
                continue
            if given.name.text in self.scope.bindings:
                self.report.error("E0217", f"input `{given.name.text}` is declared twice", given.name.span)
            type = self.type(given.type)
            value = Value(len(self.scope.types), type or Type("f32"))
            self.scope.types.append(value.type)
            self.scope.inputs += 1
            self.scope.bind(given.name.text, value if type else UNKNOWN, given.name.span)
        return tuple(given.name.text for given in inputs)

    def type(self, written: tree.TensorType) -> Type | None:
        """The type of a declaration; None after reporting what is wrong."""
        axes: list[Axis] = []
        errors, complete = self.report.errors, True
        dtype = written.dtype.text if written.dtype else "f32"
        if dtype not in DTYPES:
            assert written.dtype is not None
            help = suggestion(dtype, DTYPES)
            self.report.error("E0207", f"unknown dtype `{dtype}`", written.dtype.span, help=help)
        for name in written.axes:
            try:
                axis = self.expressions.axis(name)
                if axis is not None and any(axis.name == other.name for other in axes):
                    raise refuse("E0216", f"axis `{axis.name}` stands twice in this type", name.span)
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
            self.models.spend(statement.span)
            errors = self.report.errors
            match statement:
                case tree.Let():
                    self.let(statement)
                case tree.Param():
                    self.param(statement)
                case tree.Sample():
                    self.sample(statement)
                case tree.Repeat():
                    self.repeat(statement)
                case tree.Loss():
                    self.set_loss(statement)
                case tree.Metric():
                    self.metric(statement)
            self.failed = self.failed or self.report.errors > errors

    def bind(self, name: tree.Name, meaning: Value | Constant | Unknown, kind: str) -> None:
        """Bind a name, and remember it for the question whether it is ever read."""
        if unreserved(name, self.report):
            self.scope.bind(name.text, meaning, name.span)
            self.models.bindings.setdefault((id(name.span.source), name.span.start), (kind, name))

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
        """A type that must be f32."""
        type = self.type(written)
        if type is not None and type.dtype not in FLOATS:
            self.report.error("E0205", f"{what} is a float tensor, not {type.dtype}", written.span)
            return None
        return type

    def distribution(
        self, written: tree.Expression, signatures: Mapping[str, Signature], what: str
    ) -> spec.Call | None:
        """The call after `~`."""
        call = tree.bare(written)
        if isinstance(call, tree.Call):
            return self.models.settings.call(call, signatures, what, self.expressions.number_of)
        self.report.error("E0306", "expected a call such as `normal(0.02)`", written.span)
        return None

    def set_loss(self, statement: tree.Loss) -> None:
        """`loss value`."""
        if not self.top:
            self.report.error("E0221", "`loss` stands at the top level of a model", statement.span)
            return
        if self.has_loss:
            self.report.error("E0221", "a second `loss`: a model has one", statement.span, help="add them up")
            return
        self.has_loss = True
        found = self.expressions.tensor(statement.value)
        if found is None:
            self.failed = True
        elif found.type.axes or not found.type.is_float:
            help = f"`mean({found.text})`" if found.type.is_float else None
            self.report.error("E0221", "the loss is a scalar float", found.span, [str(found)], help)
        else:
            self.loss = Value(found.value, found.type), statement.value.span

    def metric(self, statement: tree.Metric) -> None:
        """`metric name = value`."""
        name = statement.name
        if not self.top:
            self.report.error("E0222", "`metric` stands at the top level of a model", statement.span)
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
            self.report.error("E0222", "a metric is a scalar", found.span, [str(found)], help)
        else:
            self.metrics.append((name.text, Value(found.value, found.type)))

    # ------------------------------------------------------------ repeats

    def repeat(self, statement: tree.Repeat) -> None:
        """`repeat count as name { body }`: names bound before and rebound inside are carried from turn to turn."""
        count = self.count(statement.count)
        if not unreserved(statement.name, self.report):
            return
        before: dict[str, Binding] = {}
        for name in _rebound(statement.body):
            found = self.scope.find(name.text)
            if found is not None and name.text not in before:
                self.expressions.mark_read(found)
                before[name.text] = found
        types = {name: _carried_type(binding) for name, binding in before.items()}
        inner = Scope(self.scope, self.scope.substitution, [type or Type("f32") for type in types.values()])
        checker = BodyChecker(self.models, inner, statement.body)
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

    def count(self, written: tree.Expression) -> int | None:
        """How many turns; None after reporting what is wrong."""
        try:
            quantity = constants.evaluate(written, self.expressions.number_of)
            return positive_integer(quantity, written, "the count of a `repeat`")
        except Refused as refused:
            self.report.refused(refused)
            return None

    def carried_results(
        self, inner: Scope, before: Mapping[str, Binding], types: Mapping[str, Type | None]
    ) -> list[spec.Operand] | None:
        """What each carried name means after a turn; None where it is unknown or changed its type."""
        results: list[spec.Operand] = []
        complete = True
        for name, type in types.items():
            after = inner.bindings[name]
            self.expressions.mark_read(after)
            meaning = after.meaning
            if type is None and isinstance(before[name].meaning, Constant):
                message = f"`{name}` cannot be carried from turn to turn: it is a boolean"
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
        notes = [f"before: {type}   (bound at {before.span.place})", f"after a turn: {now}"]
        help = "give the new value another name, or bring it back to that type"
        self.report.error("E0220", f"`{name}` changes its type from turn to turn", after.span, notes, help)


def _carried_type(binding: Binding) -> Type | None:
    """The type with which a name is carried; a number becomes a scalar. None where that is unknown."""
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


def _rebound(statements: Sequence[tree.Statement]) -> Iterator[tree.Name]:
    """The names that the lets of a body bind, repeats in it included."""
    for statement in statements:
        if isinstance(statement, tree.Let):
            yield from statement.names
        elif isinstance(statement, tree.Repeat):
            yield from _rebound(statement.body)


def _types(statements: Sequence[tree.Statement]) -> Iterator[tree.TensorType]:
    for statement in statements:
        if isinstance(statement, tree.Param | tree.Sample):
            yield statement.type
        elif isinstance(statement, tree.Repeat):
            yield from _types(statement.body)


def _expressions(statements: Sequence[tree.Statement]) -> Iterator[tree.Expression]:
    """The expressions of statements, those in repeats included."""
    for statement in statements:
        match statement:
            case tree.Let(value=value) | tree.Loss(value=value) | tree.Metric(value=value):
                yield value
            case tree.Param(initial=value) | tree.Sample(distribution=value):
                yield value
            case tree.Repeat():
                yield statement.count
                yield from _expressions(statement.body)


def _walk(expressions: Sequence[tree.Expression]) -> Iterator[tree.Expression]:
    """All expressions within some, in the order in which they are written."""
    stack = list(reversed(expressions))
    while stack:
        top = stack.pop()
        yield top
        match top:
            case tree.Binary(left=left, right=right) | tree.Arrow(left=left, right=right):
                stack += [right, left]
            case tree.Negative(operand=inner) | tree.Group(inner=inner):
                stack.append(inner)
            case tree.Call():
                stack += [argument.value for argument in reversed(top.arguments)]
            case tree.List():
                stack += reversed(top.items)


def _mentions(block: tree.Block, axes: Axes) -> Iterator[str]:
    """The axes that a block is written over."""
    for type in (*(given.type for given in block.inputs), *_types(block.body)):
        yield from (axis.text for axis in type.axes)
    for expression in _walk([*_expressions(block.body), *block.results.values]):
        if isinstance(expression, tree.Path) and expression.parts[0].text in axes.entries:
            yield expression.parts[0].text
