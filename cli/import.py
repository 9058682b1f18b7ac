"""`partita import SOURCE`: writes the file of a PyTorch module, and proves that it is equal to it."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from typing import Any

from partita.cli.command import UsageError, command
from partita.cli.modules import check_free, deliver, import_pretrained, proof_text, target, tell
from partita.cli.source import printable
from partita.dsl.diagnostic import refuse, shown

ATTRIBUTE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    what = (
        "MODULE:FUNCTION, a function of Python that returns an nn.Module; or a folder or config.json of transformers, "
    )
    parser.add_argument("source", metavar="SOURCE", help=f"{what}or the id of a model on the hub")
    what = "MODULE:FUNCTION, which returns a dictionary of example tensors for `forward`"
    parser.add_argument("--example", metavar="MODULE:FUNCTION", help=what)
    what = (
        "of a module that returns outputs alone: cross_entropy(logits, targets), mse(a, b), binary_cross_entropy(a, b)"
    )
    parser.add_argument("--loss", metavar="LOSS", help=what)
    what = "names of the axes of an input, as in tokens=batch,seq; may be repeated"
    parser.add_argument("--axes", metavar="INPUT=AXIS,…", type=_axes, action="append", default=[], help=what)
    parser.add_argument("--name", metavar="NAME", help="the name of the model (default: that of the module's class)")
    parser.add_argument("-o", "--output", metavar="OUT", help="the file to write (default: NAME.par)")
    parser.set_defaults(needs="run")


def _axes(text: str) -> tuple[str, list[str]]:
    name, _, axes = text.partition("=")
    names = axes.split(",")
    if not name.isidentifier() or not all(re.fullmatch(r"[a-z_]\w*(\*[a-z_]\w*)*", each) for each in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form tokens=batch,seq")
    return name, names


@command("import", add_arguments, "from-torch", "from_torch")
def run(arguments: argparse.Namespace) -> None:
    """Write the file. Raises Refused (E1201 to E1205), and UsageError if the file exists or cannot be written."""
    if ATTRIBUTE.fullmatch(arguments.source) and not os.path.exists(arguments.source):
        _of_python(arguments)
        return
    for option in ("example", "loss"):
        if getattr(arguments, option) is not None:
            raise UsageError(f"--{option} is for a module of Python, MODULE:FUNCTION")
    import_pretrained(arguments.source, arguments.output, arguments.name, dict(arguments.axes))


def _of_python(arguments: argparse.Namespace) -> None:
    """Import a module that a function returns."""
    from partita.importing.from_torch import example_of, file_and_proof

    if arguments.output is not None:
        check_free(target(arguments.output))
    if arguments.example is None:
        raise UsageError(
            "a module needs example inputs: `--example MODULE:FUNCTION`, which returns a dictionary of them"
        )
    if not ATTRIBUTE.fullmatch(arguments.example):
        raise UsageError(f"{printable(repr(arguments.example))} is not of the form MODULE:FUNCTION")
    module, inputs = _made(arguments.source), _made(arguments.example)
    example = example_of(module, inputs, arguments.loss)
    file, proof = file_and_proof(example, arguments.name, dict(arguments.axes), tell)
    deliver(arguments.output, example.module, file, f"equal to the module: {proof_text(file, proof)}")


def _made(name: str) -> Any:
    """What a function returns, given as MODULE:FUNCTION. The current directory is importable."""
    from partita.importing.from_torch import failed

    module_name, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise failed(f"`{module_name}` cannot be imported", error) from error
        help = f"it is looked for as {module_name.replace('.', '/')}.py in this directory, and among what is installed"
        raise refuse("E1201", f"there is no Python module `{module_name}`", help=help) from error
    except (Exception, SystemExit) as error:
        raise failed(f"`{module_name}` cannot be imported", error) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise refuse("E1201", f"`{module_name}` has no `{attribute}`")
        found = getattr(found, part)
    if not callable(found):
        raise refuse("E1201", f"`{name}` is not a function, but `{shown(type(found).__name__)}`")
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise failed(f"`{name}` failed", error) from error
