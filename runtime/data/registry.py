"""The data sources by name. A source is a module that registers a `Source` when it is imported; whatever needs numpy is
imported when data is opened, so that files can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from attrs import evolve, frozen

from partita.dsl.check.language_model import SOURCES_OF, sources_of
from partita.dsl.config import builtins
from partita.dsl.config.builtins import DataSignature
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.registry import Registry
from partita.dsl.spec import Call, PythonFunction
from partita.runtime.data.files import Files

if TYPE_CHECKING:
    from partita.runtime.data.dataset import Dataset, Input


# The argument that opening adds to calls: what their ids have in common.
COMMON = "common"


class Use(IntEnum):
    """What a run does with a source: it only trains; it trains, and evaluates what is held out; or it evaluates all."""

    TRAIN = 0
    HOLD_OUT = 1
    EVALUATE = 2


# Makes the dataset for a call, the model's inputs, a seed, the directory that paths are relative to, and what the run
# does with it.
Opener: TypeAlias = "Callable[[Call, tuple[Input, ...], int, Path, Use], Dataset]"


@frozen(kw_only=True, eq=False)
class Source(DataSignature):
    """A data source: how files call it, what it reads, and how it is opened.

    `files` are those that a call reads, each with the name by which it is compared with others; `open` makes its
    dataset; `warnings` finds what looks wrong in data that can be opened; `common` gives what the ids of all calls of
    this source must have in common, so that a model trained on one can be evaluated on another. All raise Refused
    (E06xx).
    """

    open: Opener
    files: Files = lambda call, root: []
    warnings: Callable[[Call, Path], list[Diagnostic]] = lambda call, root: []
    common: Callable[[Sequence[Call], Path], Mapping[str, Any] | None] = lambda calls, root: None


def opened_by(module: str, function: str, **options: Any) -> Opener:
    """Opens by a function of a module beside this one, which is imported then: it takes numpy. It is given `options` as
    well.
    """

    def open(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Dataset:
        opener = getattr(import_module(f"{__package__}.{module}"), function)
        dataset: Dataset = opener(call, inputs, seed, root, use, **options)
        return dataset

    return open


# All entries are of type Source.
SOURCES = cast("Registry[Source]", builtins.DATA)
register = SOURCES.register


def open_dataset(
    call: Call,
    inputs: tuple[Input, ...],
    seed: int,
    root: Path,
    *,
    use: Use = Use.TRAIN,
    trained: Call | None = None,
    allow_python: bool = False,
) -> Dataset:
    """The dataset that a call such as `text("corpus/*.txt", holdout = 10%)` names, for a model's inputs.

    `root` is the directory of the `.par` file, which paths are relative to; `use` is what the run does with the data,
    and `trained` what the model is trained on, if that is other data. Raises Refused (E06xx, at the call) for data that
    is missing, damaged, too short, does not fit the inputs, or is made by a Python function, unless that is allowed;
    out-of-range ids in a very large file are found when they are used.
    """
    assert inputs, "a model without inputs needs no data"
    from partita.runtime.python_files import require_functions  # which `check` has no use for

    require_functions(python_functions(call), allow_python)
    call = with_training_arguments(call, call if trained is None else trained, root)
    return SOURCES[call.name].open(call, inputs, seed, root, use)


def python_functions(call: Call) -> dict[str, PythonFunction]:
    """The Python functions that make data, by what messages call them. A reward, which scores what is made, is none."""
    functions = [source.arguments.get("function") for source in sources_of(call)]
    return {f"data by `{each.name}`": each for each in functions if isinstance(each, PythonFunction)}


def with_training_arguments(call: Call, trained: Call, root: Path) -> Call:
    """A call, with what it has in `COMMON` with the data that a model is trained on. Raises Refused (E06xx)."""
    if call is trained and len(sources_of(call)) == 1:
        return call  # it has everything by itself
    known: dict[str, Mapping[str, Any] | None] = {}

    def one(call: Call) -> Call:
        if SOURCES_OF in call.arguments:
            parts = tuple(evolve(each, call=one(each.call)) for each in call.arguments[SOURCES_OF])
            return evolve(call, arguments={**call.arguments, SOURCES_OF: parts})
        if COMMON in call.arguments:
            return call
        if call.name not in known:
            same = [each for each in sources_of(trained) if each.name == call.name]
            known[call.name] = SOURCES[call.name].common(same, root)
        common = known[call.name]
        return call if common is None else evolve(call, arguments={**call.arguments, COMMON: common})

    return one(call)
