"""Gloo: ranks are processes that compute on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.runtime.transports.registry import Processes, register

if TYPE_CHECKING:
    import torch

    from partita.runtime.transports.transport import ProcessEnd


def _end(device: torch.device, secret: bytes) -> ProcessEnd:
    from partita.runtime.transports.process import ProcessTransport

    return ProcessTransport(device, secret)


register(Processes(name="gloo", default=lambda gpus, ranks: gpus < ranks, backend="gloo", end=_end))
