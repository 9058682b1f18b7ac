"""What an editor shows of what the pointer is on, as Markdown: what a name is, its type and its layout."""

from __future__ import annotations

from partita.cli.editor.document import Document
from partita.compiler.report.explain import Explanation, explain
from partita.dsl.occurrences import BOUND, Occurrence
from partita.dsl.types import Type

MOST = 4  # tensors of one name that are described


def described(document: Document, line: int, column: int) -> str | None:
    """What the name at a place is, as Markdown: kind and declaration; of tensors type and layout."""
    found = document.at(line, column)
    if found is None:
        return None
    span = found.declared.span
    parts = [f"{found.kind} `{found.name.text}`", _code(span.source.line(span.line).strip())]
    if found.kind in BOUND:
        type = _type(document, found)
        parts += [f"type `{type}`"] if type is not None else []
        parts += [_tensor(each) for each in _tensors(document, found)]
    return "\n\n".join(parts)


def _type(document: Document, found: Occurrence) -> Type | None:
    """The type of a tensor where it was bound last before a place; None if that is not known."""
    _, _, types = document.checked
    places = [each.name.span.start for each in document.names if each.declared is found.declared]
    before = [place for place in places if place <= found.name.span.start and place in types]
    return types[before[-1]] if before else None


def _tensors(document: Document, found: Occurrence) -> list[Explanation]:
    """The tensors that a name is, made in the body in which it stands."""
    if document.compiled is None:
        return []
    try:
        tensors = explain(document.compiled, found.name.text)
    except ValueError:
        return []
    first, last = document.body(found.declared.span.line)
    return [
        each
        for each in tensors
        if each.span is not None
        and each.span.source.name == found.declared.span.source.name
        and first <= each.span.line <= last
    ][:MOST]


def _tensor(found: Explanation) -> str:
    """Type, and for each mesh axis how the tensor is split along it."""
    splits = [
        f"over {each.mesh_axis} ({each.parts}): {each.axis or 'replicated'}"
        + (f", by `{each.rule.text}`" if each.rule is not None else "")
        for each in found.splits
    ]
    lines = [f"`{found.name}`: `{found.type}`, {found.role}", f"a rank computes with `{found.local}`", *splits]
    return "\n".join(f"- {line}" if i else line + "\n" for i, line in enumerate(lines))


def _code(line: str) -> str:
    return f"```par\n{line}\n```"
