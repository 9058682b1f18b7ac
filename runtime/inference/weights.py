"""The weights of a trained model: which checkpoint they are in, whether they are of this model, and reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path

import torch
from attrs import frozen

from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.spec import Spec
from partita.dsl.types import Type
from partita.runtime.addresses import Place
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.commits import read_manifest, refuse_links
from partita.runtime.checkpoint.exchange import weights_of
from partita.runtime.checkpoint.files import Damaged
from partita.runtime.checkpoint.identity import MOST_SHOWN, changed_lines, difference, digest_of, sources_of
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.checkpoint.located import located
from partita.runtime.checkpoint.manifest import Manifest
from partita.runtime.checkpoint.settings import DIRECTORY, run_directory, settings_of
from partita.runtime.checkpoint.store import commit_name

Report = Callable[[Diagnostic], None]


@frozen(eq=False)
class Weights:
    """Parameters and buffers by full name, from the checkpoint `path` of a `step`."""

    path: Place
    step: int
    parameters: Mapping[str, torch.Tensor]


def read_weights(
    given: Spec,
    folder: Path,
    needed: Mapping[str, Type],
    report: Report,
    place: Place | None = None,
    weights: str = "trained",
) -> Weights:
    """The tensors that are `needed`, by name and type, from the newest intact checkpoint of a run.

    `folder` is the directory of the file. `place` is a run directory, a directory of checkpoints, or a checkpoint,
    also at an address; by default it is where `partita run` would save. With `weights` "ema", parameters have the
    values of their means. Reports checkpoints that are skipped (W0801) and a model that has changed since (W1002).

    Raises Refused (E0804 to E0808, E0816; E0602, E0617 and E0819 for addresses).
    """
    path, step = located(place) if place is not None else _own(given, folder)
    if step is not None:
        try:
            return _read(given, path, step, needed, weights, report)
        except Damaged as damage:
            raise refuse("E0808", f"{path / commit_name(step)} is damaged: {damage}") from damage
    for each in reversed(steps_in(path)):
        try:
            return _read(given, path, each, needed, weights, report)
        except Damaged as damage:
            report(Diagnostic("W0801", f"{path / commit_name(each)} is skipped: {damage}"))
    raise refuse("E0806", f"all checkpoints in {path} are damaged")


def _own(given: Spec, folder: Path) -> tuple[Place, None]:
    """Where the runs of a file have their checkpoints. Raises Refused (E0807)."""
    directory = run_directory(given.name, None)
    settings = settings_of(given, directory, folder)
    path = settings.path if settings is not None else directory / DIRECTORY
    if not steps_in(path):
        entry = "" if settings is not None else ", with `checkpoint = every(100)` in the train block"
        help = f"train it first: `partita run`{entry}; or name a run or a checkpoint with --from"
        raise refuse("E0807", f"there is no checkpoint in {path}", help=help)
    return path, None


def _read(given: Spec, path: Place, step: int, needed: Mapping[str, Type], weights: str, report: Report) -> Weights:
    """The tensors of one checkpoint. Raises Damaged, and Refused (E0804, E0816)."""
    manifest = read_manifest(path, step)
    refuse_links(path, step)
    _compare(given, path / commit_name(step), manifest, needed, report)
    with Commit(path, manifest) as commit:
        problem = next(commit.problems(range(len(manifest.files))), None)
        if problem is not None:
            raise Damaged(problem)
        source = weights_of(manifest, weights)
        return Weights(path / commit_name(step), step, {name: commit.read(source[name]) for name in needed})


def _compare(given: Spec, path: Place, saved: Manifest, needed: Mapping[str, Type], report: Report) -> None:
    """Refuse (E0804) a checkpoint with other tensors than are needed; report (W1002) other operations."""
    there = {each.name: each.type for each in saved.tensors}
    notes = [difference(name, there.get(name), type) for name, type in needed.items() if there.get(name) != type]
    if notes:
        help = "name the run that trained this model, with the same overrides of sizes: --from"
        raise refuse("E0804", f"{path} is of another model", notes=_few(notes), help=help)
    model, _ = given.trained
    if saved.steps_digest != digest_of(model):
        texts = [source.text for source in sources_of(given)]
        lines = islice(changed_lines(saved.sources.values(), texts), 2 * MOST_SHOWN)
        report(Diagnostic("W1002", f"the model has changed since {path} was saved", notes=tuple(lines)))


def _few(notes: Iterable[str]) -> list[str]:
    first, *others = list(notes)
    more = [f"and {len(others) - MOST_SHOWN + 1} more tensors"] if len(others) >= MOST_SHOWN else []
    return [first, *others[: MOST_SHOWN - 1], *more]
