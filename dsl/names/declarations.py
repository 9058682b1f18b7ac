"""A file and its imports → their declarations by name, one table for each kind.

Invariants: an import stays under the root directory, symbolic links included; a file is read once however often it is
imported; the importing file's axis or constant overrides an imported one of the same name; any other duplicate name of
a kind is an error. Axes and constants share one namespace.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from partita.dsl import limits
from partita.dsl.advice.report import Full, Report
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import RESERVED, parse_file
from partita.dsl.syntax.reader import Reader, inside
from partita.dsl.syntax.source import Source, Span


@frozen
class Declarations:
    """Everything that a file declares or imports. `train` and `expect` are the main file's only."""

    source: Source
    axes: dict[str, tree.Entry] = field(factory=dict)
    constants: dict[str, tree.Entry] = field(factory=dict)
    blocks: dict[str, tree.Block] = field(factory=dict)
    operations: dict[str, tree.Operation] = field(factory=dict)
    models: dict[str, tree.Model] = field(factory=dict)
    meshes: dict[str, tree.Mesh] = field(factory=dict)
    layouts: dict[str, tree.Layout] = field(factory=dict)
    schedules: dict[str, tree.Schedule] = field(factory=dict)
    adapters: dict[str, tree.Adapters] = field(factory=dict)
    optimizers: dict[str, tree.Optimizer] = field(factory=dict)
    weights: dict[str, tree.Weights] = field(factory=dict)
    train: list[tree.Train] = field(factory=list)
    expect: list[tree.Expect] = field(factory=list)

    @property
    def alternatives(
        self,
    ) -> dict[str, Mapping[str, tree.Model | tree.Layout | tree.Schedule | tree.Adapters | tree.Optimizer]]:
        """The declarations of which `train` chooses one of each kind."""
        return {
            "model": self.models,
            "layout": self.layouts,
            "schedule": self.schedules,
            "adapters": self.adapters,
            "optimizer": self.optimizers,
        }

    def own(self, span: Span) -> bool:
        """Whether a span is in the main file, not in an imported one."""
        return span.source is self.source


# Kind of declaration -> its name in messages, and its table in `Declarations`.
KINDS: dict[type, tuple[str, str]] = {
    tree.Block: ("block", "blocks"),
    tree.Operation: ("op", "operations"),
    tree.Model: ("model", "models"),
    tree.Mesh: ("mesh", "meshes"),
    tree.Layout: ("layout", "layouts"),
    tree.Schedule: ("schedule", "schedules"),
    tree.Adapters: ("adapters", "adapters"),
    tree.Optimizer: ("optimizer", "optimizers"),
    tree.Weights: ("weights", "weights"),
}

# The tables of entries, each with the other one of the same namespace.
SIZES = {"axes": "constants", "constants": "axes"}
CALLED = {"axes": "axis", "constants": "constant"} | {table: kind for kind, table in KINDS.values()}


def gather(main: Source, path: str | None, root: str | None, reader: Reader, report: Report) -> Declarations:
    """The declarations of the main file and of all its imports; errors are reported.

    Without a `path` (text that is in no file) nothing can be imported.
    """
    return _Gathering(main, path, root, reader, report).file(main, path, ())


