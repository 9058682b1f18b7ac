"""Tensors as a numpy archive."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch


def write_archive(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to an archive, atomically; numpy has no bf16, which becomes f32. Raises OSError."""
    arrays = {name: (x.float() if x.dtype == torch.bfloat16 else x).numpy() for name, x in tensors.items()}
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        # As `np.savez`, which cannot have arrays of its arguments' names.
        with ZipFile(aside, "x") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
        os.replace(aside, path)
    except BaseException:
        with suppress(FileNotFoundError):
            aside.unlink()
        raise
