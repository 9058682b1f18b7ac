"""`arrays(path, holdout)`: a `.npz` file with one array for each input of the model, by name.

The first axis of an array counts items and takes the place of the batch axis (wherever the model declares
that); the others are as declared. An input without the batch axis is one array of exactly its shape. Training
goes through all items that are not held out in a new order every epoch: a permutation that depends on (seed,
epoch) alone. A batch may end one epoch and begin the next. Evaluation takes the held-out items in order, over
and over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from lzma import LZMAError
from pathlib import Path
from struct import error as StructError
from tokenize import TokenError
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
from attrs import field, frozen

from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.source import Span
from partita.dsl.spec import Call
from partita.runtime.data.dataset import Arrays, Batch, Input
from partita.runtime.data.files import single
from partita.runtime.data.formats import NPY, NPZ, refuse_format
from partita.runtime.data.windows import check_limit
from partita.runtime.dtypes import NUMPY
from partita.runtime.philox import stream, words

# numpy's kinds of dtype that may stand for one of the language's: f float, i u integers, b boolean.
KINDS = {"f32": "f", "bf16": "f", "f64": "f", "i64": "iu", "i32": "iu", "bool": "b"}

# What numpy and the archives that it reads raise for files that are not as they must be: of another kind, cut off,
# changed, encrypted, or of arrays larger than all memory.
UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    OverflowError,
    RuntimeError,
    BadZipFile,
    LZMAError,
    StructError,
    TokenError,
    ZlibError,
)


@frozen(eq=False)
class Items:
    """A `Dataset` of items. `arrays` have the item axis first; `whole` holds what comes with every batch."""

    inputs: tuple[Input, ...]
    arrays: Arrays
    whole: Arrays
    training: int  # items; those after them are held out
    items: int
    seed: int
    _orders: Callable[[int, int, int], np.ndarray] = field(
        init=False, factory=lambda: lru_cache(maxsize=2)(_permutation), repr=False
    )

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The items of a training step."""
        return self._take(self._items(step, rows))

    def row_names(self, step: int) -> list[str]:
        """The numbers of the items."""
        return [f"item {number}" for number in self._items(step)]

    def _items(self, step: int, rows: range | None = None) -> np.ndarray:
        assert step >= 1, "steps count from 1"
        batch = self._rows
        positions = (step - 1) * batch + np.asarray(range(batch) if rows is None else rows, np.int64)
        epochs, places = np.divmod(positions, self.training)
        chosen = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = self._order(int(epoch))[places[here]]
        return chosen

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The items of an evaluation batch."""
        return self._take(self._held_out(index, rows))

    def holdout_row_names(self, index: int) -> list[str]:
        """The numbers of the items."""
        return [f"item {number}" for number in self._held_out(index)]

    def _held_out(self, index: int, rows: range | None = None) -> np.ndarray:
        held = self.items - self.training
        assert held > 0, "open_dataset(evaluates=True) makes sure that there is a holdout"
        batch = self._rows
        positions = index * batch + np.asarray(range(batch) if rows is None else rows, np.int64)
        return np.asarray(self.training + positions % held)

    @property
    def _rows(self) -> int:
        return next(given.batch for given in self.inputs if given.batch_axis is not None)

    def _order(self, epoch: int) -> np.ndarray:
        return self._orders(self.seed, epoch, self.training)

    def _take(self, chosen: np.ndarray) -> Batch:
        batch: Batch = {}
        for given in self.inputs:
            dtype = NUMPY[given.type.dtype]
            if given.batch_axis is None:
                batch[given.name] = np.ascontiguousarray(self.whole[given.name], dtype)
            else:
                values = np.moveaxis(self.arrays[given.name][chosen], 0, given.type.position(given.batch_axis))
                batch[given.name] = np.ascontiguousarray(values, dtype)
        return batch


def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch: items sorted by random words."""
    return np.argsort(words(stream(seed, "epoch", epoch), 0, count), kind="stable")


