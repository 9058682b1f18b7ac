"""Trained models of other programs come in, and ours go out, under the names that a `weights` declaration gives.

Both go tensor by tensor: a tensor of theirs and one of ours at most are in memory at a time. Nothing is dropped: every
tensor of theirs is read or skipped by the declaration, and every one of ours has a counterpart or is left out by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, frozen

from partita.compiler.graph import without_iterations
from partita.compiler.program import Program
from partita.dsl.correspondence import Part, Theirs, Weights
from partita.dsl.diagnostic import Diagnostic, refuse, shown
from partita.dsl.report import nearest, suggestion
from partita.dsl.types import Type
from partita.runtime.checkpoint.exchange import (
    FLOAT_CODES,
    INTEGER_CODES,
    commit_tensors,
    few,
    is_state,
    on_one_rank,
    weights_of,
)
from partita.runtime.checkpoint.files import Damaged
from partita.runtime.checkpoint.foreign_files import ForeignFiles, shards, write_files
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.checkpoint.manifest import Manifest, Tensor
from partita.runtime.checkpoint.parts import mean_name
from partita.runtime.checkpoint.repeated import families
from partita.runtime.checkpoint.shards import Entry
from partita.runtime.checkpoint.store import commit_name
from partita.runtime.initial import initial
from partita.runtime.kernels.dtypes import DTYPES

FOREIGN_DTYPES = {**DTYPES, "f16": torch.float16}
BLOCK = 1 << 22  # elements that are looked at together


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


# ---------------------------------------------------------------- import


@frozen
class Found:
    """A tensor of theirs, under the name that it has in the files."""

    tensor: Theirs
    name: str
    dtype: str


@frozen
class ForeignImport:
    """The result of an import: the commit's directory, what was taken from where, what begins as the file says, and
    what the files' names lack or have before ours.
    """

    path: Path
    found: tuple[Found, ...]
    begun: tuple[str, ...]
    renamed: str
    warnings: tuple[Diagnostic, ...]


def import_foreign(
    path: Path,
    step: int,
    wanted: Manifest,
    program: Program,
    source: Path,
    weights: Weights,
    only: Sequence[str] = (),
) -> ForeignImport:
    """Make a commit of a model from another program's files, as if it had been saved after `step`.

    With `only`, what these paths do not name begins as the file says. Optimizer states are zero. Raises Refused (E0802,
    E0803, E0808, E0809, E0811, E0813, E0817), OSError.
    """
    manifest = on_one_rank(wanted, step)
    parameters = {each.name: each.type for each in manifest.tensors if not is_state(each)}
    chosen = chosen_tensors(weights, parameters, only)
    records = {each.name: each for each in program.parameters}
    means = {mean_name(name): name for name in records}
    try:
        with ForeignFiles(source) as files:
            rename, renamed = _prefix(files, [tensor.names for tensor in weights.tensors()])
            found = _found(files, source.name, chosen, rename)
            _refuse_unexpected(files, source.name, weights, rename)
            _refuse_others(files, found, rename)
            _refuse_numbers(files, source.name, found)
            parts = {part.name: list[tuple[Found, Part]]() for each in found for part in each.tensor.parts}
            for each in found:
                for part in each.tensor.parts:
                    parts[part.name].append((each, part))

            def read(tensor: Tensor) -> torch.Tensor:
                dtype = DTYPES[tensor.type.dtype]
                name = means.get(tensor.name, tensor.name)  # which begin as the parameters
                if name not in records:
                    return torch.zeros(tensor.type.shape, dtype=dtype)
                if name not in parts:
                    record = records[name]
                    array = initial(record.initial, record.type, manifest.seed, record.name, record.fans)
                    return torch.from_numpy(array).to(dtype).contiguous()
                ours = torch.empty(tensor.type.shape, dtype=dtype)
                for each, part in parts[name]:
                    theirs = files.read(each.name)
                    seen_as_theirs(ours, part).copy_(seen_as_ours(theirs, part, each.tensor.joined))
                return ours

            warnings = commit_tensors(path, manifest, read)
    except Damaged as damage:
        raise refuse("E0808", str(damage)) from damage
    begun = tuple(name for name in parameters if name not in parts)
    return ForeignImport(path / commit_name(step), tuple(found), begun, renamed, warnings)


def chosen_tensors(weights: Weights, parameters: Mapping[str, Type], only: Sequence[str]) -> list[Theirs]:
    """The tensors of theirs that have the parameters of some paths, or all.

    Raises Refused (E0409) if a path names none, and (E0809) if a parameter has no counterpart, or another type.
    """
    tensors = list(weights.tensors())
    wanted = {name: None for name in parameters if not only or any(named(path, name) for path in only)}
    for path in only:
        if not any(named(path, name) for name in parameters):
            known = {part for name in parameters for part in without_iterations(name).split(".")}
            raise refuse("E0409", f"`--only` names no parameter: `{path}`", help=suggestion(path, known))
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
            notes=_families(unnamed),
            help="add lines for them; or `--only PATH,…` names those that are meant",
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


def _prefix(files: ForeignFiles, names: Sequence[Sequence[str]]) -> tuple[Callable[[str], str], str]:
    """How the files call what we call so, and a word on it: they may lack the first part of names, or have another.

    A model without its head is saved without the part that names it; wrappers put one in front.
    """
    missing = [each for each in names if not any(name in files for name in each)]
    if not missing:
        return lambda name: name, ""
    first = f"{missing[0][0].partition('.')[0]}."
    if all(any(name.startswith(first) and name[len(first) :] in files for name in every) for every in missing):
        lacking = {name for every in missing for name in every}
        return lambda name: name.removeprefix(first) if name in lacking else name, f"lack `{first}`"
    head = f"{files.names()[0].partition('.')[0]}." if files.names() else ""
    if len(missing) == len(names) and all(any(head + name in files for name in every) for every in missing):
        return lambda name: head + name, f"begin with `{head}`"
    return lambda name: name, ""


def _found(files: ForeignFiles, name: str, tensors: Iterable[Theirs], rename: Callable[[str], str]) -> list[Found]:
    """Their tensors in the files. Raises Refused (E0809) if some are missing, or have another shape or dtype."""
    missing, wrong, found = [], [], []
    for tensor in tensors:
        there = next((rename(each) for each in tensor.names if rename(each) in files), None)
        if there is None:
            missing.append(tensor)
            continue
        dtype, shape = files.dtype(there), files.shape(there)
        codes = FLOAT_CODES if tensor.parts[0].type.is_float else INTEGER_CODES
        if shape != tensor.shape or dtype not in codes:
            ours = ", ".join(dict.fromkeys(without_iterations(part.name) for part in tensor.parts))
            wrong.append(((there,), (dtype, shape, ours, tensor.shape)))
        found.append(Found(tensor, there, dtype))
    if missing:
        rows = [((each.names[0], *(part.name for part in each.parts)), None) for each in missing]
        notes = [f"{shown(row.names[0])}   ({', '.join(row.names[1:])})" for row in families(rows)]
        near = nearest(missing[0].names[0], files.names())
        raise refuse(
            "E0809",
            f"{name} lacks {len(missing)} of {len(missing) + len(found)} tensors",
            notes=few(notes),
            help=f"it has `{shown(near)}`" if near else "`--only PATH,…` imports a part of the model",
        )
    if wrong:
        notes = []
        for each in families(wrong):
            dtype, shape, ours, expected = each.shared
            notes.append(f"{shown(each.names[0])} is {dtype}{list(shape)}, but {ours} needs {list(expected)}")
        message = f"{len(wrong)} of {len(found)} tensors in {name} have a different shape or dtype"
        raise refuse("E0809", message, notes=few(notes), help="the sizes of axes can be given: `embed=4096`")
    return found


def _refuse_unexpected(files: ForeignFiles, name: str, weights: Weights, rename: Callable[[str], str]) -> None:
    """Refuse (E0811) tensors of theirs that no line names or skips."""
    known = {rename(each) for tensor in weights.tensors() for each in tensor.names}
    unread = [each for each in files.names() if each not in known]
    lost = [each for each in unread if not any(fnmatchcase(each, pattern) for pattern in weights.skipped)]
    if not lost:
        return
    notes = [shown(row.names[0]) for row in families(((each,), None) for each in lost)]
    near = nearest(lost[0], sorted(each for each in known if each not in files))
    raise refuse(
        "E0811",
        f"{len(lost):,} of {len(files.names()):,} tensors in {name} are not in `weights {weights.name}`",
        weights.span,
        notes=few(notes),
        help=(f"is it `{near}`? " if near else "")
        + f'`skip "{shown(lost[0])}"` drops one knowingly; `*` matches any text',
    )


def _refuse_others(files: ForeignFiles, found: Iterable[Found], rename: Callable[[str], str]) -> None:
    """Refuse (E0817) tensors that are there under several names, and differ."""
    for each in found:
        for other in map(rename, each.tensor.names):
            if other == each.name or other not in files:
                continue
            one, two = files.read(each.name), files.read(other)
            if one.dtype != two.dtype or one.shape != two.shape or not _same(one, two):
                message = f"`{shown(each.name)}` and `{shown(other)}` differ"
                help = "names in one line are those of one tensor; give the other a parameter of its own"
                raise refuse("E0817", message, help=help)


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_blocks(one), _blocks(two), strict=True))


def _blocks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(tensor.reshape(-1), BLOCK)


def _refuse_numbers(files: ForeignFiles, name: str, found: Iterable[Found]) -> None:
    """Refuse (E0813) values that are not finite, or that overflow our dtype."""
    notes = []
    for each in found:
        dtype = each.tensor.parts[0].type.dtype
        count, first, value = 0, 0, 0.0
        flat = files.read(each.name).reshape(-1)
        for start, block in zip(range(0, len(flat) or 1, BLOCK), _blocks(flat), strict=True):
            wrong = ~(block.isfinite() & block.to(DTYPES[dtype]).isfinite())
            bad = int(wrong.sum())
            if bad and not count:
                first = start + int(wrong.to(torch.uint8).argmax())
                value = float(flat[first])
            count += bad
        if count:
            place = [int(i) for i in np.unravel_index(first, each.tensor.shape)]
            told = f"{count:,} of {len(flat):,} numbers are not finite as {dtype}"
            notes.append(f"{shown(each.name)}: {told}, the first at {place}: {value:g}")
    if notes:
        raise refuse("E0813", f"{name} has numbers that cannot be trained from", notes=few(notes))


def _families(names: Iterable[str]) -> list[str]:
    return few([row.names[0] for row in families(((name,), None) for name in names)])


# ---------------------------------------------------------------- export


def export_foreign(
    commit: Commit,
    path: Path,
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
    own = tensor.parts[0].type.dtype
    return wanted if wanted is not None and tensor.parts[0].type.is_float else own
