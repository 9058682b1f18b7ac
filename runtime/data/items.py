"""Items: what `arrays` reads from an archive, in a new order every epoch (`partita.runtime.data.arrays`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from lzma import LZMAError
from math import prod
from pathlib import Path
from struct import error as StructError
from tokenize import TokenError
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
from attrs import Factory, field, frozen

from partita.dsl.diagnostic import Diagnostic, Refused, refuse, shown
from partita.dsl.reprs import count
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.dataset import Arrays, Batch, Dataset, Input, positions
from partita.runtime.data.epochs import Order
from partita.runtime.data.files import single
from partita.runtime.data.formats import NPY, NPZ, refuse_format
from partita.runtime.data.registry import Use
from partita.runtime.data.windows import check_limit, fitting_holdout, other_holdout, share_held_out
from partita.runtime.dtypes import NUMPY, outside

# Kinds of numpy dtypes accepted for each dtype of the language: f float, i u integers, b boolean.
KINDS = {"f32": "f", "bf16": "f", "f64": "f", "i64": "iu", "i32": "iu", "i8": "iu", "u8": "iu", "bool": "b"}

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
HEAD = 1 << 15  # bytes within which an array's header ends; numpy itself reads none longer than 10,000
# How much memory arrays may take: this many bytes in any case, and this many times the size of their archive.
MIN_UNPACKED, MAX_TIMES = 1 << 28, 100
MAX_NAMES = 20  # shown

# What numpy and the archives that it reads raise for invalid files: of another kind, truncated, modified, encrypted, or
# with arrays larger than memory.
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
class Items(Dataset):
    """A `Dataset` of items. `arrays` have the item axis first; `whole` are returned with every batch."""

    inputs: tuple[Input, ...]
    arrays: Arrays
    whole: Arrays
    training: int  # items; later ones are held out
    items: int
    seed: int
    names: Sequence[str] = ()  # of items, if they have any
    _order: Order = field(init=False, default=Factory(lambda self: Order(self.seed, self.training), takes_self=True))

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The items of a training step."""
        return self._take(self._items(step, rows))

    def row_names(self, step: int) -> list[str]:
        """The numbers of the items."""
        return [self._name(number) for number in self._items(step)]

    def _items(self, step: int, rows: range | None = None) -> np.ndarray:
        assert step >= 1, "steps count from 1"
        return self._order.at(positions(self.inputs, step - 1, rows))

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The items of an evaluation batch."""
        return self._take(self._held_out(index, rows))

    def holdout_row_names(self, index: int) -> list[str]:
        """The numbers of the items."""
        return [self._name(number) for number in self._held_out(index)]

    def _name(self, number: int) -> str:
        return self.names[number] if self.names else f"item {number}"

    def _held_out(self, index: int, rows: range | None = None) -> np.ndarray:
        held_out = self.items - self.training
        assert held_out > 0, "data that is opened to be evaluated has a holdout"
        return np.asarray(self.training + positions(self.inputs, index, rows) % held_out)

    @property
    def held_out(self) -> int:
        """The items that are held out."""
        return self.items - self.training

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """Items that are held out."""
        return self._take(self.training + np.asarray(numbers, np.int64))

    def _take(self, chosen: np.ndarray) -> Batch:
        batch: Batch = {}
        for model_input in self.inputs:
            dtype = NUMPY[model_input.type.dtype]
            if model_input.batch_axis is None:
                batch[model_input.name] = np.asarray(
                    self.whole[model_input.name], dtype, order="C"
                )  # a scalar stays one
            else:
                values = np.moveaxis(self.arrays[model_input.name][chosen], 0, model_input.batch_position)
                batch[model_input.name] = np.ascontiguousarray(values, dtype)
        return batch


def open_items(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Items:
    """The items of a `.npz` file. Raises Refused (E06xx)."""
    name = call.arguments["path"]
    loaded = _load(single(name, root, call.span), name, inputs, call.span)
    arrays = {
        model_input.name: loaded[model_input.name] for model_input in inputs if model_input.batch_axis is not None
    }
    whole = {model_input.name: loaded[model_input.name] for model_input in inputs if model_input.batch_axis is None}
    counts = {key: len(array) for key, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise refuse(
            "E0607",
            f"the arrays of `{name}` have different numbers of items" if counts else "no input has the batch axis",
            call.span,
            notes=[f"{key}: {count} items" for key, count in counts.items()],
            help="item i is element i of each of them: write arrays that are equally long"
            if counts
            else "items go along the batch axis: `x: [batch, …]`",
        )
    for model_input in inputs:
        array = loaded[model_input.name]
        if array.dtype.kind in "iu":
            check_limit(array, model_input, f"`{model_input.name}` in `{name}`", call.span)
            wrong = outside(array, model_input.type.dtype)
            if wrong:
                help = f"declare `{model_input.name}` in another dtype, such as i64"
                raise refuse("E0605", f"`{model_input.name}` in `{name}` {wrong}", call.span, help=help)
    items = next(iter(counts.values()))
    if items == 0:
        raise refuse("E0604", f"`{name}` has no items", call.span, help="write arrays that have some")
    return Items(inputs, arrays, whole, split_items(call, use, items, f"`{name}`"), items, seed)


def split_items(call: Call, use: Use, items: int, what: str, kind: str = "items") -> int:
    """How many items are trained on, of those that `what` has. Raises Refused (E0604, E0608)."""
    holdout = share_held_out(call, use)
    held_out = round(items * holdout)
    help = other_holdout(fitting_holdout(lambda share: 0 < round(items * share) < items), f"use more {kind}")
    if items - held_out < 1 and use != Use.EVALUATE:
        message = f"{what} has no {kind} to train on: {held_out} of {count(items, kind[:-1])} held out"
        raise refuse("E0604", message, call.span, help=help)
    if use and held_out == 0:
        few = f"`holdout` is less than one of the {items} {kind} of {what}"
        raise refuse("E0604", few, call.span, help=help)
    return items - held_out


@frozen
class Declared:
    """What an archive says of an array, before it is read."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in memory, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def _load(path: Path, name: str, inputs: tuple[Input, ...], span: Span | None) -> dict[str, np.ndarray]:
    """The arrays of the inputs. Nothing is unpacked before all of them are known to fit and not to be too large."""
    try:
        refuse_format(path, name, "`arrays` reads numpy archives", span, but=(NPY, NPZ))
        with path.open("rb") as file:
            if not file.read(6).startswith((b"PK", b"\x93NUMPY")):  # numpy takes all else for a pickle, and says so
                raise refuse("E0603", f"`{name}` is not a numpy archive", span, help=_SAVE)
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise refuse("E0603", f"`{name}` is one array, not an archive of named ones", span, help=_SAVE)
        with archive:
            headers = {
                model_input.name: _declared(archive, model_input.name, name, span)
                for model_input in inputs
                if model_input.name in archive
            }
            _check(headers, archive.files, name, inputs, span)
            _check_size(headers, path.stat().st_size, name, span)
            return {model_input.name: archive[model_input.name] for model_input in inputs}
    except Refused:
        raise
    except UNREADABLE as error:
        reason = str(error).split("\n")[0]
        raise refuse("E0603", f"cannot read `{name}`: {shown(reason)}", span, help=_SAVE) from error


