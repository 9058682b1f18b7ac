"""Binds the inputs of a program to the data that its file names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from attrs import frozen

from partita.compiler.program import InputRecord, Program
from partita.dsl.config.builtins import ALL
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.spec import Call, Train
from partita.dsl.syntax.source import Span
from partita.runtime.data.dataset import Dataset, Input
from partita.runtime.data.registry import SOURCES, Use, open_dataset
from partita.runtime.data.whole import SeparateEvaluationData
from partita.runtime.data_files import DataFile, identified


@frozen(eq=False)
class Bound:
    """A run's data: where batches come from (None for a model without inputs), the identity of the files that it trains
    on, and of all that it reads; and warnings about data that can be opened but looks wrong. `rows` is the number of
    rows that are evaluated, if that is the whole set.
    """

    dataset: Dataset | None
    files: Sequence[DataFile]
    all_files: Sequence[DataFile]
    warnings: Sequence[Diagnostic]
    rows: int | None = None


def bind(program: Program, train: Train, root: Path, allow_python: bool = False) -> Bound:
    """Bind the data of a train block to a program's inputs. Raises Refused (E06xx)."""
    dataset = open_data(program, train, root, allow_python)
    if dataset is None:
        return Bound(None, (), (), ())
    files = identify(train.data, root)
    warnings = SOURCES[train.data.name].warnings(train.data, root)
    evaluated = train.eval.arguments.get("data") if train.eval is not None else None
    others = () if evaluated is None else identify(evaluated, root)
    if evaluated is not None:
        warnings = [*warnings, *SOURCES[evaluated.name].warnings(evaluated, root)]
    rows = dataset.rows if isinstance(dataset, SeparateEvaluationData) else None
    if rows is not None and dataset.left_out:
        warnings = [*warnings, _left_out(dataset.left_out, (evaluated or train.data).span)]
    return Bound(dataset, files, tuple(dict.fromkeys((*files, *others))), warnings, rows)


def _left_out(count: int, span: Span | None) -> Diagnostic:
    return Diagnostic(
        "W0605",
        f"the last {count:,} ids of the evaluation data do not fill a row, and are not evaluated",
        span,
        help="`cross_entropy(…, ignore = -1)`: then the last row may end early",
    )


def identify(call: Call, root: Path) -> tuple[DataFile, ...]:
    """The identity of the files that a call reads. Raises Refused (E0601 to E0603)."""
    return identified(SOURCES[call.name].files(call, root), call.span)


def inputs_of(records: Iterable[InputRecord], batch: str) -> tuple[Input, ...]:
    """Inputs of a program whose batch axis has this name, as datasets know them."""
    return tuple(
        Input(
            each.name,
            each.type,
            batch if each.type.has(batch) else None,
            each.limit.size if each.limit else None,
            each.limit.name if each.limit else None,
            each.ignored,
        )
        for each in records
    )


def open_data(program: Program, train: Train, root: Path, allow_python: bool = False) -> Dataset | None:
    """The dataset of a train block for a program's inputs; None for a model without inputs.

    `root` is the directory of the `.par` file. Raises Refused (E06xx) for data that is missing, does not fit, or is
    made by a Python function, unless that is allowed.
    """
    if not program.inputs:
        return None
    inputs, opened = inputs_of(program.inputs, program.batch), partial(open_dataset, allow_python=allow_python)
    if train.eval is None:
        return opened(train.data, inputs, train.seed, root)
    own, whole = train.eval.arguments.get("data"), train.eval.arguments["batches"] == ALL
    if own is None:
        dataset = evaluated = opened(train.data, inputs, train.seed, root, use=Use.HOLD_OUT)
    else:
        dataset = opened(train.data, inputs, train.seed, root)
        evaluated = opened(own, inputs, train.seed, root, use=Use.EVALUATE, trained=train.data)
    if not whole:
        return dataset if own is None else SeparateEvaluationData(evaluated, dataset)
    if evaluated.held_out is None:
        raise refuse(
            "E0608",
            "this data has no end, so there is no evaluating all of it",
            (own or train.data).span,
            help="`batches = 20`",
        )
    size = max(model_input.batch for model_input in inputs)
    return SeparateEvaluationData(evaluated, dataset, evaluated.held_out, size)
