"""Full tensors of safetensors files become a checkpoint: under our names, or those that `weights` declares.

They come tensor by tensor: one of theirs and one of ours at most are in memory at a time. Nothing is bound silently
that could be bound in another way: tensors that are missing, in the way or of another shape are refused, and so are
numbers that cannot be trained from. Messages propose the lines of `weights` that would settle what is open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from attrs import frozen

from partita.compiler.graph import without_iterations
from partita.compiler.layout import REPLICATED
from partita.compiler.ops.four_bits import PARTS, FourBits
from partita.compiler.program import Program
from partita.dsl.advice.report import nearest
from partita.dsl.diagnostic import Diagnostic, Refused, refuse, shown
from partita.dsl.names.correspondence import Groups, Part, Theirs, Weights
from partita.dsl.names.paths import adapters_in
from partita.dsl.types import BYTES, FLOATS, INDICES, Type
from partita.runtime.addresses import PathOrUrl
from partita.runtime.checkpoint.exchange import commit_tensors, few, is_state, on_one_rank, untrained
from partita.runtime.checkpoint.files import Corrupt
from partita.runtime.checkpoint.foreign import chosen_tensors, matching_parameters, seen_as_ours, seen_as_theirs
from partita.runtime.checkpoint.foreign_files import ForeignFiles, foreign_files
from partita.runtime.checkpoint.four_bits import forms_of, with_wholes
from partita.runtime.checkpoint.manifest import Manifest, Tensor
from partita.runtime.checkpoint.matching import axes_of, matches, own_axes
from partita.runtime.checkpoint.parts import copies_of_parameters, mean_name
from partita.runtime.checkpoint.proposals import MAX_PROPOSED, declared, lines, proposed
from partita.runtime.checkpoint.repeated import families
from partita.runtime.checkpoint.store import commit_name
from partita.runtime.initial import initial
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.kernels.four_bits import quantize

FLOAT_CODES = ("F64", "F32", "F16", "BF16")
INTEGER_CODES = ("I64", "I32", "I16", "I8", "U8")  # of buffers
BLOCK = 1 << 22  # elements that are looked at together

Rename = Callable[[str], str]


@frozen
class ImportedTensor:
    """A tensor of theirs, under the name that it has in the files.

    `ambiguous` are our axes of equal size, if nothing says which of theirs is which.
    """

    tensor: Theirs
    name: str
    dtype: str
    ambiguous: tuple[str, ...] = ()


@frozen
class Imported:
    """The result of an import: the commit's directory, what was taken from where, what begins as the file says, tensors
    of theirs that were not used, what the files' names lack or have before ours, and warnings.
    """

    path: PathOrUrl
    found: tuple[ImportedTensor, ...]
    begun: tuple[str, ...]
    unused: tuple[str, ...]
    renamed: str
    warnings: tuple[Diagnostic, ...]


def import_tensors(
    path: PathOrUrl,
    step: int,
    target: Manifest,
    program: Program,
    source: PathOrUrl,
    weights: Weights | None = None,
    only: Sequence[str] = (),
    strict: bool = False,
    blocks: Sequence[Weights] = (),
) -> Imported:
    """Make a commit of a model from safetensors files of its full parameters, as if it had been saved after `step`.

    Names are those of `weights`, or without one our own. Then there may be optimizer states, and tensors that are not
    used: if `strict`, these are refused, and so are orders of axes that only the .par file gives. If there are states,
    those that are missing are zero, and means begin as their parameters; if there are none, the commit has parameters
    alone, with which any optimizer may begin. With `only`, what these paths do not name begins as the file says.
    `blocks` are all `weights` of the file, which messages may name. Raises Refused (E0409, E0802, E0803, E0808,
    E0809, E0811 to E0813, E0817), OSError.
    """
    manifest = on_one_rank(target, step)
    parameters = {each.name: each.type for each in manifest.tensors if not is_state(each)}
    warnings, unused = list[Diagnostic](), list[str]()
    try:
        with foreign_files(source) as files:
            if weights is None:
                tensors = _wanted(manifest.tensors, {*files.names()}, forms_of(program))
                parameters = {each.name: each.type for each in tensors if not is_state(each)}
                chosen = _under_our_names(tensors, matching_parameters(parameters, only), files.names())
                propose = Proposing(files, parameters, blocks)
                imported = _found(files, source.name, chosen, propose)
                unused = sorted({*files.names()} - {each.name for each in imported})
                warnings = _ambiguous("E0812" if strict else "W0807", source.name, imported, propose)
                if strict and (unused or warnings):
                    raise Refused((*_unused(source.name, unused), *warnings))
                renamed = ""
            else:
                rename, renamed = _prefix(files, [tensor.names for tensor in weights.tensors()])
                known = {rename(name) for tensor in weights.tensors() for name in tensor.names}
                named = {part.name for tensor in weights.tensors() for part in tensor.parts}
                own = adapters_in(parameters) - named  # these begin as the file says
                parameters = with_wholes(parameters, forms_of(program))
                theirs = {name: type for name, type in parameters.items() if name not in own}
                chosen = chosen_tensors(weights, theirs, only, files.unread(known))
                imported = _found(files, source.name, chosen, Proposing(files, parameters, (), weights), rename)
                _refuse_unexpected(files, source.name, weights, rename)
                _refuse_others(files, imported, rename)
            _refuse_numbers(files, source.name, imported)
            if not any("/" in part.name for each in imported for part in each.tensor.parts):
                manifest = untrained(manifest)
            warnings += commit_tensors(path, manifest, _reader(files, imported, manifest, program))
    except Corrupt as damage:
        raise refuse("E0808", str(damage)) from damage
    imported_names = {part.name for each in imported for part in each.tensor.parts}
    begun = tuple(name for name in parameters if name not in imported_names)
    return Imported(path / commit_name(step), tuple(imported), begun, tuple(unused), renamed, tuple(warnings))


def _reader(
    files: ForeignFiles, imported: Iterable[ImportedTensor], manifest: Manifest, program: Program
) -> Callable[[Tensor], torch.Tensor]:
    """Reads a tensor of ours."""
    records = {each.name: each for each in program.parameters}
    copies, forms = copies_of_parameters(program), forms_of(program)
    parts: dict[str, list[tuple[ImportedTensor, Part]]] = {}
    for each in imported:
        for part in each.tensor.parts:
            parts.setdefault(part.name, []).append((each, part))

    def found(name: str, type: Type) -> torch.Tensor:
        ours = torch.empty(type.shape, dtype=DTYPES[type.dtype])
        for each, part in parts[name]:
            seen_as_theirs(ours, part).copy_(seen_as_ours(files.read(each.name), part, each.tensor.joined))
        return ours

    def read(tensor: Tensor) -> torch.Tensor:
        dtype = DTYPES[tensor.type.dtype]
        name = tensor.name if tensor.name in parts else copies.get(tensor.name, tensor.name)
        if name in parts:
            return found(name, tensor.type)
        matrix, _, part_name = name.rpartition(".")
        if matrix in forms and matrix in parts and part_name in PARTS:
            return quantize(found(matrix, forms[matrix].whole), forms[matrix])[part_name]
        if name not in records:
            return torch.zeros(tensor.type.shape, dtype=dtype)
        record = records[name]
        array = initial(record.initial, record.type, manifest.seed, record.name, record.fans)
        return torch.from_numpy(array).to(dtype).contiguous()

    return read


def _wanted(tensors: Sequence[Tensor], names: Collection[str], forms: Mapping[str, FourBits]) -> list[Tensor]:
    """What is wanted of files with some `names`: matrices in four bits as these or as numbers, and adapters only if
    there are some.
    """
    whole = {name: form for name, form in forms.items() if name in names}
    left_out = {f"{name}.{part}" for name in whole for part in PARTS}
    own = adapters_in([each.name for each in tensors])
    left_out |= set() if own & set(names) else own
    wanted = [each for each in tensors if each.name.rpartition("/")[2] not in left_out]
    return [*wanted, *(Tensor(name, form.whole, REPLICATED, ()) for name, form in whole.items())]


def _under_our_names(tensors: Sequence[Tensor], selected: Collection[str], names: Iterable[str]) -> list[Theirs]:
    """Which tensors must be in files that have some `names`: all parameters that are wanted, and all their states if
    there is any; but means only if there are.
    """
    named = {*names}
    own = [each for each in tensors if each.name.rpartition("/")[2] in selected]
    means = {mean_name(each.name) for each in own if not is_state(each)}
    states = any(is_state(each) and each.name in named - means for each in own)

    def taken(tensor: Tensor) -> bool:
        if tensor.name in means:
            return tensor.name in named
        return states or not is_state(tensor)

    parts = (Part(each.name, each.type, own_axes(each.type)) for each in own if taken(each))
    return [Theirs((part.name,), (part,)) for part in parts]


def _prefix(files: ForeignFiles, names: Sequence[Sequence[str]]) -> tuple[Rename, str]:
    """Map our parameter names to the files' names, and describe the difference: files may omit the first part of
    names, or have another.

    A model without its head is saved without the part that names it; wrappers put one in front.
    """
    missing = [each for each in names if not any(name in files for name in each)]
    if not missing:
        return _same_name, ""
    first = f"{missing[0][0].partition('.')[0]}."
    if all(any(name.startswith(first) and name[len(first) :] in files for name in every) for every in missing):
        unprefixed = {name for every in missing for name in every}
        return lambda name: name.removeprefix(first) if name in unprefixed else name, f"lack `{first}`"
    head = f"{files.names()[0].partition('.')[0]}." if files.names() else ""
    if len(missing) == len(names) and all(any(head + name in files for name in every) for every in missing):
        return lambda name: head + name, f"begin with `{head}`"
    return _same_name, ""


def _same_name(name: str) -> str:
    return name


@frozen
class Proposing:
    """What messages propose: of the tensors in files, for the parameters of a model. `weights` are those by which they
    are read; or there are `blocks` by which they might be.
    """

    files: ForeignFiles
    parameters: Mapping[str, Type]
    blocks: Sequence[Weights] = ()
    weights: Weights | None = None

    def names(self) -> str:
        """How to import by the names of `weights`: of the file's, or of some to be declared."""
        names = {*self.files.names()}
        blocks = {
            each.name: sum(not names.isdisjoint(tensor.names) for tensor in each.tensors()) for each in self.blocks
        }
        if blocks:
            options = [f"`--as {name}`" for name in sorted(blocks, key=lambda name: -blocks[name])]
            return f"{' or '.join(options)} imports by the names that the .par file says in `weights`"
        return self.declaration()

    def declaration(self) -> str:
        """Lines of `weights` for all parameters, of the tensors in the files, under a name that the file has not."""
        used = {each.name for each in self.blocks}
        names = ("theirs", *(f"theirs_{number}" for number in range(2, len(used) + 3)))
        name = next(each for each in names if each not in used)
        return declared(proposed(self.parameters, self.files.unread(())), name)

    def instead(self, rows: Iterable[tuple[str, str, Groups]]) -> str | None:
        """Lines for the declaration that there is: our name, theirs, and the axes of theirs."""
        proposals = lines(rows, self.parameters)
        if self.weights is None or not proposals:
            return None
        return f"in `weights {self.weights.name}`, is it `{'`, `'.join(proposals[:MAX_PROPOSED])}`?"


