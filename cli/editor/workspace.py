"""The files that an editor works on: what it has open, unsaved as it is, and the `.par` files of its folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

from attrs import define, field, frozen

from partita.dsl.advice.report import Full, Report
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.load import load_text
from partita.dsl.names.occurrences import Names, Occurrence, names
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import parse_file
from partita.dsl.syntax.reader import Reader, real_path_inside, source_of
from partita.dsl.syntax.source import Source, Span

MOST = 2000  # files that are looked through, in all folders
# Folders of which the files are nobody's own.
FOREIGN = {"node_modules", "site-packages", "__pycache__"}

Place = tuple[str, int]  # the real path of a file, and a character of its text


@frozen(eq=False)
class Parsed:
    """A file as far as it can be parsed, and whether that is `whole`. `path` is the real one."""

    path: str
    file: tree.File
    whole: bool


@define(eq=False)
class World:
    """A file, the first, and all that it imports: what `check` sees together."""

    files: Sequence[Parsed]

    @cached_property
    def names(self) -> Names:
        """All names in the files."""
        return names([each.file for each in self.files])

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(each.file.span.source): each.path for each in self.files}

    def place(self, span: Span) -> Place:
        """Where a span of one of the files begins."""
        return self._paths[id(span.source)], span.start

    @cached_property
    def declared(self) -> dict[Place, set[Place]]:
        """For each place of a name the places that declare it, of which there are several where it is ambiguous."""
        declarations: dict[Place, set[Place]] = {}
        for each in self.names.occurrences:
            declarations.setdefault(self.place(each.name.span), set()).add(self.place(each.declared.span))
        return declarations

    def at(self, line: int, column: int) -> list[Occurrence]:
        """What the name at a place of the first file, or just before it, stands for."""
        source = self.files[0].file.span.source if self.files else None
        return [
            each
            for each in self.names.occurrences
            if each.name.span.source is source
            and each.name.span.line == line
            and each.name.span.column <= column <= each.name.span.column + len(each.name.text)
        ]


@define(eq=False)
class Workspace:
    """Texts of open files by real path, and folders."""

    edited: dict[str, str] = field(factory=dict)
    folders: Sequence[str] = ()
    _parsed: dict[str, tuple[tuple[str, str], Parsed]] = field(factory=dict)

    def now(self, edited: dict[str, str], folders: Sequence[str]) -> Workspace:
        """The same, which remembers what it has parsed, with these texts and folders."""
        self.edited, self.folders = edited, folders
        return self

    def changed(self, texts: Mapping[str, str]) -> Workspace:
        """The same with other texts of some files."""
        return Workspace({**self.edited, **texts}, self.folders, self._parsed)

    def parsed(self, path: str, name: str) -> Parsed | None:
        """A file, by its real path, under the name that the user knows; None if it cannot be read."""
        try:
            source = self.reader().source(path, name)
        except Refused:
            return None
        known = self._parsed.get(path)
        if known is None or known[0] != (name, source.text):
            known = self._parsed[path] = (name, source.text), _parse(path, source)
        return known[1]

    def text(self, path: str) -> str:
        """The text of a file, by its real path. Raises Refused if it cannot be read."""
        return self.reader().source(path, path).text

    def world(self, path: str) -> World:
        """A file and all that it imports, each once."""
        real = os.path.realpath(path)
        first = self.parsed(real, path)
        files: dict[str, Parsed] = {}
        waiting = [first] if first is not None else []
        while waiting:
            each = waiting.pop()
            if each.path not in files:
                files[each.path] = each
                waiting += reversed(list(self._imported(each, os.path.dirname(real))))
        return World(tuple(files.values()))

    def _imported(self, importer: Parsed, root: str) -> Iterator[Parsed]:
        for declaration in importer.file.declarations:
            if isinstance(declaration, tree.Import) and "\0" not in declaration.path.value:
                written = declaration.path.value
                target = os.path.join(os.path.dirname(importer.path), written)
                real = real_path_inside(root, target) if written else None
                name = os.path.normpath(os.path.join(os.path.dirname(importer.file.span.source.name), written))
                other = self.parsed(real, name) if real is not None else None
                if other is not None:
                    yield other

    def worlds_with(self, paths: set[str]) -> Iterator[World]:
        """The worlds of all files that are among some files, or import one of them, directly or not."""
        for path in sorted({*self.edited, *islice(self._on_disk(), MOST)}):
            world = self.world(path)
            if any(each.path in paths for each in world.files):
                yield world

    def _on_disk(self) -> Iterator[str]:
        for folder in self.folders:
            for where, inside, files in os.walk(folder):
                inside[:] = sorted(each for each in inside if not each.startswith(".") and each not in FOREIGN)
                yield from (os.path.realpath(os.path.join(where, each)) for each in files if each.endswith(".par"))

    def reader(self) -> Reader:
        """Reads files as they are in the editor."""
        return Reader(edited=self.edited)

    def diagnostics(self, world: World) -> tuple[Diagnostic, ...]:
        """What `check` says of the first file of a world."""
        path = world.files[0].path
        return load_text(self.text(path), path, path=path, reader=self.reader())[1]


def _parse(path: str, source: Source) -> Parsed:
    report = Report()
    try:
        file = parse_file(source, report)
    except Full:
        file = tree.File((), span=Span(source, 0, len(source.text)))
    return Parsed(path, file, not report.errors)


def replaced(text: str, starts: Sequence[int], name: str, to: str) -> str:
    """A text with another word in the places of a name; line ends are those of `partita.dsl.syntax.reader`."""
    text = source_of(text, "").text
    for start in sorted(starts, reverse=True):
        text = text[:start] + to + text[start + len(name) :]
    return text
