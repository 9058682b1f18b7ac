"""Binds the inputs of a program to the data that its file names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from partita.compiler.program import Program
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Call, Train
from partita.runtime.data.dataset import Dataset, Input
from partita.runtime.data.registry import SOURCES, open_dataset
from partita.runtime.data_files import DataFile, identified


@frozen(eq=False)
class Bound:
    """A run's data: where batches come from (None for a model without inputs), the identity of its files, and warnings
    about data that can be opened but looks wrong.
    """

    dataset: Dataset | None
    files: Sequence[DataFile]
    doubts: Sequence[Diagnostic]


def bind(program: Program, train: Train, root: Path) -> Bound:
    """Bind the data of a train block to a program's inputs. Raises Refused (E06xx)."""
    dataset = open_data(program, train, root)
    if dataset is None:
        return Bound(None, (), ())
    return Bound(dataset, identify(train.data, root), SOURCES[train.data.name].doubts(train.data, root))


def identify(call: Call, root: Path) -> tuple[DataFile, ...]:
    """The identity of the files that a call reads. Raises Refused (E0601 to E0603)."""
    return identified(SOURCES[call.name].files(call, root), call.span)


def open_data(program: Program, train: Train, root: Path) -> Dataset | None:
    """The dataset of a train block for a program's inputs; None for a model without inputs.

    `root` is the directory of the `.par` file. Raises Refused (E06xx) for data that is missing or does not fit.
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
            each.ignored,
        )
        for each in program.inputs
    )
    return open_dataset(train.data, inputs, train.seed, root, evaluates=train.eval is not None)
