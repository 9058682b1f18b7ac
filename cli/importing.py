"""The output of `partita checkpoint import`: what was bound to what, what was not used, and how to train from it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.dsl.diagnostic import shown
from partita.runtime.checkpoint.repeated import families
from partita.runtime.checkpoint.settings import DIRECTORY

if TYPE_CHECKING:
    from rich.table import Table

    from partita.dsl.spec import Spec
    from partita.runtime.checkpoint.exchange import Binding, Imported

MOST_LINES = 100
INTERVAL = 100  # of the `checkpoint` entry that is proposed


def as_json(made: Imported) -> dict[str, Any]:
    """The full result, tensor by tensor."""
    return {
        "path": str(made.path),
        "tensors": [
            {
                "name": each.tensor.name,
                "type": str(each.tensor.type),
                "from": each.form.name,
                "dtype": each.dtype,
                "shape": list(each.shape),
                "axes": [list(group) for group in each.form.axes],
                "ambiguous": list(each.ambiguous),
            }
            for each in made.bindings
        ],
        "unused": list(made.unused),
    }


def binding_table(bindings: Sequence[Binding]) -> tuple[Table, int]:
    """The parameters and their sources, those of repeated layers on one line; and how many exceed `MOST_LINES`."""
    from rich.table import Table

    from partita.runtime.checkpoint.exchange import is_state

    found = families(
        ((each.tensor.name, each.form.name), (str(each.tensor.type), f"{each.dtype}{list(each.shape)}", _axes(each)))
        for each in bindings
        if not is_state(each.tensor)
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("tensor", "type", "", "from", "shape", "axes"):
        table.add_column(heading, overflow="fold")
    for family in found[:MOST_LINES]:
        ours, theirs = family.names
        type, shape, axes = family.shared
        table.add_row(ours, type, "←", shown(theirs), shape, axes)
    return table, sum(family.count for family in found[MOST_LINES:])


def _axes(binding: Binding) -> str:
    """Their axes in terms of ours; `?` if their order is a guess."""
    return ", ".join(" ".join(group) for group in binding.form.axes) + " ?" * bool(binding.ambiguous)


def unused_lines(names: Sequence[str]) -> Iterator[str]:
    """The tensors of the file that were not used."""
    if not names:
        return
    found = families(((name,), None) for name in names)
    yield f"not used: {', '.join(shown(family.names[0]) for family in found[:8])}"
    more = sum(family.count for family in found[8:])
    if more:
        yield f"  and {more:,} more; --json lists them all"


def training_lines(arguments: argparse.Namespace, given: Spec) -> Iterator[str]:
    """How to start a run from what was imported into `arguments.directory`."""
    _, train = given.trained
    directory, call = arguments.directory, train.checkpoint
    folder, here = Path(arguments.file).resolve().parent, directory.resolve()
    written = call.arguments["dir"] if call is not None else None
    interval = call.arguments["interval"] if call is not None else INTERVAL
    keep = f", keep = {call.arguments['keep']}" if call is not None else ""
    run, entry, move = None, None, None
    if written is not None and (folder / str(written)).resolve() == here:
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
    if run is not None and run.resolve() != Path(f"runs/{given.name}").resolve():
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
