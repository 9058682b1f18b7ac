"""Whether two graphs say the same: field by field, values one to one. Places in the file do not count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import fields, has

from partita.compiler.graph import Value
from partita.dsl.syntax.source import Span


def difference(a: Any, b: Any) -> str | None:
    """Where two records differ first, or None. A value that one reads several times is one value in the other."""
    return _difference(a, b, {}, {}, "")


def _difference(a: Any, b: Any, there: dict[Value, Value], back: dict[Value, Value], at: str) -> str | None:
    if isinstance(a, Value) and isinstance(b, Value) and (a in there or b in back):
        return None if there.get(a) is b and back.get(b) is a else f"{at}: {a} and {b} stand for several values"
    if isinstance(a, Value) and isinstance(b, Value):
        there[a], back[b] = b, a
    if isinstance(a, Span) or (a is None and isinstance(b, Span)):
        return None
    if type(a) is not type(b):
        return f"{at}: {a!r} and {b!r}"
    if isinstance(a, (tuple, list, Mapping)):
        if isinstance(a, Mapping):
            a, b = list(a.items()), list(b.items())
        if len(a) != len(b):
            return f"{at}: {len(a)} and {len(b)}"
        parts = [(f"{at}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif has(type(a)):
        names = [each.name for each in fields(type(a)) if each.eq]
        parts = [(f"{at}.{name}", getattr(a, name), getattr(b, name)) for name in names]
    else:
        return None if repr(a) == repr(b) else f"{at}: {a!r} and {b!r}"
    return next((found for where, x, y in parts if (found := _difference(x, y, there, back, where))), None)
