"""HTML and SVG: elements as text, in which all other text is escaped; and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeAlias

from attrs import frozen

from partita.cli.source import printable

VOID = frozenset(("br", "link", "meta"))


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | None"


def text(value: str) -> Markup:
    """Text as HTML, without what that does not permit, escaped or not. What is HTML already stays as it is."""
    return value if isinstance(value, Markup) else Markup(escape(printable(value), quote=True))


def prose(value: str) -> Markup:
    """A message: what it quotes in backticks is code."""
    words = value.split("`")
    if len(words) % 2 == 0:  # a backtick without another
        return text(value)
    return joined(*(tag("code", word) if i % 2 else word for i, word in enumerate(words)))


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """An element. Attributes that are None are left out; `_` in their names is `-`, at the end nothing."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            written = f"{value:.6g}" if isinstance(value, float) else str(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{text(written)}"')
    start = f"<{' '.join(words)}>"
    return Markup(start) if name in VOID else Markup(f"{start}{joined(*children)}</{name}>")


def tiles(entries: Iterable[tuple[str, str]]) -> Markup:
    """Names, each with its value."""
    pairs = (tag("div", tag("dt", name), tag("dd", value)) for name, value in entries)
    return tag("dl", *pairs, class_="tiles")


def joined(*children: Child) -> Markup:
    """Several after each other; None is nothing."""
    return Markup("".join(text(child) for child in children if child is not None))


@frozen
class Group:
    """Rows of a table; a `title` spans all columns above them."""

    rows: Sequence[Sequence[str]]
    title: Markup | None = None


def table(name: str, headings: Sequence[str], groups: Sequence[Group], right: set[int]) -> Markup:
    """A table, which scrolls within itself where the page is narrow; its columns `right` are aligned at the
    right. `name` is for those who do not see what it is.
    """

    def cell(kind: str, column: int, value: str) -> Markup:
        return tag(kind, value, class_="right" if column in right else None)

    top = tag("tr", *(cell("th", i, heading) for i, heading in enumerate(headings)))
    bodies = []
    for group in groups:
        rows = [tag("tr", *(cell("td", i, value) for i, value in enumerate(row))) for row in group.rows]
        if group.title is not None:
            rows.insert(0, tag("tr", tag("th", group.title, colspan=str(len(headings)), scope="rowgroup")))
        bodies.append(tag("tbody", *rows))
    whole = tag("table", tag("thead", top), *bodies)
    return tag("div", whole, class_="table scroll", tabindex="0", role="group", aria_label=name)
