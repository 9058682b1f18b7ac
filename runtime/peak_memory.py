"""The most memory that this process has used: on a GPU of tensors, elsewhere resident."""

from __future__ import annotations

import resource
import sys

import torch

# Of `ru_maxrss`, by getrusage(2): kilobytes on Linux, bytes on macOS.
UNIT = 1 if sys.platform == "darwin" else 1024


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak since this process started. On a GPU: of the tensors that torch had allocated there. On a CPU:
    of the whole process, including Python and libraries, as torch does not count tensors there.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
