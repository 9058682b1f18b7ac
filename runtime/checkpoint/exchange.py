"""To and from single files of whole tensors, as other programs write and read them.

Both go tensor by tensor: no more than one whole tensor is in memory at a time.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from partita.compiler.layout import WHOLE
from partita.compiler.mesh import ONE_RANK
from partita.dsl.diagnostic import refuse
from partita.runtime.checkpoint.commits import file_name
from partita.runtime.checkpoint.files import Damaged, directory, put
from partita.runtime.checkpoint.loading import Commit, by_width
from partita.runtime.checkpoint.manifest import NAME, Manifest, Tensor
from partita.runtime.checkpoint.names import Form, forms
from partita.runtime.checkpoint.sealed import seal
from partita.runtime.checkpoint.shards import Entry, bytes_of, header, opened, write_file
from partita.runtime.checkpoint.store import Store, commit_name, steps_in
from partita.runtime.kernels.dtypes import DTYPES

FLOAT_CODES = ("F64", "F32", "F16", "BF16")
MOST_SHOWN = 8


def is_state(tensor: Tensor) -> bool:
    """Whether it is the optimizer's."""
    return "/" in tensor.name


# ---------------------------------------------------------------- export


def export(commit: Commit, path: Path, names: Mapping[str, Any], states: bool) -> int:
    """Write the whole parameters (and states) of a commit to a safetensors file; returns its size.

    The file is there whole or not at all. Raises Refused (E0810), OSError, and Damaged where the commit is.
    """
    tensors = by_width(each for each in commit.manifest.tensors if states or not is_state(each))
    theirs = forms(tensors, names)
    entries = [Entry(theirs[t.name].name, t.type.dtype, theirs[t.name].shape(t.type)) for t in tensors]

    def blocks() -> Iterator[bytes | memoryview]:
        yield header(entries)
        for tensor in tensors:
            yield bytes_of(theirs[tensor.name].theirs(commit.read(tensor.name), tensor.type))

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


# ---------------------------------------------------------------- import


@frozen
class Imported:
    """What an import has made: the commit's directory, how many tensors it took, and the names that it did not."""

    path: Path
    taken: int
    unused: tuple[str, ...]


def import_file(path: Path, step: int, wanted: Manifest, tensors: Path, names: Mapping[str, Any]) -> Imported:
    """Make a commit of a model from a file of its whole parameters, as if it had been saved after `step`.

    States of the optimizer are the file's, or zero where it has none of them. Raises Refused (E0802, E0803, E0808,
    E0809, E0810), OSError.
    """
    manifest = evolve(
        wanted,
        step=step,
        mesh=ONE_RANK,
        layout="",
        schedule="",
        tensors=tuple(Tensor(each.name, each.type, WHOLE, ()) for each in wanted.tensors),
    )
    theirs = forms(manifest.tensors, names)
    try:
        with opened(tensors) as file:
            there = set(file.keys())
            has_states = any(is_state(each) and theirs[each.name].name in there for each in manifest.tensors)
            taken = {each.name: theirs[each.name] for each in manifest.tensors if has_states or not is_state(each)}
            _check_file(file, tensors.name, manifest, taken)
            _commit(path, manifest, file, taken)
    except Damaged as damage:
        raise refuse("E0808", str(damage)) from damage
    unused = there - {form.name for form in taken.values()}
    return Imported(path / commit_name(step), len(taken), tuple(sorted(unused)))


def _commit(path: Path, manifest: Manifest, file: Any, taken: Mapping[str, Form]) -> None:
    """Write the tensors taken from a file, zeros for all others, and commit them."""
    tensors = by_width(manifest.tensors)
    entries = [Entry(each.name, each.type.dtype, each.type.shape) for each in tensors]

    def blocks() -> Iterator[bytes | memoryview]:
        yield header(entries)
        for tensor in tensors:
            dtype, form = DTYPES[tensor.type.dtype], taken.get(tensor.name)
            if form is None:
                yield bytes_of(torch.zeros(tensor.type.shape, dtype=dtype))
            else:
                yield bytes_of(form.ours(file.get_tensor(form.name).to(dtype), tensor.type))

    store = Store(path, secrets.randbits(48))
    store.lock()
    try:
        if steps_in(path):
            raise refuse("E0802", f"{path} holds checkpoints already", help="import into a new directory")
        try:
            store.begin(manifest.step)
            with directory(path) as outer, directory(store.partial(manifest.step), outer) as handle:
                written = write_file(file_name(0), handle, blocks())
                put(NAME, handle, seal(evolve(manifest, files=(written,), time=int(time.time())).as_json()))
            store.commit(manifest.step)
        except BaseException:
            store.abandon(manifest.step)
            raise
    finally:
        store.close()


def _check_file(file: Any, name: str, manifest: Manifest, taken: Mapping[str, Form]) -> None:
    """Refuse (E0809) a file that does not have what is to be taken from it."""
    there = set(file.keys())
    missing, wrong = [], []
    for tensor in manifest.tensors:
        form = taken.get(tensor.name)
        if form is None:
            continue
        if form.name not in there:
            missing.append(f"{form.name}" + (f"   ({tensor.name})" if form.name != tensor.name else ""))
            continue
        part = file.get_slice(form.name)
        shape = form.shape(tensor.type)
        if tuple(part.get_shape()) != shape or part.get_dtype() not in FLOAT_CODES:
            found = f"{part.get_dtype()}{list(part.get_shape())}"
            wrong.append(f"{form.name} is {found}, and {tensor.name}: {tensor.type} wants {list(shape)}")
    if missing:
        raise refuse(
            "E0809",
            f"{name} lacks {len(missing)} of {len(taken)} tensors",
            notes=_few(missing),
            help="map their names with `--names`",
        )
    if wrong:
        raise refuse(
            "E0809",
            f"{len(wrong)} of {len(taken)} tensors in {name} have another shape or dtype",
            notes=_few(wrong),
            help="say in the `--names` map how their axes are made of these",
        )


def _few(lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return [*lines[:MOST_SHOWN], *more]
