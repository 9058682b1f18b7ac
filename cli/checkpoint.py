"""`partita checkpoint`: inspects and verifies checkpoints, and moves tensors to and from other programs."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.cli import importing
from partita.cli.command import Run, UsageError, command, writing
from partita.cli.foreign import add_foreign_arguments, export_as
from partita.cli.inference import add_weights_argument
from partita.cli.number_format import bytes_text, count_text
from partita.cli.output import add_output, deliver, json_text
from partita.cli.source import add_source_arguments
from partita.dsl.diagnostic import refuse, shown
from partita.runtime.addresses import Address, PathOrUrl, check_writable, names_in, place_of
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.commits import quick_problem, read_manifest, refuse_links
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.located import located
from partita.runtime.checkpoint.manifest import MAX_STEPS
from partita.runtime.checkpoint.store import commit_name

if TYPE_CHECKING:
    from partita.runtime.checkpoint.manifest import Manifest

DIRECTORY_HELP = "a directory of checkpoints, a single checkpoint, or a run directory; or its address"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands and their options."""
    commands = parser.add_subparsers(metavar="ACTION", dest="action", required=True)

    def add(name: str, help: str) -> argparse.ArgumentParser:
        aliases = ["list"] if name == "ls" else []
        subparser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, aliases=aliases)
        subparser.set_defaults(action=name, needs=None if name in ("ls", "show") else "run")
        what = "the directory or address to import into" if name == "import" else DIRECTORY_HELP
        subparser.add_argument("directory", metavar="DIR", type=place_of, help=what)
        if name != "ls":
            which = {
                "import": "the step after which training resumes (default: 0)",
                "verify": "only the one of this step",
            }
            what = which.get(name, "which one (default: the newest)")
            subparser.add_argument("--step", type=_step, metavar="N", help=what)
        if name != "export":
            add_output(subparser, output=None)
        return subparser

    add("ls", "list the checkpoints of a directory")
    add("show", "show the contents of a checkpoint, and the run that it is from")
    add("verify", "read checkpoints completely and check them for damage")
    export = add("export", "write full tensors to safetensors files, under their .par names or another program's")
    what = "the file to write; with --as, the directory"
    export.add_argument("-o", "--output", metavar="OUT", type=place_of, required=True, help=what)
    which = export.add_mutually_exclusive_group()
    which.add_argument("--states", action="store_true", help="include optimizer state")
    add_weights_argument(which, "which to write: ")
    add_foreign_arguments(export, export=True)
    what = "the .par file with `weights` (default: what the checkpoint was trained from)"
    add_source_arguments(export, what)
    importing = add("import", "make a checkpoint of a file's model from the full tensors of safetensors files")
    what = "a safetensors file, an index of several, a directory with either, or the id of a model on the hub"
    importing.add_argument("tensors", metavar="TENSORS", type=place_of, help=what)
    add_foreign_arguments(importing, export=False)
    what = "without --as: reject unused tensors, and orders of axes that sizes leave ambiguous"
    importing.add_argument("--strict", action="store_true", help=what)
    add_source_arguments(importing)


