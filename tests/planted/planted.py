"""What a planted mistake is: a change of one definition that a contributor might make, and who must notice."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import TypeVar

from attrs import frozen

from tests import fragments
from tests.definitions import NATIVE, Definition, Sources

VERIFY = "verify "
Each = TypeVar("Each")
BESIDE = re.compile(r"\s+where\s+")
MARKED = re.compile(r"\{\{\s*(.*?)\s*=>\s*(.*?)\s*\}\}", re.DOTALL)


@frozen
class Planted:
    """One mistake: what `fragment` says becomes of the definition `place`, or of a file that is not Python. `caught`
    is what must then fail: a test (`FILE`, `FILE::NAME`), or `verify FILE`, the command, with overrides if there are
    any.
    """

    name: str
    place: str
    fragment: str
    caught: str

    def __str__(self) -> str:
        return self.name

    @property
    def by_verify(self) -> bool:
        """Whether it must be caught by the command `partita verify`."""
        return self.caught.startswith(VERIFY)

    @property
    def sides(self) -> tuple[str, str]:
        """What stands in the place, and what is put there."""
        change = BESIDE.split(self.fragment)[0]
        if MARKED.search(change):
            return MARKED.sub(r" \1 ", change).strip(), MARKED.sub(r" \2 ", change).strip()
        old, _, new = change.partition("=>")
        return old.strip(), new.strip()

    def planted(self, sources: Sources) -> tuple[str, str]:
        """The file that has the mistake, and its text. ValueError where what it changes does not stand there once."""
        if self.place.endswith(NATIVE):
            return self._in_native(sources)
        definition, made = self.change(sources)
        if isinstance(definition.holder, ast.ClassDef):
            made = made.partition("\n")[2]
        lines = sources.texts[definition.file].split("\n")
        lines[definition.lines] = [made]
        return definition.file, "\n".join(lines)

    def change(self, sources: Sources) -> tuple[Definition, str]:
        """The definition, and its holder's text with the mistake."""
        before, after = map(fragments.parsed, self.sides)
        beside = [fragments.parsed(each) for each in BESIDE.split(self.fragment)[1:]]
        if isinstance(before, ast.expr) and not isinstance(after, ast.expr):
            before = [ast.Expr(before)]
        elif isinstance(after, ast.expr) and not isinstance(before, ast.expr):
            after = [ast.Expr(after)]
        if not (definitions := sources.definitions(self.place)):
            raise ValueError(f"{self.name}: nothing is called {self.place}")
        definition, place = self._only(
            [(each, place) for each in definitions for place in fragments.places(each.holder, before, beside)]
        )
        return definition, place.unparsed(definition.holder, fragments.filled(after, place.fit))

    def _in_native(self, sources: Sources) -> tuple[str, str]:
        old, new = self.sides
        words = re.compile(r"\s+".join(map(re.escape, old.split())))
        file, found = self._only(
            [
                (file, each)
                for file, text in sources.texts.items()
                if file.endswith(f"/{self.place}")
                for each in words.finditer(text)
            ]
        )
        return file, found.string[: found.start()] + new + found.string[found.end() :]

    def _only(self, found: Sequence[Each]) -> Each:
        if len(found) != 1:
            raise ValueError(f"{self.name}: what it changes stands {len(found)} times in {self.place}")
        return found[0]
