"""Where ranks compute, and over what they talk: GPUs and NCCL, or processors and Gloo."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from partita.dsl.diagnostic import refuse

if TYPE_CHECKING:
    import torch

    from partita.dsl.spec import Spec
    from partita.runtime.supervision.rendezvous import Identity

DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # without one there is no GPU, and no need to import torch and ask it


def transport_of(arguments: argparse.Namespace, spec: Spec) -> str:
    """The transport of all ranks, which are on this machine. Refused: E0611."""
    ranks = spec.mesh.ranks if spec.mesh is not None else 1
    unasked = arguments.transport == "gloo" or not any(Path(each).exists() for each in DRIVERS)
    return _settled(arguments.transport, 0 if unasked else gpus_here(), ranks)


def _settled(transport: str | None, gpus: int, ranks: int) -> str:
    """NCCL where there is a GPU for each of a machine's ranks: half a group on NCCL would wait for the other half for
    ever. Refused: E0611 where NCCL is asked for and there is not.
    """
    if transport == "nccl" and gpus < ranks:
        raise refuse(
            "E0611",
            f"ranks on this machine: {ranks}; GPUs (NCCL needs one per rank): {gpus}",
            help="start at most as many ranks per machine as it has GPUs, or use --transport gloo",
        )
    return transport or ("nccl" if gpus >= ranks else "gloo")


def gpus_here() -> int:
    """The GPUs that this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of_rank(transport: str | None, identity: Identity) -> torch.device:
    """Where this rank computes: on a GPU, and through NCCL, or on a CPU, and through Gloo. Refused: E0611."""
    import torch

    gpus = gpus_here()
    number, ranks = (0, 1) if identity.own_gpu else (identity.local_rank, identity.local_ranks)
    if _settled(transport, gpus, ranks) == "nccl":
        return torch.device("cuda", number)
    if transport is None and gpus and identity.local_rank == 0:
        print(f"partita: {gpus} GPUs for {ranks} ranks: computing on CPUs", file=sys.stderr)
    return torch.device("cpu")
