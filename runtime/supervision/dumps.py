"""What C++ or the interpreter writes to standard error when it aborts a process: long, with one line that says why."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import define, field

BEGINNINGS = (b"terminate called", b"libc++abi", b"Fatal Python error", b"*** SIG", b"FATAL: ")
# The cause, and its location: `what():  [enforce fail at …/tcp/pair.cc:598] …`.
CAUSE = re.compile(r"(?:what\(\): |uncaught exception of type [^:]*: |Fatal Python error: )\s*(.+)")
MAX_BYTES = 1 << 16
LONGEST_CAUSE = 300


@define(eq=False)
class Dump:
    """The dump of one process, if it writes one: everything from its first line on."""

    _lines: list[bytes] = field(factory=list)
    _bytes: int = 0

    def without(self, lines: Sequence[bytes]) -> list[bytes]:
        """Returns the lines that are not part of the dump, and keeps those that are."""
        begins = (i for i, line in enumerate(lines) if self._lines or line.startswith(BEGINNINGS))
        first = next(begins, len(lines))
        for line in lines[first:]:
            if self._bytes < MAX_BYTES:
                self._lines.append(line)
                self._bytes += len(line)
        return list(lines[:first])

    @property
    def text(self) -> str:
        """The full dump."""
        return b"\n".join(self._lines).decode(errors="replace")

    @property
    def cause(self) -> str:
        """The line that says why; empty if there is no dump."""
        text = self.text
        match = CAUSE.search(text)
        line = match[1] if match else text.partition("\n")[0]
        return line.strip()[:LONGEST_CAUSE]