def _step(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step")
    return int(text)


@command("checkpoint", add_arguments, "checkpoints", "ckpt", "export", "convert")
def run(arguments: argparse.Namespace) -> int | None:
    """Run the action. Returns 1 if a checkpoint is damaged. Raises UsageError and Refused."""
    actions: dict[str, Run] = {
        "ls": _list,
        "show": _show,
        "verify": _verify,
        "export": _export,
        "import": importing.import_checkpoint,
    }
    wrong = _misused(arguments)
    if wrong:
        raise UsageError(wrong)
    return actions[arguments.action](arguments)


def _misused(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the options together."""
    options, directory = vars(arguments), str(arguments.directory)
    if directory.endswith(".par") and not os.path.isdir(directory):
        return f"DIR is a directory; runs of that file save to `runs/{Path(directory).stem}`, if it is not said where"
    if options.get("program") is not None:
        for name in ("strict", "states"):
            if options.get(name):
                return f"--{name} does not go with --as"
    elif arguments.action in ("import", "export"):
        for name, default in (("only", []), ("dtype", None), ("config", None), ("merge", False)):
            if arguments.action == "export" and options.get(name, default) != default:
                return f"--{name} needs --as NAME"
        if arguments.action == "export" and arguments.file is not None:
            return f"{arguments.file}: a .par file is read for its `weights`, with --as NAME"
    return None


# ---------------------------------------------------------------- choosing a checkpoint


def _chosen(arguments: argparse.Namespace) -> tuple[PathOrUrl, int]:
    """The single checkpoint to use. Raises Refused (E0807)."""
    path, step = located(arguments.directory)
    steps = steps_in(path)
    requested = arguments.step if arguments.step is not None else step if step is not None else steps[-1]
    if requested not in steps:
        raise refuse(
            "E0807", f"{path} has no checkpoint of step {requested}", help=f"it has {', '.join(map(str, steps))}"
        )
    return path, requested


def _manifest(path: PathOrUrl, step: int) -> Manifest:
    """The manifest of a checkpoint. Raises Refused (E0808)."""
    try:
        return read_manifest(path, step)
    except Corrupt as damage:
        raise refuse("E0808", f"{path / commit_name(step)} is damaged: {damage}") from damage


# ---------------------------------------------------------------- listing and showing


def _list(arguments: argparse.Namespace) -> None:
    path, _ = located(arguments.directory)
    rows: list[dict[str, Any]] = []
    for step in steps_in(path):
        row: dict[str, Any] = {"step": step, "path": str(path / commit_name(step))}
        try:
            manifest = read_manifest(path, step)
            row |= {
                "time": manifest.time,
                "bytes": manifest.bytes,
                "ranks": manifest.mesh.ranks,
                "mesh": manifest.mesh_text,
                "layout": manifest.layout,
                "problem": quick_problem(path, manifest),
            }
        except Corrupt as damage:
            row["problem"] = str(damage)
        rows.append(row)
    if arguments.json:
        return deliver(json_text(rows))
    from rich.table import Table

    table = Table("step", "saved", "size", "mesh", "layout", "", box=None, pad_edge=False)
    for row in rows:
        cells = ["", "", "", ""]
        if "bytes" in row:
            cells = [_when(row["time"]), bytes_text(row["bytes"]), row["mesh"], shown(row["layout"])]
        table.add_row(str(row["step"]), *cells, f"damaged: {shown(row['problem'])}" if row["problem"] else "")
    _print(table)


def _show(arguments: argparse.Namespace) -> None:
    from rich.table import Table

    path, step = _chosen(arguments)
    manifest = _manifest(path, step)
    if arguments.json:
        return deliver(json_text(manifest.as_json()))
    parameters = [each for each in manifest.tensors if "/" not in each.name]
    elements = sum(each.type.elements for each in parameters)
    table = Table("", "", box=None, show_header=False, pad_edge=False)
    for name, text in (
        ("checkpoint", str(path / commit_name(step))),
        ("saved", f"{_when(manifest.time)} by {manifest.written_by}"),
        ("model", f"{manifest.model}: {len(parameters)} parameters, {count_text(elements)} elements"),
        ("size", f"{bytes_text(manifest.bytes)} in {len(manifest.files)} files"),
        ("mesh", manifest.mesh_text),
        ("layout", manifest.layout or "none"),
        ("schedule", manifest.schedule or "none"),
        *manifest.settings.items(),
        *([("skipped", f"{manifest.history.skipped:,} steps")] if manifest.history.skipped else []),
    ):
        table.add_row(shown(name), shown(text))
    _print(table)
    print()
    table = Table("tensor", "type", "split", "saved at", box=None, pad_edge=False)
    for each in manifest.tensors:
        at = " ".join(f"{axis} {i}" for axis, i in each.at if manifest.mesh.sizes[axis] > 1)
        table.add_row(each.name, str(each.type), str(each.layout), at or "")
    _print(table)


def _print(table: object) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False).print(table)


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


# ---------------------------------------------------------------- verifying


def _verify(arguments: argparse.Namespace) -> int:
    path, named = located(arguments.directory)
    steps = [_chosen(arguments)[1]] if arguments.step is not None or named is not None else steps_in(path)
    rows = []
    for step in steps:
        manifest, problems = _problems(path, step)
        rows.append({"step": step, "path": str(path / commit_name(step)), "problems": problems})
        if arguments.json:
            continue
        if manifest is not None and not problems:
            files = f"{len(manifest.files)} file{'s' * (len(manifest.files) > 1)}"
            print(f"{path / commit_name(step)}: intact ({files}, {bytes_text(manifest.bytes)})")
        for problem in problems:
            print(f"{path / commit_name(step)}: damaged: {shown(problem)}")
    if arguments.json:
        deliver(json_text(rows))
    return 1 if any(row["problems"] for row in rows) else 0


def _problems(path: PathOrUrl, step: int) -> tuple[Manifest | None, list[str]]:
    """Everything that is wrong with a commit, and its manifest unless that is damaged."""
    from partita.runtime.checkpoint.loading import Commit

    try:
        manifest = read_manifest(path, step)
        refuse_links(path, step)
    except Corrupt as damage:
        return None, [str(damage)]
    with Commit(path, manifest) as commit:
        return manifest, list(commit.problems(range(len(manifest.files))))


# ---------------------------------------------------------------- export and import


def _export(arguments: argparse.Namespace) -> None:
    from partita.runtime.checkpoint.exchange import check_place, export
    from partita.runtime.checkpoint.loading import Commit
    from partita.runtime.data.formats import SAFETENSORS

    path, step = _chosen(arguments)
    with writing(arguments.output):  # before everything is read
        if arguments.program is None:
            check_place(arguments.output, SAFETENSORS)
        elif not _is_empty(arguments.output):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    manifest, problems = _problems(path, step)
    if manifest is None or problems:
        raise refuse("E0808", f"{path / commit_name(step)} is damaged: {problems[0]}", notes=problems[1:9])
    with Commit(path, manifest) as commit, writing(arguments.output):
        if arguments.program is not None:
            return export_as(arguments, commit)
        size = export(commit, arguments.output, arguments.states, arguments.weights)
    print(f"{arguments.output}: {bytes_text(size)} from {path / commit_name(step)}")


def _is_empty(path: PathOrUrl) -> bool:
    """Whether nothing is there, or an empty directory. Raises OSError; Refused (E0602) if it cannot be written to."""
    if isinstance(path, Address):
        check_writable(path)
        return not names_in(path)
    return not path.exists() or not any(path.iterdir())
