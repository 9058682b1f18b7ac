"""Full tensors: exported to a single file under our own names, and committed as a checkpoint of one rank.

Both go tensor by tensor: at most one full tensor is in memory at a time.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import evolve

from partita.compiler.layout import REPLICATED
from partita.compiler.mesh import ONE_RANK
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.runtime.addresses import Address, PathOrUrl, check_writable
from partita.runtime.checkpoint.address_store import steps_in, store_at
from partita.runtime.checkpoint.checksummed import with_checksum
from partita.runtime.checkpoint.files import KINDS, directory
from partita.runtime.checkpoint.folders import LocalFolder, RemoteFolder
from partita.runtime.checkpoint.foreign_files import refuse_names
from partita.runtime.checkpoint.loading import Commit, by_width
from partita.runtime.checkpoint.manifest import UNTRAINED, Manifest, Tensor, file_name
from partita.runtime.checkpoint.parts import mean_name
from partita.runtime.checkpoint.settings import DIRECTORY
from partita.runtime.checkpoint.shards import Entry, whole_file, write_file
from partita.runtime.data.formats import SAFETENSORS, Format, format_of

MAX_SHOWN = 8


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor is optimizer state."""
    return "/" in tensor.name


# ---------------------------------------------------------------- export


def export(commit: Commit, path: PathOrUrl, states: bool = False, weights: str = "trained") -> int:
    """Write the full parameters (and states) of a commit to a safetensors file; returns its size.

    With `weights` "ema", each parameter that was trained has the value of its mean. The file is written atomically.
    Raises Refused (E0810, E0816), OSError, and Corrupt if the commit is.
    """
    check_place(path, SAFETENSORS)
    source = weights_of(commit.manifest, weights)
    tensors = by_width(each for each in commit.manifest.tensors if states or not is_state(each))
    entries = [Entry(each.name, each.type.dtype, each.type.shape) for each in tensors]
    refuse_names(entries)
    blocks = whole_file(entries, (commit.read(source.get(each.name, each.name)) for each in tensors))
    if isinstance(path, Address):
        return write_file(path.name, RemoteFolder(path.parent), blocks).size
    with directory(path.parent) as parent:
        aside, folder = f".{path.name}.{secrets.token_hex(4)}", LocalFolder(parent)
        try:
            file = write_file(aside, folder, blocks)
            os.rename(aside, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            folder.remove(aside)
            raise
    return file.size


def weights_of(manifest: Manifest, weights: str) -> Mapping[str, str]:
    """The tensor of a commit that has the value of each parameter: its own, or its mean (`weights` "ema") if it was
    trained. A mean begins as its parameter. Raises Refused (E0816) if the commit is of a run without means.
    """
    saved = {tensor.name for tensor in manifest.tensors}
    names = [tensor.name for tensor in manifest.tensors if not is_state(tensor)]
    means = {name: mean_name(name) for name in names if mean_name(name) in saved and weights == "ema"}
    if weights == "ema" and not means and not manifest.is_untrained:
        raise refuse(
            "E0816",
            f"the checkpoint of step {manifest.step} has no mean of the weights",
            help="`ema = 0.999` in the train block keeps one, from the first step of a run on",
        )
    return {name: means.get(name, name) for name in names}


def check_place(path: PathOrUrl, own: Format) -> None:
    """Raise OSError if a path exists and is not a regular file, or has content that is not of one's `own` format: it
    was named by mistake. A link would be replaced and not followed.

    Refuses (E0602) an address that cannot be written to.
    """
    if isinstance(path, Address):
        check_writable(path)
        return
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'not a regular file')}; name a regular file, or a new one")
    if path.stat().st_size and format_of(path) != own:
        raise FileExistsError(errno.EEXIST, "it is a file of another kind; name a new one, or remove it")


def on_one_rank(manifest: Manifest, step: int) -> Manifest:
    """The manifest of a commit of the step, of whole tensors."""
    return evolve(
        manifest,
        step=step,
        mesh=ONE_RANK,
        layout="",
        schedule="",
        tensors=tuple(Tensor(each.name, each.type, REPLICATED, ()) for each in manifest.tensors),
    )


def untrained(manifest: Manifest) -> Manifest:
    """The manifest of the parameters alone, with which any optimizer may begin."""
    parameters = tuple(each for each in manifest.tensors if not is_state(each))
    return evolve(manifest, optimizer=UNTRAINED, settings={"optimizer": UNTRAINED}, tensors=parameters)


def commit_tensors(
    path: PathOrUrl, manifest: Manifest, read: Callable[[Tensor], torch.Tensor]
) -> tuple[Diagnostic, ...]:
    """Write and commit tensors, of which one at a time is read; returns warnings."""
    tensors = by_width(manifest.tensors)
    entries = [Entry(each.name, each.type.dtype, each.type.shape) for each in tensors]
    store = store_at(path, secrets.randbits(48))
    unlocked = store.lock()
    try:
        for place in (path, path / DIRECTORY):  # in that of a run they would be taken for its own
            if steps_in(place):
                raise refuse("E0802", f"{place} already has checkpoints", help="import into a new directory")
        try:
            with store.save(manifest.step) as folder:
                written = write_file(file_name(0, store.suffix), folder, whole_file(entries, map(read, tensors)))
            committed = evolve(manifest, files=(written,), suffix=store.suffix, time=int(time.time()))
            store.commit(manifest.step, with_checksum(committed.as_json()), [])
        except BaseException:
            store.abandon(manifest.step)
            raise
    finally:
        store.close()
    return () if unlocked is None else (unlocked,)


def few(lines: Sequence[str]) -> list[str]:
    """The first of some notes, and how many more there are."""
    more = [f"and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    return [*lines[:MAX_SHOWN], *more]
