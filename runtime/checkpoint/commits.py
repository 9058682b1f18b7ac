"""The commits of a directory, as described by their names and manifests; reads no tensors and does not need torch.

Anything wrong with a commit is raised as Corrupt, which names the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from partita.runtime.addresses import PathOrUrl
from partita.runtime.checkpoint.checksummed import MAX_BYTES
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.folders import Folder, opened_folder
from partita.runtime.checkpoint.manifest import NAME, Manifest, parse
from partita.runtime.checkpoint.store import commit_name


def read_manifest(place: PathOrUrl, step: int) -> Manifest:
    """The manifest of a step's commit in the directory `place`. Raises Corrupt; Refused (E0805, E0819)."""
    name = commit_name(step)
    with open_commit(place, step) as folder:
        try:
            manifest = parse(folder.read(NAME, MAX_BYTES), f"{place / name}")
        except Corrupt as damage:
            text = str(damage)
            raise Corrupt(text if text.startswith(NAME) else f"{NAME}: {text}") from damage
    if manifest.step != step:
        raise Corrupt(f"{NAME} is of step {manifest.step}")
    return manifest


def quick_problem(place: PathOrUrl, manifest: Manifest) -> str | None:
    """What is wrong with a commit's directory or file sizes, or None. File contents are not read."""
    try:
        refuse_links(place, manifest.step)
        with open_commit(place, manifest.step) as folder:
            for rank, file in enumerate(manifest.files):
                name = manifest.file_name(rank)
                size = folder.size(name)
                if size != file.size:
                    return f"{name} has {size:,} bytes instead of {file.size:,}"
    except Corrupt as damage:
        return str(damage)
    return None


@contextmanager
def open_commit(place: PathOrUrl, step: int) -> Iterator[Folder]:
    """Open the directory of a commit. Raises Corrupt."""
    try:
        with opened_folder(place, commit_name(step)) as folder:
            yield folder
    except NotADirectoryError as error:
        raise Corrupt(f"{commit_name(step)} is a link, or not a directory") from error
    except OSError as error:
        raise Corrupt(f"{commit_name(step)} cannot be read: {error.strerror}") from error


def refuse_links(place: PathOrUrl, step: int) -> None:
    """Raise Corrupt if the directory of a commit contains a link."""
    with open_commit(place, step) as folder:
        links = folder.links()
    if links:
        raise Corrupt(f"{links[0]} is a link")
