"""What a check has found: how much was checked, and the first violations, each with its place and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import define, field, frozen

from partita.compiler.certificate.meanings import UNKNOWN, Meanings
from partita.compiler.certificate.rules import Rules, Violation, demand
from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Move
from partita.compiler.ops.op import Op
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.source import Span

# One defect shows in all that follows from it: the first of them say where it is.
MOST = 5
HELP = "this is a bug in Partita, not in the file: please report it with the file"


@frozen(eq=False)
class Certificate:
    """What was proved of a compilation: the nodes, changes of layout, messages and parameters that were checked.

    Without `problems` the partitioned program is the whole one.
    """

    nodes: int
    moves: int
    messages: int
    parameters: int
    problems: tuple[Diagnostic, ...]

    @property
    def passed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


@define(eq=False)
class Checker:
    """Checks nodes by the rules, and tells what their results mean. Collects what does not hold."""

    rules: Rules
    meanings: Meanings
    nodes: int = 0
    moves: int = 0
    problems: list[Diagnostic] = field(factory=list)

    @contextmanager
    def at(self, span: Span | None = None, where: str = "") -> Iterator[None]:
        """Report what is violated within. A broken program breaks what reads it: any exception is a violation."""
        try:
            yield
        except Violation as violation:
            self.report(str(violation), span, violation.values, where)
        except Refused as refused:
            for each in refused.diagnostics:
                self.report(each.message, each.span, (), " ".join(each.notes))
        except Exception as error:
            self.report(f"the program is not well formed ({type(error).__name__}: {error})", span, (), where)

    def report(self, message: str, span: Span | None, values: Sequence[Value], where: str) -> None:
        """Add a problem."""
        notes = [f"{v.name}: {v.type} on each rank, laid out as {v.layout}" for v in dict.fromkeys(values)]
        notes += [where] if where else []
        if len(self.problems) < MOST:
            self.problems.append(Diagnostic("E0701", message, span, tuple(notes), HELP))

    def results(self, node: Node, operands: tuple[int, ...], new: bool = False) -> tuple[int, ...]:
        """The meanings of a node's results. Unless `new`, the whole program must have them already."""
        if isinstance(node.op, Move):
            self.rules.move(node.op, node.inputs, node.outputs)
            self.moves += 1
            return operands
        whole = self.rules.operation(node.op, node.inputs, node.outputs)
        self.nodes += 1
        return self.applied(whole, operands, node, new)

    def applied(self, whole: Op, operands: tuple[int, ...], node: Node, new: bool) -> tuple[int, ...]:
        """The meanings of a whole operation's results."""
        if UNKNOWN in operands:
            return (UNKNOWN,) * len(node.outputs)
        found = self.meanings.of(whole, operands) if new else self.meanings.known(whole, operands)
        if found is None:
            what = ", ".join(f"`{value.name}`" for value in node.outputs)
            raise Violation(
                f"the single-device program has no `{whole.label}` of these operands ({what})", *node.inputs
            )
        return found

    def given(self, number: int, value: Value) -> int:
        """The meaning of a given value, once its type and layout have been found to be parts of the whole."""
        whole = self.meanings.types[number]
        demand(self.rules.whole(value) == whole, f"`{value.name}` is not laid out as a shard of {whole}", value)
        return number


def quoted(node: Node) -> str:
    """What a message calls a node: its first result, or its operation."""
    return f"`{node.outputs[0].name}`" if node.outputs else f"`{node.op.label}`"
