"""Standard output and error of a run: if a reader exits or a disk is full, the display ends but not the training."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from partita.cli.streams import abandon


class Tolerant:
    """A text stream that ignores write errors: after the first one, which is reported on `other`, it drops all text."""

    def __init__(self, stream: TextIO, name: str, other: TextIO | None) -> None:
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        """Write and flush, or drop the text."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush, ignoring errors."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        abandon(self._stream)
        if self._other is not None:
            why = "its reader has exited" if error.errno == errno.EPIPE else str(error.strerror)
            with suppress(OSError):
                print(f"partita: {self._name} failed: {why}; the run continues", file=self._other, flush=True)


@contextmanager
def tolerate_output_errors() -> Iterator[None]:
    """Make both streams of this process ignore write errors."""
    out, errors = sys.stdout, sys.stderr
    lenient = cast(TextIO, Tolerant(errors, "standard error", None))
    sys.stdout = cast(TextIO, Tolerant(out, "standard output", lenient))
    sys.stderr = lenient
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, errors