def open_arrays(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, evaluates: bool) -> Items:
    """The items of a `.npz` file; yields its arrays."""
    name = call.arguments["path"]
    found = _load(single(name, root, call.span), name, inputs, call.span)
    wrong = [diagnostic for given in inputs for diagnostic in _unfit(given, found[given.name], name, call.span)]
    if wrong:
        raise Refused(wrong)
    arrays = {given.name: found[given.name] for given in inputs if given.batch_axis is not None}
    whole = {given.name: found[given.name] for given in inputs if given.batch_axis is None}
    counts = {key: len(array) for key, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise refuse(
            "E0607",
            f"the arrays of `{name}` have different numbers of items" if counts else "no input has the batch axis",
            call.span,
            notes=[f"{key}: {count} items" for key, count in counts.items()],
        )
    for given in inputs:
        if found[given.name].dtype.kind in "iu":
            check_limit(found[given.name], given, f"`{given.name}` in `{name}`", call.span)
    items = next(iter(counts.values()))
    holdout = float(call.arguments.get("holdout", 0.0))
    held = round(items * holdout)
    if items - held < 1:
        raise refuse("E0604", f"`{name}` has no items to train on: {items} items, {held} held out", call.span)
    if evaluates and held == 0:
        raise refuse(
            "E0604" if holdout else "E0608",
            f"`holdout` is less than one of the {items} items of `{name}`"
            if holdout
            else "`eval` needs data that training does not see, and there is no `holdout`",
            call.span,
            help=f'hold out a share: `arrays("{name}", holdout = 10%)`',
        )
    return Items(inputs, arrays, whole, items - held, items, seed)


def _load(path: Path, name: str, inputs: tuple[Input, ...], span: Span | None) -> dict[str, np.ndarray]:
    try:
        refuse_format(path, name, "`arrays` reads numpy archives", span, but=(NPY, NPZ))
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise refuse("E0603", f"`{name}` is one array, not an archive of named ones", span, help=_SAVE)
        with archive:
            arrays = {given.name: archive[given.name] for given in inputs if given.name in archive.files}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):
                raise refuse("E0603", f"`{name}` holds what is no array", span, help=_SAVE)
            names = ", ".join(archive.files) or "none"
    except Refused:
        raise
    except UNREADABLE as error:
        reason = str(error).split("\n")[0]
        raise refuse("E0603", f"cannot read `{name}`: {reason}", span, help=_SAVE) from error
    missing = [given.name for given in inputs if given.name not in arrays]
    if missing:
        raise Refused(
            Diagnostic(
                "E0606",
                f"`{name}` has no array called `{lacking}`",
                span,
                (f"its arrays: {names}",),
                "name the arrays after the model's inputs",
            )
            for lacking in missing
        )
    return arrays


_SAVE = "write it with `numpy.savez(path, name = array, …)`, without Python objects"


def _conversion(given: Input, array: np.ndarray) -> str:
    """How an array of another kind and an input come together, in dtypes that there are."""
    ours = {"f": "f32", "i": "i64", "u": "i64", "b": "bool"}.get(array.dtype.kind)
    convert = f"convert the array: `array.astype(numpy.{np.dtype(NUMPY[given.type.dtype]).name})`"
    if ours is None:
        return convert
    axes = ", ".join(given.type.names)
    cast = f"`cast({given.name}, {given.type.dtype})`"
    return f"declare it as `{given.name}: {ours}[{axes}]` and use {cast} in the model, or {convert}"


def _unfit(given: Input, array: np.ndarray, name: str, span: Span | None) -> list[Diagnostic]:
    if array.dtype.kind not in KINDS[given.type.dtype]:
        wanted = {"f": "floats", "iu": "integers", "b": "booleans"}[KINDS[given.type.dtype]]
        return [
            Diagnostic(
                "E0607",
                f"`{given.name}` in `{name}` holds {array.dtype}, and the model wants {wanted}",
                span,
                (f"{given.name}: {given.type}",),
                _conversion(given, array),
            )
        ]
    others = given.type.without([given.batch_axis] if given.batch_axis else [])
    shape = array.shape if given.batch_axis is None else array.shape[1:]
    if shape != others.shape or (given.batch_axis is not None and array.ndim == 0):
        items = ["items"] if given.batch_axis is not None else []
        wanted = ", ".join([*items, *map(str, others.axes)])
        return [
            Diagnostic(
                "E0607",
                f"`{given.name}` in `{name}` has shape {list(array.shape)}, and the model wants [{wanted}]",
                span,
                (f"{given.name}: {given.type}",),
                "change the axis sizes, or the array",
            )
        ]
    return []
