"""The transports by name. Each is a module that registers its record on import; only the in-process one needs torch."""

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

    `default` says whether it is the default for a number of GPUs and of ranks on this machine, `problem` why it cannot
    serve them. With `gpu`, each rank has its own GPU.
    """

    name: str
    default: Callable[[int, int], bool] = lambda gpus, ranks: False
    problem: Callable[[int, int], Diagnostic | None] = lambda gpus, ranks: None
    gpu: bool = False


@frozen(kw_only=True)
class Processes(TransportKind):
    """For ranks that are processes, connected by torch.distributed over `backend`: `end` makes the transport of one
    rank, from its device and the run's secret.
    """

    backend: str
    end: Callable[[torch.device, bytes], ProcessEnd]


@frozen(kw_only=True)
class InProcess(TransportKind):
    """For ranks that are all in this process: `cluster` takes their number, whether it is strict, and a seed."""

    cluster: Callable[[int, bool, int], Cluster]


TRANSPORTS: Registry[Processes | InProcess] = Registry(
    "transport", "partita.runtime.transports", ("gloo", "nccl", "virtual")
)
register = TRANSPORTS.register
