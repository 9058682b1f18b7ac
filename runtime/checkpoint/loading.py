"""A commit, opened for reading: everything is checked before anything is used.

Whoever reads a commit first looks for problems: `commits` checks the directory, `Commit.problems` the files, their
sizes, hashes and headers. After that, any region of any tensor can be read, from whichever ranks saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from attrs import define, field

from partita.compiler.layout import REPLICATED
from partita.compiler.mesh import Mesh
from partita.dsl.types import BYTES
from partita.runtime.addresses import PathOrUrl
from partita.runtime.checkpoint.commits import open_commit
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.manifest import Manifest, Tensor
from partita.runtime.checkpoint.parts import saved_shape, saves, sources
from partita.runtime.checkpoint.shards import Entry, check_entries, opened, read_region
from partita.runtime.checkpoint.store import commit_name
from partita.runtime.declared import waits
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.regions import Region, in_slabs, region_of, shape_of

MAX_OPEN = 64  # files open at a time


def entries_of(manifest: Manifest, rank: int) -> tuple[Entry, ...]:
    """The tensors of a rank's file, in the order of their bytes: widest dtypes first, so that each is aligned."""
    coordinates = manifest.mesh.coordinates(rank)
    own = (tensor for tensor in manifest.tensors if saves(tensor, coordinates))
    return tuple(_entry(tensor, manifest, rank) for tensor in by_width(own))


def by_width(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors, widest dtypes first and otherwise in order."""
    return sorted(tensors, key=lambda tensor: -BYTES[tensor.type.dtype])


def read_parts(
    tensor: Tensor,
    mesh: Mesh,
    region: Region,
    into: torch.Tensor,
    file_of: Callable[[int], Any],
    moved: Callable[[], None],
) -> None:
    """Copy a region of a tensor, saved on a mesh, into another from the open files of ranks. Raises Corrupt."""
    for source in sources(tensor, mesh, region):
        if source.shape is not None:
            flat = read_region(file_of(source.rank), tensor.name, source.inner)
            into[source.outer].copy_(flat.view(source.shape)[source.within])
            moved()
            continue
        for rows, part in in_slabs(source.inner):
            into[source.outer][rows].copy_(read_region(file_of(source.rank), tensor.name, part))
            moved()


def files_of(manifest: Manifest, regions: Iterable[tuple[str, Region]]) -> list[int]:
    """The ranks in whose files regions of tensors are."""
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    return sorted({each.rank for name, region in regions for each in sources(tensors[name], manifest.mesh, region)})


def _entry(tensor: Tensor, manifest: Manifest, rank: int) -> Entry:
    mesh = manifest.mesh
    return Entry(tensor.name, tensor.type.dtype, saved_shape(tensor, mesh.sizes, mesh.coordinates(rank)))


def _nothing() -> None:
    """Ignores progress."""


@define(eq=False)
class Commit:
    """A commit of the directory `path`; a context manager, which closes the files that were opened.

    `moved` is called repeatedly while files are read, which may take long.
    """

    path: PathOrUrl
    manifest: Manifest
    moved: Callable[[], None] = _nothing
    _open: dict[int, tuple[Any, ExitStack]] = field(factory=dict, init=False)
    _tensors: dict[str, Tensor] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._tensors = {tensor.name: tensor for tensor in self.manifest.tensors}

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._close_oldest()

    def _close_oldest(self) -> None:
        _, stack = self._open.pop(next(iter(self._open)))
        stack.close()

    def problems(self, ranks: Iterable[int]) -> Iterator[str]:
        """Yields what is wrong with the files of some ranks, which are read completely."""
        for rank in ranks:
            try:
                self._check(rank)
            except Corrupt as damage:
                yield str(damage)

    def _check(self, rank: int) -> None:
        name, expected = self.manifest.file_name(rank), self.manifest.files[rank]
        with open_commit(self.path, self.manifest.step) as folder:
            if folder.sha256(name, expected.size, self.moved) != expected.sha256:
                raise Corrupt(f"{name}: its SHA-256 is not the manifest's")
        with opened(self._path(rank)) as file:
            check_entries(file, name, entries_of(self.manifest, rank))

    def _path(self, rank: int) -> PathOrUrl:
        return self.path / commit_name(self.manifest.step) / self.manifest.file_name(rank)

    @waits("files are mapped into memory that is not pinned")
    def read(self, name: str, region: Region | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor or a region of it, on the CPU, or copied `into` a tensor of that shape. Raises Corrupt."""
        tensor = self._tensors[name]
        selected = region_of(tensor.type, REPLICATED, {}, {}) if region is None else region
        if into is None:
            into = torch.empty(shape_of(selected), dtype=DTYPES[tensor.type.dtype])
        read_parts(tensor, self.manifest.mesh, selected, into, self._file, self.moved)
        return into

    def _file(self, rank: int) -> Any:
        if rank not in self._open:
            if len(self._open) == MAX_OPEN:
                self._close_oldest()
            stack = ExitStack()
            self._open[rank] = stack.enter_context(opened(self._path(rank))), stack
        return self._open[rank][0]
