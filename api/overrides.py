"""Overrides in Python: `"batch=64"`, or `{"batch": 64, "train.clip": None}`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import TypeAlias

Value: TypeAlias = str | int | float | bool | None
Override: TypeAlias = str | Mapping[str, Value]


def written(overrides: Iterable[Override]) -> tuple[str, ...]:
    """Overrides as written on the command line, in order. Raises TypeError for other types."""
    assignments: list[str] = []
    for override in overrides:
        if isinstance(override, str):
            assignments.append(override)
        elif isinstance(override, Mapping):
            assignments += [f"{_key(key)}={_value(key, value)}" for key, value in override.items()]
        else:
            example = 'a string such as "batch=64", or a mapping such as {"batch": 64}'
            raise TypeError(f"an override is {example}, not {type(override).__name__}")
    return tuple(assignments)


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f'the key of an override is a string such as "train.steps", not {type(key).__name__}')
    return key


def _value(key: str, value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case Integral():  # including numpy's
            return str(int(value))
        case Real():
            return repr(float(value))
    kinds = "a string as in the file, a number, a boolean or None"
    raise TypeError(f"the override of `{key}` is {kinds}, not {type(value).__name__}")
