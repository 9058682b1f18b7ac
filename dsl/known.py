"""What is known of a file while the bodies of its blocks and models are checked."""

from __future__ import annotations

from partita.dsl import limits, tree
from partita.dsl.axes import Axes
from partita.dsl.declarations import Declarations
from partita.dsl.report import Full, Report
from partita.dsl.scope import Checked, Instance
from partita.dsl.settings import Settings
from partita.dsl.source import Span


class Known:
    """Declarations and axes; the blocks that are checked, by the axes that they are called over; and what is read."""

    def __init__(self, declarations: Declarations, axes: Axes, report: Report) -> None:
        self.declarations, self.axes, self.report = declarations, axes, report
        self.settings = Settings(report, axes.entries, axes.used)
        self.checked: dict[Instance, Checked | None] = {}
        self.called: set[str] = set()
        self.bindings: dict[tuple[int, int], tuple[str, tree.Name]] = {}  # place -> what was bound there
        self.read: set[tuple[int, int]] = set()
        self.mentioned: dict[str, frozenset[str]] = {}  # block -> the axes it is written over
        self._work = 0

    def spend(self, span: Span) -> None:
        """Count an expression that is checked. Reports and raises Full when there are too many."""
        self._work += 1
        if self._work > limits.CHECKED:
            message = "the blocks are called over too many different sets of axes to be checked"
            self.report.error("E0008", message, span)
            raise Full
