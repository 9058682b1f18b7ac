"""Tables, which scroll within themselves where the page is narrow."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from partita.cli.page.markup import Markup, tag


@frozen
class Group:
    """Rows of a table; a `title` spans all columns above them."""

    rows: Sequence[Sequence[str]]
    title: Markup | None = None


def table(name: str, headings: Sequence[str], groups: Sequence[Group], right: set[int]) -> Markup:
    """A table whose columns `right` are aligned at the right. `name` is for those who do not see what it is."""

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
