"""A device with a memory of its own, on a CPU: counts the live tensors that lie there, and refuses beyond a limit.

What the host keeps (`offload`) is not counted: tensors that are placed there, and what operations make of these alone.
Copies between the two memories are copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any
from unittest import mock

import torch
from memory import Live
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from partita.runtime import kernels
from partita.runtime.rank import Rank


class OutOfMemory(Exception):
    """More than the limit is alive on the device."""


class Device(Live):
    """Counts what is alive on the device, in bytes; raises OutOfMemory beyond a `limit`."""

    def __init__(self, limit: float = inf) -> None:
        super().__init__()
        self.limit = limit
        self._host: dict[int, StorageWeakRef] = {}
        self._placing: bool | None = None  # whether what is made lies with the host, if that is said

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.numel() > 1]
        there = bool(given) and all(map(self.with_host, given)) if self._placing is None else self._placing
        if not there:
            found = super().__torch_dispatch__(func, types, args, kwargs)
            if self.now > self.limit:
                raise OutOfMemory(f"{self.now:,} bytes are alive, of at most {self.limit:,.0f}, after {func}")
            return found
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.place(each)
        return found

    def with_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the host's memory."""
        known = self._host.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def place(self, tensor: torch.Tensor) -> None:
        """A tensor lies in the host's memory."""
        storage = tensor.untyped_storage()
        self.alive.pop(storage._cdata, None)
        self._host[storage._cdata] = StorageWeakRef(storage)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies between the memories are copies. A prefetched tensor has no content until it has arrived."""
        coming: dict[int, torch.Tensor] = {}

        def moved(x: torch.Tensor, host: bool) -> torch.Tensor:
            self._placing = host
            try:
                return x.clone()
            finally:
                self._placing = None

        def prefetch(x: torch.Tensor, context: object) -> torch.Tensor:
            found = moved(x, False)
            if found.is_floating_point():
                found.fill_(float("nan"))
            coming[id(found)] = x
            return found

        def arrive(x: torch.Tensor, context: object) -> torch.Tensor:
            return x.copy_(coming.pop(id(x)))

        changes = {
            "to_host": lambda x: moved(x, True),
            "to_device": lambda x, context: moved(x, False),
            "prefetch": prefetch,
            "arrive": arrive,
        }
        with mock.patch.multiple(kernels, **changes):
            yield

    def begin(self, rank: Rank, limit: float = inf) -> None:
        """Counts a rank, which has been made under this mode; from here on with a limit."""
        for record in rank.plan.program.parameters:
            if record.name in rank.memory.masters and record.host:
                self.place(rank.memory.masters[record.name])
            for state in record.states:
                if state.host and (state.name, record.name) in rank.memory.states:
                    self.place(rank.memory.states[state.name, record.name])
        self.peak, self.limit = self.now, limit
