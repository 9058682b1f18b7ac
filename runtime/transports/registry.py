"""What a transport is besides its ends, and all of them by name. One is a module, which registers its record when it is
imported; none of that needs torch but what runs all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from partita.dsl.diagnostic import Diagnostic
from partita.dsl.registry import Registry

if TYPE_CHECKING:
    import torch

    from partita.runtime.transports.transport import Cluster, ProcessEnd


@frozen(kw_only=True)
class TransportKind:
    """A transport: how it is chosen, and how a rank gets its end of it.

    `default` says whether it is taken where none is asked for, with so many GPUs for so many ranks on this machine;
    `problem` why it cannot serve them. Each rank has a GPU of its own with `gpu`.

    Ranks are processes that torch.distributed connects by `backend`, and `end` makes the end of one, on a device, of
    those who know a secret; or all are in one process, and `cluster` makes the ends of so many ranks, strict or not,
    with a seed.
    """

    name: str
    default: Callable[[int, int], bool] = lambda gpus, ranks: False
    problem: Callable[[int, int], Diagnostic | None] = lambda gpus, ranks: None
    gpu: bool = False
    backend: str = ""
    end: Callable[[torch.device, bytes], ProcessEnd] | None = None
    cluster: Callable[[int, bool, int], Cluster] | None = None


TRANSPORTS: Registry[TransportKind] = Registry("transport", "partita.runtime.transports", ("gloo", "nccl", "virtual"))


def register(kind: TransportKind) -> TransportKind:
    """Make a transport known. Raises ValueError where another one has its name."""
    return TRANSPORTS.register(kind)
