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
    """How a transport is chosen.

    `default` says whether it is taken where none is asked for, with so many GPUs for so many ranks on this machine;
    `problem` why it cannot serve them. Each rank has a GPU of its own with `gpu`.
    """

    name: str
    default: Callable[[int, int], bool] = lambda gpus, ranks: False
    problem: Callable[[int, int], Diagnostic | None] = lambda gpus, ranks: None
    gpu: bool = False


@frozen(kw_only=True)
class Processes(TransportKind):
    """Of ranks that are processes, which torch.distributed connects by `backend`: `end` makes that of one, on a device,
    among those who know a secret.
    """

    backend: str
    end: Callable[[torch.device, bytes], ProcessEnd]


@frozen(kw_only=True)
class InProcess(TransportKind):
    """Of ranks that are all in this process: `cluster` makes the ends of so many, strict or not, with a seed."""

    cluster: Callable[[int, bool, int], Cluster]


TRANSPORTS: Registry[Processes | InProcess] = Registry(
    "transport", "partita.runtime.transports", ("gloo", "nccl", "virtual")
)
register = TRANSPORTS.register