def _declared(archive: np.lib.npyio.NpzFile, key: str, name: str, span: Span | None) -> Declared:
    """What the header of an array says. Raises Refused, and the errors in `UNREADABLE`."""
    assert archive.zip is not None
    member = key if key in archive.zip.namelist() else f"{key}.npy"
    with archive.zip.open(member) as file:
        head = BytesIO(file.read(HEAD))  # the length in the header may be anything
    if not head.getvalue().startswith(b"\x93NUMPY"):
        raise refuse("E0603", f"`{name}` has an entry that is not an array", span, help=_SAVE)
    version = np.lib.format.read_magic(head)
    read_header = HEADERS.get(version)
    if read_header is None:
        raise ValueError(f"`{key}` is of version {version} of the format")
    shape, _, dtype = read_header(head)
    if dtype.hasobject:
        raise ValueError(f"`{key}` holds Python objects")
    return Declared(dtype, shape)


def _check(
    headers: dict[str, Declared], names: Sequence[str], name: str, inputs: tuple[Input, ...], span: Span | None
) -> None:
    """Refuse (E0606, E0607) an archive that lacks an input or has it with another shape or dtype."""
    missing = [model_input.name for model_input in inputs if model_input.name not in headers]
    if missing:
        has = ", ".join(map(shown, names[:MAX_NAMES])) or "none"
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        raise Refused(
            Diagnostic(
                "E0606",
                f"`{name}` has no array called `{key}`",
                span,
                (f"its arrays: {has}{more}",),
                "name the arrays after the model's inputs",
            )
            for key in missing
        )
    wrong = [
        diagnostic
        for model_input in inputs
        for diagnostic in _unfit(model_input, headers[model_input.name], name, span)
    ]
    if wrong:
        raise Refused(wrong)


