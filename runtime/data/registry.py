"""The data sources by name. A source is a module that registers a `Source` when it is imported; whatever needs numpy is
imported when data is opened, so that files can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, cast

from attrs import frozen

from partita.dsl import builtins
from partita.dsl.builtins import DataSignature
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.registry import Registry
from partita.dsl.spec import Call
from partita.runtime.data.files import Files

if TYPE_CHECKING:
    from partita.runtime.data.dataset import Dataset, Input


class Use(IntEnum):
    """What a run does with a source: it only trains; it trains, and evaluates what is held out; or it evaluates all."""

    TRAIN = 0
    HOLD_OUT = 1
    EVALUATE = 2


@frozen(kw_only=True, eq=False)
class Source(DataSignature):
    """A data source: how files call it, what it reads, and how it is opened.

    `files` are those that a call reads, each with the name by which it is compared with others; `open` makes the
    dataset for a call, the model's inputs, a seed, the directory that paths are relative to, and what the
    run does with it; `doubts` is what looks wrong in data that can be opened. All raise Refused (E06xx).
    """

    open: Callable[[Call, tuple[Input, ...], int, Path, Use], Dataset]
    files: Files = lambda call, root: []
    doubts: Callable[[Call, Path], list[Diagnostic]] = lambda call, root: []


# All entries are of type Source.
SOURCES = cast("Registry[Source]", builtins.DATA)
register = SOURCES.register


def open_dataset(
    call: Call,
    inputs: tuple[Input, ...],
    seed: int,
    root: Path,
    *,
    evaluates: bool = False,
    use: Use | None = None,
) -> Dataset:
    """The dataset that a call such as `text("corpus/*.txt", holdout = 10%)` names, for a model's inputs.

    `root` is the directory of the `.par` file, which paths are relative to. `evaluates`: the run has an `eval` and so
    needs a holdout; `use` says what else it may do with the data. Raises Refused (E06xx, at the call) for data that is
    missing, damaged, too short, or does not fit the inputs; out-of-range ids in a very large file are found when they
    are used.
    """
    assert inputs, "a model without inputs needs no data"
    if use is None:
        use = Use.HOLD_OUT if evaluates else Use.TRAIN
    return SOURCES[call.name].open(call, inputs, seed, root, use)
