"""Where a run's checkpoints are, how often they are written, and whether existing ones are of its model."""

from __future__ import annotations

from itertools import count
from pathlib import Path, PurePosixPath
from shlex import quote

from attrs import frozen

from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Spec
from partita.dsl.syntax.source import Span
from partita.runtime.addresses import Address, PathOrUrl, check_writable, is_address, place_of, resolved
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.identity import changed_data, changes, differences
from partita.runtime.checkpoint.manifest import Manifest
from partita.runtime.checkpoint.store import commit_name

DIRECTORY = "checkpoints"


@frozen
class Settings:
    """`checkpoint = every(interval, dir = …, keep = …, copies = …)`, with the directory resolved.

    `changed_data`: the run may resume from a checkpoint even if the data has changed.
    """

    path: PathOrUrl
    interval: int
    keep: int
    changed_data: bool = False
    copies: int | None = None  # steps between copies in memory
    beside: bool = True  # in the run's directory, since the file names no other

    @property
    def anew(self) -> str:
        """How the next run does not resume from these: an option, a command or words."""
        if self.beside and isinstance(self.path, Path):
            return f"`--run-dir {quote(str(_free(self.path.parent)))}`"
        if isinstance(self.path, Path):
            return f"`mv {quote(str(self.path))} {quote(str(_free(self.path)))}`"
        return "another `dir` of `checkpoint`"


def _free(path: Path) -> Path:
    """A path that is not there yet, named after another: `gpt-2`."""
    path = path if path.name not in ("", "..") else path.resolve()
    return next(each for each in (path.with_name(f"{path.name}-{n}") for n in count(2)) if not each.exists())


def run_directory(file: str, named: str | Path | None) -> Path:
    """The directory of a run: the one that the user named, or `runs/NAME`, after the file."""
    return Path(named or f"runs/{file}")


def settings_of(spec: Spec, run_directory: Path, folder: Path) -> Settings | None:
    """The checkpoints that a file asks for; None if it asks for none. Raises Refused (E0602, E0801, E0802).

    `dir` is an address; or relative to the directory of the file, and may not lead out of it, not even by a link. The
    default is `checkpoints` in the run's directory, which the user names and not the file.
    """
    _, train = spec.trained
    call = train.checkpoint
    if call is None:
        return None
    name = call.arguments["dir"]
    path: PathOrUrl
    if name is not None and is_address(str(name)):
        path = _at(str(name), train.spans.get("checkpoint"))
    else:
        path = _beside(run_directory) if name is None else _under(folder, str(name), spec)
    copies = call.arguments["copies"]
    return Settings(
        path, int(call.arguments["interval"]), int(call.arguments["keep"]), False, copies and int(copies), name is None
    )


def recorded_at(place: PathOrUrl, run_directory: Path) -> str:
    """The text by which a run records where its checkpoints go: relative to its directory if they go there, so that a
    copy of it has its own, whatever becomes of the original.
    """
    whole = run_directory.resolve()
    if isinstance(place, Path) and place.resolve().is_relative_to(whole):
        return str(place.resolve().relative_to(whole))
    return resolved(place)


def refuse_within(run_directory: Path, span: Span | None) -> None:
    """Refuse (E0814) a run's directory that is a checkpoint of another run, lies in one, or has only checkpoints:
    `keep` would remove the run with the checkpoint.
    """
    path = run_directory.resolve()
    for each in (path, *path.parents[:2]):
        in_run = each.parent if each.name == DIRECTORY else each.parent.parent
        a_checkpoint = each.name in map(commit_name, steps_in(each.parent))
        if a_checkpoint or (each == path and each.name == DIRECTORY and steps_in(each)):
            what = "a checkpoint" if a_checkpoint and each == path else "in the checkpoints"
            message = f"{run_directory} is {what} of the run in {in_run}"
            help = f"`--run-dir {quote(str(in_run))}` resumes from the last one; name another directory to begin anew"
            raise refuse("E0814", message, span, help=help)


