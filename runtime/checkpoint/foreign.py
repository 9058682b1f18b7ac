"""What a `weights` declaration relates: tensors of another program and ours, of which some are chosen; and export.

Tensors go out one by one: a tensor of theirs and one of ours at most are in memory at a time, and another of theirs
where several lines have one tensor. Nothing is dropped silently: every one of ours has a counterpart, is left out by
name, or is equal to what is written in its place, unless a warning says otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from attrs import evolve

from partita.compiler.graph import without_iterations
from partita.dsl.advice.report import suggestion
from partita.dsl.diagnostic import Diagnostic, refuse, shown
from partita.dsl.grouping import grouped
from partita.dsl.names.correspondence import Join, Part, Theirs, Weights
from partita.dsl.types import BYTES, Type
from partita.runtime.addresses import PathOrUrl
from partita.runtime.checkpoint.exchange import few
from partita.runtime.checkpoint.foreign_files import shards, write_files
from partita.runtime.checkpoint.matching import Shape, own_axes
from partita.runtime.checkpoint.proposals import lines, proposed
from partita.runtime.checkpoint.repeated import families
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


def seen_as_ours(theirs: torch.Tensor, part: Part, joined: Join | None) -> torch.Tensor:
    """A view of a tensor of theirs: the part, with unmerged axes in the order of theirs."""
    if joined is not None:
        outer, rows = part.rows(joined)
        before, after = theirs.shape[: joined.axis], theirs.shape[joined.axis + 1 :]
        theirs = theirs.view(*before, outer, -1, *after).narrow(joined.axis + 1, part.start, rows)
    return theirs.view([part.type.axis(name).size for name in part.order])


# ---------------------------------------------------------------- those that are meant


def chosen_tensors(
    weights: Weights,
    parameters: Mapping[str, Type],
    only: Sequence[str],
    unread: Mapping[str, Shape] | None = None,
) -> list[Theirs]:
    """The tensors of theirs that have the parameters of some paths, or all. Lines are proposed for others; if they are
    read from files, of what is there and `unread`.

    Raises Refused (E0409) if a path names none, and (E0809) if a parameter has no counterpart, or another type.
    """
    tensors = list(weights.tensors())
    selected = matching_parameters(parameters, only)
    named_types = {part.name: part.type for tensor in tensors for part in tensor.parts}
    for name, type in named_types.items():
        saved = parameters.get(name)
        if saved is None or (saved.axes, saved.is_float) != (type.axes, type.is_float):
            difference = f"and is {saved} in the checkpoint" if saved is not None else "which the checkpoint lacks"
            message = f"`weights {weights.name}` is of another model"
            raise refuse("E0809", message, notes=[f"{name} is {type} in the file, {difference}"])
    unnamed = [name for name in selected if name not in named_types]
    if unnamed:
        count = "1 parameter" if len(unnamed) == 1 else f"{len(unnamed):,} parameters"
        raise refuse(
            "E0809",
            f"`weights {weights.name}` says nothing of {count}",
            weights.span,
            notes=few(
                lines(((name, name, own_axes(parameters[name])) for name in unnamed), parameters)
                if unread is None
                else proposed({name: parameters[name] for name in unnamed}, unread)
            ),
            help="add such lines, with its names and orders of axes; or `--only PATH,…` names those that are meant",
        )
    chosen = []
    for tensor in tensors:
        inside = [part.name for part in tensor.parts if part.name in selected]
        if inside and len(inside) < len(tensor.parts):
            other = next(part.name for part in tensor.parts if part.name not in selected)
            message = f"`--only` names `{inside[0]}`, but not `{other}`, which is in the same tensor of theirs"
            raise refuse("E0409", message, help="name both")
        if inside:
            # The compute dtype, which the file calls f32, is the precision's.
            parts = tuple(evolve(part, type=parameters[part.name]) for part in tensor.parts)
            chosen.append(evolve(tensor, parts=parts))
    return chosen


def path_matches(path: str, name: str) -> bool:
    """Whether a path names a parameter, by the end of its name, or a block or repeat that it is in."""
    return f".{path}." in f".{without_iterations(name)}." or f".{path}." in f".{name}."


def matching_parameters(parameters: Collection[str], only: Sequence[str]) -> dict[str, None]:
    """The parameters that some paths name, or all. Raises Refused (E0409) if a path names none."""
    for path in only:
        if not any(path_matches(path, name) for name in parameters):
            known = {part for name in parameters for part in without_iterations(name).split(".")}
            raise refuse("E0409", f"`--only` names no parameter: `{path}`", help=suggestion(path, known))
    return {name: None for name in parameters if not only or any(path_matches(path, name) for path in only)}


# ---------------------------------------------------------------- export


class Saved(Protocol):
    """Parameters of a commit, as they are to be written: by name their types, and regions of their values."""

    @property
    def types(self) -> Mapping[str, Type]:
        """Their types."""

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """A region of one."""


def export_foreign(
    saved: Saved,
    path: PathOrUrl,
    weights: Weights,
    only: Sequence[str] = (),
    dtype: str | None = None,
    max_bytes: int = 5 * 10**9,
    more: Mapping[str, bytes] | None = None,
) -> tuple[int, int, tuple[Diagnostic, ...]]:
    """Write the parameters of a commit as files of another program, and `more` files beside them.

    Floats are cast to `dtype`, if given. A file has at most `max_bytes`, or one tensor. Of the lines with one tensor,
    the first is written; those that differ from it are warned of (W0809). Returns the number of tensors and of bytes,
    and warnings. Raises Refused (E0409, E0809, E0810, E0816), OSError, and Corrupt if the commit is.
    """
    tensors = grouped(chosen_tensors(weights, saved.types, only), lambda each: each.names[0])
    entries = [Entry(name, _dtype(first, dtype), first.shape) for name, (first, *_) in tensors.items()]
    differing: list[tuple[str, str, str]] = []

    def read(entry: Entry) -> torch.Tensor:
        first, *others = tensors[entry.name]
        for other in others:
            # What is frozen may be kept in a narrower dtype, and is equal if it is the same in that.
            narrow = min(_dtype(first), _dtype(other), key=BYTES.__getitem__)
            if not torch.equal(made(first, narrow), made(other, narrow)):
                own, lost = (", ".join(part.name for part in each.parts) for each in (first, other))
                differing.append((entry.name, own, lost))
        return made(first, entry.dtype)

    def made(tensor: Theirs, dtype: str) -> torch.Tensor:
        theirs = torch.empty(tensor.shape, dtype=FOREIGN_DTYPES[dtype])
        for part in tensor.parts:
            region = tuple(
                slice(part.index[axis.name], part.index[axis.name] + 1)
                if axis.name in part.index
                else slice(0, axis.size)
                for axis in part.type.axes
            )
            ours = saved.read(part.name, region)
            alone = Part(part.name, part.type, part.groups, dict.fromkeys(part.index, 0))
            seen_as_ours(theirs, part, tensor.joined).copy_(seen_as_theirs(ours, alone))
        return theirs

    size = write_files(path, shards(entries, max_bytes), read, more or {})
    return len(entries), size, _unwritten(differing)


def _unwritten(differing: Iterable[tuple[str, str, str]]) -> tuple[Diagnostic, ...]:
    """A warning about parameters that differ from what was written: a name of theirs, ours that it has, and others."""
    rows = families((names, None) for names in differing)
    if not rows:
        return ()
    notes = few([f"{shown(row.names[0])} is {row.names[1]}, and not {row.names[2]}" for row in rows])
    help = "the first line of `weights` with a tensor says what is written; `--only PATH,…` chooses among parameters"
    message = "parameters that differ have one tensor in `weights`: of these, one is written"
    return (Diagnostic("W0809", message, notes=tuple(notes), help=help),)


def _dtype(tensor: Theirs, requested: str | None = None) -> str:
    own = max((part.type.dtype for part in tensor.parts), key=BYTES.__getitem__)
    return requested if requested is not None and tensor.parts[0].type.is_float else own