def _check_size(headers: dict[str, Declared], size: int, name: str, span: Span | None) -> None:
    """Refuse (E0603) a small file that unpacks to a huge size: untrusted data must not exhaust memory."""
    unpacked = sum(each.bytes for each in headers.values())
    if unpacked > max(MIN_UNPACKED, MAX_TIMES * size):
        raise refuse(
            "E0603",
            f"`{name}` has {size:,} bytes, and its arrays would take {unpacked:,}",
            span,
            notes=[f"`{key}` is {each.dtype}{list(each.shape)}" for key, each in headers.items()],
            help="if that is meant, write it with `numpy.savez`, which does not compress",
        )


_SAVE = "write it with `numpy.savez(path, name = array, …)`, without Python objects"


def _conversion(model_input: Input, array: Declared) -> str:
    """How to make an array and an input of different kinds match, in dtypes that exist."""
    ours = {"f": "f32", "i": "i64", "u": "i64", "b": "bool"}.get(array.dtype.kind)
    convert = f"convert the array: `array.astype(numpy.{np.dtype(NUMPY[model_input.type.dtype]).name})`"
    if ours is None:
        return convert
    axes = ", ".join(model_input.type.names)
    cast = f"`cast({model_input.name}, {model_input.type.dtype})`"
    return f"declare it as `{model_input.name}: {ours}[{axes}]` and use {cast} in the model, or {convert}"


def _unfit(model_input: Input, array: Declared, name: str, span: Span | None) -> Iterator[Diagnostic]:
    kinds = KINDS[model_input.type.dtype]
    others = model_input.type.without([model_input.batch_axis] if model_input.batch_axis else [])
    shape = array.shape if model_input.batch_axis is None else array.shape[1:]
    if array.dtype.kind not in kinds:
        expected = {"f": "floats", "iu": "integers", "b": "booleans"}[kinds]
        yield Diagnostic(
            "E0607",
            f"`{model_input.name}` in `{name}` holds {array.dtype}, and the model wants {expected}",
            span,
            (f"{model_input.name}: {model_input.type}",),
            _conversion(model_input, array),
        )
    elif shape != others.shape or (model_input.batch_axis is not None and not array.shape):
        items = ["items"] if model_input.batch_axis is not None else []
        expected = ", ".join([*items, *map(str, others.axes)])
        yield Diagnostic(
            "E0607",
            f"`{model_input.name}` in `{name}` has shape {list(array.shape)}, and the model wants [{expected}]",
            span,
            (f"{model_input.name}: {model_input.type}",),
            "change the axis sizes, or the array",
        )
