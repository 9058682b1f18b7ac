"""Other names for what files declare: everywhere where it is meant, in all files that share it.

The law: with the other name, every name still means what it did, and `check` says the same. Otherwise renaming is
refused, and why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from os.path import basename

from attrs import define

from partita.cli.editor.workspace import Place, Workspace, World, replaced
from partita.dsl import limits
from partita.dsl.advice.report import listed
from partita.dsl.config.builtins import DATA
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.names.occurrences import BOUND, IN_EXPRESSIONS, Occurrence
from partita.dsl.spec import BATCH
from partita.dsl.syntax import tree
from partita.dsl.syntax.lexer import RESERVED_WORDS
from partita.dsl.syntax.parser import RESERVED

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Kinds of names that full names have in them.
IN_FULL_NAMES = ("block", "model", "repeat", "parameter", "buffer")


@define(eq=False)
class Everywhere:
    """All places of a name, in the worlds that have them; `declared` are those of its declarations. A name is the same
    in two worlds if they share a place of it.
    """

    name: str
    kind: str
    worlds: list[World]
    places: set[Place]
    declared: set[Place]

    def by_file(self) -> dict[str, list[int]]:
        """The characters at which the name begins, by the real path of the file."""
        starts: dict[str, list[int]] = {}
        for path, start in sorted(self.places):
            starts.setdefault(path, []).append(start)
        return starts

    def search(self, workspace: Workspace) -> None:
        """Find all places and worlds, from those that are known."""
        searched: set[str] = set()
        while True:
            before = len(self.places)
            for world in self.worlds:
                self.spread(world)
            paths = {path for path, _ in self.places} | {each.path for each in self.worlds[0].files}
            if len(self.places) == before and paths <= searched:
                return
            if not paths <= searched:
                searched |= paths
                known = {world.files[0].path for world in self.worlds}
                self.worlds += [each for each in workspace.worlds_with(paths) if each.files[0].path not in known]

    def spread(self, world: World) -> None:
        """All places in a world of what one of the places declares; an ambiguous place tells nothing."""
        by_declared: dict[Place, list[Place]] = {}
        for place, declared in world.declared.items():
            for each in declared:
                by_declared.setdefault(each, []).append(place)
        waiting = [each for each in self.places if len(world.declared.get(each, ())) == 1]
        known = {each for each in self.declared if each in by_declared}
        known |= {next(iter(world.declared[each])) for each in waiting}
        done: set[Place] = set()
        while known - done:
            each = (known - done).pop()
            done.add(each)
            for place in by_declared.get(each, ()):
                self.places.add(place)
                if len(world.declared[place]) == 1:
                    known |= world.declared[place]
        self.declared |= done


def everywhere(workspace: Workspace, path: str, occurrence: Occurrence) -> Everywhere:
    """All places of a name that stands in a file: also in files that import it or what it imports."""
    first = workspace.world(path)
    place, declared = first.place(occurrence.name.span), first.place(occurrence.declared.span)
    name = Everywhere(occurrence.declared.text, occurrence.kind, [first], {place}, {declared})
    name.search(workspace)
    return name


def rename(workspace: Workspace, path: str, line: int, column: int, to: str) -> Everywhere:
    """The places that get another name. Raises ValueError, which says why it is refused."""
    world = workspace.world(path)
    occurrence = _meant(world, line, column)
    _spelled(to)
    if to == BATCH and occurrence.kind == "axis":
        raise ValueError(f"`{to}` is the axis of the batch by this name")
    name = everywhere(workspace, path, occurrence)
    for world in name.worlds:
        _clear(world, name)
    after = workspace.changed(
        {file: replaced(workspace.text(file), starts, name.name, to) for file, starts in name.by_file().items()}
    )
    for world in name.worlds:
        _same(workspace, after, world, name, to)
    return name


def _meant(world: World, line: int, column: int) -> Occurrence:
    occurrences = world.at(line, column)
    if not occurrences:
        raise ValueError("there is no name here that a file declares")
    if len({each.declared.span.start for each in occurrences}) > 1:
        places = ", ".join(sorted(f"{each.kind} at {basename(each.declared.span.place)}" for each in occurrences))
        raise ValueError(f"`{occurrences[0].name.text}` means several things here: {places}")
    return occurrences[0]


def renameable(workspace: Workspace, path: str, line: int, column: int) -> Occurrence:
    """The name at a place, if that can be renamed. Raises ValueError, which says why not."""
    occurrence = _meant(workspace.world(path), line, column)
    name = everywhere(workspace, path, occurrence)
    for world in name.worlds:
        _clear(world, name)
    return occurrence


def _spelled(to: str) -> None:
    if not NAME.fullmatch(to):
        raise ValueError(f"`{to}` is not a name: letters, digits and `_`, not beginning with a digit")
    if to in RESERVED_WORDS or to in RESERVED:
        raise ValueError(f"`{to}` is a keyword")
    if len(to) > limits.NAME_CHARACTERS:
        raise ValueError(f"a name has at most {limits.NAME_CHARACTERS} characters")


def _clear(world: World, name: Everywhere) -> None:
    """Refuse what cannot be renamed, whatever the other name."""
    for each in world.files:
        if not each.whole:
            raise ValueError(f"`{basename(each.path)}` has syntax errors, so that names in it are not known")
    for place, declared in world.declared.items():
        if place in name.places and not declared <= name.declared:
            path, start = place
            file = next(each.file for each in world.files if each.path == path)
            line, column = file.span.source.position(start)
            where = f"{basename(path)}:{line}:{column}"
            raise ValueError(f"at {where}, `{name.name}` means something else too: write more of the full name there")
    declarations = [each for file in world.files for each in file.file.declarations]
    inputs = {
        world.place(parameter.name.span)
        for each in declarations
        if isinstance(each, tree.Model)
        for parameter in each.inputs
    }
    if name.kind == "axis" and name.name == BATCH:
        raise ValueError(f"`{name.name}` is the axis of the batch by this name")
    if name.declared & inputs and any(_reads_data(each) for each in declarations if isinstance(each, tree.Train)):
        raise ValueError(f"`{name.name}` is an input of a model: `data` yields it by this name")


def _reads_data(train: tree.Train) -> bool:
    """Whether inputs are bound to what is called like them outside."""
    calls = [tree.bare(each.value) for each in train.table.entries if each.key.text == "data"]
    sources = [DATA.get(call.name.text) for call in calls if isinstance(call, tree.Call)]
    return len(sources) < len(calls) or any(source is None or source.named for source in sources)


def _same(workspace: Workspace, after: Workspace, world: World, name: Everywhere, to: str) -> None:
    """Refuse a name with which anything in a world would be otherwise."""
    other = after.world(world.files[0].path)
    before, then = workspace.diagnostics(world), after.diagnostics(other)
    if _shape(world) == _shape(other) and _codes(before) == _codes(then):
        return
    rivals = {name.kind}.union(*(group for group in (BOUND, IN_EXPRESSIONS) if name.kind in group))  # share names
    declared = [each for each in world.names.occurrences if each.name.text == to and each.name is each.declared]
    conflict = next((each for each in declared if each.kind in rivals), None)
    if conflict is not None:
        article = "an" if conflict.kind[0] in "aeio" else "a"
        raise ValueError(f"`{to}` is taken: {article} {conflict.kind} at {basename(conflict.name.span.place)}")
    new = [each for each in then if _codes([each])[0] not in _codes(before)]
    if new:
        place = f" at {basename(new[0].span.place)}" if new[0].span is not None else ""
        raise ValueError(f"`check` would then say {new[0].code}{place}: {new[0].message}")
    if _codes(before) != _codes(then):
        missing = [each.code for each in before if _codes([each])[0] not in _codes(then)]
        raise ValueError(f"`check` would then no longer say {listed(missing)}")
    raise ValueError(f"`{to}` would mean something else")


def _shape(world: World) -> tuple[list[tuple[str, int]], list[str]]:
    """Which names are the same, whatever they are called, and the numbers in segments."""
    numbers: dict[Place, int] = {}
    names = [
        (each.kind, numbers.setdefault(world.place(each.declared.span), len(numbers)))
        for each in world.names.occurrences
    ]
    return names, [each.number for each in world.names.members]


def _codes(diagnostics: Iterable[Diagnostic]) -> list[tuple[str, str, int]]:
    """What is said of which lines: names are never longer than those."""
    spans = [(each.code, each.span) for each in diagnostics]
    return [(code, span.source.name, span.line) if span is not None else (code, "", 0) for code, span in spans]
