"""Where a run's checkpoints are and how often they are made; and that those which are there are of its model."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from attrs import frozen

from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Spec
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.files import Damaged
from partita.runtime.checkpoint.identity import changed_data, differences
from partita.runtime.checkpoint.manifest import Manifest
from partita.runtime.checkpoint.store import commit_name, steps_in

DIRECTORY = "checkpoints"


@frozen
class Settings:
    """`checkpoint = every(interval, dir = …, keep = …)`, with the directory found.

    `changed_data`: the run may go on from a checkpoint though the data is not what it was.
    """

    path: Path
    interval: int
    keep: int
    changed_data: bool = False


def settings_of(given: Spec, run_directory: Path, folder: Path) -> Settings | None:
    """The checkpoints that a file asks for; None where it asks for none. Raises Refused (E0801).

    `dir` is relative to the folder of the file, and may not lead out of it, nor by a link. Without one it is
    `checkpoints` in the run's directory, which the user names and not the file.
    """
    assert given.train is not None
    call = given.train.checkpoint
    if call is None:
        return None
    name = call.arguments["dir"]
    path = run_directory / DIRECTORY if name is None else _under(folder, str(name), given)
    return Settings(path, int(call.arguments["interval"]), int(call.arguments["keep"]))


def _under(folder: Path, name: str, given: Spec) -> Path:
    assert given.train is not None
    span = given.train.spans.get("checkpoint")
    help = f"name a directory in {folder}; without `dir` it is `{DIRECTORY}` in the directory of --run-dir"
    parts = PurePosixPath(name)
    if "\0" in name or not parts.parts or parts.is_absolute() or ".." in parts.parts:
        raise refuse("E0801", f"`{name}` leads out of the folder of the file", span, help=help)
    root = folder.resolve()
    path = (root / parts).resolve()
    if not path.is_relative_to(root) or path == root:
        raise refuse("E0801", f"`{name}` leads out of the folder of the file, by a link", span, help=help)
    return path


def check_newest(settings: Settings, wanted: Manifest) -> None:
    """Refuse a directory whose newest readable commit is of another model (E0804), or of other data (E0811)."""
    for step in reversed(steps_in(settings.path)):
        try:
            refuse_others(settings, read_manifest(settings.path, step), wanted)
            return
        except Damaged:
            continue


def refuse_others(settings: Settings, saved: Manifest, wanted: Manifest) -> None:
    """Refuse a commit that is of another model (E0804), or of other data (E0811), with what differs."""
    path = settings.path
    found = differences(saved, wanted)
    if found:
        raise refuse(
            "E0804",
            f"{path / commit_name(saved.step)} is of another model",
            notes=found,
            help="give this run another directory, or move that one away to begin anew; "
            "`partita checkpoint export` and `import` move tensors from one model to another",
        )
    files = [] if settings.changed_data else changed_data(saved, wanted)
    if files:
        raise refuse(
            "E0811",
            f"the data is not what {path / commit_name(saved.step)} was trained on",
            notes=files,
            help="put it back as it was, or go on with what is there now: --changed-data",
        )
