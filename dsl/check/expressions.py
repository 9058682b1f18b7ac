"""Expressions in a body: names are resolved, numbers folded, and applications of functions and blocks become steps.

Methods return None if they, or an earlier check, reported an error; some raise Refused instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

from attrs import evolve

from partita.dsl import limits, spec
from partita.dsl.advice import foreign
from partita.dsl.advice.corrected_calls import reordered
from partita.dsl.advice.report import suggestion
from partita.dsl.check import constants
from partita.dsl.check.arguments import bind, parameters_of_call
from partita.dsl.check.formulas import Size
from partita.dsl.check.instances import sharing
from partita.dsl.check.known import CheckContext
from partita.dsl.check.operands import Operands
from partita.dsl.config.builtins import OneOf
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.functions import rules
from partita.dsl.functions.signatures import (
    AXES,
    AXIS,
    DTYPE,
    FLAG,
    FUNCTIONS,
    NUMBER,
    NUMBERS,
    OPERAND,
    TENSOR,
    TENSORS,
    Arrow,
    Constant,
    Decomposition,
    Function,
    Origin,
    PrimitiveResult,
    Tensor,
    Use,
)
from partita.dsl.names.origins import origin
from partita.dsl.names.scope import Binding, Instance, Kept, Scope, SharedBlock, Unknown, Value, composed
from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.units import PLAIN, RATIO, Quantity, read, shortened
from partita.dsl.syntax.unparse import expression_text
from partita.dsl.syntax.walk import bindings_in, nodes
from partita.dsl.types import DTYPES, Axis, Type

Result = Tensor | Constant
# What to do about a tensor in a scan that has its axis.
MADE_BEFORE = "make it before the scan, and use it inside; or rename the axis"


class Expressions:
    """Checks the expressions of one scope."""

    def __init__(self, known: CheckContext, scope: Scope, body: Sequence[tree.Statement]) -> None:
        self.known, self.scope, self.body = known, scope, body
        self.report = known.report
        self.arguments = Operands(self, known.report)

    # ------------------------------------------------------------ entry points

    def tensor(self, written: tree.Expression, name: str | None = None) -> Tensor | None:
        """Check an expression that must be a tensor."""
        result = self.one(written, name)
        if isinstance(result, Constant):
            help = f"`zeros([…]) + {result.text}`, with axes in the brackets, is a tensor of it"
            self.report.error("E0213", f"`{result.text}` is a number where a tensor is needed", written.span, help=help)
            return None
        return result

    def one(self, written: tree.Expression, name: str | None = None) -> Result | None:
        """Check an expression that is a tensor or a number."""
        results = self.several(written, 1, name)
        return results[0] if results is not None else None

    def several(self, written: tree.Expression, count: int, name: str | None = None) -> list[Result] | None:
        """Check an expression that must have `count` results."""
        with self.report:
            results = self._results(written, name)
            if results is not None and len(results) != count:
                message = f"this gives {_results(len(results))}, and {count} {'is' if count == 1 else 'are'} taken"
                raise refuse("E0219", message, written.span)
            return results
        return None

    def number_of(self, written: tree.Path | tree.Call) -> Quantity:
        """The value of a name or call that must be a number; a `Lookup` of `partita.dsl.check.constants`."""
        results = self._results(written, None)
        if results is not None and len(results) == 1 and isinstance(results[0], Constant):
            value = results[0].value
            if not isinstance(value, bool):
                return value
        if results is None:
            raise Refused(())
        name = tree.single(written)
        repeat = self._repeat(name) if name is not None else None
        help = (
            f"give the value another name: `{name.text}` could be the number of the iteration"
            if repeat and name
            else None
        )
        raise refuse("E0212", f"`{_text(written)}` is a tensor where a number is needed", written.span, help=help)

    def setting(self, written: tree.Expression, kind: OneOf, name: str) -> spec.Call | None:
        """A call of one of the signatures, of the argument `name`; its numbers may be sizes."""
        call: spec.Call | None = self.known.settings.value(written, kind, f"`{name}`", self.number_of)
        return call

    def axis(self, name: tree.Name) -> Axis | None:
        """The axis that a name refers to here, under the block's axis substitution. Raises Refused (E0202)."""
        other = self.scope.substitution.get(name.text)
        if other is None:
            axes = self.known.axes
            if name.text not in axes and self.scope.find(name.text) is not None:
                help = "`maximum(a, b)` and `minimum(a, b)` are elementwise"
                raise refuse("E0202", f"`{name.text}` is a value, not an axis", name.span, help=help)
            return axes.find(name)
        self.known.axes.used.add(name.text)
        return self.known.axes.find(tree.Name(other, span=name.span))

    def kinds(self, written: tree.Expression) -> frozenset[str]:
        """The kinds of slots that might take an expression, by its form and what its name means."""
        bare, name = tree.bare(written), tree.single(written)
        if name is not None:
            binding = self.scope.find(name.text)
            constant = binding is not None and isinstance(binding.meaning, Constant)
            kinds = {NUMBER, NUMBERS, OPERAND} if constant else {TENSOR, OPERAND} if binding is not None else set()
            kinds |= {AXIS, AXES} if name.text in self.known.axes.entries else set()
            return frozenset(kinds | ({DTYPE} if name.text in DTYPES else set()))
        if isinstance(bare, tree.Number | tree.Negative):
            return frozenset((NUMBER, NUMBERS, OPERAND))
        if isinstance(bare, tree.Boolean):
            return frozenset((FLAG, OPERAND))
        if isinstance(bare, tree.List):
            return frozenset((AXES, NUMBERS))
        return frozenset((TENSOR, OPERAND, NUMBER))

    def is_read(self, binding: Binding) -> bool:
        """Whether something reads what is bound."""
        return binding.span.key in self.known.read

    def mark_read(self, binding: Binding) -> None:
        """Record that a name is read."""
        self.known.read.add(binding.span.key)

    # ------------------------------------------------------------ kinds of expressions

    def _results(self, written: tree.Expression, name: str | None) -> list[Result] | None:
        self.known.spend(written.span)
        match written:
            case tree.Group():
                return self._results(written.inner, name)
            case tree.Number():
                quantity = read(written.text, written.span)
                return [_unitless(Constant(quantity, written.text, written.span))]
            case tree.Boolean():
                return [Constant(written.value, _text(written), written.span)]
            case tree.Path():
                return self._path(written)
            case tree.Negative():
                return self._operator("negate", [written.operand], written, name)
            case tree.Not():
                return self._operator("logical_not", [written.operand], written, name)
            case tree.Binary():
                return self._operator(rules.OPERATORS[written.operator], [written.left, written.right], written, name)
            case tree.Call():
                return self._call(written, name)
            case tree.String():
                raise refuse("E0212", "a string has no meaning here", written.span)
            case tree.List():
                raise refuse("E0212", "a list has no meaning here", written.span)
            case tree.Arrow():
                raise refuse("E0212", "`->` has no meaning here", written.span)

    def _path(self, written: tree.Path) -> list[Result] | None:
        name = written.parts[0]
        if len(written.parts) > 1:
            help = foreign.MEMBERS.get(written.parts[-1].text)
            raise refuse("E0201", f"`{written}` is a path, and paths are only used in layouts", written.span, help=help)
        binding = self.scope.find(name.text)
        if binding is None:
            raise self._unbound(name)
        self.mark_read(binding)
        meaning = binding.meaning
        if isinstance(meaning, Unknown):
            return None
        if isinstance(meaning, Kept):
            meaning = self._kept(written, meaning)
        elif written.iterations:
            message = f"`{name.text}` is not kept by the iterations of a repeat, and has no value for each"
            raise refuse("E0230", message, written.span, help=foreign.INDEXING)
        if isinstance(meaning, Value):
            return [Tensor(meaning.number, meaning.type, name.text, written.span)]
        return [_unitless(Constant(meaning.value, name.text, written.span))]

    def _kept(self, written: tree.Path, kept: Kept) -> Value:
        """What an iteration has kept. Raises Refused (E0230)."""
        name, count = written.parts[0].text, len(kept.values)
        if not written.iterations or written.iterations[0] is None:
            message = f"`{name}` has a value for each iteration of its repeat"
            raise refuse("E0230", message, written.span, help=f"`{name}[0]` is that of the first")
        number = constants.evaluate(written.iterations[0].first, self.number_of)
        if number.dimension != PLAIN or number.value != int(number.value) or not 0 <= number.value < count:
            message = f"`{expression_text(written)}` is of no iteration: `{name}` has {count}, 0 to {count - 1}"
            raise refuse("E0230", message, written.span, notes=[f"the number is {float(number.value):g}"])
        return kept.values[int(number.value)]

    def _unbound(self, name: tree.Name) -> Refused:
        inside = nodes(*self.body, *self.known.declarations.models.values(), *self.known.declarations.blocks.values())
        if any(isinstance(each, tree.Keep) and each.name.text == name.text for each in inside):
            message = f"`{name.text}` is kept in a repeat, and read after it in the body around that"
            help = f"in it, a value of the turn before is carried by `let`; further out, `keep {name.text}[0] as other`"
            return refuse("E0230", message, name.span, help=help)
        later = bindings_in(self.body)
        if name.text in later:
            place, ended = later[name.text]
            if place.start > name.span.start:
                notes = [f"`{name.text}` is bound at {place.place}"]
                return refuse("E0208", f"`{name.text}` is used before it is bound", name.span, notes=notes)
            if ended:
                notes = [f"`{name.text}` is local to the repeat at {place.place}"]
                help = "bind it before the repeat as well, so that it is carried from iteration to iteration"
                return refuse("E0208", f"`{name.text}` is not bound here", name.span, notes=notes, help=help)
        if name.text in self.known.axes.entries:
            help = f"write `size({name.text})` for its size; `iota({name.text})` are its positions"
            return refuse("E0201", f"`{name.text}` is an axis, not a value", name.span, help=help)
        repeat = self._repeat(name)
        if repeat is not None:
            message = f"`{name.text}` is the number of an iteration, which is known inside the repeat alone"
            notes = [f"the repeat is at {repeat.name.span.place}"]
            blocks = self.known.declarations.blocks.values()
            mine = (b for b in blocks if b.span.source is name.span.source)
            block = next((b.name.text for b in mine if b.span.start <= name.span.start < b.span.end), None)
            help = "bind what is computed from it in the repeat, and read that here"
            if block is not None:
                help = f"the block may take it: `block {block}(…, {name.text}: number)`, called with `{name.text}`"
            return refuse("E0201", message, name.span, notes=notes, help=help)
        known = foreign.VALUES.get(name.text) or suggestion(name.text, self.scope.names())
        return refuse("E0201", f"unknown name `{name.text}`", name.span, help=known)

    def _repeat(self, name: tree.Name) -> tree.Repeat | None:
        """The repeat of that name: in this body, or else in another, which may call this one."""
        declared = self.known.declarations
        inside = nodes(*self.body, *declared.blocks.values(), *declared.models.values())
        return next((each for each in inside if isinstance(each, tree.Repeat) and each.name.text == name.text), None)

    def _operator(
        self, function: str, operands: list[tree.Expression], written: tree.Expression, name: str | None
    ) -> list[Result] | None:
        values = [self.one(operand) for operand in operands]
        numbers = [f.value for f in values if isinstance(f, Constant) and not isinstance(f.value, bool)]
        flags = [f.value for f in values if isinstance(f, Constant) and isinstance(f.value, bool)]
        if function in rules.LOGIC and len(flags) == len(values):
            return [Constant(rules.LOGIC[function](*flags), _text(written), written.span)]
        if len(numbers) == len(values) and function not in rules.LOGIC:
            if function == "negate":
                return [Constant(constants.negative(numbers[0]), _text(written), written.span)]
            assert isinstance(written, tree.Binary)
            if function in rules.COMPARED:
                holds = constants.compared(rules.COMPARED[function], numbers[0], numbers[1], written.span)
                return [Constant(holds, _text(written), written.span)]
            value = constants.combine(written.operator, numbers[0], numbers[1], written.span)
            return [Constant(value, _text(written), written.span)]
        if any(f is None for f in values):
            return None
        slots = FUNCTIONS[function].slots
        if not any(isinstance(f, Tensor) for f in values) and function not in rules.LOGIC:
            raise refuse("E0213", "an operand must be a tensor", written.span)
        by_slot = {slot.name: value for slot, value in zip(slots, values, strict=True)}
        spans = {slot: value.span for slot, value in by_slot.items() if value is not None}
        sign = written.operator if isinstance(written, tree.Binary) else "-" if function == "negate" else "not"
        use = Use(function, written.span, by_slot, spans, sign=sign, origin=self._origin)
        return self._apply(FUNCTIONS[function], use, _text(written), name)

    # ------------------------------------------------------------ calls

    def _call(self, written: tree.Call, name: str | None) -> list[Result] | None:
        called = written.name.text
        if called in self.known.declarations.operations:
            return self._call_operation(written, name)
        shared = self.scope.shared(called)
        if shared is not None:
            levels, block = shared
            return None if block is None else self._call_block(written, block, (levels, called))
        if called in self.known.declarations.blocks:
            return self._call_block(written)
        if called == "size":
            return self._size(written)
        if constants.is_of_numbers(written):
            operands = [self.one(argument.value) for argument in written.arguments]
            numbers = []
            for operand, argument in zip(operands, written.arguments, strict=True):
                if isinstance(operand, Constant):
                    if isinstance(operand.value, bool):
                        raise refuse("E0213", f"`{operand.text}` is neither a number nor a tensor", argument.span)
                    numbers.append(operand.value)
            if len(numbers) == len(operands):
                return [Constant(constants.apply(called, numbers, written.span), _text(written), written.span)]
            if None in operands:
                return None
            slots = (slot.name for slot in FUNCTIONS[called].slots)
            return self._finish(written, dict(zip(slots, operands, strict=True)), (), name)
        late = (each for each in nodes(*self.body) if isinstance(each, tree.Share | tree.Copy))
        declared = next((each for each in late if each.name.text == called), None)
        if called not in FUNCTIONS and declared is not None:
            notes = [f"`{called}` is declared at {declared.span.place}"]
            message = f"`{called}` is called before it is declared"
            raise refuse("E0208", message, written.name.span, notes=notes, help="move its declaration up")
        if called not in FUNCTIONS:
            choices = [*FUNCTIONS, *self.known.declarations.blocks, *self.known.declarations.operations, "size"]
            help = foreign.function(called) or suggestion(called, choices)
            raise refuse("E0206", f"unknown function or block `{called}`", written.name.span, help=help)
        return self._call_function(written, FUNCTIONS[called], name)

    def _size(self, written: tree.Call) -> list[Result] | None:
        name = tree.single(written.arguments[0].value) if len(written.arguments) == 1 else None
        if name is None or written.arguments[0].name is not None:
            raise refuse("E0212", "`size` takes the name of an axis", written.span)
        axis = self.axis(name)
        if axis is None:
            return None
        size = Quantity(Fraction(axis.size), formula=Size(axis.name, axis.size))
        return [Constant(size, _text(written), written.span)]

    def _call_function(self, written: tree.Call, function: Function, name: str | None) -> list[Result] | None:
        arrows = self.arguments.arrows(written, function)
        if function.slots and function.slots[0].kind == TENSORS:
            by_slot: dict[str, Any] | None = self.arguments.all_tensors(written)
        else:
            by_slot = self.arguments.bound(written, function.slots)
        if by_slot is None or arrows is None:
            return None
        return self._finish(written, by_slot, arrows, name)

    def _finish(
        self, written: tree.Call, by_slot: dict[str, Any], arrows: tuple[Arrow, ...], name: str | None
    ) -> list[Result] | None:
        function = FUNCTIONS[written.name.text]
        named = list(
            zip(parameters_of_call(written, [slot.name for slot in function.slots]), written.arguments, strict=True)
        )
        spans = {slot: each.value.span for slot, each in named if slot is not None}
        if arrows:
            spans["->"] = arrows[0].span
        use = Use(function.name, written.span, by_slot, spans, arrows, origin=self._origin)
        tensors = {slot: each for slot, each in named if slot is not None and isinstance(by_slot.get(slot), Tensor)}

        def fits(moved: Mapping[str, str]) -> bool:
            arguments = {slot: by_slot[moved.get(slot, slot)] for slot in by_slot}
            return not refused_by(lambda: function.rule(evolve(use, arguments=arguments)))

        try:
            return self._apply(function, use, _text(written), name)
        except Refused as refused:
            raise reordered(refused, written, tensors, fits) from None

    def _apply(self, function: Function, use: Use, text: str, name: str | None) -> list[Result]:
        """Check the types of a use of a function, and append its step, or those that it stands for."""
        typed = function.rule(use)
        if isinstance(typed, Decomposition):
            values: list[Value] = []
            for number, part in enumerate(typed.parts):
                operands = [
                    values[each.part].number if isinstance(each, PrimitiveResult) else each for each in part.operands
                ]
                own = name if typed.results == (number,) else None
                values.append(self._step(part.function, operands, part.options, part.type, use.span, own))
            return [Tensor(values[i].number, values[i].type, text, use.span) for i in typed.results]
        type, options = typed
        scanned = self.scope.scans().intersection(type.names)
        if scanned:
            axis = min(scanned)
            message = f"`{text}` has the axis `{axis}` of this scan, of which the body sees one position"
            raise refuse("E0227", message, use.span, help=MADE_BEFORE)
        tensors = use.tensors
        dtype = next((t.type.dtype for t in tensors if t.type.dtype != "bool"), type.dtype)
        operands = []
        for value in use.arguments.values():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Tensor):
                    operands.append(part.value)
                elif isinstance(part, Constant):
                    operands.append(part.literal("bool" if isinstance(part.value, bool) else dtype))
        value = self._step(function.name, operands, options, type, use.span, name)
        return [Tensor(value.number, type, text, use.span)]

    def _origin(self, value: int, axis: str) -> Origin | None:
        return origin(self.scope, value, axis)

    def _step(
        self,
        function: str,
        operands: Sequence[spec.Operand],
        options: Mapping[str, Any],
        type: Type,
        span: Span,
        name: str | None,
    ) -> Value:
        """Append the step of a function."""
        if type.elements > limits.ELEMENTS:
            help = f"at most 2^{limits.ELEMENTS.bit_length() - 1}"
            raise refuse("E0007", f"a tensor of {type.elements:,} elements", span, help=help)
        (value,) = self.scope.add(spec.Apply(function, tuple(operands), options, type, span, name), [type])
        return value

    # ------------------------------------------------------------ blocks

    def _call_block(
        self, written: tree.Call, shared: SharedBlock | None = None, place: tuple[int, str] | None = None
    ) -> list[Result] | None:
        """A call of a block or, at its `place`, of one that is shared."""
        called = written.name.text if shared is None else shared.block
        self.known.called.add(called)
        block = self.known.declarations.blocks[called]
        arrows = self._arrows(written, "block", self.known.mentioned.get(called, ()))
        given = self._arguments(written, block.inputs)
        if given is None or arrows is None:
            return None
        tensors, numbers = given
        outer = self.scope.substitution if shared is None else {**self.scope.substitution, **dict(shared.substitution)}
        instance = Instance(called, composed(outer, arrows), numbers)
        if numbers and instance not in self.known.checked:
            self.known.check(instance, written)
        checked = self.known.checked.get(instance)
        if checked is None:
            return None
        names = (each.name.text for each in block.inputs if not each.is_number)
        types = zip(names, checked.body.types, strict=False)
        self._fit(written, list(types), tensors)
        segment = self.scope.segment(written.name.text)
        self.scope.segments[segment] = written.span
        operands = tuple(argument.value for argument in tensors)
        body = checked.body if shared is None else sharing(checked.body, shared, written.span)
        step = spec.CallBlock(called, segment, body, operands, written.span, place)
        values = self.scope.add(step, checked.results, max(1, checked.nodes), checked.depth + 1)
        return [Tensor(value.number, value.type, _text(written), written.span) for value in values]

    def _call_operation(self, written: tree.Call, name: str | None) -> list[Result] | None:
        called = written.name.text
        self.known.called.add(called)
        declared = self.known.declarations.operations[called]
        axes = frozenset(axis.text for type in declared.types for axis in type.axes)
        arrows = self._arrows(written, "op", axes)
        given = self._arguments(written, declared.inputs)
        operation = self.known.operations[called]
        if given is None or arrows is None or operation is None:
            return None
        tensors, _ = given
        renamed = tuple(pair for pair in composed(self.scope.substitution, arrows) if pair[0] in axes)
        inputs = [(operand, self._renamed(type, renamed, written)) for operand, type in operation.operands]
        self._fit(written, inputs, tensors)
        types = [self._renamed(type, renamed, written) for type in operation.results]
        results: list[Result] = []
        for number, type in enumerate(types):
            options = {"name": called, "result": number, "renamed": renamed}
            own = name if len(types) == 1 else None
            step = spec.Apply(spec.OPERATION, tuple(each.value for each in tensors), options, type, written.span, own)
            (value,) = self.scope.add(step, [type])
            results.append(Tensor(value.number, value.type, _text(written), written.span))
        return results

    def _renamed(self, type: Type, pairs: Sequence[tuple[str, str]], written: tree.Call) -> Type:
        """A declared type over the axes of a call. Raises Refused (E0216)."""
        names = [dict(pairs).get(name, name) for name in type.names]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            message = f"axis `{twice}` would appear twice in {type}"
            raise refuse("E0216", message, written.span)
        sizes = self.known.axes.sizes
        return Type(type.dtype, tuple(sizes[new] or old for new, old in zip(names, type.axes, strict=True)))

    def _arguments(
        self, written: tree.Call, inputs: Sequence[tree.Input]
    ) -> tuple[list[Tensor], tuple[Quantity, ...]] | None:
        """The tensors and the numbers that a block or an op is called with; None after reporting errors."""
        names = [declared.name.text for declared in inputs]
        bound = bind(written, names, names, self.report)
        if bound is None:
            return None
        tensors: list[Tensor | None] = []
        numbers: list[Quantity] = []
        for declared in inputs:
            argument = bound[declared.name.text]
            if declared.is_number:
                with self.report:
                    numbers.append(constants.evaluate(argument, self.number_of))
            else:
                tensors.append(self.tensor(argument))
        found = [tensor for tensor in tensors if tensor is not None]
        complete = len(found) + len(numbers) == len(inputs)
        return (found, tuple(numbers)) if complete else None

    def _arrows(self, written: tree.Call, kind: str, mentioned: Collection[str]) -> list[tuple[str, str]] | None:
        """The arrows of a call of a block or an op: axes that it is declared over, and those that replace them."""
        called, errors = written.name.text, self.report.errors
        renamed: dict[str, str] = {}
        for argument in written.arguments:
            if not isinstance(argument.value, tree.Arrow) or argument.name is not None:
                continue
            left, right = tree.single(argument.value.left), tree.single(argument.value.right)
            if left is None or right is None:
                article = "a block" if kind == "block" else "an op"
                self.report.error("E0223", f"an arrow in a call of {article} is `axis -> axis`", argument.span)
                continue
            if left.text not in mentioned:
                help = suggestion(left.text, mentioned, f"`{called}` is declared over")
                self.report.error("E0223", f"{kind} `{called}` has no axis `{left.text}`", left.span, help=help)
            elif left.text in renamed:
                self.report.error("E0223", f"axis `{left.text}` is renamed twice", argument.span)
            renamed[left.text] = right.text
            with self.report:
                self.axis(right)
        return list(renamed.items()) if self.report.errors == errors else None

    def _fit(self, written: tree.Call, inputs: Sequence[tuple[str, Type]], tensors: Sequence[Tensor]) -> None:
        """Check that the arguments of a block or an op fit its inputs. Raises Refused (E0204, E0205)."""
        called, by_name = written.name.text, {name: each for (name, _), each in zip(inputs, tensors, strict=True)}

        def check(moved: Mapping[str, str]) -> None:
            for name, declared in inputs:
                self._fits(called, name, by_name[moved.get(name, name)], declared)

        try:
            check({})
        except Refused as refused:
            named = zip(parameters_of_call(written, by_name), written.arguments, strict=True)
            arguments = {name: each for name, each in named if name is not None}
            raise reordered(refused, written, arguments, lambda moved: not refused_by(lambda: check(moved))) from None

    def _fits(self, block: str, name: str, argument: Tensor, declared: Type) -> None:
        """Check that an argument has the dtype and the axes that the block declares, in any order."""
        notes = [str(argument), f"`{block}` takes {name}: {declared}"]
        if argument.type.dtype != declared.dtype:
            cast = f"`cast({argument.text}, {declared.dtype})`"
            message = f"`{name}` of `{block}` is {declared.dtype}"
            raise refuse("E0205", message, argument.span, notes=notes, help=cast)
        if set(argument.type.names) != set(declared.names):
            extra = [n for n in argument.type.names if not declared.has(n)]
            missing = [n for n in declared.names if not argument.type.has(n)]
            help = None
            if len(extra) == 1 and len(missing) == 1:
                help = f"to call it over `{extra[0]}`: `{block}(…, {missing[0]} -> {extra[0]})`"
            axis_origin = self._origin(argument.value, (extra or missing)[0])
            notes += [str(axis_origin)] if axis_origin is not None else []
            help = help or (axis_origin.help if axis_origin is not None else None)
            message = f"`{argument.text}` does not have the axes that `{block}` takes"
            raise refuse("E0204", message, argument.span, notes=notes, help=help)


def refused_by(check: Callable[[], object]) -> bool:
    """Whether a check raises Refused."""
    try:
        check()
    except Refused:
        return True
    return False


def _unitless(constant: Constant) -> Constant:
    """The constant. Raises Refused (E0307) if it has a unit."""
    if isinstance(constant.value, Quantity) and constant.value.dimension not in (PLAIN, RATIO):
        raise refuse("E0307", "numbers in tensor expressions take no unit", constant.span)
    return constant


def _text(written: tree.Expression) -> str:
    """The source text of an expression, on one line and shortened."""
    span = written.span
    return shortened(" ".join(span.source.text[span.start : span.end].split()))


def _results(count: int) -> str:
    return "1 result" if count == 1 else f"{count} results"
