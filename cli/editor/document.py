"""What a language server knows of one file: pure functions of its text, and of the files that it imports.

Lines and columns count from 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

from attrs import define, field

from partita.cli.editor.workspace import Workspace, World
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.functions.signatures import FUNCTIONS
from partita.dsl.load import load_text
from partita.dsl.names.occurrences import BOUND, Occurrence
from partita.dsl.spec import Spec
from partita.dsl.syntax import tree
from partita.dsl.syntax.lexer import language
from partita.dsl.syntax.reader import Reader
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type


@define(eq=False)
class Document:
    """One version of a file. `path` is where it is; without one, it cannot import."""

    text: str
    name: str
    path: str | None = None
    workspace: Workspace = field(factory=Workspace)

    def __attrs_post_init__(self) -> None:
        self.workspace = self.workspace.changed({os.path.realpath(self.place): self.text})

    @property
    def place(self) -> str:
        """Where the file is, for the workspace; one that is nowhere has a name."""
        return self.path or self.name.replace("\0", "")

    @cached_property
    def reader(self) -> Reader:
        """What the check of the file has read."""
        return self.workspace.reader()

    @cached_property
    def checked(self) -> tuple[Spec | None, tuple[Diagnostic, ...], dict[int, Type]]:
        """What the file means and what `check` says, and the types of tensors by where they are bound."""
        types: dict[int, Type] = {}
        return *load_text(self.text, self.name, path=self.path, types=types, reader=self.reader), types

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """What `partita check` says of the file."""
        _, diagnostics, _ = self.checked
        return diagnostics

    @cached_property
    def world(self) -> World:
        """The file and what it imports, as far as they can be parsed."""
        return self.workspace.world(self.place)

    @cached_property
    def names(self) -> list[Occurrence]:
        """The names of the file."""
        source = self.world.files[0].file.span.source if self.world.files else None
        return [each for each in self.world.names.occurrences if each.name.span.source is source]

    @property
    def declarations(self) -> Sequence[tree.Declaration]:
        """What the file declares."""
        return self.world.files[0].file.declarations if self.world.files else ()

    def at(self, line: int, column: int) -> Occurrence | None:
        """The name at a place, or just before it."""
        return next(iter(self.world.at(line, column)), None)

    def imported(self, line: int, column: int) -> list[Span]:
        """The beginning of the file that an `import` at a place names."""
        for each in self.declarations:
            if isinstance(each, tree.Import) and each.span.line == line:
                span = each.path.span
                name = os.path.normpath(os.path.join(os.path.dirname(self.place), each.path.value))
                sources = [file.file.span.source for file in self.world.files]
                if span.column <= column <= span.column + span.end - span.start:
                    return [Span(source, 0, 0) for source in sources if source.name == name]
        return []

    def suggestions(self, line: int) -> list[tuple[str, str]]:
        """What may be written on a line: keywords, functions, and the names that are declared, tensors in its body;
        each with its kind: `keyword`, `function`, or that of a name.
        """
        words = [(word, "keyword") for word in language().words if word.isalpha()]
        words += [(name, "function") for name in FUNCTIONS]
        first, last = self.body(line)
        for each in self.world.names.occurrences:
            own = each.name.span.source.name == self.place and first <= each.name.span.line <= min(line, last)
            if each.name is each.declared and (each.kind not in BOUND or own):
                words.append((each.name.text, each.kind))
        return list(dict.fromkeys(words))

    def body(self, line: int) -> tuple[int, int]:
        """The first and last line of the block or model around a line; none if there is none."""
        for each in self.declarations:
            last = each.span.source.position(each.span.end)[0]
            if isinstance(each, tree.Block | tree.Model) and each.span.line <= line <= last:
                return each.span.line, last
        return 0, -1

    @cached_property
    def compiled(self) -> Compilation | None:
        """The compiled program; None where there is none."""
        spec, _, _ = self.checked
        try:
            return compile_spec(spec) if spec is not None else None
        except Refused:
            return None
