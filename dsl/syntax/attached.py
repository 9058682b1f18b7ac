"""Text files that a .par file names and that are read along with it: schedules and profiles."""

from __future__ import annotations

import os

from attrs import define, field

from partita.dsl import limits
from partita.dsl.config.overrides import PLACE
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.reader import Reader, inside
from partita.dsl.syntax.source import Source, Span


@define(eq=False)
class Attached:
    """Reads text files, each once, relative to the .par file that names them, under the root.

    Paths on the command line are relative to the main file. Together the texts may be as large as one file. If `main`
    is None (text that is in no file), none can be named.
    """

    main: str | None
    name: str
    root: str | None
    files: Reader
    _texts: dict[str, Source] = field(factory=dict, init=False)  # by real path

    def read(self, written: str, span: Span) -> Source:
        """The text of a file. Raises Refused (E0001 to E0004, E0010)."""
        if self.main is None:
            raise refuse("E0010", f"`{written}` cannot be read from here", span)
        root = os.path.realpath(self.root if self.root is not None else os.path.dirname(self.main) or ".")
        beside = self.main if span.source.name in (PLACE, self.name) else span.source.name
        target = os.path.normpath(os.path.join(os.path.dirname(beside), written))
        real = inside(root, target, written, span)
        if real not in self._texts:
            source = self.files.source(real, target, span)
            if len(source.text) + sum(len(each.text) for each in self._texts.values()) > limits.FILE_BYTES:
                message = f"the files named here have, together, more than {limits.FILE_BYTES:,} characters"
                raise refuse("E0004", message, span)
            self._texts[real] = source
        return self._texts[real]
