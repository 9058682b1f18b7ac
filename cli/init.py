"""`partita init NAME`: writes a file to start from, for users without a checkout of Partita.

Given a model of transformers, `init` does what `partita import` does.

The files to start from are installed with Partita: those of `specs/` and of its zoo, by name. One is copied together
with what it reads: the files that it imports, and data that is installed beside it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path, PurePosixPath

from partita.cli.argument_types import count
from partita.cli.command import UsageError, command
from partita.cli.extras import missing
from partita.cli.modules import TENSORS, LowRank, import_pretrained, target
from partita.cli.source import printable
from partita.dsl.load import load

CONFIG = "config.json"
RANK = 8
NAMELESS = "missing file name: `partita init NAME`"
USUAL = "start"
SPECS = resources.files("partita.specs")
FOLDERS = (SPECS, SPECS.joinpath("zoo"))
# In quotation marks, what a file imports or reads. What is not installed is the user's own data.
READ = re.compile(r'"([^"\n:]+\.(?:par|npz|jsonl|py))(?::\w+)?"')
TOKENIZER = re.compile(r'tokenizer = "(\w+)"')  # a folder
NUMBERS = {1: "in one process", 2: "on two processes of this machine"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    what = (
        "the name of the file, with or without `.par`; or a model of transformers: a folder, a config.json, or its "
        "id on the hub"
    )
    parser.add_argument("file", metavar="NAME", nargs="?", help=what)
    names = ", ".join(starter_names())
    what = f"another file to start from than {USUAL}: {names} (default of NAME: the same)"
    parser.add_argument("--from", dest="starter", choices=starter_names(), metavar="STARTER", help=what)
    what = "the file to write of a model of transformers (default: its `model_type` and `.par`)"
    parser.add_argument("-o", "--output", metavar="OUT", help=what)
    what = "adapters in a model of transformers, of all matrices of its layers or of some modules, such as q,v"
    parser.add_argument("--lora", nargs="?", const="", metavar="MODULE,…", help=what)
    what = f"the rank of the adapters (default: {RANK})"
    parser.add_argument("--rank", type=count, metavar="N", help=what)


@command("init", add_arguments, "new", "create")
def run(arguments: argparse.Namespace) -> None:
    """Write the file. Raises UsageError if it exists or cannot be written, and Refused if a model is not understood."""
    if arguments.file is None and arguments.starter is None:
        raise UsageError(NAMELESS)
    if arguments.starter is None and _is_model(arguments.file):
        problem = missing("run", "a model of transformers")
        if problem is not None:
            raise UsageError(problem)
        modules = tuple(each.strip() for each in (arguments.lora or "").split(",") if each.strip())
        adapters = LowRank(modules, arguments.rank or RANK) if arguments.lora is not None else None
        if adapters is None and arguments.rank is not None:
            raise UsageError("--rank is that of the adapters of --lora")
        return import_pretrained(arguments.file, arguments.output, adapters=adapters)
    for option in ("output", "lora", "rank"):
        if getattr(arguments, option) is not None:
            raise UsageError(f"--{option} is for a model of transformers: `partita init CONFIG.json`")
    name = arguments.starter or USUAL
    written = arguments.file if arguments.file is not None else arguments.starter
    own, text = Path(written).name.removesuffix(".par"), starter(name)
    if not own.strip("."):
        raise UsageError(NAMELESS)
    path = target(written)
    beside = {path.parent / each: content for each, content in files_named_in(text).items()}
    _write({path: text.replace(f"{name}.par", path.name).encode(), **beside})
    files = ", ".join(printable(str(each)) for each in (path, *beside))
    allow = " --allow-python" if any(each.suffix == ".py" for each in beside) else ""
    other = f"; `partita init --from {own}` is another file" if own in starter_names() and own != name else ""
    print(f"wrote {files}; {_how_to_run(path, allow)}{other}")


def _is_model(name: str) -> bool:
    """Whether a name is that of a model of transformers: a folder that has one, a config.json, or one of the hub."""
    if name.endswith(".json") or any(os.path.isfile(os.path.join(name, each)) for each in (CONFIG, *TENSORS)):
        return True
    named = re.fullmatch(
        r"(hf://|https?://(www\.)?(huggingface\.co|hf\.co)/)[\w.-]+/[\w.-]+([/?#].*)?|[\w.-]+/[\w.-]+", name
    )
    return named is not None and not name.endswith(".par") and not os.path.isdir(os.path.dirname(name))


def _how_to_run(path: Path, allow: str) -> str:
    """What a user does next with a starter, whose Python code an option may have to `allow`."""
    spec, _ = load(path)
    ranks = spec.mesh.ranks if spec is not None and spec.mesh is not None else 1
    shown = printable(str(path))
    if ranks in NUMBERS:
        return f"`partita run {shown}{allow}` trains it {NUMBERS[ranks]}"
    return f"`partita compile {shown}` shows what runs on its {ranks} ranks"


def _write(files: Mapping[Path, bytes]) -> None:
    """Write a file, the first, and what it reads beside it. Nothing is written if the file is there."""
    path = each = next(iter(files))
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
    names = READ.findall(text)
    for name in TOKENIZER.findall(text):
        inside = (folder.joinpath(name) for folder in FOLDERS)
        names += [f"{name}/{each.name}" for folder in inside if folder.is_dir() for each in folder.iterdir()]
    contents = {}
    for name in names:
        for each in (folder.joinpath(*PurePosixPath(name).parts) for folder in FOLDERS):
            if each.is_file():
                contents[name] = each.read_bytes()
    return contents
