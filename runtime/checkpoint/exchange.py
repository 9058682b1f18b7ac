"""Export to and import from single files of full tensors, as other programs write and read them.

Both go tensor by tensor: at most one full tensor is in memory at a time.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from partita.compiler.layout import REPLICATED
from partita.compiler.mesh import ONE_RANK
from partita.dsl.diagnostic import Diagnostic, Refused, refuse, shown
from partita.dsl.types import Type
from partita.runtime.checkpoint.checksummed import with_checksum
from partita.runtime.checkpoint.commits import file_name
from partita.runtime.checkpoint.files import KINDS, Damaged, directory, put
from partita.runtime.checkpoint.loading import Commit, by_width
from partita.runtime.checkpoint.manifest import NAME, Manifest, Tensor
from partita.runtime.checkpoint.names import Form, forms
from partita.runtime.checkpoint.parts import mean_name
from partita.runtime.checkpoint.repeated import families
from partita.runtime.checkpoint.shards import MOST_HEADER, Entry, bytes_of, header, opened, write_file
from partita.runtime.checkpoint.store import Store, commit_name, steps_in
from partita.runtime.kernels.dtypes import DTYPES

FLOAT_CODES = ("F64", "F32", "F16", "BF16")
INTEGER_CODES = ("I64", "I32", "I16", "I8", "U8")  # of buffers
MOST_SHOWN = 8


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor is optimizer state."""
    return "/" in tensor.name


# ---------------------------------------------------------------- export


def export(commit: Commit, path: Path, names: Mapping[str, Any], states: bool = False, weights: str = "trained") -> int:
    """Write the full parameters (and states) of a commit to a safetensors file; returns its size.

    With `weights` "ema", each parameter that was trained has the value of its mean. The file is written atomically.
    Raises Refused (E0810, E0816), OSError, and Damaged if the commit is.
    """
    check_place(path)
    source = weights_of(commit.manifest, weights)
    tensors = by_width(each for each in commit.manifest.tensors if states or not is_state(each))
    theirs = forms(tensors, names)
    entries = [Entry(theirs[t.name].name, t.type.dtype, theirs[t.name].shape(t.type)) for t in tensors]

    if len(header(entries)) - 8 > MOST_HEADER:
        raise refuse("E0810", f"the names have more than the {MOST_HEADER:,} bytes that a safetensors file may have")

    def blocks() -> Iterator[bytes | memoryview]:
        yield header(entries)
        for tensor in tensors:
            value = commit.read(source.get(tensor.name, tensor.name))
            yield bytes_of(theirs[tensor.name].theirs(value, tensor.type))

    with directory(path.parent) as parent:
        aside = f".{path.name}.{secrets.token_hex(4)}"
        try:
            file = write_file(aside, parent, blocks())
            os.rename(aside, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=parent)
            raise
    return file.size


def weights_of(manifest: Manifest, weights: str) -> Mapping[str, str]:
    """The tensor of a commit that has the value of each parameter: its own, or its mean (`weights` "ema") if it was
    trained. Raises Refused (E0816) if the commit has no means.
    """
    there = {tensor.name for tensor in manifest.tensors}
    names = [tensor.name for tensor in manifest.tensors if not is_state(tensor)]
    means = {name: mean_name(name) for name in names if mean_name(name) in there and weights == "ema"}
    if weights == "ema" and not means:
        raise refuse(
            "E0816",
            f"the checkpoint of step {manifest.step} has no mean of the weights",
            help="`ema = 0.999` in the train block keeps one, from the first step of a run on",
        )
    return {name: means.get(name, name) for name in names}


def check_place(path: Path) -> None:
    """Raise OSError if a path exists and is not a regular file; a link would be replaced and not followed."""
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'not a regular file')}; name a regular file, or a new one")


# ---------------------------------------------------------------- import


@frozen
class Binding:
    """One of our tensors, and the tensor of the file that it is taken from: its form, dtype and shape there."""

    tensor: Tensor
    form: Form
    dtype: str
    shape: tuple[int, ...]

    @property
    def ambiguous(self) -> tuple[str, ...]:
        """Our axes of equal size, if only a map could tell which is which."""
        sizes = [axis.size for axis in self.tensor.type.axes if axis.size > 1]
        if self.form.settled or len(set(sizes)) == len(sizes):
            return ()
        return tuple(axis.name for axis in self.tensor.type.axes if sizes.count(axis.size) > 1)


@frozen
class Imported:
    """The result of an import: the commit's directory, bindings, unused names of the file, and warnings."""

    path: Path
    bindings: tuple[Binding, ...]
    unused: tuple[str, ...]
    warnings: tuple[Diagnostic, ...]


