"""JSON files that detect any modification: the last line holds the SHA-256 of all bytes before it.

The input may be untrusted: only plain values are made of it, and `Reader` returns a value of the type and size asked
for, or raises Corrupt.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any, NoReturn, TypeVar

from attrs import frozen

from partita.runtime.checkpoint.files import Corrupt

MAX_BYTES = 1 << 24  # parsed JSON takes about twenty times as much memory
T = TypeVar("T")


def with_checksum(value: dict[str, Any]) -> bytes:
    """A JSON object, one line per entry, and the checksum."""
    lines = [f"{json.dumps(name)}: {_text(entry)}" for name, entry in value.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + _tail(body)


def checked(data: bytes) -> Reader:
    """Parse checksummed JSON. Raises Corrupt if the checksum does not match or it is not a JSON object."""
    length = len(_tail(b""))
    body, tail = data[:-length], data[-length:]
    if tail != _tail(body):
        raise Corrupt("its SHA-256 is not the one at its end")
    try:
        value = json.loads(data, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"it is no JSON that was written here: {error}") from error
    del value["seal"]
    return Reader(value, "")


def _text(entry: object) -> str:
    """A list of several objects with one per line, anything else on one line."""
    if isinstance(entry, list) and len(entry) > 1 and all(isinstance(each, dict) for each in entry):
        return "[\n  " + ",\n  ".join(map(json.dumps, entry)) + "\n]"
    return json.dumps(entry, allow_nan=False)


def _tail(body: bytes) -> bytes:
    return f',\n"seal": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key stands twice")
    return entries


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


@frozen(eq=False)
class Reader:
    """A value and its path in the document. Each method returns it as the requested type, or raises Corrupt."""

    value: Any
    place: str

    def fail(self, expected: str) -> NoReturn:
        """Raise Corrupt: the value is not `expected`."""
        raise Corrupt(f"`{self.place}` is not {expected}")

    def integer(self, minimum: int, maximum: int) -> int:
        """An integer from `minimum` to `maximum`."""
        if type(self.value) is not int or not minimum <= self.value <= maximum:
            self.fail(f"an integer from {minimum} to {maximum}")
        return int(self.value)

    def number(self) -> float:
        """A finite float."""
        if type(self.value) is not float or not isfinite(self.value):
            self.fail("a number")
        return float(self.value)

    def text(self, pattern: str, limit: int = 200) -> str:
        """A string of at most `limit` characters that `pattern` fully matches."""
        value = self.value
        if not isinstance(value, str) or len(value) > limit or not re.fullmatch(pattern, value, re.DOTALL):
            self.fail(f"a text like {pattern}")
        return str(value)

    def each(self, limit: int) -> Iterator[Reader]:
        """The entries of a list of at most `limit`."""
        if not isinstance(self.value, list) or len(self.value) > limit:
            self.fail(f"a list of at most {limit:,}")
        for i, entry in enumerate(self.value):
            yield Reader(entry, f"{self.place}[{i}]")

    def table(self, limit: int, pattern: str, entry: Callable[[Reader], T]) -> dict[str, T]:
        """An object of at most `limit` entries whose keys match `pattern`; `entry` reads the values."""
        if not isinstance(self.value, dict) or len(self.value) > limit:
            self.fail(f"an object of at most {limit:,} entries")
        return {Reader(name, self.place).text(pattern): entry(self._of(name)) for name in self.value}

    def record(self, *names: str) -> Sequence[Reader]:
        """The values of an object with exactly these keys."""
        if not isinstance(self.value, dict) or set(self.value) != set(names):
            self.fail(f"an object with {', '.join(names)}")
        return [self._of(name) for name in names]

    def _of(self, name: str) -> Reader:
        return Reader(self.value[name], f"{self.place}.{name}" if self.place else name)
