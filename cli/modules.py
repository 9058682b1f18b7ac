"""What `partita import` and `partita init` share: files of models of transformers, and what is said of a file."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from partita.cli.command import UsageError, writing
from partita.cli.number_format import count_text
from partita.cli.source import printable
from partita.dsl.diagnostic import refuse
from partita.dsl.load import load_text
from partita.dsl.spec import Repeat
from partita.dsl.syntax.format import format_text

if TYPE_CHECKING:
    from torch import nn

    from partita.dsl.names.correspondence import Theirs
    from partita.dsl.spec import Spec
    from partita.importing.imported import Imported
    from partita.importing.prove import Proof

LORA_RATE = "2e-4"
NAMES = "hf"  # of the `weights` that the file has
# What a folder of a trained model has, in the formats that `checkpoint import` reads.
TENSORS = ("model.safetensors", "model.safetensors.index.json")


@frozen
class LowRank:
    """`init --lora`: the modules that get adapters of a rank, by names or beginnings of names; none for all layers."""

    modules: tuple[str, ...]
    rank: int


def import_pretrained(
    source: str,
    output: str | None,
    name: str | None = None,
    axes: Mapping[str, Sequence[str]] | None = None,
    adapters: LowRank | None = None,
) -> None:
    """Write the file of a model of transformers, with adapters if there are to be some, and prove it. Raises Refused
    (E1202, E1203, E1205), and UsageError if the file exists or cannot be written, or has no such modules.
    """
    from partita.importing.assumed import Assumed
    from partita.importing.from_torch import file_of, proven
    from partita.importing.on_disk import on_disk
    from partita.importing.pretrained import differing, pretrained, whole
    from partita.runtime.hub import ADDRESS

    if output is not None:
        check_free(target(output))
    model = pretrained(source)
    both = (model.few, model.small)
    few, small = (file_of(each, name or model.name, axes, tell) for each in both)
    if differing(few, small) is not None:  # where other sizes are equal than in the whole
        few, small = (file_of(each, name or model.name, axes, tell, Assumed(joined=False)) for each in both)
    if (other := differing(few, small)) is not None:
        raise refuse("E1203", f"the proof is of a small configuration, whose file is written otherwise: {other}")
    proof = proven(model.small, small, tell)
    written = whole(model, few)
    text = written.text if adapters is None else adapted(written, adapters)
    file = evolve(written, text=format_text(on_disk(text, model.whole)))
    equal = f"equal to the module at small sizes, {model.sizes}: {proof_text(small, proof)}"
    path = deliver(output, model.whole, file, equal)
    folder, id = Path(source) if os.path.isdir(source) else Path(source).parent, ADDRESS.sub("", source)
    there = any((folder / each).is_file() for each in TENSORS)
    tensors = shlex.quote(str(folder)) if there else "TENSORS" if os.path.exists(source) else shlex.quote(id)
    run, shown = shlex.quote(f"runs/{path.stem}/checkpoints"), shlex.quote(str(path))
    print(f"its weights: `partita checkpoint import {run} {tensors} {shown} --as {NAMES}`")


def adapted(file: Imported, adapters: LowRank) -> str:
    """The text of a file with adapters, which are trained alone. Raises UsageError if it has no such modules."""
    spec, rank = _spec(file), adapters.rank
    named: dict[str, set[str]] = {}  # by the name of a module the matrices of ours that it has
    for line in spec.weights[NAMES].lines:
        module = line.theirs[0].parts[-1]
        matrices = {each.path[-1] for each in line.ours if len(each.type.axes) > 1 and each.repeats}
        if isinstance(module, str) and module.endswith(".weight") and matrices:
            named.setdefault(module.removesuffix(".weight").rpartition(".")[2], set()).update(matrices)
    chosen = dict[str, None]()
    for name in adapters.modules:
        found = [each for own, each in named.items() if own == name or own.startswith(f"{name}_")]
        if not found:
            raise UsageError(f"--lora: the layers have no module `{name}`; there are {', '.join(named)}")
        chosen |= dict.fromkeys(sorted(set().union(*found)))
    model, _ = spec.trained
    repeats = {step.scope: None for step in model.body.steps if isinstance(step, Repeat)}
    targets = ", ".join(chosen or repeats)
    block = f"adapters small {{\nlora {targets} -> lora(rank = {rank}, alpha = {2 * rank})\nfreeze all\n}}"
    text = file.text.replace("\ntrain {\n", f"\n{block}\n\ntrain {{\nadapters = small\n", 1)
    return text.replace("adamw(lr = 1e-3)", f"adamw(lr = {LORA_RATE})", 1)


def tell(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def deliver(output: str | None, module: nn.Module, file: Imported, equal: str) -> Path:
    """Write a file, and say what it has; its path. Raises UsageError if it exists or cannot be written."""
    path = target(output or file.program.model.name)
    check_free(path)
    if file.tables:
        check_free(path.with_suffix(".safetensors"))
    with writing(printable(str(path))):
        written = file.write(path)
    print(f"{', '.join(printable(str(each)) for each in written)}: {summary(module, file)}")
    print(equal)
    return path


def target(name: str) -> Path:
    """The path of a file that is to be written, with the suffix `.par`."""
    path = Path(name)
    return path.with_name(f"{path.name.removesuffix('.par')}.par")


def check_free(path: Path) -> None:
    """Raises UsageError if there is something."""
    if os.path.lexists(path):
        raise UsageError(f"{printable(str(path))} already exists, and is left unchanged")


def summary(module: nn.Module, file: Imported) -> str:
    """`3 blocks, 28 layers, 596.0 M parameters; weights `hf` for 310 tensors`."""
    theirs = list(_spec(file).weights[NAMES].tensors())
    buffers = {name for name, _ in module.named_buffers()}
    parameters = sum(prod(each.shape) for each in theirs if not buffers & {*each.names})
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