class _Gathering:
    def __init__(self, main: Source, path: str | None, root: str | None, reader: Reader, report: Report) -> None:
        self.main, self.reader, self.report = main, reader, report
        folder = root if root is not None else os.path.dirname(path) if path is not None else None
        self.root = os.path.realpath(folder or ".")
        self.files: dict[str, Declarations] = {}
        self.bytes = len(main.text)

    def file(self, source: Source, path: str | None, importers: tuple[str, ...]) -> Declarations:
        """The declarations of one file and its imports."""
        real = os.path.realpath(path) if path is not None else source.name
        own = Declarations(source)
        self.files[real] = own
        parsed = parse_file(source, self.report)
        imports = []
        for declaration in parsed.declarations:
            if isinstance(declaration, tree.Import):
                imports.append(declaration)
            else:
                self.declare(own, declaration)
        merged = Declarations(source, train=own.train, expect=own.expect)
        for kind, names in _tables(own):
            getattr(merged, kind).update(names)
        for declaration in imports:
            with self.report:
                self.merge(merged, own, self.imported(declaration, source, path, (*importers, real)))
        self.files[real] = merged
        return merged

    def imported(
        self, declaration: tree.Import, importer: Source, path: str | None, importers: tuple[str, ...]
    ) -> Declarations:
        """The declarations of an imported file. Raises Refused."""
        written, span = declaration.path.value, declaration.path.span
        if path is None or not written or "\0" in written:
            raise refuse("E0010", f"`{written}` cannot be imported here", span)
        target = os.path.join(os.path.dirname(path), written)
        real = inside(self.root, target, written, span)
        if real in importers:
            raise refuse("E0011", f"`{written}` imports itself, directly or through other files", span)
        if real in self.files:
            return self.files[real]
        if len(self.files) >= limits.IMPORTS:
            raise refuse("E0013", f"more than {limits.IMPORTS} files are imported", span)
        name = os.path.normpath(os.path.join(os.path.dirname(importer.name), written))
        source = self.reader.source(real, name, span)
        self.bytes += len(source.text)
        if self.bytes > limits.FILE_BYTES:
            message = f"the imported files have, together, more than {limits.FILE_BYTES:,} characters"
            self.report.error("E0004", message, span)
            raise Full
        return self.file(source, target, importers)

    def declare(self, own: Declarations, declaration: tree.Declaration) -> None:
        """Enter a declaration of a file; reports reserved names and duplicates."""
        report = self.report
        if isinstance(declaration, tree.Axes):
            for entry in declaration.entries:
                self.enter("axis", own.axes, entry.key, entry, own.constants)
        elif isinstance(declaration, tree.Constants):
            for entry in declaration.entries:
                self.enter("constant", own.constants, entry.key, entry, own.axes)
        elif isinstance(declaration, tree.Train):
            if own.train:
                report.error("E0301", "there is a second train block", declaration.span, help="a file has one")
            own.train.append(declaration)
        elif isinstance(declaration, tree.Expect):
            own.expect.append(declaration)
        else:
            kind, table = KINDS[type(declaration)]
            assert not isinstance(declaration, tree.Import)
            self.enter(kind, getattr(own, table), declaration.name, declaration)

    def enter(
        self, kind: str, table: dict[str, Any], name: tree.Name, value: object, other: Mapping[str, Any] | None = None
    ) -> None:
        """Enter one name, which must not be in the table, nor in the `other` of the same namespace."""
        if not unreserved(name, self.report):
            return
        if name.text in table:
            notes = [f"the first is at {table[name.text].span.place}"]
            self.report.error("E0301", f"{kind} `{name.text}` is declared twice", name.span, notes)
            return
        if other and name.text in other:
            notes = [f"the first is at {other[name.text].span.place}"]
            message = f"`{name.text}` is declared as an axis and as a constant"
            self.report.error("E0301", message, name.span, notes, "in sizes, both are numbers: rename one of them")
            return
        table[name.text] = value

    def merge(self, merged: Declarations, own: Declarations, other: Declarations) -> None:
        """Add the declarations of an imported file."""
        for table, names in _tables(other):
            into, owned = getattr(merged, table), getattr(own, table)
            for name, value in names.items():
                existing = into.get(name)
                if existing is None and table in SIZES:
                    existing = getattr(merged, SIZES[table]).get(name)
                if existing is None or existing is value:
                    into[name] = value
                elif not (table in SIZES and name in owned):
                    notes = [f"also declared at {existing.span.place}"]
                    place = value.key.span if table in SIZES else value.name.span
                    message = f"imported {CALLED[table]} `{name}` is declared twice"
                    self.report.error("E0012", message, place, notes, "rename one of them")


def _tables(declarations: Declarations) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for table in (*SIZES, *(table for _, table in KINDS.values())):
        yield table, getattr(declarations, table)


def unreserved(name: tree.Name, report: Report) -> bool:
    """Whether a name may be declared; reports E0104 if not."""
    if name.text in RESERVED:
        message = f"`{name.text}` is reserved and cannot be declared"
        report.error("E0104", message, name.span, help="choose another name")
        return False
    return True
