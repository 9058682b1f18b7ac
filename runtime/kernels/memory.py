"""What results keep of memory."""

from __future__ import annotations

import torch
from torch import Tensor


def owned(part: Tensor, whole: Tensor) -> Tensor:
    """A part of a tensor that nothing else reads, in memory of its own: the rest is not kept."""
    return part if part.numel() == whole.numel() else part.clone(memory_format=torch.contiguous_format)
