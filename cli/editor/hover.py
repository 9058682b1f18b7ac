"""What an editor shows of what the pointer is on, as Markdown: what a name is, its type and its layout."""

from __future__ import annotations

from collections.abc import Iterator

from partita.cli.editor.document import Document
from partita.cli.number_format import bytes_text, seconds_text
from partita.compiler.analysis.traffic import cost, traffic
from partita.compiler.report.explain import Explanation, explain
from partita.compiler.state import Compilation
from partita.dsl.grouping import grouped
from partita.dsl.names.occurrences import BOUND, Occurrence
from partita.dsl.syntax import tree
from partita.dsl.types import Type

MOST = 4  # tensors of one name that are described


def described(document: Document, line: int, column: int) -> str | None:
    """What the name at a place is, as Markdown: kind and declaration; of tensors type and layout."""
    occurrence = document.at(line, column)
    if occurrence is None:
        return _rule(document, line, column)
    span = occurrence.declared.span
    parts = [f"{occurrence.kind} `{occurrence.name.text}`", _code(span.source.line(span.line).strip())]
    if occurrence.kind in BOUND:
        type = _type(document, occurrence)
        parts += [f"type `{type}`"] if type is not None else []
        parts += [_tensor(each) for each in _tensors(document, occurrence)]
    return "\n\n".join(parts)


def _rule(document: Document, line: int, column: int) -> str | None:
    """What is sent along the mesh axes of the `shard` rule at a place, by all rules together."""
    rules = [rule for each in document.declarations if isinstance(each, tree.Layout) for rule in each.rules]
    for rule in rules:
        span = rule.span
        if isinstance(rule, tree.Shard) and span.line == line and span.column <= column:
            state = document.compiled
            layout = state.spec.layout if state is not None else None
            if state is None or layout is None or all(each.span.start != span.start for each in layout.rules):
                return None  # of another layout than is trained with
            lines = [line for name in rule.mesh_axes for line in _sent(state, name.text)]
            return "\n\n".join([_code(span.text), "a step sends, from the rank that sends the most:", "\n".join(lines)])
    return None


def _sent(state: Compilation, axis: str) -> Iterator[str]:
    own = grouped((each for each in traffic(state) if each.axis == axis), lambda each: (each.phase, each.kind))
    for (phase, kind), records in own.items():
        sums = cost(records).busiest
        yield f"- over {axis}, {phase.name.lower()}: {kind} {bytes_text(sums.bytes)} in {seconds_text(sums.seconds)}"
    if not own:
        yield f"- over {axis}: nothing"


def _type(document: Document, occurrence: Occurrence) -> Type | None:
    """The type of a tensor where it was bound last before a place; None if that is not known."""
    _, _, types = document.checked
    places = [each.name.span.start for each in document.names if each.declared is occurrence.declared]
    before = [place for place in places if place <= occurrence.name.span.start and place in types]
    return types[before[-1]] if before else None


def _tensors(document: Document, occurrence: Occurrence) -> list[Explanation]:
    """The tensors that a name is, made in the body in which it stands."""
    if document.compiled is None:
        return []
    try:
        tensors = explain(document.compiled, occurrence.name.text)
    except ValueError:
        return []
    first, last = document.body(occurrence.declared.span.line)
    return [
        each
        for each in tensors
        if each.span is not None
        and each.span.source.name == occurrence.declared.span.source.name
        and first <= each.span.line <= last
    ][:MOST]


def _tensor(tensor: Explanation) -> str:
    """Type, and for each mesh axis how the tensor is split along it."""
    splits = [
        f"over {each.mesh_axis} ({each.parts}): {each.axis or 'replicated'}"
        + (f", by `{each.rule.text}`" if each.rule is not None else "")
        for each in tensor.splits
    ]
    lines = [f"`{tensor.name}`: `{tensor.type}`, {tensor.role}", f"a rank computes with `{tensor.local}`", *splits]
    return "\n".join(f"- {line}" if i else line + "\n" for i, line in enumerate(lines))


def _code(line: str) -> str:
    return f"```par\n{line}\n```"
