"""torch's dtypes by the language's names, and the dtype in which reductions compute."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}


def widened(x: Tensor) -> Tensor:
    """The tensor in the dtype of accumulation."""
    return x.float() if x.dtype == torch.bfloat16 else x
