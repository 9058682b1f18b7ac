"""What torch's fused kernels of attention ask for on GPUs: the runtime pads to it, and memory is bounded by it."""

from __future__ import annotations

ROWS_OF = 8  # queries, keys and values have rows of so many elements each, and so have numbers that are added to scores
DENOMINATORS_OF = 32  # for so many queries at a time does memory-efficient attention make denominators
FLASH_SIZE = 256  # the largest heads that FlashAttention knows


def rounded_up(count: int, multiple: int) -> int:
    """The least multiple that is not less than a count."""
    return -(-count // multiple) * multiple
