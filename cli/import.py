"""`partita import SOURCE`: writes the file of a PyTorch module, and proves that it is equal to it."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from partita.cli.command import UsageError, command, writing
from partita.cli.number_format import count_text
from partita.cli.source import printable
from partita.dsl.diagnostic import refuse, shown
from partita.dsl.load import load_text
from partita.dsl.syntax.format import format_text

if TYPE_CHECKING:
    from torch import nn

    from partita.dsl.names.correspondence import Theirs
    from partita.dsl.spec import Spec
    from partita.importing.imported import Imported
    from partita.importing.prove import Proof

ATTRIBUTE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
NAMES = "hf"  # of the `weights` that the file has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    what = (
        "MODULE:FUNCTION, a function of Python that returns an nn.Module; or a folder or config.json of transformers, "
    )
    parser.add_argument("source", metavar="SOURCE", help=f"{what}or a name on the hub that is on this machine already")
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
    if arguments.output is not None:
        _check_free(_target(arguments.output))
    if ATTRIBUTE.fullmatch(arguments.source) and not os.path.exists(arguments.source):
        _of_python(arguments)
    else:
        _of_config(arguments)


def _of_python(arguments: argparse.Namespace) -> None:
    """Import a module that a function returns."""
    from partita.importing.from_torch import example_of, file_of, proven

    if arguments.example is None:
        raise UsageError(
            "a module needs example inputs: `--example MODULE:FUNCTION`, which returns a dictionary of them"
        )
    if not ATTRIBUTE.fullmatch(arguments.example):
        raise UsageError(f"{printable(repr(arguments.example))} is not of the form MODULE:FUNCTION")
    module, inputs = _made(arguments.source), _made(arguments.example)
    example = example_of(module, inputs, arguments.loss)
    file = file_of(example, arguments.name, dict(arguments.axes), _tell)
    proof = proven(example, file, _tell)
    _deliver(arguments, example.module, file, f"equal to the module: {proof_text(file, proof)}")


def _of_config(arguments: argparse.Namespace) -> None:
    """Import a model of transformers."""
    from partita.importing.from_torch import file_of, proven
    from partita.importing.on_disk import on_disk
    from partita.importing.pretrained import differing, pretrained, whole

    for option in ("example", "loss"):
        if getattr(arguments, option) is not None:
            raise UsageError(f"--{option} is for a module of Python, MODULE:FUNCTION")
    model = pretrained(arguments.source)
    name, axes = arguments.name or model.name, dict(arguments.axes)
    few = file_of(model.few, name, axes, _tell)
    small = file_of(model.small, name, axes, _tell)
    if (other := differing(few, small)) is not None:
        raise refuse("E1203", f"the proof is of a small configuration, whose file is written otherwise: {other}")
    proof = proven(model.small, small, _tell)
    equal = f"equal to the module at small sizes, {model.sizes}: {proof_text(small, proof)}"
    written = whole(model, few)
    _deliver(arguments, model.whole, evolve(written, text=format_text(on_disk(written.text, model.name))), equal)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


# ------------------------------------------------------------ what is said


def _deliver(arguments: argparse.Namespace, module: nn.Module, file: Imported, equal: str) -> None:
    path = _target(arguments.output or file.program.model.name)
    _check_free(path)
    if file.tables:
        _check_free(path.with_suffix(".safetensors"))
    with writing(printable(str(path))):
        written = file.write(path)
    print(f"{', '.join(printable(str(each)) for each in written)}: {summary(module, file)}")
    print(equal)


def _target(name: str) -> Path:
    path = Path(name)
    return path.with_name(f"{path.name.removesuffix('.par')}.par")


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise UsageError(f"{printable(str(path))} already exists, and is left unchanged")


def summary(module: nn.Module, file: Imported) -> str:
    """`3 blocks, 28 layers, 596.0 M parameters; weights `hf` for 310 tensors`."""
    theirs = list(_spec(file).weights[NAMES].tensors())
    trained = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    parameters = sum(prod(each.shape) for each in theirs if trained & {*each.names})
    blocks, layers = file.text.count("\nblock "), _layers(theirs)
    parts = [_counted(blocks, "block"), _counted(layers, "layer"), f"{count_text(parameters)} parameters"]
    return f"{', '.join(each for each in parts if each)}; weights `{NAMES}` for {_counted(len(theirs), 'tensor')}"


def proof_text(file: Imported, proof: Proof) -> str:
    """`loss, logits and 310 gradients within 4e-14 in f64, at (2, 10), (3, 14), (2, 37)`."""
    model, _ = _spec(file).trained
    what = ["loss", *(name for name, _ in model.outputs), _counted(proof.buffers, "buffer")]
    listed = ", ".join(each for each in what if each)
    sizes = ", ".join(f"({', '.join(map(str, each))})" for each in proof.sizes)
    return f"{listed} and {_counted(proof.tensors, 'gradient')} within {proof.error:.0e} in f64, at {sizes}"


def _layers(theirs: Sequence[Theirs]) -> int:
    """How many layers there are: modules of lists of modules, as names number them."""
    numbered = (re.match(r"(.*?)\.(\d+)\.", name) for each in theirs for name in each.names[:1])
    return len({found.groups() for found in numbered if found is not None})


def _spec(file: Imported) -> Spec:
    spec, diagnostics = load_text(file.text, "model.par")
    if spec is None:
        raise refuse("E1203", f"the file is not valid: {diagnostics[0].message}")
    return spec


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}" if count else ""
