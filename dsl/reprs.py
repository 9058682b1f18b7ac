"""Short representations of records that hold whole programs; and, in notebooks, pictures of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from reprlib import Repr
from typing import Any, ClassVar

import attrs

MOST = 200  # characters


class _Fields(Repr):
    """Short representations of field values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 2
        self.maxother = self.maxstring = 60


_FIELDS = _Fields()


def outline(kind: str, name: str, facts: Iterable[object | None]) -> str:
    """`<Compilation of gpt.par: 16 ranks, 213 operations>`; facts that are None are omitted."""
    details = ", ".join(str(fact) for fact in facts if fact is not None)
    name = name.replace("\\", "/").rsplit("/", 1)[-1]
    return _cut(f"<{kind} {name if len(name) <= 60 else name[:59] + '…'}: {details}", ">")


class Shortened:
    """A record, shown with its fields as attrs shows them, but with long values shortened."""

    __slots__ = ()
    __attrs_attrs__: ClassVar[tuple[attrs.Attribute[Any], ...]]

    def __repr__(self) -> str:
        fields = (field.name for field in self.__attrs_attrs__ if field.repr)
        details = ", ".join(f"{name}={_FIELDS.repr(getattr(self, name))}" for name in fields)
        return _cut(f"{type(self).__name__}({details}", ")")


def _cut(text: str, end: str) -> str:
    return text + end if len(text) < MOST else f"{text[: MOST - 2]}…{end}"


def count(number: int, thing: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


class Pictured:
    """A result of the Python API that notebooks show as HTML; what they show is imported when one asks."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        markup: str = import_module("partita.cli.notebook").html(self)
        return markup


def kind_of(value: object) -> str:
    """What a value is, for a message on an argument: `a numpy array`, `None`, `an int`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = {"ndarray": "numpy array", "Tensor": "tensor"}.get(type(value).__name__, type(value).__name__)
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
