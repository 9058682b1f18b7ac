"""Files of tensors as Hugging Face lays them out: one file, or several with an index that says which has which.

A directory has `model.safetensors`, or `model.safetensors.index.json` and the files that it names.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from partita.dsl.diagnostic import refuse, shown
from partita.runtime.addresses import Address, PathOrUrl, exists, names_in
from partita.runtime.checkpoint.files import Corrupt, directory
from partita.runtime.checkpoint.folders import Folder, LocalFolder, RemoteFolder, unreadable
from partita.runtime.checkpoint.remote_tensors import MAX_HEADER
from partita.runtime.checkpoint.shards import (
    WIDTHS,
    Entry,
    header,
    opened,
    read_region,
    whole_file,
    write_file,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = "config.json"
METADATA = "__metadata__"  # reserved by the format
MAX_INDEX = 1 << 27  # bytes


# ---------------------------------------------------------------- reading


@frozen(eq=False)
class ForeignFiles:
    """The tensors of open files, by name."""

    files: Mapping[str, Any]

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.files)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def dtype(self, name: str) -> str:
        """The format's name of a tensor's dtype."""
        return str(self.files[name].get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.files[name].get_slice(name).get_shape())

    def unread(self, known: Container[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that are not `known`."""
        return {name: self.shape(name) for name in self.files if name not in known}

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor, or a region of it. Raises Corrupt."""
        return read_region(self.files[name], name, region or ())


@contextmanager
def foreign_files(path: PathOrUrl) -> Iterator[ForeignFiles]:
    """Open a file of tensors, or those of a directory. Raises Corrupt, and Refused (E0808) if there are none."""
    with ExitStack() as stack:
        place = found(path)
        if not place.name.endswith(".json"):
            file = stack.enter_context(opened(place))
            yield ForeignFiles(dict.fromkeys(file.keys(), file))
            return
        names = read_index(place)
        files = {name: stack.enter_context(_member(place, name)) for name in sorted(set(names.values()))}
        keys_of = {name: set(file.keys()) for name, file in files.items()}
        for tensor, name in names.items():
            if tensor not in keys_of[name]:
                raise Corrupt(f"{place.name} says that {name} has {tensor}, which it lacks")
        for name, keys in keys_of.items():
            for key in keys - names.keys():
                raise Corrupt(f"{name} has {key}, which {place.name} does not name")
        yield ForeignFiles({tensor: files[name] for tensor, name in names.items()})


def found(path: PathOrUrl) -> PathOrUrl:
    """The file of tensors, or the index, that a place means. Raises Refused (E0808, E0819)."""
    names = _names(path)
    if names is None:
        if path.name.endswith((".bin", ".pt", ".pth")):
            help = "`save_pretrained` of transformers writes safetensors; pickles, which can run code, are not read"
            raise refuse("E0808", f"{path} is not a safetensors file", help=help)
        return path
    for name in (SINGLE, INDEX):
        if name in names:
            return path / name
    others = [each for each in names if each.endswith((".safetensors", ".safetensors.index.json"))]
    if len(others) == 1:
        return path / others[0]
    message = f"{path} has neither {SINGLE} nor {INDEX}"
    few = ", ".join(map(shown, others[:8]))
    raise refuse("E0808", message, help=f"name one of its files: {few}" if others else None)


def _names(path: PathOrUrl) -> list[str] | None:
    """What is in a folder; None if it is a file, or nothing. Of an address, only its name tells. Raises Refused."""
    if isinstance(path, Path):
        return sorted(each.name for each in path.iterdir()) if path.is_dir() else None
    if path.name.endswith((".safetensors", ".json", ".bin", ".pt", ".pth")):
        return None
    try:  # where nothing can be listed, names can be tried
        return names_in(path) or [name for name in (SINGLE, INDEX) if exists(path / name)]
    except OSError as error:
        raise unreadable(path, error) from error


def content_of(path: PathOrUrl, max_bytes: int) -> bytes:
    """The content of a file. Raises Corrupt; Refused (E0819)."""
    if isinstance(path, Address):
        return RemoteFolder(path.parent).read(path.name, max_bytes)
    try:
        if path.stat().st_size > max_bytes:
            raise Corrupt(f"{path.name} has more than {max_bytes:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise Corrupt(f"{path.name} cannot be read: {error.strerror}") from error


def read_index(path: PathOrUrl) -> dict[str, str]:
    """Which file each tensor is in. Raises Corrupt; Refused (E0819)."""
    try:
        content = json.loads(content_of(path, MAX_INDEX))
        names = content["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(f"{path.name} is not an index of tensors: it has no `weight_map`") from error
    if not isinstance(names, dict) or not all(isinstance(each, str) for each in names.values()):
        raise Corrupt(f"{path.name} is not an index of tensors: its `weight_map` does not map names to files")
    for name in names.values():
        if "/" in name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise Corrupt(f"{path.name} names `{name}`, which is no safetensors file beside it")
    return names


def _member(index: PathOrUrl, name: str) -> Any:
    if isinstance(index, Path) and not (index.parent / name).exists():
        raise Corrupt(f"{name} is missing, which {index.name} names")
    return opened(index.parent / name)


# ---------------------------------------------------------------- writing


def shards(entries: Iterable[Entry], max_bytes: int) -> list[list[Entry]]:
    """The entries of each file: as many as fit into `max_bytes`, at least one; widest dtypes first, to be aligned."""
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.bytes
    return [sorted(each, key=lambda entry: -WIDTHS[entry.dtype]) for each in files]


def refuse_names(entries: Sequence[Entry]) -> None:
    """Refuse (E0810) names that cannot be those of a safetensors file."""
    for entry in entries:
        if entry.name == METADATA or any("\ud800" <= character <= "\udfff" for character in entry.name):
            raise refuse("E0810", f"`{shown(entry.name)}` cannot be the name of a tensor in a safetensors file")
    if len(header(entries)) - 8 > MAX_HEADER:
        raise refuse("E0810", f"the names have more than the {MAX_HEADER:,} bytes that a safetensors file may have")


def write_files(
    path: PathOrUrl,
    files: Sequence[Sequence[Entry]],
    read: Callable[[Entry], torch.Tensor],
    more: Mapping[str, bytes],
    single: str = SINGLE,
) -> int:
    """Write a new directory of files of tensors, with an index if they are several, and `more`; returns its size. The
    only file is called `single`.

    It has its name only when it is complete; at an address, what others read first comes last. Raises Refused (E0810),
    and OSError, also if there is something that is not empty.
    """
    for entries in files:
        refuse_names(entries)
    if len(files) == 1:
        names = [single]
    else:
        names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    written = {name: whole_file(entries, map(read, entries)) for name, entries in zip(names, files, strict=True)}
    written |= {name: iter([content]) for name, content in more.items()}
    if len(files) > 1:
        where = {entry.name: name for name, entries in zip(names, files, strict=True) for entry in entries}
        total = sum(entry.bytes for entries in files for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        written[INDEX] = iter([json.dumps(index, indent=2).encode() + b"\n"])
    with _new_folder(path) as folder:
        return sum(write_file(name, folder, content).size for name, content in written.items())


@contextmanager
def _new_folder(path: PathOrUrl) -> Iterator[Folder]:
    """A folder that has its name when it is complete, or at an address its files. If it fails, nothing is left."""
    if isinstance(path, Address):
        folder = RemoteFolder(path)
        try:
            yield folder
        except BaseException:
            with suppress(OSError):
                for name in names_in(path):
                    folder.remove(name)
            raise
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    aside.mkdir()
    try:
        with directory(aside) as handle:
            yield LocalFolder(handle)
        os.rename(aside, path)  # which an empty directory does not hinder
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
