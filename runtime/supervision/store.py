"""The store by which ranks find each other: what is asked of those of torch.distributed, and how they are opened."""

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

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` waits."""


# torch does not name its stores as its own to type checkers.


def in_file(path: str) -> Store:
    """A store in a file, which goes with its directory."""
    import torch.distributed as dist

    found: Store = dist.FileStore(path, -1)  # type: ignore[attr-defined]
    return found


def at_address(host: str, port: int, keeps: bool, seconds: float) -> Store:
    """A connection to the store at an address, which this process `keeps` or waits for so long. Raises RuntimeError.

    Ranks of other runs may share it; who keeps it waits for nobody here.
    """
    import torch.distributed as dist

    left = timedelta(seconds=seconds)
    found: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, keeps, left, wait_for_workers=False, multi_tenant=True
    )
    return found


def within(prefix: str, store: Store) -> Store:
    """A store whose keys all begin with a prefix."""
    import torch.distributed as dist

    found: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined, arg-type]
    return found
