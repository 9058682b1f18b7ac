"""Standard output and error of a run: a reader that leaves, or a full disk, ends the display and not the training."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from partita.cli.streams import abandon


class Patient:
    """A text stream that writes on as long as that works. Where it does not any more, that is said once, on `other`."""

    def __init__(self, stream: TextIO, name: str, other: TextIO | None) -> None:
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        """Write and flush, or lose it."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""
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
def patient() -> Iterator[None]:
    """Let both streams of this process fail in peace."""
    out, errors = sys.stdout, sys.stderr
    lenient = cast(TextIO, Patient(errors, "standard error", None))
    sys.stdout = cast(TextIO, Patient(out, "standard output", lenient))
    sys.stderr = lenient
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, errors
