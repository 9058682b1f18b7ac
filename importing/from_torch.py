"""The way of a module from what the user gives to a file that is proven, or to a diagnostic."""

from __future__ import annotations

import inspect
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import is_dataclass
from io import StringIO
from traceback import extract_tb

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves

from partita.dsl.diagnostic import Refused, refuse, shown
from partita.importing.assumed import USUAL, Assumed
from partita.importing.graph import NotUnderstood
from partita.importing.imported import Imported, imported
from partita.importing.losses import with_loss
from partita.importing.prove import Proof, prove, restored

MOST_LINES = 4
MASKED = re.compile(r"\battend\([^;]*\bmask = ")
HOUSE = os.path.dirname(os.path.dirname(__file__))
# Files whose lines are not the user's.
LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "/importlib/", "<frozen ")
OURS = (os.path.join(HOUSE, "importing", ""), os.path.join(HOUSE, "cli", "import.py"))


@frozen(eq=False)
class Example:
    """A module, and keyword arguments for its `forward`."""

    module: nn.Module
    inputs: Mapping[str, Tensor]


def file_of(
    example: Example,
    name: str | None = None,
    axes: Mapping[str, Sequence[str]] | None = None,
    told: Callable[[str], None] = lambda line: None,
    assumed: Assumed = USUAL,
) -> Imported:
    """The file of a module. Raises Refused (E1201, E1202)."""
    axes = dict(axes or {})
    for given, names in axes.items():
        if given not in example.inputs:
            known = ", ".join(f"`{each}`" for each in example.inputs)
            raise refuse("E1201", f"axes are given of `{shown(given)}`, and the example inputs are {known}")
        if len(names) != example.inputs[given].dim():
            has = example.inputs[given].dim()
            raise refuse("E1201", f"{len(names)} axes are given of `{given}`, which has {has}: {', '.join(names)}")
    told("exporting the module")
    # Of a branch that depends on data torch prints the whole graph.
    with _refusals("E1202"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        file = imported(
            example.module, example.inputs, name, {key: list(names) for key, names in axes.items()}, assumed
        )
    if file.left_out:
        told(f"leaving out all outputs but the loss: {file.left_out}")
    return file


def proven(example: Example, file: Imported, told: Callable[[str], None] = lambda line: None) -> Proof:
    """The proof that a file is equal to its module. Raises Refused (E1203)."""
    with _refusals("E1203"):
        proof = prove(example.module, example.inputs, file, told)
        if not proof.sizes:
            raise NotUnderstood("the module takes no inputs with which the two could be compared")
        return proof


def file_and_proof(
    example: Example,
    name: str | None = None,
    axes: Mapping[str, Sequence[str]] | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> tuple[Imported, Proof]:
    """The file of a module, and the proof that they are equal. Raises Refused (E1201 to E1203)."""
    file = file_of(example, name, axes, told)
    try:
        return file, proven(example, file, told)
    except Refused:
        other = file_of(example, name, axes, told, Assumed(attended=False)) if MASKED.search(file.text) else file
        if other.text == file.text:
            raise
    return other, proven(example, other, told)


def example_of(module: object, inputs: object, loss: str | None = None) -> Example:
    """A module that takes these inputs, and computes a loss of them. Raises Refused (E1201, E1204)."""
    if not isinstance(module, nn.Module):
        raise refuse("E1201", f"a module is expected, an `nn.Module`, and this is of `{type(module).__name__}`")
    if not isinstance(inputs, Mapping) or not all(isinstance(each, str) for each in inputs):
        kind = type(inputs).__name__
        raise refuse("E1201", f"example inputs are a dictionary of keyword arguments for `forward`, not of `{kind}`")
    for name, each in inputs.items():
        if not isinstance(each, Tensor):
            raise refuse("E1201", f"the example input `{name}` is no tensor, but of `{type(each).__name__}`")
    first = {name: each.shape[0] for name, each in inputs.items() if each.dim()}
    if {*first.values()} == {1}:
        message = (
            f"the example input `{next(iter(first))}` has a batch of one: an axis of size 1 cannot be told from none"
        )
        raise refuse("E1201", message, help="give two rows or more")
    if not inputs:
        raise refuse("E1201", "there are no example inputs")
    inputs = {name: each.detach().contiguous() for name, each in inputs.items()}  # strides are no part of a module
    taken = inspect.signature(module.forward).parameters
    every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    strange = [name for name in inputs if name not in taken and not every]
    if loss is not None:
        module = with_loss(module, inputs, loss)
    elif strange:
        help = 'of a module that returns outputs alone, say the loss: `--loss "cross_entropy(logits, targets)"`'
        raise refuse("E1201", f"`forward` of the module takes no `{shown(strange[0])}`", help=help)
    try:
        with torch.no_grad(), quiet(), restored(module):
            returned = module(**inputs)
            if is_dataclass(returned) and type(returned) not in SUPPORTED_NODES:
                torch.export.register_dataclass(type(returned))
            results = tree_leaves(returned)
    except Refused:
        raise
    except Exception as error:
        raise failed("the module cannot be called with the example inputs", error) from error
    if not any(isinstance(each, Tensor) and not each.dim() and each.is_floating_point() for each in results):
        help = '`--loss "cross_entropy(logits, targets)"` computes one of what it returns and of example inputs'
        raise refuse("E1201", "the module returns no loss", help=help)
    return Example(module, inputs)


def failed(what: str, error: BaseException) -> Refused:
    """What the user's code raised, with its own lines through which it came (E1201)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = [
        shown(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}")
        for frame in extract_tb(error.__traceback__)
        if not any(each in frame.filename for each in LIBRARIES) and not frame.filename.startswith(OURS)
    ]
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return refuse("E1201", what, notes=[*frames[-MOST_LINES:], shown(reason), *map(shown, lines[1:MOST_LINES])])


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, torch and transformers warn of nothing, and log nothing."""
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _refusals(code: str) -> Iterator[None]:
    """Makes diagnostics of what the importer refuses, and of its own defects."""
    try:
        with quiet():
            yield
    except NotUnderstood as error:
        raise refuse(code, shown(str(error))) from error
    except (Refused, MemoryError):
        raise
    except Exception as error:
        at = extract_tb(error.__traceback__)[-1]
        place = f"{at.filename.rsplit('/', 1)[-1]}:{at.lineno}"
        message = f"the importer failed: {type(error).__name__}: {error} ({place})"
        raise refuse(code, shown(message), help="please report it with the module") from error
