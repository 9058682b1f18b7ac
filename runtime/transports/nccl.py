"""NCCL: ranks are processes with a GPU each; if only some ranks of a group use it, they hang.

One assumption is not checked: kernels of different communicators run concurrently as long as their thread blocks (CTAs)
fit on the device together, which is why channels ask for few.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from partita.dsl.diagnostic import Diagnostic
from partita.runtime.transports.registry import Processes, register

if TYPE_CHECKING:
    import torch

    from partita.runtime.transports.transport import ProcessEnd

# Set to 1, NCCL from 2.30 on lets ranks share a GPU (docs.nvidia.com/deeplearning/nccl, environment variables).
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
CTAS_PER_CHANNEL = 2  # enough for a link's bandwidth, and few enough for dozens of channels next to the computation


def _end(device: torch.device, secret: bytes) -> ProcessEnd:
    from partita.runtime.transports.process import ProcessTransport

    return ProcessTransport(device, secret, sums=True, shares=False, channel_options=_channel_options)


def _channel_options() -> Any:
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    if hasattr(options, "config"):
        options.config.min_ctas = 1
        options.config.max_ctas = CTAS_PER_CHANNEL
    return options


def _problem(gpus: int, ranks: int) -> Diagnostic | None:
    if gpus >= ranks or (gpus > 0 and os.environ.get(SHARING) == "1"):
        return None
    return Diagnostic(
        "E0611",
        f"ranks on this machine: {ranks}; GPUs (NCCL needs one per rank): {gpus}",
        None,
        help="start at most as many ranks per machine as it has GPUs, or use --transport gloo",
    )


register(
    Processes(
        name="nccl",
        default=lambda gpus, ranks: gpus >= ranks,
        problem=_problem,
        gpu=True,
        backend="nccl",
        end=_end,
    )
)
