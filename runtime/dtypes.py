"""The numpy dtype that represents each of the language's dtypes on the host.

numpy has no bfloat16: such values are float32 until they are rounded on their way to the device.
"""

from __future__ import annotations

import numpy as np

from partita.dsl.types import integers

NUMPY: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}


def outside(array: np.ndarray, dtype: str) -> str | None:
    """What is wrong with integers that a dtype of integers does not hold: `has 300, and u8 holds 0 to 255`."""
    held = integers(dtype)
    wrong = [each for each in (int(array.min()), int(array.max())) if each not in held] if array.size else []
    return f"has {wrong[0]}, and {dtype} holds {held[0]} to {held[-1]}" if wrong else None
