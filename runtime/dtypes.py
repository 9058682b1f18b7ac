"""The numpy dtype that carries each dtype of the language outside the device.

numpy has no bfloat16: such values travel as float32 and are rounded where they enter the device.
"""

from __future__ import annotations

import numpy as np

NUMPY: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "bool": np.dtype(np.bool_),
}