def import_file(
    path: Path, step: int, wanted: Manifest, tensors: Path, names: Mapping[str, Any], strict: bool = False
) -> Imported:
    """Make a commit of a model from a file of its full parameters, as if it had been saved after `step`.

    Optimizer states are read from the file, or zero if it has none; means of parameters are, or else begin as these. If
    `strict`, every tensor of the file must be used, and no order of axes be ambiguous. Raises Refused (E0802, E0803,
    E0808 to E0813), OSError.
    """
    manifest = on_one_rank(wanted, step)
    theirs = forms(manifest.tensors, names)
    try:
        with opened(tensors) as file:
            there = set(file.keys())
            taken = _taken(manifest.tensors, theirs, there)
            bindings = _bound(file, tensors.name, manifest, taken)
            unused = tuple(sorted(there - {form.name for form in taken.values()}))
            ambiguous = tuple(_ambiguous("E0812" if strict else "W0807", tensors.name, bindings))
            if strict and (unused or ambiguous):
                raise Refused((*_unused(tensors.name, unused), *ambiguous))
            _check_numbers(file, tensors.name, bindings)
            means = {mean_name(name): form for name, form in taken.items()}

            def read(tensor: Tensor) -> torch.Tensor:
                dtype, form = DTYPES[tensor.type.dtype], taken.get(tensor.name, means.get(tensor.name))
                if form is None:
                    return torch.zeros(tensor.type.shape, dtype=dtype)
                return form.ours(file.get_tensor(form.name).to(dtype), tensor.type)

            unlocked = commit_tensors(path, manifest, read)
    except Damaged as damage:
        raise refuse("E0808", str(damage)) from damage
    return Imported(path / commit_name(step), bindings, unused, (*unlocked, *ambiguous))


def _taken(tensors: Sequence[Tensor], theirs: Mapping[str, Form], there: Collection[str]) -> dict[str, Form]:
    """Our tensors to read from a file that has some tensors `there`: all parameters, and all states if it has any; but
    means only if it has them.
    """
    means = {mean_name(each.name) for each in tensors if not is_state(each)}
    found = {each.name for each in tensors if theirs[each.name].name in there}
    states = any(is_state(each) and each.name in found - means for each in tensors)
    wanted = (each.name for each in tensors if states or not is_state(each) or each.name in means)
    return {name: theirs[name] for name in wanted if name in found or name not in means}


def on_one_rank(wanted: Manifest, step: int) -> Manifest:
    """The manifest of a commit of the step, of whole tensors."""
    return evolve(
        wanted,
        step=step,
        mesh=ONE_RANK,
        layout="",
        schedule="",
        tensors=tuple(Tensor(each.name, each.type, REPLICATED, ()) for each in wanted.tensors),
    )


def commit_tensors(path: Path, manifest: Manifest, read: Callable[[Tensor], torch.Tensor]) -> tuple[Diagnostic, ...]:
    """Write and commit tensors, of which one at a time is read; returns warnings."""
    tensors = by_width(manifest.tensors)
    entries = [Entry(each.name, each.type.dtype, each.type.shape) for each in tensors]

    def blocks() -> Iterator[bytes | memoryview]:
        yield header(entries)
        for tensor in tensors:
            yield bytes_of(read(tensor))

    store = Store(path, secrets.randbits(48))
    unlocked = store.lock()
    try:
        if steps_in(path):
            raise refuse("E0802", f"{path} already has checkpoints", help="import into a new directory")
        try:
            store.begin(manifest.step)
            with directory(path) as outer, directory(store.partial(manifest.step), outer) as handle:
                written = write_file(file_name(0), handle, blocks())
                put(NAME, handle, with_checksum(evolve(manifest, files=(written,), time=int(time.time())).as_json()))
            store.commit(manifest.step)
        except BaseException:
            store.abandon(manifest.step)
            raise
    finally:
        store.close()
    return () if unlocked is None else (unlocked,)


