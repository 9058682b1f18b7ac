"""The commits of a directory, as described by their names and manifests; reads no tensors and does not need torch.

Anything wrong with a commit is raised as Damaged, which names the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partita.runtime.checkpoint.checksummed import MOST_BYTES
from partita.runtime.checkpoint.files import Damaged, directory, links, read, regular_file
from partita.runtime.checkpoint.manifest import NAME, Manifest, parse
from partita.runtime.checkpoint.store import commit_name


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.safetensors"


def read_manifest(path: Path, step: int) -> Manifest:
    """The manifest of a step's commit in the directory `path`. Raises Damaged; Refused (E0805)."""
    name = commit_name(step)
    with open_commit(path, step) as handle:
        try:
            manifest = parse(read(NAME, handle, MOST_BYTES), f"{path / name}")
        except Damaged as damage:
            text = str(damage)
            raise Damaged(text if text.startswith(NAME) else f"{NAME}: {text}") from damage
    if manifest.step != step:
        raise Damaged(f"{NAME} is of step {manifest.step}")
    return manifest


def quick_problem(path: Path, manifest: Manifest) -> str | None:
    """What is wrong with a commit's directory or file sizes, or None. File contents are not read."""
    try:
        refuse_links(path, manifest.step)
        with open_commit(path, manifest.step) as handle:
            for rank, file in enumerate(manifest.files):
                with regular_file(file_name(rank), handle) as (_, size):
                    if size != file.size:
                        return f"{file_name(rank)} has {size:,} bytes instead of {file.size:,}"
    except Damaged as damage:
        return str(damage)
    return None


@contextmanager
def open_commit(path: Path, step: int) -> Iterator[int]:
    """Open the directory of a commit. Raises Damaged."""
    try:
        with directory(path) as outer, directory(commit_name(step), outer) as handle:
            yield handle
    except NotADirectoryError as error:
        raise Damaged(f"{commit_name(step)} is a link, or not a directory") from error
    except OSError as error:
        raise Damaged(f"{commit_name(step)} cannot be read: {error.strerror}") from error


def refuse_links(path: Path, step: int) -> None:
    """Raise Damaged if the directory of a commit contains a link."""
    with open_commit(path, step) as handle:
        found = links(handle)
    if found:
        raise Damaged(f"{found[0]} is a link")
