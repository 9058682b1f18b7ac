"""Tables and paragraphs of text, without trailing blanks.

If a table is wider than the console, columns that readers can do without are omitted; if that is not enough, the cells
of the last column are wrapped. Columns without any entries are not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from rich.console import Console

GAP = "  "
# The minimum width at which the last column is wrapped.
LEAST = 20


@frozen
class Column:
    """A heading. `right` aligns numbers; of columns with `spare`, those with the highest are omitted first."""

    heading: str
    right: bool = False
    spare: int = 0


class Table:
    """Columns fitted to all of the rows, which can be printed in parts."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> None:
        self.columns = columns
        self.rows = list(rows)
        cells = [[column.heading, *entries] for column, entries in zip(columns, self._entries(), strict=True)]
        self._widths = [max(map(len, each)) for each in cells]
        self._shown = [i for i, each in enumerate(cells) if any(each[1:])]
        for i in sorted(self._shown, key=lambda i: -columns[i].spare):
            if self._least() > width and columns[i].spare:
                self._shown.remove(i)
        # The width of the last column if it is text.
        self._room = max(LEAST, width - sum(self._widths[i] + len(GAP) for i in self._shown[:-1]))

    def _entries(self) -> list[tuple[str, ...]]:
        return list(zip(*self.rows, strict=True)) if self.rows else [()] * len(self.columns)

    def _least(self) -> int:
        """The minimum width of the table, with the last column wrapped."""
        *before, last = self._shown
        last_width = self._widths[last] if self.columns[last].right else min(self._widths[last], LEAST)
        return sum(self._widths[i] + len(GAP) for i in before) + last_width

    @property
    def heading(self) -> str:
        """The line of headings."""
        return "\n".join(self.lines([[column.heading for column in self.columns]]))

    def lines(self, rows: Iterable[Sequence[str]] | None = None) -> Iterator[str]:
        """The lines of some rows, by default all."""
        for row in self.rows if rows is None else rows:
            *before, last = [(row[i], self._widths[i], self.columns[i].right) for i in self._shown]
            start = "".join((cell.rjust(n) if right else cell.ljust(n)) + GAP for cell, n, right in before)
            cell, n, right = last
            parts = [cell.rjust(n)] if right else wrap(cell, self._room) or [""]
            for i, part in enumerate(parts):
                yield ((" " * len(start) if i else start) + part).rstrip()


def print_text(console: Console, text: str, title: str = "") -> None:
    """Print a wrapped paragraph that starts with a title in bold."""
    from rich.text import Text

    lines = Text("\n".join(wrap(title + text, console.width)))
    lines.stylize("bold", 0, len(title))
    console.print(lines, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print the headings, if there are any, and all rows; nothing if there are none."""
    from rich.text import Text

    if table.rows and table.heading:
        console.print(Text(table.heading, "bold"), soft_wrap=True)
    for line in table.lines():
        console.print(Text(line), soft_wrap=True)