def _found(
    files: ForeignFiles, name: str, tensors: Iterable[Theirs], propose: Proposing, rename: Rename = _same_name
) -> list[ImportedTensor]:
    """Their tensors in the files. Raises Refused (E0809) if some are missing, or have another shape or dtype."""
    missing, wrong, imported = list[Theirs](), list[ImportedTensor](), list[ImportedTensor]()
    for tensor in tensors:
        key = next((rename(each) for each in tensor.names if rename(each) in files), None)
        if key is None:
            missing.append(tensor)
            continue
        settled = propose.weights is not None or "/" in tensor.parts[0].name
        each = ImportedTensor(tensor, key, files.dtype(key), () if settled else _of_equal_size(tensor.parts[0].type))
        imported.append(each)
        dtype = tensor.parts[0].type.dtype
        codes = FLOAT_CODES if dtype in FLOATS else INTEGER_CODES if dtype in INDICES else (dtype.upper(),)
        if files.shape(key) != tensor.shape or each.dtype not in codes:
            wrong.append(each)
    if missing:
        raise _missing(name, missing, imported, propose)
    if wrong:
        raise _wrong(name, wrong, len(imported), propose)
    return imported


def _missing(name: str, missing: Sequence[Theirs], imported: Sequence[ImportedTensor], propose: Proposing) -> Refused:
    rows = [
        ((each.names[0], *(part.name for part in each.parts if part.name != each.names[0])), None) for each in missing
    ]
    notes = [
        shown(row.names[0]) + (f"   ({', '.join(row.names[1:])})" if row.names[1:] else "") for row in families(rows)
    ]
    if propose.weights is None:
        help: str | None = propose.names()
    else:
        alone = {each.parts[0].name: each.parts[0].type for each in missing if len(each.parts) == 1}
        pairs = matches(alone, propose.files.unread({each.name for each in imported}))
        likely = (
            (own[0], other[0], match.axes)
            for family, match in pairs
            if match is not None
            for own, other in zip(family.members, match.theirs.members, strict=True)
        )
        near = nearest(missing[0].names[0], propose.files.names())
        other = f"it has `{shown(near)}`" if near else "`--only PATH,…` imports a part of the model"
        help = propose.instead(likely) or other
    message = f"{name} lacks {len(missing)} of {len(missing) + len(imported)} tensors"
    return refuse("E0809", message, notes=few(notes), help=help)


