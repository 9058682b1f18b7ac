"""The result of translation validation: counts of what was checked, and the first violations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import define, field, frozen

from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Reshard
from partita.compiler.ops.op import Op
from partita.compiler.verify.rules import Rules, Violation, require
from partita.compiler.verify.value_numbering import UNKNOWN, ValueNumbering
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.syntax.source import Span

# Problems reported at most. A defect shows up in everything that depends on it; the first ones locate it.
MAX_REPORTED = 5
HELP = "this is a bug in Partita, not in the file: please report it with the file"


@frozen(eq=False)
class Validation:
    """The number of nodes, reshardings, messages and parameters that were checked, and the problems found.

    Without `problems` the partitioned program is equivalent to the single-device one.
    """

    nodes: int
    reshardings: int
    messages: int
    parameters: int
    problems: tuple[Diagnostic, ...]

    @property
    def passed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


@define(eq=False)
class Checker:
    """Checks nodes by the rules and numbers their results. Collects violations."""

    rules: Rules
    numbering: ValueNumbering
    nodes: int = 0
    reshardings: int = 0
    problems: list[Diagnostic] = field(factory=list)

    @contextmanager
    def at(self, span: Span | None = None, where: str = "") -> Iterator[None]:
        """Report violations raised inside. Any exception is one: a malformed program may raise anything."""
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
        if len(self.problems) < MAX_REPORTED:
            self.problems.append(Diagnostic("E0701", message, span, tuple(notes), HELP))

    def results(self, node: Node, operands: tuple[int, ...], new: bool = False) -> tuple[int, ...]:
        """The value numbers of a node's results. Unless `new`, the single-device program must have them."""
        if isinstance(node.op, Reshard) and node.op.reshards:
            self.rules.reshard(node.op, node.inputs, node.outputs)
            self.reshardings += 1
            return operands
        whole = self.rules.operation(node.op, node.inputs, node.outputs)
        self.nodes += 1
        return self.applied(whole, operands, node, new)

    def applied(self, whole: Op, operands: tuple[int, ...], node: Node, new: bool) -> tuple[int, ...]:
        """The value numbers of the results of a global (unsharded) operation."""
        if UNKNOWN in operands:
            return (UNKNOWN,) * len(node.outputs)
        numbers = self.numbering.of(whole, operands) if new else self.numbering.known(whole, operands)
        if numbers is None:
            what = ", ".join(f"`{value.name}`" for value in node.outputs)
            raise Violation(
                f"the single-device program has no `{whole.label}` of these operands ({what})", *node.inputs
            )
        return numbers

    def given(self, number: int, value: Value) -> int:
        """Returns `number`, after checking that `value` is laid out as a shard of its tensor."""
        whole = self.numbering.types[number]
        require(self.rules.tensor(value) == whole, f"`{value.name}` is not laid out as a shard of {whole}", value)
        return number


def quoted(node: Node) -> str:
    """How messages refer to a node: by its first result, else its operation."""
    return f"`{node.outputs[0].name}`" if node.outputs else f"`{node.op.label}`"
