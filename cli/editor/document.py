"""What a language server knows of one file: pure functions of its text, in lines and columns from 1."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from attrs import define, frozen

from partita.compiler.pipeline import compile_spec
from partita.compiler.report.explain import Explanation, explain
from partita.compiler.state import Compilation
from partita.dsl import tree
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.functions import FUNCTIONS
from partita.dsl.lexer import language
from partita.dsl.load import load_text
from partita.dsl.occurrences import Occurrence, occurrences, paths
from partita.dsl.parser import parse_file
from partita.dsl.reader import source_of
from partita.dsl.report import Full, Report
from partita.dsl.source import Span
from partita.dsl.spec import Spec
from partita.dsl.types import Type

NAME = re.compile(r"[A-Za-z_]\w*")
# Names in paths, which overrides and checkpoints have, too.
IN_PATHS = "it is a name in paths, as of rules, overrides and checkpoints"


@frozen
class Suggestion:
    """A word that may stand here, and what it is: `keyword`, `function`, or the kind of a name."""

    word: str
    kind: str


@define(eq=False)
class Document:
    """One version of a file. `path` is where it is; without one, it cannot import."""

    text: str
    name: str
    path: str | None = None

    @cached_property
    def _checked(self) -> tuple[Spec | None, tuple[Diagnostic, ...], dict[int, Type]]:
        """What the file means and what `check` says, and the types of tensors by where they are bound."""
        types: dict[int, Type] = {}
        return *load_text(self.text, self.name, path=self.path, types=types), types

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """What `partita check` says of the file."""
        _, diagnostics, _ = self._checked
        return diagnostics

    @cached_property
    def _file(self) -> tree.File | None:
        """The file, if it can be parsed."""
        try:
            return parse_file(source_of(self.text, self.name), Report())
        except (Refused, Full):
            return None

    @cached_property
    def names(self) -> list[Occurrence]:
        """The names of the file, as far as it can be parsed."""
        return occurrences(self._file) if self._file is not None else []

    @property
    def _declarations(self) -> Sequence[tree.Declaration]:
        return self._file.declarations if self._file is not None else ()

    def at(self, line: int, column: int) -> Occurrence | None:
        """The name at a place, or just before it."""
        for each in self.names:
            span = each.name.span
            if span.line == line and span.column <= column <= span.column + len(each.name.text):
                return each
        return None

    def references(self, line: int, column: int) -> list[Span]:
        """All places of the name that stands here, the declaration among them."""
        found = self.at(line, column)
        if found is None:
            return []
        return [each.name.span for each in self.names if each.declared is found.declared]

    def suggestions(self, line: int) -> list[Suggestion]:
        """What may be written on a line: keywords, functions, and the names that are declared, tensors in its body."""
        words = [Suggestion(word, "keyword") for word in language().words if word.isalpha()]
        words += [Suggestion(name, "function") for name in FUNCTIONS]
        first, last = self._body(line)
        for each in self.names:
            place = each.declared.span.line
            if each.name is each.declared and (each.kind != "tensor" or first <= place <= min(line, last)):
                words.append(Suggestion(each.name.text, each.kind))
        return list(dict.fromkeys(words))

    def _body(self, line: int) -> tuple[int, int]:
        """The first and last line of the block or model around a line; none if there is none."""
        for each in self._declarations:
            last = each.span.source.position(each.span.end)[0]
            if isinstance(each, tree.Block | tree.Model) and each.span.line <= line <= last:
                return each.span.line, last
        return 0, -1

    # ------------------------------------------------------------ hover

    def described(self, line: int, column: int) -> str | None:
        """What the name at a place is, as Markdown: kind and declaration; of tensors type and layout."""
        found = self.at(line, column)
        if found is None:
            return None
        span = found.declared.span
        parts = [f"{found.kind} `{found.name.text}`", _code(span.source.line(span.line).strip())]
        if found.kind == "tensor":
            type = self._type(found)
            parts += [f"type `{type}`"] if type is not None else []
            parts += [_tensor(each) for each in self._tensors(found)]
        return "\n\n".join(parts)

    def _type(self, found: Occurrence) -> Type | None:
        """The type of a tensor where it was bound last before a place; None if that is not known."""
        _, _, types = self._checked
        places = [each.name.span.start for each in self.names if each.declared is found.declared]
        before = [place for place in places if place <= found.name.span.start and place in types]
        return types[before[-1]] if before else None

    def _tensors(self, found: Occurrence) -> list[Explanation]:
        """The tensors that a name is, made in the body in which it stands."""
        if self._compiled is None:
            return []
        try:
            tensors = explain(self._compiled, found.name.text)
        except ValueError:
            return []
        first, last = self._body(found.name.span.line)
        return [
            each
            for each in tensors
            if each.span is not None and each.span.source.name == self.name and first <= each.span.line <= last
        ][:4]

    @cached_property
    def _compiled(self) -> Compilation | None:
        spec, _, _ = self._checked
        try:
            return compile_spec(spec) if spec is not None else None
        except Refused:
            return None

    # ------------------------------------------------------------ renaming

    def renamed(self, line: int, column: int, to: str) -> list[Span]:
        """The places where a name is to be replaced. Raises ValueError if the file would then mean something else."""
        found = self.at(line, column)
        if found is None:
            raise ValueError("there is no name of this file here")
        if not NAME.fullmatch(to):
            raise ValueError(f"`{to}` is not a name")
        if problem := self._in_paths(found):
            raise ValueError(f"`{found.name.text}` cannot be renamed: {problem}")
        spans = self.references(line, column)
        after = Document(replaced(self.text, spans, to), self.name, self.path)
        if _shape(self.names) != _shape(after.names) or _codes(self.diagnostics) != _codes(after.diagnostics):
            raise ValueError(f"`{to}` would mean something else in this file")
        return spans

    def _in_paths(self, found: Occurrence) -> str | None:
        """Why a name is one that not only this file has."""
        if found.kind in ("block", "op", "model"):
            return IN_PATHS
        file = self._file
        if file is None:
            return "the file cannot be parsed"
        parameters = {
            name.span.start
            for declaration in file.declarations
            if isinstance(declaration, tree.Block | tree.Model)
            for name in _stored(declaration.body)
        }
        if found.declared.span.start in parameters:
            return IN_PATHS
        outside = [
            name.value
            for declaration in file.declarations
            for line in (declaration.lines if isinstance(declaration, tree.Weights) else ())
            for name in (line.theirs if isinstance(line, tree.Correspondence) else ())
        ]
        if any(f"{{{found.name.text}}}" in each for each in outside):
            return "a name of `weights` has it in braces"
        if found.name.text in {part.text for path in paths(file) for part in path.parts}:
            return "a rule or `weights` has it in a path"
        if any(isinstance(each, tree.Import) for each in file.declarations) and found.kind != "tensor":
            return "the file imports others, in which it may stand"
        return None


def replaced(text: str, spans: list[Span], to: str) -> str:
    """A text with other words in places of it, which is as `partita.dsl.reader` gives it."""
    text = source_of(text, "").text
    for span in sorted(spans, key=lambda each: -each.start):
        text = text[: span.start] + to + text[span.end :]
    return text


def _stored(statements: tuple[tree.Statement, ...]) -> Iterator[tree.Name]:
    for statement in statements:
        if isinstance(statement, tree.Param | tree.Buffer):
            yield from statement.names
        elif isinstance(statement, tree.Repeat | tree.Scan):
            yield from _stored(statement.body)


def _shape(names: list[Occurrence]) -> list[tuple[str, int]]:
    """Which names of a file are the same, whatever they are called: kind, and the number of the declaration."""
    numbers: dict[int, int] = {}
    return [(each.kind, numbers.setdefault(each.declared.span.start, len(numbers))) for each in names]


def _codes(diagnostics: tuple[Diagnostic, ...]) -> Counter[str]:
    return Counter(each.code for each in diagnostics)


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
