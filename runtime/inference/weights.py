"""The weights of a trained model: which checkpoint they are in, whether they are of this model, and reading them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen

from partita.compiler.ops.op import accumulation
from partita.compiler.passes.decode import STATE
from partita.dsl.check.language_model import sources_of as sources_of_data
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.spec import Spec
from partita.dsl.types import Type
from partita.runtime.addresses import PathOrUrl
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.commits import read_manifest, refuse_links
from partita.runtime.checkpoint.exchange import weights_of
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.identity import MAX_SHOWN, changed_text, difference, digest_of, sources_of, types_of
from partita.runtime.checkpoint.loading import Commit, files_of
from partita.runtime.checkpoint.located import located
from partita.runtime.checkpoint.manifest import Manifest
from partita.runtime.checkpoint.settings import DIRECTORY, run_directory, settings_of
from partita.runtime.checkpoint.store import commit_name
from partita.runtime.data.binding import identify
from partita.runtime.data.files import tokenizer_file
from partita.runtime.data_files import DataFile, changed, identified
from partita.runtime.inference.ranks import ForwardRank, Ranks

Report = Callable[[Diagnostic], None]


@frozen
class Weights:
    """The checkpoint, of a `step`, that weights are from."""

    path: PathOrUrl
    step: int


def load_weights(
    spec: Spec,
    folder: Path,
    ranks: Ranks,
    report: Report,
    place: PathOrUrl | None = None,
    weights: str = "trained",
    spelled: bool = True,
) -> Weights:
    """Read the parameters and buffers of ranks from the newest checkpoint of a run that is intact on all of them; each
    reads its own shards alone.

    `folder` is the directory of the file. `place` is a run directory, a directory of checkpoints, or a checkpoint,
    also at an address; by default it is where `partita run` would save. With `weights` "ema", parameters have the
    values of their means. Reports checkpoints that are skipped (W0801) and a model that has changed since (W1002);
    and, if the file's data says which ids text has (`spelled`), a tokenization that has changed since the
    checkpoint (W1003).

    Raises Refused (E0804 to E0808, E0816; E0602, E0617 and E0819 for addresses).
    """
    path, step = located(place) if place is not None else _default_checkpoint_dir(spec, folder)
    for each in [step] if step is not None else reversed(steps_in(path)):
        damage = _loaded(spec, folder, path, each, ranks, report, weights, spelled)
        if damage is None:
            return Weights(path / commit_name(each), each)
        if step is not None:
            raise refuse("E0808", f"{path / commit_name(step)} is damaged: {damage}")
        report(Diagnostic("W0801", f"{path / commit_name(each)} is skipped: {damage}"))
    raise refuse("E0806", f"all checkpoints in {path} are damaged")


def _loaded(
    spec: Spec, folder: Path, path: PathOrUrl, step: int, ranks: Ranks, report: Report, weights: str, spelled: bool
) -> str | None:
    """Read one checkpoint; returns what is wrong with it. Raises Refused (E0804, E0816)."""
    programs = [executor.program for executor in ranks.ranks[0].executors]
    needed = {
        each.name: each.type.with_dtype(accumulation(each.type.dtype))
        for program in programs
        for each in program.parameters
        if not each.name.startswith(STATE)
    }
    problems: list[str] = []
    manifest: Manifest | None = None
    source: Mapping[str, str] = {}
    try:
        manifest = read_manifest(path, step)
        refuse_links(path, step)
        _compare(spec, path / commit_name(step), manifest, needed, report)
        source = weights_of(manifest, weights)
    except Corrupt as damage:
        problems.append(str(damage))

    def part(rank: ForwardRank) -> Generator[None, None, bool]:
        if manifest is not None and not problems:
            try:
                _read(Commit(path, manifest), rank, source)
            except Corrupt as damage:
                problems.append(str(damage))
        bad = yield from rank.sum(torch.tensor([float(bool(problems))]))
        return bool(bad)

    if not ranks.run(part):
        if spelled and manifest is not None:
            _compare_spelling(spec, folder, manifest, path / commit_name(step), report)
        return None
    return problems[0] if problems else "another rank cannot read it"


def _read(opened: Commit, rank: ForwardRank, source: Mapping[str, str]) -> None:
    """Read what a rank holds, in whose tensors it is stored. Raises Corrupt."""
    reads = [
        (source[name], region, view)
        for name in rank.records
        if not name.startswith(STATE)
        for region, view in rank.pieces(name)
    ]
    with opened as commit:
        problem = next(commit.problems(files_of(commit.manifest, ((name, region) for name, region, _ in reads))), None)
        if problem is not None:
            raise Corrupt(problem)
        for name, region, view in reads:
            commit.read(name, region, view)


def _default_checkpoint_dir(spec: Spec, folder: Path) -> tuple[PathOrUrl, None]:
    """Where the runs of a file have their checkpoints. Raises Refused (E0807)."""
    directory = run_directory(spec.name, None)
    settings = settings_of(spec, directory, folder)
    path = settings.path if settings is not None else directory / DIRECTORY
    if not steps_in(path):
        entry = "" if settings is not None else ", with `checkpoint = every(100)` in the train block"
        help = f"train it first: `partita run`{entry}; or name a run or a checkpoint with --run-dir"
        raise refuse("E0807", f"there is no checkpoint in {path}", help=help)
    return path, None


def _compare(spec: Spec, path: PathOrUrl, saved: Manifest, needed: Mapping[str, Type], report: Report) -> None:
    """Refuse (E0804) a checkpoint with other tensors than are needed; report (W1002) other operations."""
    saved_types = types_of(saved)
    notes = [
        difference(name, saved_types.get(name), type) for name, type in needed.items() if saved_types.get(name) != type
    ]
    if notes:
        help = "name the run that trained this model, with the same overrides of sizes and `precision`: --run-dir"
        raise refuse("E0804", f"{path} is of another model", notes=_few(notes), help=help)
    model, _ = spec.trained
    if saved.steps_digest != digest_of(model):
        texts = [source.text for source in sources_of(spec)]
        lines = changed_text(saved.sources.values(), texts)
        report(Diagnostic("W1002", f"the model has changed since {path} was saved", notes=tuple(lines)))


def _compare_spelling(spec: Spec, folder: Path, saved: Manifest, path: PathOrUrl, report: Report) -> None:
    """Report (W1003) if files that say which id text has are not those of the training."""
    data = sources_of_data(spec.trained[1].data)[0]  # a mixture is of one encoding
    tokenizer = data.arguments.get("tokenizer")
    if not saved.data or (tokenizer is None and data.arguments.get("alphabet") != "chars"):
        return
    before: Sequence[DataFile] = saved.data
    if tokenizer is not None:
        before = [each for each in before if each.name == str(tokenizer)]
        now = identified([(str(tokenizer), tokenizer_file(tokenizer, folder, data.span))], data.span)
    else:
        now = identify(data, folder)
    if before and (notes := changed(before, now)):
        what = "the tokenizer" if tokenizer is not None else "the text, whose characters have the ids,"
        message = f"{what} is not what {path} was trained with: ids may stand for other text"
        report(Diagnostic("W1003", message, data.span, notes=tuple(notes), help="restore it"))


def _few(notes: Iterable[str]) -> list[str]:
    first, *others = list(notes)
    more = [f"and {len(others) - MAX_SHOWN + 1} more tensors"] if len(others) >= MAX_SHOWN else []
    return [first, *others[: MAX_SHOWN - 1], *more]
