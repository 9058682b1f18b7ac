"""NCCL: ranks are processes with a GPU each; if only some ranks of a group use it, they hang."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from partita.dsl.diagnostic import Diagnostic
from partita.runtime.transports.registry import Processes, register

if TYPE_CHECKING:
    import torch

    from partita.runtime.transports.transport import ProcessEnd

# Set to 1, NCCL from 2.30 on lets ranks share a GPU (docs.nvidia.com/deeplearning/nccl, environment variables).
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"


def _end(device: torch.device, secret: bytes) -> ProcessEnd:
    import torch

    from partita.runtime.transports.process import ProcessTransport

    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return ProcessTransport(device, secret, sums=True, shares=False, options=_options, multiprocessors=multiprocessors)


def _options(blocks: int) -> Any:
    """Options of a group that takes at most so many thread blocks."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    if hasattr(options, "config"):
        options.config.min_ctas = 1
        options.config.max_ctas = blocks
    return options


def pending_operations() -> str:
    """The operations that a GPU has not done, of this process's groups: a line each, the oldest first."""
    import torch

    names = "_dump_nccl_trace_json", "_dump_fr_trace_json"  # the first where torch has NCCL
    dump = next(
        getattr(torch._C._distributed_c10d, each) for each in names if hasattr(torch._C._distributed_c10d, each)
    )
    entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", ())
    return "\n".join(_line(each) for each in entries if each["state"] != "completed")


def _line(entry: Mapping[str, Any]) -> str:
    """One entry of torch's flight recorder."""
    group, kind = entry["process_group"][-1], zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
    operands = ", ".join(f"{dtype} {'x'.join(map(str, sizes))}" for dtype, sizes in kind)
    return f"{entry['profiling_name']} {entry['collective_seq_id']} of {group}, {operands}, {entry['state']}"


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
