"""Arguments of the public functions, checked where they are given: whatever is wrong with one is said by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from partita.dsl.advice.report import suggestion
from partita.dsl.reprs import kind_of

T = TypeVar("T")
Callback = Callable[[dict[str, Any]], object]


def file_at(path: object) -> str | Path:
    """The path of a .par file. Raises TypeError and ValueError."""
    if isinstance(path, str) and "\n" in path:
        raise ValueError("`path` is the path of a .par file, not what is written in one")
    if isinstance(path, str | Path):
        return path
    if isinstance(path, os.PathLike) and isinstance(fspath := os.fspath(path), str):
        return fspath
    help = ""
    if any((each.__module__, each.__name__) == ("torch.nn.modules.module", "Module") for each in type(path).__mro__):
        help = ": a model is declared in such a file, and `partita init NAME` writes one to start from"
    raise TypeError(f"`path` is the path of a .par file, not {kind_of(path)}{help}")


def folder_at(name: str, path: object, what: str = "a directory") -> str | Path | None:
    """The path of a directory, or of something else, if one is given. Raises TypeError."""
    if path is None or isinstance(path, str | Path):
        return path
    if isinstance(path, os.PathLike) and isinstance(fspath := os.fspath(path), str):
        return fspath
    raise TypeError(f"`{name}` is the path of {what}, not {kind_of(path)}")


def flag(name: str, value: object) -> bool:
    """True or False. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` is True or False, not {kind_of(value)}")
    return value


def count(name: str, value: object) -> int:
    """A number from 1 up. Raises TypeError and ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` is an integer, not {kind_of(value)}")
    if value < 1:
        raise ValueError(f"`{name}` is at least 1, not {value}")
    return int(value)


def seconds(name: str, value: object) -> float:
    """A number above 0. Raises TypeError and ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` is a number of seconds, not {kind_of(value)}")
    duration = float(value)
    if not duration > 0:
        raise ValueError(f"`{name}` is above 0 seconds, not {duration:g}")
    return duration


def word(name: str, value: object, choices: tuple[str, ...]) -> str:
    """One of some words. Raises TypeError and ValueError."""
    expected = f"`{name}` is {' or '.join(map(repr, choices))}"
    if not isinstance(value, str):
        raise TypeError(f"{expected}, not {kind_of(value)}")
    if value not in choices:
        help = suggestion(value, choices) or ""
        raise ValueError(f"{expected}, not {value!r}{f'; {help}' if help.startswith('did') else ''}")
    return value


def instance(name: str, value: object, kind: type[T], expected: str) -> T:
    """A value of a class. Raises TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` is {expected}, not {kind_of(value)}")
    return value


def optional_word(name: str, value: object, what: str) -> str | None:
    """A text, if one is given. Raises TypeError."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"`{name}` is {what}, not {kind_of(value)}")
    return value


def by_name(name: str, value: object, kind: type[T], what: str) -> Mapping[str, T]:
    """Values of a class by name. Raises TypeError, and ValueError if there are none."""
    expected = f"`{name}` is a dictionary of {what}"
    if not isinstance(value, Mapping):
        raise TypeError(f"{expected}, not {kind_of(value)}")
    for key, each in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{expected} by name, and a key is {kind_of(key)}")
        if not isinstance(each, kind):
            raise TypeError(f"{expected}, and `{key}` is {kind_of(each)}")
    if not value:
        raise ValueError(f"{expected}, and is empty")
    return value


def callback(name: str, value: object) -> Callback | None:
    """A function that is called while ranks run, if one is given. Raises TypeError; when called RuntimeError for
    StopIteration, which would end what calls it.
    """
    if value is None:
        return None
    if not callable(value):
        raise TypeError(f"`{name}` is a function of a record, not {kind_of(value)}")

    @wraps(value)
    def called(record: dict[str, Any]) -> object:
        try:
            return value(record)
        except StopIteration as error:
            raise RuntimeError(f"`{name}` raised StopIteration: to end a run, raise another exception") from error

    return called
