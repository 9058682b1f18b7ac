"""The numpy dtype that represents each of the language's dtypes on the host.

numpy has no bfloat16: such values are float32 until they are rounded on their way to the device.
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
    "u8": np.dtype(np.uint8),
}
