"""What a `weights` declaration relates: tensors of another program and ours, of which some are chosen; and export.

Tensors go out one by one: a tensor of theirs and one of ours at most are in memory at a time. Nothing is dropped: every
one of ours has a counterpart, or is left out by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from attrs import evolve

from partita.compiler.graph import without_iterations
from partita.dsl.correspondence import Part, Theirs, Weights
from partita.dsl.diagnostic import refuse
from partita.dsl.report import suggestion
from partita.dsl.types import BYTES, Type
from partita.runtime.addresses import Place
from partita.runtime.checkpoint.exchange import few, is_state, weights_of
from partita.runtime.checkpoint.foreign_files import shards, write_files
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.checkpoint.proposals import lines, own_axes
from partita.runtime.checkpoint.shards import Entry
from partita.runtime.kernels.dtypes import DTYPES

FOREIGN_DTYPES = {**DTYPES, "f16": torch.float16}


# ---------------------------------------------------------------- one tensor in the form of the other


def seen_as_theirs(ours: torch.Tensor, part: Part) -> torch.Tensor:
    """A view of a tensor of ours: what the part has of it, with unmerged axes in the order of theirs."""
    for name, index in part.index.items():
        position = part.type.position(name)
        ours = ours.narrow(position, index, 1)
    names = [*part.type.names]
    order = [names.index(name) for name in part.order]
    alone = [names.index(name) for name in part.index]
    return ours.permute([*order, *alone]).view([part.type.axis(name).size for name in part.order])


def seen_as_ours(theirs: torch.Tensor, part: Part, joined: int | None) -> torch.Tensor:
    """A view of a tensor of theirs: the part, with unmerged axes in the order of theirs."""
    if joined is not None:
        theirs = theirs.narrow(joined, part.start, part.shape[joined])
    return theirs.view([part.type.axis(name).size for name in part.order])


# ---------------------------------------------------------------- those that are meant


def chosen_tensors(weights: Weights, parameters: Mapping[str, Type], only: Sequence[str]) -> list[Theirs]:
    """The tensors of theirs that have the parameters of some paths, or all.

    Raises Refused (E0409) if a path names none, and (E0809) if a parameter has no counterpart, or another type.
    """
    tensors = list(weights.tensors())
    wanted = named_by(parameters, only)
    named_types = {part.name: part.type for tensor in tensors for part in tensor.parts}
    for name, type in named_types.items():
        there = parameters.get(name)
        if there is None or (there.axes, there.is_float) != (type.axes, type.is_float):
            told = f"and is {there} in the checkpoint" if there is not None else "which the checkpoint lacks"
            message = f"`weights {weights.name}` is of another model"
            raise refuse("E0809", message, notes=[f"{name} is {type} in the file, {told}"])
    unnamed = [name for name in wanted if name not in named_types]
    if unnamed:
        count = "1 parameter" if len(unnamed) == 1 else f"{len(unnamed):,} parameters"
        raise refuse(
            "E0809",
            f"`weights {weights.name}` says nothing of {count}",
            weights.span,
            notes=few(lines(((name, name, own_axes(parameters[name])) for name in unnamed), parameters)),
            help="add such lines, with its names and orders of axes; or `--only PATH,…` names those that are meant",
        )
    chosen = []
    for tensor in tensors:
        inside = [part.name for part in tensor.parts if part.name in wanted]
        if inside and len(inside) < len(tensor.parts):
            other = next(part.name for part in tensor.parts if part.name not in wanted)
            message = f"`--only` names `{inside[0]}`, but not `{other}`, which is in the same tensor of theirs"
            raise refuse("E0409", message, help="name both")
        if inside:
            # The compute dtype, which the file calls f32, is the precision's.
            parts = tuple(evolve(part, type=parameters[part.name]) for part in tensor.parts)
            chosen.append(evolve(tensor, parts=parts))
    return chosen


def named(path: str, name: str) -> bool:
    """Whether a path names a parameter, by the end of its name, or a block or repeat that it is in."""
    return f".{path}." in f".{without_iterations(name)}." or f".{path}." in f".{name}."


def named_by(parameters: Collection[str], only: Sequence[str]) -> dict[str, None]:
    """The parameters that some paths name, or all. Raises Refused (E0409) if a path names none."""
    for path in only:
        if not any(named(path, name) for name in parameters):
            known = {part for name in parameters for part in without_iterations(name).split(".")}
            raise refuse("E0409", f"`--only` names no parameter: `{path}`", help=suggestion(path, known))
    return {name: None for name in parameters if not only or any(named(path, name) for path in only)}


# ---------------------------------------------------------------- export


def export_foreign(
    commit: Commit,
    path: Place,
    weights: Weights,
    which: str = "trained",
    only: Sequence[str] = (),
    dtype: str | None = None,
    most: int = 5 * 10**9,
    more: Mapping[str, bytes] | None = None,
) -> tuple[int, int]:
    """Write the parameters of a commit as files of another program, and `more` files beside them.

    `which` are the trained ones, or "ema": their means. Floats are cast to `dtype`, if given. A file has at most `most`
    bytes, or one tensor. Returns the number of tensors and of bytes. Raises Refused (E0409, E0809, E0810, E0816),
    OSError, and Damaged if the commit is.
    """
    parameters = {each.name: each.type for each in commit.manifest.tensors if not is_state(each)}
    source = weights_of(commit.manifest, which)
    tensors = {each.names[0]: each for each in chosen_tensors(weights, parameters, only)}
    entries = [Entry(name, _dtype(each, dtype), each.shape) for name, each in tensors.items()]

    def read(entry: Entry) -> torch.Tensor:
        tensor = tensors[entry.name]
        theirs = torch.empty(tensor.shape, dtype=FOREIGN_DTYPES[entry.dtype])
        for part in tensor.parts:
            region = tuple(
                slice(part.index[axis.name], part.index[axis.name] + 1)
                if axis.name in part.index
                else slice(0, axis.size)
                for axis in part.type.axes
            )
            ours = commit.read(source[part.name], region)
            alone = Part(part.name, part.type, part.groups, dict.fromkeys(part.index, 0))
            seen_as_ours(theirs, part, tensor.joined).copy_(seen_as_theirs(ours, alone))
        return theirs

    size = write_files(path, shards(entries, most), read, more or {})
    return len(entries), size


def _dtype(tensor: Theirs, wanted: str | None) -> str:
    own = max((part.type.dtype for part in tensor.parts), key=BYTES.__getitem__)
    return wanted if wanted is not None and tensor.parts[0].type.is_float else own
