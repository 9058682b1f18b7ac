"""Data: what `train.data` names, opened as batches that are a pure function of (seed, step). numpy only.

A source is one file here, one line in `SOURCES`, and one in `FILES`, which says what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Call
from partita.runtime.data.arrays import open_arrays
from partita.runtime.data.dataset import Batch, Dataset, Input
from partita.runtime.data.files import matched
from partita.runtime.data.random import open_random
from partita.runtime.data.stdlib import open_stdlib, stdlib_files
from partita.runtime.data.text import open_text
from partita.runtime.data.tokens import open_tokens, token_doubts
from partita.runtime.data_files import DataFile, identified

__all__ = ["DOUBTS", "FILES", "SOURCES", "Batch", "DataFile", "Dataset", "Input", "identify", "open_dataset"]

SOURCES: dict[str, Callable[[Call, tuple[Input, ...], int, Path, bool], Dataset]] = {
    "text": open_text,
    "stdlib": open_stdlib,
    "tokens": open_tokens,
    "arrays": open_arrays,
    "random": open_random,
}

# The files that a source reads, each with the name by which it is compared with others.
FILES: dict[str, Callable[[Call, Path], list[tuple[str, Path]]]] = {
    "text": matched("glob"),
    "stdlib": stdlib_files,
    "tokens": matched("path"),
    "arrays": matched("path"),
    "random": lambda call, root: [],
}

# What looks wrong in data that can be opened, for the sources that can tell.
DOUBTS: dict[str, Callable[[Call, Path], list[Diagnostic]]] = {"tokens": token_doubts}


def identify(call: Call, root: Path) -> tuple[DataFile, ...]:
    """The identity of the files that a call reads. Raises Refused (E0601 to E0603)."""
    return identified(FILES[call.name](call, root), call.span)


def open_dataset(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, *, evaluates: bool = False) -> Dataset:
    """The dataset that a call such as `text("corpus/*.txt", holdout = 10%)` names, for a model's inputs.

    `root` is the folder of the `.par` file, which paths are relative to. `evaluates` says that the run has an
    `eval` and so needs a holdout. Raises `Refused` (E06xx, at the place of the call) for data that is
    missing, damaged, too short or does not fit the inputs; ids beyond an axis in a very large file are found
    when they are used.
    """
    assert inputs, "a model without inputs needs no data"
    return SOURCES[call.name](call, inputs, seed, root, evaluates)