def _bound(file: Any, name: str, manifest: Manifest, taken: Mapping[str, Form]) -> tuple[Binding, ...]:
    """Bind our tensors to those of the file. Refuses (E0809) a file that lacks some, or has other shapes or dtypes."""
    there = set(file.keys())
    missing, wrong, bindings = [], [], []  # the first two are rows of `families`
    for tensor in manifest.tensors:
        form = taken.get(tensor.name)
        if form is None:
            continue
        if form.name not in there:
            missing.append(((form.name, tensor.name), None))
            continue
        part = file.get_slice(form.name)
        shape = form.shape(tensor.type)
        bindings.append(Binding(tensor, form, part.get_dtype(), shape))
        found = tuple(part.get_shape())
        codes = FLOAT_CODES if tensor.type.is_float else INTEGER_CODES
        if found != shape or part.get_dtype() not in codes:
            axes = _reordered(tensor.type, found) if found != shape else None
            wrong.append(((form.name, tensor.name), (part.get_dtype(), found, tensor.type, shape, axes)))
    if missing:
        notes = [shown(a) + (f"   ({b})" if a != b else "") for a, b in (each.names for each in families(missing))]
        raise refuse(
            "E0809",
            f"{name} lacks {len(missing)} of {len(taken)} tensors",
            notes=few(notes),
            help="map their names with `--names`",
        )
    if wrong:
        notes, entries = [], list[str]()
        for each in families(wrong):
            dtype, found, type, shape, axes = each.shared
            stands = f"{shown(each.names[0])} is {dtype}{list(found)}"
            notes.append(f"{stands}, but {each.names[1]}: {type} needs {list(shape)}")
            entries += [_entry(each.patterns[1], each.patterns[0], axes)] if axes is not None else []
        raise refuse(
            "E0809",
            f"{len(wrong)} of {len(taken)} tensors in {name} have a different shape or dtype",
            notes=few(notes),
            help="give in the `--names` map how their axes are composed of these"
            + (f", such as {entries[0]}" if entries else ""),
        )
    return tuple(bindings)


def _reordered(type: Type, shape: Sequence[int]) -> tuple[str, ...] | None:
    """Our axes in an order that gives this shape, if there is one."""
    left = list(type.axes)
    order = []
    for size in shape:
        axis = next((axis for axis in left if axis.size == size), None)
        if axis is None:
            return None
        left.remove(axis)
        order.append(axis.name)
    return None if left else tuple(order)


def _entry(ours: str, theirs: str, axes: Sequence[str]) -> str:
    """A name map with the axes of a tensor, or of those that match a pattern."""
    return json.dumps({ours: {"name": theirs, "axes": list(axes)}})


def _unused(name: str, unused: Sequence[str]) -> Iterator[Diagnostic]:
    if unused:
        notes = [shown(each.names[0]) for each in families(((one,), None) for one in unused)]
        are = "1 tensor is" if len(unused) == 1 else f"{len(unused):,} tensors are"
        yield Diagnostic("E0811", f"{are} not used in {name}", notes=tuple(few(notes)))


def _ambiguous(code: str, name: str, bindings: Sequence[Binding]) -> Iterator[Diagnostic]:
    """A diagnostic about tensors whose axes could be in another order than assumed."""
    open_ = [each for each in bindings if each.ambiguous and not is_state(each.tensor)]
    if not open_:
        return
    found = families(((each.tensor.name, each.form.name), each.tensor.type) for each in open_)
    notes = [f"{each.names[0]}: {each.shared} ← {shown(each.names[1])}" for each in found]
    ours, theirs = found[0].patterns
    entry = _entry(ours, theirs, [" ".join(group) for group in open_[0].form.axes])
    have = "1 tensor has" if len(open_) == 1 else f"{len(open_)} tensors have"
    yield Diagnostic(
        code,
        f"{have} axes of equal size, whose order in {name} is ambiguous",
        notes=tuple(few(notes)),
        help=f"the order of the .par file is assumed; the `--names` map can give it, such as {entry}",
    )


def _check_numbers(file: Any, name: str, bindings: Sequence[Binding]) -> None:
    """Refuse (E0813) values that are not finite, or that overflow our dtype."""
    notes = []
    for each in bindings:
        there = file.get_tensor(each.form.name)
        finite, held = there.isfinite(), there.to(DTYPES[each.tensor.type.dtype]).isfinite()
        for wrong, what in ((~finite, "NaN or infinite"), (finite & ~held, f"beyond {each.tensor.type.dtype}")):
            count = int(wrong.sum())
            if count:
                place = int(wrong.view(-1).to(torch.uint8).argmax())
                first = [int(i) for i in np.unravel_index(place, each.shape)]
                of = f"{count:,} of {there.numel():,} numbers"
                notes.append(
                    f"{shown(each.form.name)}: {of} are {what}, the first at {first}: {there.view(-1)[place]:g}"
                )
    if notes:
        raise refuse("E0813", f"{name} has numbers that cannot be trained from", notes=few(notes))


def few(lines: Sequence[str]) -> list[str]:
    """The first of some notes, and how many more there are."""
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return [*lines[:MOST_SHOWN], *more]
