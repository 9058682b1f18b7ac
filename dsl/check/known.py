"""State that is shared while the blocks and models of a file are checked."""

from __future__ import annotations

from collections.abc import Callable

from partita.dsl import limits, spec
from partita.dsl.advice.report import Full
from partita.dsl.config.settings import Settings
from partita.dsl.functions.signatures import Constant
from partita.dsl.names.declarations import Declarations
from partita.dsl.names.scope import UNKNOWN, Checked, Instance, Meaning, Scope, Value
from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type


class CheckContext:
    """Declarations, axes and settings; the checked blocks, by the axes that they are called over, and operations; what
    is called and read.
    """

    def __init__(self, declarations: Declarations, settings: Settings) -> None:
        self.declarations, self.settings = declarations, settings
        self.axes, self.report = settings.axes, settings.report
        self.constants = Scope(None, {})  # around every body
        for name, quantity in self.axes.numbers.items():
            span = self.axes.constants[name].key.span
            self.constants.bind(name, UNKNOWN if quantity is None else Constant(quantity, name, span), span)
        self.checked: dict[Instance, Checked | None] = {}
        # Checks a block over certain axes, with certain numbers.
        self.check: Callable[[Instance, tree.Call], None] = lambda instance, call: None
        self.operations: dict[str, spec.Operation | None] = {}
        self.called: set[str] = set()
        self.bindings: dict[tuple[int, int], tuple[str, tree.Name]] = {}  # place -> (kind, name) bound there
        self.types: dict[tuple[int, int], Type] = {}  # place -> type of the tensor bound there, as checked first
        self.read: set[tuple[int, int]] = set()
        self.mentioned: dict[str, frozenset[str]] = {}  # block -> the axes that it and its callees mention
        self._work = 0

    def bound(self, name: tree.Name, meaning: Meaning, kind: str | None = None) -> None:
        """A name of a body is bound to this; unless it has no `kind`, there is a warning if nothing reads it."""
        if kind is not None:
            self.bindings.setdefault(name.span.key, (kind, name))
        if isinstance(meaning, Value):
            self.types.setdefault(name.span.key, meaning.type)

    def spend(self, span: Span) -> None:
        """Count one checked expression. Reports E0008 and raises Full if there are too many."""
        self._work += 1
        if self._work > limits.CHECKED:
            message = "the blocks are called over too many different sets of axes to be checked"
            self.report.error("E0008", message, span)
            raise Full
