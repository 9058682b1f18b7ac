"""What torch's fused kernels of attention ask for on GPUs: the runtime pads to it, and memory is bounded by it."""

from __future__ import annotations

ROWS_OF = 8  # queries, keys and values have rows of so many elements each, and so have numbers that are added to scores
DENOMINATORS_OF = 32  # for so many queries at a time does memory-efficient attention make denominators
FLASH_SIZE = 256  # the largest heads that FlashAttention knows
CUDNN_SIZE = 128  # and cuDNN's attention with its gradient
# The largest that torch tests memory-efficient attention with: at 320, what it makes in bf16 was wrong (H200, torch
# 2.11). So is what it makes of more positions than these (pytorch 162588).
EFFICIENT_SIZE, EFFICIENT_LENGTH = 128, 1 << 16


def rounded_up(count: int, multiple: int) -> int:
    """The least multiple that is not less than a count."""
    return -(-count // multiple) * multiple
