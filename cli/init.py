"""`partita init NAME`: writes a file to start from, for users without a checkout of Partita.

`partita init CONFIG.json` writes the model of a config of Hugging Face.

The files to start from are installed with Partita: those of `specs/` and of its zoo, by name. One is copied together
with what it reads: the files that it imports, and data that is installed beside it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path, PurePosixPath

from partita.cli.command import UsageError, command
from partita.cli.families.registry import from_config
from partita.cli.source import printable
from partita.dsl.load import load

CONFIG = "config.json"
NAMELESS = "missing file name: `partita init NAME`"
# What a folder of a trained model has beside it, in the formats that `checkpoint import` reads.
TENSORS = ("model.safetensors", "model.safetensors.index.json")
USUAL = "start"
SPECS = resources.files("partita.specs")
FOLDERS = (SPECS, SPECS.joinpath("zoo"))
# In quotation marks, what a file imports or reads. What is not installed is the user's own data.
READ = re.compile(r'"([^"\n]+\.(?:par|npz))"')
NUMBERS = {1: "in one process", 2: "on two processes of this machine"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    what = (
        "the name of the file, with or without `.par`; or a config.json of Hugging Face, or the directory that has it"
    )
    parser.add_argument("file", metavar="NAME", nargs="?", help=what)
    names = ", ".join(starter_names())
    what = f"another file to start from than {USUAL}: {names} (default of NAME: the same)"
    parser.add_argument("--from", dest="starter", choices=starter_names(), metavar="STARTER", help=what)
    what = "the file to write from a config (default: its `model_type` and `.par`)"
    parser.add_argument("-o", "--output", metavar="OUT", help=what)
    what = "settings of a config that are to be left out, separated by commas"
    parser.add_argument("--ignore", metavar="KEY,…", type=lambda text: text.split(","), default=[], help=what)


@command("init", add_arguments, "new", "create")
def run(arguments: argparse.Namespace) -> None:
    """Write the file. Raises Refused if a config cannot be said, and UsageError if the file exists or cannot be
    written.
    """
    if arguments.file is None and arguments.starter is None:
        raise UsageError(NAMELESS)
    target = Path(arguments.file if arguments.file is not None else arguments.starter)
    inside = os.path.join(target, CONFIG)
    config = Path(inside) if os.path.isfile(inside) else target if target.suffix == ".json" else None
    if config is None or arguments.starter is not None:
        if arguments.starter is None:
            _check_meant(arguments.file)
        if arguments.output is not None or arguments.ignore:
            raise UsageError("--output and --ignore are for a config.json: `partita init CONFIG.json`")
        name = arguments.starter or USUAL
        text = starter(name)
        own = target.name.removesuffix(".par")
        other = own if own in starter_names() and own != name else None
        return _write(
            target,
            lambda path: text.replace(f"{name}.par", path.name),
            files_named_in(text),
            lambda path: _how_to_run(path) + (f"; `partita init --from {other}` is another file" if other else ""),
        )
    kind, text = from_config(config, tuple(arguments.ignore))
    _write(
        Path(arguments.output or kind), lambda _: text, files_named_in(text), lambda path: _how_to_import(path, config)
    )


def _check_meant(name: str) -> None:
    """Raises UsageError for a name that is meant for something else than a starter: a model of the hub, or a folder
    that has one.
    """
    if any(os.path.isfile(os.path.join(name, each)) for each in TENSORS):
        raise UsageError(f"{printable(name)} has the tensors of a model, and no {CONFIG}, which says what they are")
    address = re.fullmatch(
        r"(?:hf://|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)([\w.-]+/[\w.-]+)(?:[/?#].*)?", name
    )
    hub = address[1] if address is not None else name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None
    if hub is None or name.endswith(".par") or os.path.isdir(os.path.dirname(name)):
        return
    folder = hub.partition("/")[2]
    missing = "" if address is not None else f"cannot write {name}.par: No such file or directory; "
    raise UsageError(
        f"{missing}if `{hub}` is a model of the Hugging Face hub, download its {CONFIG}: "
        f"`hf download {hub} {CONFIG} --local-dir {folder}`, and then `partita init {folder}`"
    )


def _how_to_run(path: Path) -> str:
    """What a user does next with a starter."""
    spec, _ = load(path)
    ranks = spec.mesh.ranks if spec is not None and spec.mesh is not None else 1
    shown = printable(str(path))
    if ranks in NUMBERS:
        return f"`partita run {shown}` trains it {NUMBERS[ranks]}"
    return f"`partita compile {shown}` shows what runs on its {ranks} ranks"


def _how_to_import(path: Path, config: Path) -> str:
    """What a user does next with a model of a config."""
    shown, where = printable(str(path)), f"runs/{printable(path.stem)}/checkpoints"
    has_tensors = any(config.with_name(each).is_file() for each in TENSORS)
    tensors = printable(str(config.parent)) if has_tensors else "TENSORS"
    return f"`partita checkpoint import {where} {tensors} {shown} --as hf` reads its weights"


def _write(path: Path, text: Callable[[Path], str], beside: Mapping[str, bytes], next: Callable[[Path], str]) -> None:
    """Write a file, and what it reads beside it; and say what comes next. Nothing is written if a file is there."""
    if not path.name.removesuffix(".par").strip("."):
        raise UsageError(NAMELESS)
    path = path.with_name(f"{path.name.removesuffix('.par')}.par")
    files = {path: text(path).encode(), **{path.parent / name: content for name, content in beside.items()}}
    each = path
    try:
        for each, content in files.items():
            if os.path.lexists(each) and (each == path or not each.is_file() or each.read_bytes() != content):
                raise FileExistsError
        for each, content in files.items():
            if not each.exists():
                if each != path:
                    each.parent.mkdir(parents=True, exist_ok=True)
                with each.open("xb") as file:
                    file.write(content)
    except FileExistsError as error:
        raise UsageError(f"{printable(str(each))} already exists, and is left unchanged") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot write {printable(str(each))}: {reason}") from error
    print(f"wrote {', '.join(printable(str(each)) for each in files)}; {next(path)}")


def starter_names() -> tuple[str, ...]:
    """The names of all starters: first those of `specs/`, then those of the zoo."""
    return tuple(
        name.removesuffix(".par")
        for folder in FOLDERS
        for name in sorted(each.name for each in folder.iterdir())
        if name.endswith(".par")
    )


def starter(name: str) -> str:
    """The text of a starter by its name."""
    candidates = (folder.joinpath(f"{name}.par") for folder in FOLDERS)
    return next(each for each in candidates if each.is_file()).read_text(encoding="utf-8")


def files_named_in(text: str) -> dict[str, bytes]:
    """The installed files that the text of a starter names, by their paths relative to it."""
    contents = {}
    for name in READ.findall(text):
        for each in (folder.joinpath(*PurePosixPath(name).parts) for folder in FOLDERS):
            if each.is_file():
                contents[name] = each.read_bytes()
    return contents
