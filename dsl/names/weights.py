"""`weights` declarations → `correspondence.Weights`: names of parameters, axes, and names with formulas in braces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import groupby

from attrs import evolve

from partita.dsl import limits, spec
from partita.dsl.advice.report import Report, listed, suggestion
from partita.dsl.check import constants
from partita.dsl.check.constants import Lookup
from partita.dsl.check.formulas import Size, Term
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.names.correspondence import Groups, Join, Line, Parameter, Pattern, Theirs, Weights
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import parse_expression
from partita.dsl.syntax.source import Source, Span
from partita.dsl.syntax.units import PLAIN, Quantity
from partita.dsl.syntax.walk import nodes
from partita.dsl.types import Type

NAMES = "an axis of theirs is a product of ours, such as `heads * key`, or 1"
ONE_JOIN = "parameters are joined along one axis"


def parameters_of(model: spec.Model) -> list[Parameter]:
    """The parameters and buffers of a model. Raises Refused (E0008) if they are too many to be named."""
    counts: dict[int, int] = {}

    def count(body: spec.Body) -> int:
        if id(body) not in counts:
            counts[id(body)] = sum(
                count(step.body) if isinstance(step, spec.CallBlock | spec.Repeat | spec.Scan) else 1
                for step in body.steps
                if isinstance(step, spec.CallBlock | spec.Repeat | spec.Scan | spec.Parameter)
            )
        return counts[id(body)]

    if count(model.body) > limits.PARAMETERS:
        message = f"`weights` name at most {limits.PARAMETERS:,} parameters, and model `{model.name}` has more"
        raise refuse("E0008", message, model.span)
    return list(_parameters(model.body, (model.name,), ()))


def _parameters(body: spec.Body, path: tuple[str, ...], repeats: tuple[tuple[int, int], ...]) -> Iterator[Parameter]:
    for step in body.steps:
        match step:
            case spec.Parameter():
                yield Parameter((*path, step.name), step.type, repeats)
            case spec.CallBlock():
                yield from _parameters(step.body, (*path, step.scope), repeats)
            case spec.Repeat():
                yield from _parameters(step.body, (*path, step.scope), (*repeats, (len(path), step.count)))
            case spec.Scan():
                yield from _parameters(step.body, path, repeats)


class Checker:
    """Checks the `weights` of a model with these parameters; `number` looks up constants."""

    def __init__(self, model: str, parameters: Sequence[Parameter], number: Lookup, report: Report) -> None:
        self.model, self.number, self.report = model, number, report
        self.by_end: dict[str, list[Parameter]] = {}
        for parameter in parameters:
            self.by_end.setdefault(parameter.path[-1], []).append(parameter)

    def weights(self, written: tree.Weights) -> Weights | None:
        """The checked declaration; None after reporting errors."""
        errors = self.report.errors
        lines = []
        named: dict[str, Span] = {}
        for line in written.lines:
            if isinstance(line, tree.Correspondence):
                with self.report:
                    lines += [self.line(each, named) for each in _alone(line)]
        skips = [each for line in written.lines if isinstance(line, tree.Skip) for each in line.patterns]
        weights = Weights(
            written.name.text, self.model, tuple(lines), tuple(each.value for each in skips), written.span
        )
        if self.report.errors == errors:
            with self.report:
                self.twice(weights)
        return weights if self.report.errors == errors else None

    def twice(self, weights: Weights) -> None:
        """Refuse a name of theirs that two tensors have (E0322): of one line, or of several with another shape. Several
        lines may have one tensor. Refuse names that are too many (E0008).
        """
        if sum(line.count for line in weights.lines) > limits.FOREIGN:
            message = f"`weights {weights.name}` names more than {limits.FOREIGN:,} tensors"
            raise refuse("E0008", message, weights.span)
        seen: dict[str, tuple[Line, Theirs, Span]] = {}
        for line in weights.lines:
            for tensor in line.tensors():
                for pattern, name in zip(line.theirs, tensor.names, strict=True):
                    before, other, span = seen.setdefault(name, (line, tensor, pattern.span))
                    if other is tensor or (before is not line and _same_form(other, tensor)):
                        continue
                    message = f"two tensors of theirs are called `{name}`"
                    if before is line:
                        help = "in braces, the numbers of iterations tell tensors apart: `layers.{layer}.weight`"
                        raise refuse("E0322", message, pattern.span, help=help)
                    shapes = f"the other, at {span.place}, has shape {list(other.shape)}, and this {list(tensor.shape)}"
                    help = "lines with one tensor of theirs have it in one shape"
                    raise refuse("E0322", message, pattern.span, notes=[shapes], help=help)

    def line(self, line: tree.Correspondence, named: dict[str, Span]) -> Line:
        """A checked line. Raises Refused (E0317, E0320, E0321, E0322)."""
        ours = [self.parameter(path) for path in line.ours]
        for path, parameter in zip(line.ours, ours, strict=True):
            if parameter.name in named:
                notes = (f"the first is at {named[parameter.name].place}",)
                self.report.error("E0322", f"`{parameter.name}` is named twice", path.span, notes)
            named[parameter.name] = path.span
        first = ours[0]
        for path, parameter in zip(line.ours, ours, strict=True):
            if _around(parameter) != _around(first):
                message = f"`{parameter.name}` and `{first.name}` are not in the same repeats"
                raise refuse("E0320", message, path.span, help="one tensor of theirs has parameters of one iteration")
        theirs = tuple(self.pattern(text, first) for text in line.theirs)
        repeats = {first.path[position]: count for position, count in first.repeats}
        indexed = tuple(name for name in first.type.names if name in theirs[0].variables - repeats.keys())
        for text, pattern in zip(line.theirs, theirs, strict=True):
            self.tells_apart(text, pattern, repeats, indexed)
        groups, joined = self.groups(line, ours, indexed)
        return Line(tuple(ours), theirs, groups, joined, indexed, line.span)

    def tells_apart(
        self, text: tree.String, pattern: Pattern, repeats: Mapping[str, int], indexed: Sequence[str]
    ) -> None:
        """Refuse (E0321) a name that is the same for all iterations of a repeat, or lacks an index of the first."""
        for name, count in repeats.items():
            if count > 1 and name not in pattern.variables:
                message = f"this name is the same in all {count} iterations of `{name}`"
                raise refuse("E0321", message, text.span, help=f"`{{{name}}}` in it is the number of the iteration")
        if {*indexed} != pattern.variables - repeats.keys():
            raise refuse("E0321", "names of one tensor have the same axes in braces", text.span)

    # ------------------------------------------------------------ our names

    def parameter(self, path: tree.Path) -> Parameter:
        """The parameter of a path: its name without numbers of iterations, or the end of it. Raises Refused."""
        parts = tuple(part.text for part in path.parts)
        ends = self.by_end.get(parts[-1], ())
        matching = [each for each in ends if each.path[-len(parts) :] == parts]
        if not matching:
            known = [".".join(each.path[-len(parts) :]) for every in self.by_end.values() for each in every]
            message = f"model `{self.model}` has no parameter `{path}`"
            raise refuse("E0317", message, path.span, help=suggestion(str(path), known))
        whole = [each for each in matching if each.path == parts]
        if len(matching) > 1 and not whole:
            message = f"`{path}` may be {listed([each.name for each in matching[:2]], 'or')}"
            help = "write more of its name, or the names of all that are filled from this tensor, with commas between"
            raise refuse("E0320", message, path.span, help=help)
        return (whole or matching)[0]

    # ------------------------------------------------------------ their axes

    def groups(
        self, line: tree.Correspondence, ours: Sequence[Parameter], indexed: Sequence[str]
    ) -> tuple[tuple[Groups, ...], Join | None]:
        """For each of ours the axes of theirs, and where they are joined. Raises Refused (E0320)."""
        grouped: list[list[tuple[str, ...]]] = [[] for _ in ours]
        joined: Join | None = None
        for number, axis in enumerate(line.axes):
            outer, terms = _terms(axis)
            if axis.joined or len(terms) > 1:
                if joined is not None:
                    raise refuse("E0320", ONE_JOIN, axis.span)
                if axis.joined and len(terms) > 1:
                    help = "`+ heads * key` for all, or a sum with a term for each: `heads * key + states`"
                    raise refuse("E0320", "`+` before a sum", axis.span, help=help)
                if len(ours) == 1:
                    message = "one parameter is not joined with others"
                    raise refuse("E0320", message, axis.span, help="without `+`; several of ours stand before `=`")
                if len(terms) not in (1, len(ours)):
                    message = f"{len(terms)} terms for {len(ours)} parameters"
                    raise refuse("E0320", message, axis.span, help="each has a term, in their order")
                joined = Join(number, outer)
            for own, each in zip(grouped, terms * len(ours) if len(terms) == 1 else terms, strict=True):
                own.append(each)
        if len(ours) > 1 and joined is None:
            span = line.axes[0].span if line.axes else line.span
            help = "`+` before the axis of theirs along which ours follow each other: `[embed, + heads * key]`; "
            help += "or, if each of ours has all of theirs, a line for each"
            raise refuse("E0320", "it is not said how these parameters are joined", span, help=help)
        for path, parameter, groups in zip(line.ours, ours, grouped, strict=True):
            self.complete(line, path, parameter, groups, indexed)
        return tuple(tuple(groups) for groups in grouped), joined

    def complete(
        self,
        line: tree.Correspondence,
        path: tree.Path,
        parameter: Parameter,
        groups: Sequence[Sequence[str]],
        indexed: Sequence[str],
    ) -> None:
        """Refuse (E0320) axes that are not those of a parameter, each once."""
        type, seen = parameter.type, set(indexed)
        missing = [name for name in indexed if not type.has(name)]
        if missing:
            raise refuse("E0320", f"`{parameter.name}` has no axis `{missing[0]}`", path.span)
        paths = (each for each in nodes(*line.axes) if isinstance(each, tree.Path))
        written = {name.text: name for path in paths for name in path.parts}
        for name in (name for group in groups for name in group):
            if not type.has(name):
                message = f"`{parameter.name}` has no axis `{name}`"
                help = suggestion(name, type.names, "its axes:")
                raise refuse("E0320", message, written[name].span, help=help)
            if name in seen:
                how = "in braces and in brackets" if name in indexed else "twice"
                raise refuse("E0320", f"axis `{name}` stands {how}", written[name].span)
            seen.add(name)
        left = [name for name in type.names if name not in seen]
        if left:
            span = line.axes[0].span.to(line.axes[-1].span) if line.axes else line.theirs[-1].span
            message = f"{listed(left)} of `{parameter.name}` {'is' if len(left) == 1 else 'are'} missing"
            help = f"`[{', '.join(name for name in type.names if name not in indexed)}]` is the order of ours"
            raise refuse("E0320", message, span, help=help)

    # ------------------------------------------------------------ their names

    def pattern(self, text: tree.String, parameter: Parameter) -> Pattern:
        """A name of theirs, for a parameter and those beside it. Raises Refused (E0321)."""
        parts: list[str | Term] = [""]
        source, position, end = text.span.source, text.span.start + 1, text.span.end - 1
        while position < end:
            character = source.text[position]
            if character == "\\":
                position += 1
                parts.append(tree.ESCAPES.get(source.text[position], source.text[position]))
            elif character == "{":
                close = source.text.find("}", position, end)
                if close < 0:
                    raise refuse("E0321", "`{` is never closed", Span(source, position, position + 1))
                parts.append(self.formula(source, position + 1, close, parameter))
                position = close
            elif character == "}":
                raise refuse("E0321", "`}` closes nothing", Span(source, position, position + 1))
            else:
                parts.append(character)
            position += 1
        if not any(parts):
            raise refuse("E0321", "a name of theirs is empty", text.span)
        return Pattern(tuple(_together(parts)), text.span)

    def formula(self, source: Source, start: int, end: int, parameter: Parameter) -> Term:
        """A formula in braces. Raises Refused (E0321)."""
        within = Span(source, start, end)
        written = parse_expression(source, self.report, start, end)
        if written is None:
            raise Refused(())
        repeats = [parameter.path[position] for position, _ in parameter.repeats]
        known = {parameter.path[position]: count for position, count in parameter.repeats}
        mentioned = set()

        def lookup(expression: tree.Path | tree.Call) -> Quantity:
            name = tree.single(expression)
            if name is not None and repeats.count(name.text) > 1:
                raise refuse("E0321", f"`{parameter.name}` is in two repeats called `{name.text}`", name.span)
            if name is not None and name.text in known:
                return variable(name.text, known[name.text])
            if name is not None and parameter.type.has(name.text):
                return variable(name.text, parameter.type.axis(name.text).size)
            try:
                return self.number(expression)
            except Refused as refused:
                if [each.code for each in refused.diagnostics] != ["E0306"]:
                    raise
                choices = [*known, *parameter.type.names]
                shown = str(expression) if isinstance(expression, tree.Path) else expression.name.text
                message = f"`{shown}` is no repeat around `{parameter.name}`, no axis of it and no constant"
                help = suggestion(shown, choices) if choices else "it is in no repeat, and has no axes"
                raise refuse("E0321", message, expression.span, help=help) from None

        def variable(name: str, count: int) -> Quantity:
            mentioned.add(name)
            return Quantity(Fraction(count - 1), PLAIN, Size(name, count - 1))

        term = constants.evaluate(written, lookup).term
        if mentioned and isinstance(term, Fraction | float):
            raise refuse("E0321", "this formula is too long", within)
        return term


def _alone(line: tree.Correspondence) -> Iterator[tree.Correspondence]:
    """A line for each of ours, if they are one parameter of several calls, which have all of theirs. Raises Refused."""
    joined = any(axis.joined or len(_terms(axis)[1]) > 1 for axis in line.axes)
    if joined or len({path.parts[-1].text for path in line.ours}) > 1:
        yield line
    else:
        yield from (evolve(line, ours=(path,)) for path in line.ours)


def _same_form(one: Theirs, other: Theirs) -> bool:
    """Whether one tensor may be both."""
    return one.shape == other.shape and one.parts[0].type.is_float == other.parts[0].type.is_float


def _around(parameter: Parameter) -> tuple[object, ...]:
    """The repeats around a parameter."""
    return tuple((parameter.path[: position + 1], count) for position, count in parameter.repeats)


def _together(parts: Sequence[str | Term]) -> Iterator[str | Term]:
    """The parts, with texts that follow each other as one."""
    for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
        if not is_text:
            yield from group
        elif text := "".join(map(str, group)):
            yield text


def _terms(axis: tree.WeightAxis) -> tuple[int, list[tuple[str, ...]]]:
    """The axes of ours in each term of an axis of theirs, whose sum may be a factor: `heads * (key + states)`. And how
    many axes come before the sum, or the `+`. Raises Refused (E0320).
    """
    factors = list(_operands(axis.value, "*"))
    sums = [(i, each.inner) for i, each in enumerate(factors) if isinstance(each, tree.Group) and _is_sum(each.inner)]
    if len(sums) > 1:
        raise refuse("E0320", ONE_JOIN, axis.span)
    first, summed = sums[0] if sums else (0, axis.value)
    before = [axis.outer] if axis.outer is not None else []
    before_sum, after = [*before, *factors[:first]], factors[first + 1 :] if sums else []
    outer, rest = (tuple(name for each in part for name in _factors(each)) for part in (before_sum, after))
    return len(outer), [(*outer, *_factors(term), *rest) for term in _operands(summed, "+")]


def _is_sum(expression: tree.Expression) -> bool:
    return isinstance(expression, tree.Binary) and expression.operator == "+"


def _operands(expression: tree.Expression, operator: str) -> Iterator[tree.Expression]:
    """The terms of a sum, or the factors of a product."""
    if isinstance(expression, tree.Binary) and expression.operator == operator:
        yield from _operands(expression.left, operator)
        yield expression.right
    else:
        yield expression


def _factors(term: tree.Expression) -> Iterator[str]:
    """The axes of a product; none in `1`. Raises Refused (E0320)."""
    if isinstance(term, tree.Number) and term.text == "1":
        return
    name = tree.single(term) if isinstance(term, tree.Path) else None
    if name is not None:
        yield name.text
    elif isinstance(term, tree.Binary) and term.operator == "*":
        yield from _factors(term.left)
        yield from _factors(term.right)
    else:
        raise refuse("E0320", "expected axes", term.span, help=NAMES)


def parameters_in(types: Mapping[str, Type]) -> list[Parameter]:
    """The parameters of full names, such as those of a checkpoint."""
    counts: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    by_path: dict[tuple[tuple[str, ...], tuple[int, ...]], Type] = {}
    for name, type in types.items():
        path: list[str] = []
        positions, numbers = [], []
        for part in name.split("."):
            if part.isdecimal():
                positions.append(len(path) - 1)
                numbers.append(int(part))
            else:
                path.append(part)
        key = (tuple(path), tuple(positions))
        by_path[key] = type
        counts[key] = [max(a, b + 1) for a, b in zip(counts.get(key, [0] * len(numbers)), numbers, strict=True)]
    return [
        Parameter(path, type, tuple(zip(positions, counts[path, positions], strict=True)))
        for (path, positions), type in by_path.items()
    ]
