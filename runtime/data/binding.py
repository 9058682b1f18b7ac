"""A program's inputs bound to the data that its file names."""

from __future__ import annotations

from pathlib import Path

from partita.compiler.program import Program
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Train
from partita.runtime.data import DOUBTS, DataFile, Dataset, Input, identify, open_dataset


def open_data(program: Program, train: Train, root: Path) -> Dataset | None:
    """The dataset of a train block for a program's inputs; None for a model without inputs.

    `root` is the folder of the `.par` file. Raises Refused (E06xx) for data that is missing or does not fit.
    """
    if not program.inputs:
        return None
    inputs = tuple(
        Input(
            each.name,
            each.type,
            program.batch if each.type.has(program.batch) else None,
            each.limit.size if each.limit else None,
            each.limit.name if each.limit else None,
        )
        for each in program.inputs
    )
    return open_dataset(train.data, inputs, train.seed, root, evaluates=train.eval is not None)


def identify_data(program: Program, train: Train, root: Path) -> tuple[DataFile, ...]:
    """The identity of the files that a train block's data is read from. Raises Refused, as `open_data`."""
    return identify(train.data, root) if program.inputs else ()


def data_doubts(program: Program, train: Train, root: Path) -> list[Diagnostic]:
    """Warnings of data that can be opened and looks wrong."""
    find = DOUBTS.get(train.data.name) if program.inputs else None
    return find(train.data, root) if find is not None else []