def refuse_unused(run_directory: Path, recorded: str | None, settings: Settings | None, span: Span | None) -> None:
    """Refuse (E0814) to start next to checkpoints from which this run would not resume.

    Looks at the default place of a run's checkpoints, in the run's directory itself, and where those of the last run
    were `recorded` to be. Otherwise imported weights would be ignored, or a run would start over on top of old metrics.
    """
    own = resolved(settings.path) if settings is not None else None
    places: list[PathOrUrl] = [run_directory / DIRECTORY, run_directory]
    for place in (*places, *([place_of(recorded, run_directory)] if recorded is not None else [])):
        steps = steps_in(place) if resolved(place) != own else []
        if not steps:
            continue
        existing = f"the checkpoint{'s' if len(steps) > 1 else ''} in {place}, the last of step {steps[-1]:,}"
        if own is None:
            message = f"this run would not resume from {existing}: the file has no `checkpoint` entry"
            how = "`checkpoint = every(100)`"
            if place == run_directory:
                how += f", with them moved to {place / DIRECTORY},"
            elif resolved(place) != resolved(run_directory / DIRECTORY):
                how = "the `checkpoint` entry of the run before, with its `dir`,"
            fix = f"{how} in the train block resumes from there"
        else:
            message = f"this run would not resume from {existing}: its own are in {own}"
            fix = "move them there to resume from them"
        anew = "to start over, name another directory with --run-dir, or move this one away"
        raise refuse("E0814", message, span, help=f"{fix}; {anew}")


def _beside(run_directory: Path) -> Path:
    """The directory of checkpoints in the run's, which may be untrusted. Refuses (E0802) a link."""
    path = run_directory / DIRECTORY
    if path.is_symlink():
        raise refuse(
            "E0802",
            f"{path} is a link, which is not followed",
            help="put the directory itself there; or name its location with --run-dir, or with `dir` in the file",
        )
    return path


def _at(address: str, span: Span | None) -> Address:
    """An address that the file names."""
    check_writable(Address(address), span)
    place = Address(address.rstrip("/"))
    bucket, _, folder = address.partition("://")[2].strip("/").partition("/")
    if not bucket or not folder:
        help = f"name a folder in it: `{Address(address).scheme}://{bucket or 'bucket'}/runs/gpt`"
        raise refuse("E0801", f"`{address}` is not a folder of a bucket", span, help=help)
    return place


def _under(folder: Path, name: str, spec: Spec) -> Path:
    _, train = spec.trained
    span = train.spans.get("checkpoint")
    help = f"name a directory in {folder}; without `dir` it is `{DIRECTORY}` in the directory of --run-dir"
    parts = PurePosixPath(name)
    if "\0" in name or not parts.parts or parts.is_absolute() or ".." in parts.parts:
        raise refuse("E0801", f"`{name}` leads out of the directory of the file", span, help=help)
    root = folder.resolve()
    path = (root / parts).resolve()
    if not path.is_relative_to(root) or path == root:
        raise refuse("E0801", f"`{name}` leads out of the directory of the file, by a link", span, help=help)
    return path


def check_newest(settings: Settings, current: Manifest) -> None:
    """Refuse a directory whose newest readable commit is of another model (E0804) or of other data (E0815)."""
    for step in reversed(steps_in(settings.path)):
        try:
            refuse_others(settings, read_manifest(settings.path, step), current)
            return
        except Corrupt:
            continue


def refuse_others(settings: Settings, saved: Manifest, current: Manifest) -> None:
    """Refuse a commit of another model (E0804) or of other data (E0815), listing the differences."""
    path = settings.path
    notes = differences(saved, current)
    if notes:
        raise refuse(
            "E0804",
            f"{path / commit_name(saved.step)} is of another model",
            notes=notes,
            help="give this run another directory, or move that one away to begin anew; "
            "`partita checkpoint export` and `import` move tensors from one model to another",
        )
    files = [] if settings.changed_data else changed_data(saved, current)
    if files:
        raise refuse(
            "E0815",
            f"the data is not what {path / commit_name(saved.step)} was trained on",
            notes=[*changes(saved, current, ["data"]), *files],
            help="restore it, or resume with the data as it is now: --changed-data",
        )
