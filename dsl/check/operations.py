"""`op` declarations → `spec.Operation`: their types, the Python functions that they name, and what is declared of them.

The Python files are read, so that a run knows their text, but never run: that takes `--allow-python`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from partita.dsl import spec
from partita.dsl.advice.report import suggestion
from partita.dsl.check import constants
from partita.dsl.check.bodies import BodyChecker
from partita.dsl.check.known import CheckContext
from partita.dsl.config.builtins import Number
from partita.dsl.config.python_names import check_mentioned, check_name
from partita.dsl.config.settings import number
from partita.dsl.diagnostic import refuse
from partita.dsl.names.scope import Scope
from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

Check: TypeAlias = Callable[[tree.Name], None]
ENTRIES = ("forward", "backward", "split", "linear", "flops")
FORM = '`python("kernels.py", "function")`'
ONE = spec.Literal(1)
# The most FLOPs that an element of a result may be said to take: enough for any, and no product of it overflows.
MOST_FLOPS = 1e15


class Operations:
    """Checks the operations that a file declares."""

    def __init__(self, known: CheckContext) -> None:
        self.known, self.report = known, known.report

    def run(self) -> None:
        """Check all, into `known.operations`; those that are wrong are None there."""
        for name, written in self.known.declarations.operations.items():
            errors = self.report.errors
            block = self.known.declarations.blocks.get(name)
            if block is not None:
                notes = [f"the block is at {block.name.span.place}"]
                self.report.error("E0301", f"`{name}` is a block and an op", written.name.span, notes)
            operation = self.operation(written)
            self.known.operations[name] = operation if self.report.errors == errors else None

    def operation(self, written: tree.Operation) -> spec.Operation | None:
        """One operation; None after reporting errors."""
        errors = self.report.errors
        checker = BodyChecker(self.known, Scope(self.known.constants, {}), ())
        names = checker.inputs(written.inputs)
        types = [checker.type(each) for each in written.results]
        results = tuple(each for each in types if each is not None)
        if not names:
            message = f"op `{written.name.text}` has no operands"
            self.report.error("E0210", message, written.name.span, help="a tensor that nothing determines is a `param`")
        entries = self.entries(written)
        if "forward" not in entries:
            help = f"`forward = {FORM.strip('`')}`"
            self.report.error("E0305", f"op `{written.name.text}` needs `forward`", written.name.span, help=help)
        if self.report.errors > errors or len(results) < len(types):
            return None
        operands = dict(zip(names, checker.scope.types, strict=True))
        forward = backward = None
        with self.report:
            forward = self.function(entries["forward"])
        if "backward" in entries:
            with self.report:
                backward = self.function(entries["backward"])
            with self.report:
                _differentiable(entries["backward"], operands, results)
        split = self.names("split", entries, lambda name: _splits(name, checker, operands, results))
        linear = self.names("linear", entries, lambda name: _linear(name, operands, results))
        flops = ONE
        with self.report:
            flops = _flops(entries["flops"], checker) if "flops" in entries else ONE
        if self.report.errors > errors or forward is None:
            return None
        axes = {axis.text for type in written.types for axis in type.axes}
        split = {name: split[name] for name in results[0].names if name in split}
        linear = {name: linear[name] for name in operands if name in linear}
        return spec.Operation(
            written.name.text,
            tuple(operands.items()),
            results,
            forward,
            backward,
            tuple(split),
            tuple(i for i, name in enumerate(operands) if name in linear),
            flops,
            {name: formula for name, formula in self.known.axes.formulas.items() if name in axes},
            written.name.span,
            tuple(split.values()),
            tuple(linear.values()),
        )

    def entries(self, written: tree.Operation) -> dict[str, tree.Entry]:
        """The entries by key; reports unknown ones, and those that are given twice."""
        entries: dict[str, tree.Entry] = {}
        for entry in written.table.entries:
            key = entry.key
            if key.text not in ENTRIES:
                help = suggestion(key.text, ENTRIES, "there are")
                self.report.error("E0303", f"an op has no entry `{key.text}`", key.span, help=help)
            elif key.text in entries:
                notes = [f"the first is at {entries[key.text].key.span.place}"]
                self.report.error("E0304", f"`{key.text}` is given twice", key.span, notes)
            else:
                entries[key.text] = entry
        return entries

    def function(self, entry: tree.Entry) -> spec.PythonFunction:
        """`python("kernels.py", "fused_norm")`. Raises Refused."""
        call = tree.bare(entry.value)
        what = f"`{entry.key.text}` is a Python function"
        if not isinstance(call, tree.Call) or call.name.text != "python":
            raise refuse("E0306", what, entry.value.span, help=FORM)
        values = [argument.value for argument in call.arguments if argument.name is None]
        strings = [value for value in values if isinstance(value, tree.String) and value.value]
        if len(call.arguments) != 2 or len(strings) != 2:
            raise refuse("E0306", f"{what}, named by its file and its name", call.span, help=FORM)
        path, name = strings
        check_name(name.value, name.span)
        source = self.known.settings.beside(path.value, path.span)
        check_mentioned(source, path.value, name.value, name.span)
        return spec.PythonFunction(source, name.value, call.span)

    def names(self, key: str, entries: Mapping[str, tree.Entry], check: Check) -> dict[str, Span]:
        """The names in a list, or a single one, each with its place."""
        if key not in entries:
            return {}
        written = tree.bare(entries[key].value)
        spans: dict[str, Span] = {}
        for item in written.items if isinstance(written, tree.List) else (written,):
            name = tree.single(item)
            if name is None:
                what = {"split": "axes, such as `[batch, seq]`", "linear": "operands, such as `[x]`"}[key]
                self.report.error("E0306", f"`{key}` is a list of {what}", item.span)
            elif name.text in spans:
                notes = [f"the first is at {spans[name.text].place}"]
                self.report.error("E0304", f"`{name.text}` is in `{key}` twice", name.span, notes)
            else:
                spans[name.text] = name.span
                with self.report:
                    check(name)
        return spans


def _splits(name: tree.Name, checker: BodyChecker, operands: Mapping[str, Type], results: tuple[Type, ...]) -> None:
    """An axis of `split` is one of all results and of an operand. Raises Refused."""
    checker.expressions.axis(name)
    for position, result in enumerate(results, 1):
        if not result.has(name.text):
            which = "the result" if len(results) == 1 else f"result {position}"
            help = f"axes of {which}: {', '.join(result.names) or 'none'}"
            raise refuse("E0203", f"{which} has no axis `{name.text}`", name.span, help=help)
    if not any(type.has(name.text) for type in operands.values()):
        message = f"no operand has the axis `{name.text}`, so the function cannot know which part of it to compute"
        raise refuse("E0203", message, name.span)


def _linear(name: tree.Name, operands: Mapping[str, Type], results: tuple[Type, ...]) -> None:
    """What it may be linear in is a float operand, of float results. Raises Refused."""
    if name.text not in operands:
        help = suggestion(name.text, operands, "its operands are")
        raise refuse("E0201", f"there is no operand `{name.text}`", name.span, help=help)
    for what, type in ((f"`{name.text}`", operands[name.text]), *(("a result", each) for each in results)):
        if not type.is_float:
            raise refuse("E0205", f"{what} is {type.dtype}, and only floats are linear", name.span)


def _differentiable(entry: tree.Entry, operands: Mapping[str, Type], results: tuple[Type, ...]) -> None:
    """A gradient flows from float results to float operands. Raises Refused."""
    if not any(each.is_float for each in results):
        raise refuse("E0205", "no result is a float, so none has a gradient", entry.key.span)
    if not any(type.is_float for type in operands.values()):
        raise refuse("E0205", "no operand is a float, so none has a gradient", entry.key.span)


def _flops(entry: tree.Entry, checker: BodyChecker) -> spec.Literal:
    """The FLOPs of an element of the first result. Raises Refused."""
    quantity = constants.evaluate(entry.value, checker.expressions.number_of)
    value = number(quantity, Number(minimum=0, maximum=MOST_FLOPS), entry.value, "`flops`")
    return spec.Literal(float(value), quantity.formula)
