"""Values by a key that several of them have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Each = TypeVar("Each")
Key = TypeVar("Key", bound=Hashable)


def grouped(values: Iterable[Each], key: Callable[[Each], Key]) -> dict[Key, list[Each]]:
    """Values by a key, in the order in which keys first appear."""
    groups: dict[Key, list[Each]] = {}
    for each in values:
        groups.setdefault(key(each), []).append(each)
    return groups
