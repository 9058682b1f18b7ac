"""The store of the rendezvous: the interface used of torch.distributed's stores, and how they are opened."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol


class Store(Protocol):
    """Keys and values shared by all ranks. All methods raise RuntimeError if the store cannot be reached."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0; returns the new value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until the keys exist; raises RuntimeError on timeout."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits."""


# torch does not export its stores to type checkers.


def in_file(path: str) -> Store:
    """A store in a file, which is removed with its directory."""
    import torch.distributed as dist

    store: Store = dist.FileStore(path, -1)  # type: ignore[attr-defined]
    return store


def at_address(host: str, port: int, keeps: bool, seconds: float) -> Store:
    """A connection to the store at an address. This process hosts the store if it `keeps` it; otherwise it waits for it
    up to `seconds`. Raises RuntimeError.

    Ranks of other runs may share the store; its host does not wait for other ranks here.
    """
    import torch.distributed as dist

    left = timedelta(seconds=seconds)
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, keeps, left, wait_for_workers=False, multi_tenant=True
    )
    return store


def within(prefix: str, store: Store) -> Store:
    """A store whose keys all begin with a prefix."""
    import torch.distributed as dist

    prefixed: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined, arg-type]
    return prefixed
