"""Which devices ranks compute on, and which transport connects them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.diagnostic import Refused, refuse
from partita.runtime.transports.registry import TRANSPORTS, InProcess, Processes

if TYPE_CHECKING:
    import torch

    from partita.dsl.spec import Spec
    from partita.runtime.supervision.identity import Identity

DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # if none exists there is no GPU, and torch need not be imported to ask it


def transport_of(arguments: argparse.Namespace, spec: Spec) -> Processes | InProcess:
    """The transport for all ranks on this machine. Raises Refused (E0611)."""
    ranks = spec.mesh.ranks if spec.mesh is not None else 1
    needless = arguments.transport is not None and not TRANSPORTS[arguments.transport].gpu
    none = needless or not any(Path(each).exists() for each in DRIVERS)
    return chosen(arguments.transport, 0 if none else gpus_here(), ranks)


def chosen(transport: str | None, gpus: int, ranks: int) -> Processes | InProcess:
    """The requested transport, or else the first that is the default for this many GPUs and ranks on this machine.
    Raises Refused if it does not support them.
    """
    each = TRANSPORTS.values()
    kind = TRANSPORTS[transport] if transport else next(kind for kind in each if kind.default(gpus, ranks))
    problem = kind.problem(gpus, ranks)
    if problem is not None:
        raise Refused([problem])
    return kind


def gpus_here() -> int:
    """The number of GPUs that this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of_rank(transport: str | None, identity: Identity) -> tuple[Processes, torch.device]:
    """The transport and the device of this rank. Raises Refused (E0611)."""
    import torch

    gpus = gpus_here()
    number, ranks = (0, 1) if identity.own_gpu else (identity.local_rank, identity.local_ranks)
    kind = chosen(transport, gpus, ranks)
    if not isinstance(kind, Processes):
        message = f"--transport {kind.name} runs all ranks in one process, and this is one of several"
        raise refuse("E0611", message, help="start it without a launcher")
    if kind.gpu:
        return kind, torch.device("cuda", number)
    if transport is None and gpus and identity.local_rank == 0:
        print(f"partita: {gpus} GPUs for {ranks} ranks: computing on CPUs", file=sys.stderr)
    return kind, torch.device("cpu")