def _wrong(name: str, wrong: Sequence[ImportedTensor], count: int, propose: Proposing) -> Refused:
    rows, turned, files = [], [], propose.files
    for each in wrong:
        parts, shape = each.tensor.parts, files.shape(each.name)
        ours = ", ".join(dict.fromkeys(without_iterations(part.name) for part in parts))
        what = f"{ours}: {parts[0].type}" if len(parts) == 1 else ours
        rows.append(((each.name,), (each.dtype, shape, what, each.tensor.shape)))
        axes = axes_of(parts[0].type, shape) if len(parts) == 1 else None
        if axes is not None and shape != each.tensor.shape:
            turned.append((parts[0].name, each.name, axes))
    notes = [
        f"{shown(each.names[0])} is {dtype}{list(shape)}, but {what} needs {list(expected)}"
        for each in families(rows)
        for dtype, shape, what, expected in [each.shared]
    ]
    help: str | None = "integers are read as integers, and floats as floats"
    if any(files.shape(each.name) != each.tensor.shape for each in wrong):
        sizes = "the sizes of axes can be given: `embed=4096`"
        help = propose.instead(turned) or (propose.names() if turned and propose.weights is None else sizes)
    message = f"{len(wrong)} of {count} tensors in {name} have a different shape or dtype"
    return refuse("E0809", message, notes=few(notes), help=help)


