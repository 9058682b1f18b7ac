"""Batches are the same for ever: a run that resumes with a newer version reads on where it was."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from partita.dsl.spec import Call
from partita.runtime.data.registry import Use, open_dataset
from tests.runtime.data.test_data import ARRAYS, NOISE, WINDOWS, folder, ids

__all__ = ["folder"]

CALLS = {
    "text": (Call("text", {"glob": "corpus/*.txt", "alphabet": "bytes", "holdout": 0.1}), WINDOWS),
    "characters": (Call("text", {"glob": "corpus/*.txt", "alphabet": "chars", "holdout": 0.1}), WINDOWS),
    "tokens": (Call("tokens", {"path": "train.bin", "dtype": "u16", "holdout": 0.1}), (ids("tokens", limit=2000),)),
    "arrays": (Call("arrays", {"path": "digits.npz", "holdout": 0.1}), ARRAYS),
    "random": (Call("random", {}), NOISE),
}
# Of batches 1, 7 and 1,000 and of evaluation batches 0 and 5, with seed 3: what the first version to have them made.
DIGESTS = {
    "arrays": "acd9f5bb93d21ac9",
    "characters": "bed30d83753cfd19",
    "random": "352b4695ac4b8b78",
    "text": "96257ace77469733",
    "tokens": "21c693cf9eec2cd6",
}


def digest(call: Call, inputs: tuple, root: Path) -> str:
    dataset = open_dataset(call, inputs, 3, root, use=Use.HOLD_OUT)
    found = hashlib.sha256()
    for batch in (*map(dataset.batch, (1, 7, 1_000)), *map(dataset.holdout_batch, (0, 5))):
        for name in sorted(batch):
            found.update(f"{name} {batch[name].dtype.str} {batch[name].shape}".encode())
            found.update(np.ascontiguousarray(batch[name]).tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", sorted(CALLS))
def test_batches_are_those_of_earlier_versions(name: str, folder: Path) -> None:
    assert digest(*CALLS[name], folder) == DIGESTS[name]
