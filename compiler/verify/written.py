"""Validates the text of the functions that close stages: they read no sum before all is added to it.

Nodes stand in that order (`transfers`), but what a function adds may wait for a collective, or be compiled together
with what stands behind it. On a CPU, where a copy to the host's memory is none, no number would show it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping

from attrs import define, field

from partita.compiler.program import Program
from partita.compiler.verify.rules import require


def check_written(program: Program) -> None:
    """Raises Violation if the last action of a stage adds to an accumulator that it has read."""
    functions = {each.name: each for each in ast.parse(program.source).body if isinstance(each, ast.FunctionDef)}
    written = _Written(functions)
    for stage in program.stages:
        if "C" not in stage.functions:
            continue
        sums = {f"a[{i}]": each.name for i, each in enumerate(stage.accumulators)}
        read: set[str] = set()
        for statement in functions[stage.functions["C"]].body:
            added = written.added(statement, sums)
            late = [sums[each] for each in sorted(added & read)]
            require(not late, f"stage {stage.index} reads the sum of `{', '.join(late)}` before all is added to it")
            read |= _named(statement, sums) - added


@define(eq=False)
class _Written:
    """What the statements of a module's functions add to."""

    functions: Mapping[str, ast.FunctionDef]
    known: dict[str, list[bool]] = field(factory=dict, init=False)  # of each parameter, whether its function adds to it

    def added(self, statement: ast.stmt, sums: Collection[str]) -> set[str]:
        """Those of some tensors to which a statement adds. One that adds has no result, unless it calls a function."""
        value = getattr(statement, "value", None)
        call = value.value if isinstance(value, ast.YieldFrom) else value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self.functions:
            adds = self._adds(call.func.id)
            texts = {ast.unparse(each) for each, own in zip(call.args, adds, strict=True) if own}
            return texts.intersection(sums)
        return _named(statement, sums) if isinstance(statement, ast.Expr) else set()

    def _adds(self, name: str) -> list[bool]:
        if name not in self.known:
            function = self.functions[name]
            names = [each.arg for each in function.args.args]
            added = {text for statement in function.body for text in self.added(statement, names)}
            self.known[name] = [each in added for each in names]
        return self.known[name]


def _named(statement: ast.stmt, sums: Collection[str]) -> set[str]:
    """Those of some tensors that a statement names."""
    texts = (ast.unparse(each) for each in ast.walk(statement) if isinstance(each, (ast.Name, ast.Subscript)))
    return {each for each in texts if each in sums}