def _of_equal_size(type: Type) -> tuple[str, ...]:
    sizes = [axis.size for axis in type.axes if axis.size > 1]
    return tuple(axis.name for axis in type.axes if sizes.count(axis.size) > 1)


def _unused(name: str, unused: Sequence[str]) -> list[Diagnostic]:
    if not unused:
        return []
    notes = [shown(each.names[0]) for each in families(((one,), None) for one in unused)]
    are = "1 tensor is" if len(unused) == 1 else f"{len(unused):,} tensors are"
    return [Diagnostic("E0811", f"{are} not used in {name}", notes=tuple(few(notes)))]


def _ambiguous(code: str, name: str, imported: Sequence[ImportedTensor], propose: Proposing) -> list[Diagnostic]:
    """A diagnostic about tensors whose axes could be in another order than assumed."""
    guessed = [each for each in imported if each.ambiguous]
    if not guessed:
        return []
    parts = [each.tensor.parts[0] for each in guessed]
    rows = families(((part.name,), part.type) for part in parts)
    have = "1 tensor has" if len(guessed) == 1 else f"{len(guessed)} tensors have"
    order = "the order of the .par file is assumed; if theirs is another"
    return [
        Diagnostic(
            code,
            f"{have} axes of equal size, whose order in {name} is ambiguous",
            notes=tuple(few([f"{row.names[0]}: {row.shared}" for row in rows])),
            help=f"{order}, {propose.declaration()}",
        )
    ]


def _refuse_unexpected(files: ForeignFiles, name: str, weights: Weights, rename: Rename) -> None:
    """Refuse (E0811) tensors of theirs that no line names or skips."""
    known = {rename(each) for tensor in weights.tensors() for each in tensor.names}
    unread = [each for each in files.names() if each not in known]
    lost = [each for each in unread if not any(fnmatchcase(each, pattern) for pattern in weights.skipped)]
    if not lost:
        return
    rows = families(((each,), None) for each in lost)
    near = nearest(lost[0], sorted(each for each in known if each not in files))
    skips = ", ".join(f'"{shown(row.patterns[0])}"' for row in rows[:MAX_PROPOSED])
    raise refuse(
        "E0811",
        f"{len(lost):,} of {len(files.names()):,} tensors in {name} are not in `weights {weights.name}`",
        weights.span,
        notes=few([shown(row.names[0]) for row in rows]),
        help=(f"is it `{near}`? " if near else "")
        + f"`skip {skips}` drops {'it' if len(lost) == 1 else 'them'} knowingly; `*` matches any text",
    )


def _refuse_others(files: ForeignFiles, imported: Iterable[ImportedTensor], rename: Rename) -> None:
    """Refuse (E0817) tensors that are there under several names, and differ."""
    for each in imported:
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


def _refuse_numbers(files: ForeignFiles, name: str, imported: Iterable[ImportedTensor]) -> None:
    """Refuse (E0813) values that are not finite, or that overflow our dtype."""
    notes = []
    for each in imported:
        dtype = min((part.type.dtype for part in each.tensor.parts), key=BYTES.__getitem__)
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
            summary = f"{count:,} of {len(flat):,} numbers are not finite as {dtype}"
            notes.append(f"{shown(each.name)}: {summary}, the first at {place}: {value:g}")
    if notes:
        raise refuse("E0813", f"{name} has numbers that cannot be trained from", notes=few(notes))
