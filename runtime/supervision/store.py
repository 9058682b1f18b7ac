"""The store by which ranks find each other: what is asked of those of torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol


class Store(Protocol):
    """Keys and values that all ranks see. All methods raise RuntimeError where it cannot be reached."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """A value, as soon as it is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins with 0; what it is now."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return when the keys are there; raises RuntimeError where that takes longer."""
