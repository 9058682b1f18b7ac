"""`partita checkpoint import`: says what was bound to what, what was not used, and how to train from it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.cli.command import writing
from partita.cli.foreign import CONFIG, config_of, declared, is_file, write_config
from partita.cli.output import deliver, json_text
from partita.cli.source import load_file, report
from partita.compiler.pipeline import compile_spec
from partita.dsl.diagnostic import shown
from partita.runtime.addresses import Address, PathOrUrl, resolved
from partita.runtime.checkpoint.identity import manifest_of
from partita.runtime.checkpoint.repeated import families
from partita.runtime.checkpoint.settings import DIRECTORY
from partita.runtime.hub import is_id, weights_folder

if TYPE_CHECKING:
    from partita.dsl.spec import Spec
    from partita.runtime.checkpoint.importing import Imported, ImportedTensor

MOST_LINES = 100
MOST_FEW = 8
INTERVAL = 100  # of the `checkpoint` entry that is proposed


def import_checkpoint(arguments: argparse.Namespace) -> None:
    """Make a checkpoint of a file's model. Raises Refused, and UsageError if nothing can be written."""
    from partita.runtime.checkpoint.foreign_files import found
    from partita.runtime.checkpoint.importing import import_tensors

    state = compile_spec(load_file(arguments))
    spec, source, directory = state.spec, _local(arguments.tensors), arguments.directory
    weights = declared(spec, arguments.program) if arguments.program is not None else None
    manifest, step = manifest_of(spec, state.program), 0 if arguments.step is None else arguments.step
    choice = arguments.only, arguments.strict, tuple(spec.weights.values())
    with writing(f"to {directory}"):
        imported = import_tensors(directory, step, manifest, state.program, source, weights, *choice)
        config = found(source).parent / CONFIG
        if weights is not None and is_file(config):
            write_config(directory, config_of(config))
    report(imported.warnings)
    if arguments.json:
        return deliver(json_text(_as_json(imported)))
    print(f"{imported.path}: {len(imported.found)} tensors from {arguments.tensors}")
    if imported.renamed:
        print(f"its names {imported.renamed}")
    for line in (*_bindings(imported.found), *_rest(imported), *training_lines(arguments, spec)):
        print(line)


def _local(tensors: PathOrUrl) -> PathOrUrl:
    """Where the tensors are: a path or address as it is, and a folder with what the hub has. Raises Refused (E0627)."""
    if isinstance(tensors, Path) and is_id(str(tensors)) and not tensors.exists():
        return weights_folder(str(tensors))
    return tensors


def _as_json(imported: Imported) -> dict[str, Any]:
    """The full result, tensor by tensor."""
    return {
        "path": str(imported.path),
        "tensors": [
            {
                "from": each.name,
                "dtype": each.dtype,
                "shape": list(each.tensor.shape),
                "parameters": [
                    {"name": part.name, "type": str(part.type), "axes": [list(group) for group in part.groups]}
                    for part in each.tensor.parts
                ],
                "ambiguous": list(each.ambiguous),
            }
            for each in imported.found
        ],
        "initial": list(imported.begun),
        "unused": list(imported.unused),
    }


def _bindings(tensors: Sequence[ImportedTensor]) -> Iterator[str]:
    """What was taken from where, the tensors of repeated layers on one line."""
    rows = families(
        (
            (*(part.name for part in each.tensor.parts), each.name),
            # A `?` where the order of axes is a guess.
            (f"{each.dtype}{list(each.tensor.shape)}", each.tensor.axes + " ?" * bool(each.ambiguous)),
        )
        for each in tensors
        if "/" not in each.tensor.parts[0].name
    )
    ours = [", ".join(row.names[:-1]) for row in rows[:MOST_LINES]]
    width = max(map(len, ours), default=0)
    for names, row in zip(ours, rows, strict=False):
        yield f"{names:<{width}}  ←  {shown(row.names[-1])}  {'  '.join(row.shared)}"
    more = sum(row.count for row in rows[MOST_LINES:])
    if more:
        yield f"and {more:,} more; --json lists them all"


def _rest(imported: Imported) -> Iterator[str]:
    """What begins as the file says, and the tensors of theirs that were not used."""
    for words, names in (("as the file begins", imported.begun), ("not used", imported.unused)):
        rows = families(((name,), None) for name in names)
        if rows:
            yield f"{words}: {', '.join(shown(row.names[0]) for row in rows[:MOST_FEW])}"
        more = sum(row.count for row in rows[MOST_FEW:])
        if more:
            yield f"  and {more:,} more; --json lists them all"


def training_lines(arguments: argparse.Namespace, spec: Spec) -> Iterator[str]:
    """How to start a run from what was imported into `arguments.directory`."""
    _, train = spec.trained
    directory, call = arguments.directory, train.checkpoint
    written = call.arguments["dir"] if call is not None else None
    interval = call.arguments["interval"] if call is not None else INTERVAL
    keep = f", keep = {call.arguments['keep']}" if call is not None else ""
    run, entry, move = None, None, None
    folder, here = Path(arguments.file).resolve().parent, Path(resolved(directory))
    if isinstance(directory, Address):
        if str(written).rstrip("/") != str(directory):
            entry = f'checkpoint = every({interval}, dir = "{directory}"{keep})'
    elif written is not None and (folder / str(written)).resolve() == here:
        pass
    elif here.name == DIRECTORY:
        run = directory.parent if directory.name == DIRECTORY else here.parent
        if call is None or written is not None:
            entry = f"checkpoint = every({interval}{keep})"
    elif here != folder and here.is_relative_to(folder) and _writable(str(here.relative_to(folder))):
        entry = f'checkpoint = every({interval}, dir = "{here.relative_to(folder)}"{keep})'
    else:
        run = here.with_name(f"{here.name}-run")
        move = shlex.join(["mkdir", str(run)]), shlex.join(["mv", str(here), str(run / DIRECTORY)])
        if call is None or written is not None:
            entry = f"checkpoint = every({interval}{keep})"
    # An override of the entry to be added would hide it.
    overrides = [each for each in arguments.overrides if entry is None or not each.startswith("train.checkpoint")]
    command = ["partita", "run", arguments.file, *overrides]
    command += ["--root", arguments.root] if arguments.root else []
    if run is not None and run.resolve() != Path(f"runs/{spec.name}").resolve():
        command += ["--run-dir", str(run)]
    yield "to train from this checkpoint"
    if move is not None:
        yield f"  {' && '.join(move)}"
    if entry is not None:
        yield f"  {entry}    in the train block of {arguments.file}"
    yield f"  {shlex.join(command)}"


def _writable(path: str) -> bool:
    """Whether a path can be written in a `.par` file."""
    return path.isprintable() and not set(path) & set('"\\')
