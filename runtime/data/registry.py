"""What a source of data is, and all of them by name. A source is one module, which registers a `Source` when it is
imported; what it needs numpy for is imported when it is opened, so that files can be checked without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from attrs import frozen

from partita.dsl import builtins
from partita.dsl.builtins import Signature
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.registry import Registry
from partita.dsl.spec import Call

if TYPE_CHECKING:
    from partita.runtime.data.dataset import Dataset, Input


@frozen(kw_only=True, eq=False)
class Source(Signature):
    """A source of data: how files call it, what it reads, and how it is opened.

    `files` are those that a call reads, each with the name by which it is compared with others; `open` makes the
    dataset for a call, the model's inputs, a seed, the folder that paths are relative to and whether the run evaluates;
    `doubts` is what looks wrong in data that can be opened, for those that can tell. All raise Refused (E06xx).
    """

    open: Callable[[Call, tuple[Input, ...], int, Path, bool], Dataset]
    files: Callable[[Call, Path], list[tuple[str, Path]]] = lambda call, root: []
    doubts: Callable[[Call, Path], list[Diagnostic]] = lambda call, root: []


# What is registered there is a Source.
SOURCES = cast("Registry[Source]", builtins.DATA)
register = SOURCES.register


def open_dataset(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, *, evaluates: bool = False) -> Dataset:
    """The dataset that a call such as `text("corpus/*.txt", holdout = 10%)` names, for a model's inputs.

    `root` is the folder of the `.par` file, which paths are relative to. `evaluates` says that the run has an
    `eval` and so needs a holdout. Raises `Refused` (E06xx, at the place of the call) for data that is
    missing, damaged, too short or does not fit the inputs; ids beyond an axis in a very large file are found
    when they are used.
    """
    assert inputs, "a model without inputs needs no data"
    return SOURCES[call.name].open(call, inputs, seed, root, evaluates)
