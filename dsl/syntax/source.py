"""Source files and the places in them that diagnostics, graphs and traces point to."""

from __future__ import annotations

from bisect import bisect_right

from attrs import field, frozen


@frozen(eq=False)
class Source:
    """One file's text, under the name by which the user knows it (as given on the command line or imported)."""

    name: str
    text: str = field(repr=False)
    _starts: tuple[int, ...] = field(init=False, repr=False)

    @_starts.default
    def _line_starts(self) -> tuple[int, ...]:
        starts = [0]
        starts.extend(i + 1 for i, character in enumerate(self.text) if character == "\n")
        return tuple(starts)

    @property
    def stem(self) -> str:
        """The name without directory and suffix."""
        return self.name.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".par")

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of a character offset, both from 1."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a line (from 1), without its line end."""
        if not 1 <= number <= len(self._starts):
            return ""
        start = self._starts[number - 1]
        end = self.text.find("\n", start)
        return self.text[start : end if end >= 0 else len(self.text)].rstrip("\r")


@frozen(eq=False)
class Span:
    """The characters `start` to `end` (exclusive) of a source."""

    source: Source = field(repr=False)
    start: int
    end: int

    def __repr__(self) -> str:
        return f"Span({self.place})"

    @property
    def key(self) -> tuple[int, int]:
        """What tells the name that begins here from all others: its source, by identity, and where it begins there."""
        return id(self.source), self.start

    @property
    def line(self) -> int:
        """The line on which the span begins, from 1."""
        return self.source.position(self.start)[0]

    @property
    def column(self) -> int:
        """The column at which the span begins, from 1."""
        return self.source.position(self.start)[1]

    @property
    def text(self) -> str:
        """The characters, on one line and shortened."""
        text = " ".join(self.source.text[self.start : self.end].split())
        return text if len(text) <= 60 else f"{text[:57]}…"

    @property
    def place(self) -> str:
        """`gpt.par:31:24`, for messages."""
        line, column = self.source.position(self.start)
        return f"{self.source.name}:{line}:{column}"

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of another in the same source."""
        return Span(self.source, self.start, max(self.end, other.end))
