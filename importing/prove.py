"""Whether a file computes what a module computes: loss, outputs, gradients, and buffers after a step, in f64.

Two links: the module as it is, in f32, against its exported graph in f64, whose constants are made exact; and that
graph against the file. All weights are drawn anew, and ids repeat, at several sizes, among them the example's. Dropout
has the rate 0 on both sides, and samples are the same.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partita.compiler.ops.attend import Attend
from partita.compiler.ops.position import Dropout
from partita.compiler.passes.build import build
from partita.compiler.verify.proxy import single
from partita.dsl.load import load
from partita.dsl.names.correspondence import Weights
from partita.dsl.spec import Spec
from partita.importing.capture import wider
from partita.importing.draws import Draws
from partita.importing.dropping import Dropping
from partita.importing.graph import NotUnderstood, Value, shortest
from partita.importing.imported import Imported
from partita.importing.patterns.constants import base_of, progression_of, rounded
from partita.importing.patterns.scalings import Scaling, scalings
from partita.importing.substitutes import exported
from partita.importing.writing.names import valid
from partita.importing.writing.tree import base
from partita.runtime.checkpoint.foreign import seen_as_ours, seen_as_theirs
from partita.runtime.outputs import outputs
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun

TOLERANCE = 1e-9  # in f64, of the largest of a tensor
ROUNDING = 2e-3  # of the module in f32
ROUGHLY = 5e-2  # of gradients of the module in f32
LEAST = 1e-2  # a gradient is held to no less than this share of the norm of all
DEVIATION = 0.2
FEW = 4  # numbers that may mean something each
# Inputs: drawn, with ids that are ignored and without; and those of the example, of which more may have to be true.
WAYS = ("ignored", "drawn", "example")
DROP = re.compile(r"drop(_\d+)?")  # the constants that are rates of dropout
INDEX = re.compile(r"\.\d+(?=\.)")  # of an iteration, in the name of a parameter


@frozen
class Proof:
    """At which sizes a file was compared, how far it is off, and where. `tensors`: the number of gradients; `buffers`:
    of those that a step changes.
    """

    sizes: tuple[tuple[int, ...], ...]
    error: float
    worst: str
    tensors: int
    rounding: float
    buffers: int

    @property
    def holds(self) -> bool:
        """Whether the file equals the module."""
        return self.error <= TOLERANCE and self.rounding <= ROUNDING


def prove(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    imported: Imported,
    told: Callable[[str], None] = lambda line: None,
) -> Proof:
    """Compare a file with its module. Raises NotUnderstood at the first sizes where they differ."""
    free = free_axes(imported)
    sizes: list[dict[str, int]] = []
    error, worst, rounding, tensors, buffers = 0.0, "", 0.0, 0, 0
    with restored(module), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.par"
        imported.write(path)
        path.write_text(_given(path.read_text()))
        _same_dropout(path, imported)
        for number, candidates in enumerate(variants(imported, free)):
            redraw(module, number, buffers_of(imported))
            for chosen, way in product(candidates, WAYS):
                given = (
                    repeated(imported, inputs, chosen)
                    if way == "example"
                    else drawn(imported, inputs, chosen, number, way == "ignored")
                )
                if given is None or chosen in sizes:
                    continue
                if _runs(module, given) and (not number or _is_valid(path, chosen)):
                    break
            else:
                continue
            sizes.append(chosen)
            at = ", ".join(f"{axis} = {size}" for axis, size in chosen.items())
            told(f"comparing at {at}")
            off, place, own, tensors, buffers = _compared(module, given, imported, path, chosen)
            if off > TOLERANCE or off != off or own > ROUNDING:
                raise NotUnderstood(f"the file is off {off:.1g} at {at}, first at {place}")
            if off >= error:
                error, worst = off, place
            rounding = max(rounding, own)
    return Proof(tuple(tuple(each.values()) for each in sizes), error, worst, tensors, rounding, buffers)


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """A module is as before at the end. It is not copied: a function that it keeps may be bound to it."""
    tensors = [(each, each.detach().clone()) for each in (*module.parameters(), *module.buffers())]
    parts = [(part, part.training, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for each, before in tensors:
                each.copy_(before)
        for part, training, buffers in parts:
            part.training = training
            part._buffers.update(buffers)  # `forward` may have assigned others


# ------------------------------------------------------------ sizes and numbers


def free_axes(imported: Imported) -> dict[str, list[tuple[str, int]]]:
    """Axes that only inputs have: each with the inputs and the dimensions in which it is, or another of its size."""
    program = imported.program
    held = {
        name
        for value in program.solver.values
        if value.op in ("parameter", "buffer", "part") or (value.op == "constant" and value in program.file.written)
        for dim in program.file.axes.of(value)
        for name in dim
    }
    found: dict[str, list[tuple[str, int]]] = {}
    fixed: set[str] = set(held) | set(program.file.axes.formulas) | program.file.axes.fixed
    grown: set[str] = set()  # where the module was captured at larger sizes
    for value in imported.graph.inputs:
        if value not in program.solver.dims:
            continue
        for dim, names in enumerate(program.file.axes.of(value)):
            if len(names) == 1:
                found.setdefault(program.file.axes.sized(names[0]), []).append((value.args["name"], dim))
                grown.update(names if value.twin is not None and value.twin[dim] != value.shape[dim] else ())
            fixed.update(names if len(names) > 1 else ())
    if imported.graph.lengths_fixed:
        lengths = {name for name, places in found.items() if any(dim for _, dim in places)}
        fixed.update(set(found) - grown if grown else lengths)
    return {name: places for name, places in found.items() if name not in fixed}


def variants(imported: Imported, free: Mapping[str, object]) -> Iterator[list[dict[str, int]]]:
    """Sizes of the free axes: those of the example first, then others, of which one is longer. Of each list the first
    sizes that the module takes.
    """
    sizes = imported.program.file.axes.sizes
    for batch, changes in ((0, (0,)), (2, (4, 2, -1, 0)), (3, (1, -2, 0)), (4, (13, 6, 3, -3, 0))):
        yield [
            {name: batch if batch and name == "batch" else max(2, sizes[name] + change) for name in free}
            for change in changes
        ]


def _runs(module: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Whether a module takes inputs of these sizes, and its loss is a number."""
    try:
        return all(bool(each.isfinite()) for each in _called(module, inputs) if not each.dim())
    except Exception:
        return False


def _is_valid(path: Path, sizes: Mapping[str, int]) -> bool:
    """Whether a file can have these sizes: one that a window steps over may have to be that of the example."""
    return load(path, [f"{axis}={size}" for axis, size in sizes.items()])[0] is not None


def buffers_of(imported: Imported) -> set[str]:
    """The names of buffers of the module that are buffers of the file."""
    return {name for value in imported.program.solver.values if value.op == "buffer" for name in value.args["names"]}


def redraw(module: nn.Module, seed: int, buffers: Collection[str]) -> None:
    """Draw all parameters of a module, and the buffers of these names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            made = torch.randn(parameter.shape, generator=generator) * DEVIATION + (0.5 if parameter.dim() == 1 else 0)
            ascends = parameter.dim() == 1 and len(parameter) > FEW and bool((parameter.diff() > 0).all())
            parameter.copy_(made.sort().values if ascends else made)  # bounds between which numbers are searched
        for name, buffer in module.named_buffers():
            if name in buffers and buffer.is_floating_point():
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)


def drawn(
    imported: Imported, inputs: Mapping[str, Tensor], sizes: Mapping[str, int], seed: int, ignored: bool = True
) -> dict[str, Tensor] | None:
    """Inputs of these sizes, if they can be drawn: ids are below the sizes of what they index, and 0, padding and
    those that are `ignored`, if these shall, occur.
    """
    generator = torch.Generator().manual_seed(100 + seed)
    found, shapes = {}, _shapes(imported, inputs, sizes)
    for name, example in inputs.items():
        shape = shapes[name]
        if example.is_floating_point():
            found[name] = _between(example, shape, generator)
        elif example.dtype == torch.bool:
            found[name] = torch.rand(shape, generator=generator) < 0.7
        else:
            limit, special = _ids(imported, name)
            special = [each for each in special if ignored or limit is None or 0 <= each < limit]
            if limit is not None or int(example.max()) <= 1:
                limits = torch.tensor(2 if limit is None else limit)
                found[name] = (torch.rand(shape, generator=generator) * limits).floor().to(example.dtype)
            else:  # of which more may have to be true, as of edges, of lengths, or of places that are written
                found[name] = example[tuple(slice(size) for size in shape)].clone()
                if list(found[name].shape) != shape:
                    return None
            if bool((example < 0).any()):  # which mean something else
                marked = torch.rand(shape, generator=generator) < 0.2
                found[name] = found[name].where(~marked, example.min())
            flat, first = found[name].view(-1), int(example.dim() > 1)
            if limit is not None and len(flat) > 2 + len(special):
                flat[first : first + len(special)] = torch.tensor(special)
                flat[first + len(special)] = flat[-1]
            if first and limit is not None:  # a sequence begins with what counts
                usual = next(each for each in range(limit + len(special)) if each not in special)
                begin = found[name][..., 0]
                begin[torch.isin(begin, torch.tensor(special))] = min(usual, limit - 1)
        if example.dim() > 1 and not example.is_floating_point() and int(example.max()) <= 1:
            found[name][..., 0] = example[(0,) * example.dim()]  # no row of a mask leaves out everything
    return found


def repeated(imported: Imported, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The inputs of the example at these sizes: parts of them, or the same again."""
    found = dict(inputs)
    for name, shape in _shapes(imported, inputs, sizes).items():
        for dim, size in enumerate(shape):
            found[name] = found[name].index_select(dim, torch.arange(size) % inputs[name].shape[dim])
    return found


def _shapes(imported: Imported, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """The shapes of inputs where axes have these sizes."""
    program = imported.program
    names = {
        value.args["name"]: program.file.axes.of(value)
        for value in imported.graph.inputs
        if value in program.solver.dims
    }
    return {
        name: [
            sizes.get(program.file.axes.sized(own[0]), size) if len(own) == 1 else size
            for own, size in zip(names.get(name, [()] * example.dim()), example.shape, strict=True)
        ]
        for name, example in inputs.items()
    }


def _between(example: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Numbers as an example has them, or between two of them if it has more than a few."""
    some, others = (
        example.flatten()[torch.randint(0, example.numel(), tuple(shape), generator=generator)] for _ in range(2)
    )
    share = (
        torch.rand(tuple(shape), generator=generator) if len({*example.flatten().tolist()}) > FEW else torch.ones(())
    )
    return (some + (others - some) * (1 - share)).float()


def _ids(imported: Imported, name: str) -> tuple[int | None, list[int]]:
    """What ids of an input are below, the smallest of what they index, if that is known; and ids that mean something
    else than others.
    """
    solver = imported.program.solver
    limits, special = [], [0]
    for value in solver.values:
        if value.op in ("cross_entropy", "token_nll") and _is_input(value.args["targets"], name):
            x = value.args["x"]
            limits.append(x.shape[1] if x.rank > 1 else x.shape[0])
            counts = value.args["ignore"] in (None, -100) and not base(value.args["targets"]).args.get("negative")
            special += [] if counts else [value.args["ignore"]]
        elif value.op == "embedding" and _is_input(value.args["ids"], name):
            limits.append(value.args["table"].shape[0])
            special += [value.args["padding"]] if value.args["padding"] is not None else []
    return min(limits, default=None), special


def _is_input(value: Value, name: str) -> bool:
    found = base(value)
    return found.op == "input" and found.args["name"] == name


# ------------------------------------------------------------ comparing


def _same_dropout(path: Path, imported: Imported) -> None:
    """Raises NotUnderstood unless the file drops as often as the module, and the same shares."""
    spec, diagnostics = load(path)
    if spec is None or spec.model is None:
        raise NotUnderstood(f"the file is not valid: {diagnostics[0].message}")
    ops = [node.op for node in build(spec.model, "f64").nodes]
    ours = [op.rate if isinstance(op, Dropout) else op.dropout for op in ops if isinstance(op, Dropout | Attend)]
    values = imported.program.solver.values
    theirs = [value.args["rate"] for value in values if value.op == "dropout"]
    theirs += [value.args["dropout"] for value in values if value.op == "attend"]
    counts = (Counter(f"{rate:.6g}" for rate in sorted(each) if rate) for each in (ours, theirs))
    shown = [", ".join(f"{count} times {rate}" for rate, count in each.items()) for each in counts]
    if shown[0] != shown[1]:
        raise NotUnderstood(f"the file drops {shown[0] or 'nothing'}, and the module {shown[1] or 'nothing'}")


def _hardsigmoid(x: Tensor) -> Tensor:
    return (x + 3).clamp(0, 6) / 6


def _hardswish(x: Tensor) -> Tensor:
    return x * _hardsigmoid(x)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    made = x * torch.rsqrt(x.pow(2).mean([-1 - i for i in range(len(shape))], keepdim=True) + eps)
    return made if weight is None else made * weight


def _distances(x: Tensor, y: Tensor, p: float = 2.0, mode: int | None = None) -> Tensor:
    return torch.cdist(x, y, p, "donot_use_mm_for_euclid_dist")


# What torch computes otherwise in f64: with a sixth in f32, or an epsilon that is another one for each dtype; and
# distances of many points, of a product, which rounds what is near.
EXACT: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.aten.hardsigmoid.default: _hardsigmoid,
    torch.ops.aten.hardsigmoid_.default: _hardsigmoid,
    torch.ops.aten.hardswish.default: _hardswish,
    torch.ops.aten.hardswish_.default: _hardswish,
    torch.ops.aten.rms_norm.default: _rms_norm,
    torch.ops.aten.cdist.default: _distances,
}


def _called(module: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """What a module returns; its buffers stay as they are."""
    with torch.no_grad(), Draws() as draws, Dropping(draws), restored(module):
        return _returned(module(**inputs))


def exact(module: nn.Module, inputs: Mapping[str, Tensor], tables: Collection[str] = ()) -> nn.Module:
    """The graph of a module in f64: what it computes in f32 for precision is f64 as well, and frequencies are exact,
    but for constants of these names, of which the file has a table.
    """
    scaled = scalings(module)
    program = exported(module, inputs)
    graph: nn.Module = deepcopy(program.module(check_guards=False))  # whose parameters are the module's
    for inner in graph.modules():
        if not isinstance(inner, torch.fx.GraphModule):
            continue
        for node in list(inner.graph.nodes):
            if node.op == "call_function":
                if "_assert" in str(node.target):
                    inner.graph.erase_node(node)
                    continue
                node.target = EXACT.get(node.target, node.target)
                node.args = tuple(wider(each) for each in node.args)
                node.kwargs = {key: wider(each) for key, each in node.kwargs.items()}
        inner.recompile()
    graph.double()
    for path, holder in graph.named_modules():
        for name, tensor in [*holder._buffers.items(), *vars(holder).items()]:
            if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                widened = _complex(tensor, scaled) if tensor.is_complex() else _made_exact(tensor.double(), scaled)
                widened = tensor.double() if f"{path}.{name}".lstrip(".") in tables else widened
                if name in holder._buffers:
                    holder._buffers[name] = widened
                else:
                    setattr(holder, name, widened)
    return graph


@contextmanager
def _in_f64() -> Iterator[None]:
    """What a graph makes of integers is in f64."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _made_exact(tensor: Tensor, scaled: Sequence[tuple[float, Scaling]]) -> Tensor:
    """Frequencies of rotary positions, computed in f64, base^(-i / n); the root of an integer."""
    if tensor.numel() == 1:
        return torch.full_like(tensor, shortest(tensor.flatten()[0].float()))
    for ratio, scaling in scaled if tensor.dim() == 1 else ():
        made, _ = scaling.rates(ratio, tensor.numel())
        if torch.allclose(made, tensor, rtol=1e-5):
            return made
    if tensor.dim() == 1 and tensor.numel() > 1 and abs(float(tensor[0]) - 1) < 1e-12 and float(tensor[1]) < 1:
        count = tensor.numel()
        ratio = float(f"{float(tensor[1] ** -count):.4g}")
        made = ratio ** (-torch.arange(count, dtype=torch.float64) / count)
        if torch.allclose(made, tensor, rtol=1e-5):
            return made
    line = progression_of(tensor) if tensor.dim() == 1 else None
    if line is not None:
        return line
    flat = tensor.reshape([size for size in tensor.shape if size != 1])
    angles = next((made for made in _in_parts(flat) if made is not None), None)
    return tensor if angles is None else angles.view(tensor.shape)


def _in_parts(table: Tensor) -> Iterator[Tensor | None]:
    """A table of angles, made exact; or each of two parts of it: cosines and sines, stacked, halves or neighbors."""
    if table.dim() == 2 and min(table.shape) > 1:
        yield _angles(table)
        if table.shape[1] % 2 == 0 and table.shape[1] > 2:
            neighbors = _stacked([table[:, ::2], table[:, 1::2]], 2)
            yield None if neighbors is None else neighbors.flatten(1)
            halves = _stacked(table.chunk(2, 1), 1)
            yield None if halves is None else halves.flatten(1)
    elif table.dim() == 3 and table.shape[1] > 1:
        for dim in (0, 2):
            if table.shape[dim] == 2 and min(table.select(dim, 0).shape) > 1:
                yield _stacked(table.unbind(dim), dim)


def _stacked(tables: Iterable[Tensor], dim: int) -> Tensor | None:
    made = [_angles(each) for each in tables]
    known = [each for each in made if each is not None]
    return torch.stack(known, dim) if len(known) == len(made) else None


def _complex(tensor: Tensor, scaled: Sequence[tuple[float, Scaling]]) -> Tensor:
    """Complex numbers in f64, of exact angles if those of rotary positions are meant."""
    parts = tensor.to(torch.complex128).resolve_conj()
    base = base_of(parts.real, parts.imag) if tensor.dim() == 2 else None
    if base is None:
        return torch.complex(_made_exact(parts.real, scaled), _made_exact(parts.imag, scaled))
    positions, pairs = tensor.shape
    angles = torch.arange(positions).double()[:, None] * base ** (-torch.arange(pairs).double() / pairs)
    return torch.polar(torch.ones_like(angles), angles)


def _angles(table: Tensor) -> Tensor | None:
    """Cosines or sines of position · base^(-i / n), computed in f64, if a table has them. Of a small angle the cosine
    says little, and of one beyond half a turn nothing: both the first and the last are tried.
    """
    positions, count = table.shape
    ways = product(((torch.acos, torch.cos), (torch.asin, torch.sin)), (1, positions - 1))
    for (inverse, function), row in ways:
        ratio = float(f"{float((inverse(table[row]).clamp(min=1e-30)[1] / row) ** -count):.4g}") if count > 1 else 1.0
        angles = torch.arange(positions).double()[:, None] * ratio ** (-torch.arange(count).double() / count)
        if rounded(function(angles), table, angles):
            return function(angles)
    return None


def _returned(result: Any) -> list[Tensor]:
    return [each for each in tree_leaves(result) if isinstance(each, Tensor)]


def _compared(
    module: nn.Module, inputs: Mapping[str, Tensor], imported: Imported, path: Path, sizes: Mapping[str, int]
) -> tuple[float, str, float, int, int]:
    """How far the file is off the graph in f64, and where; how far the module is; and the numbers of gradients,
    and of buffers that a step changes.
    """
    program = imported.program
    tables = {value.args["name"] for value in program.file.written if value.args.get("name")}
    graph = exact(module, inputs, tables)
    with Draws() as draws, Dropping(draws), restored(module):
        rough = _returned(module(**inputs))
        named: dict[Tensor, list[str]] = {}
        for name, each in module.named_parameters(remove_duplicate=False):
            if each.requires_grad:
                named.setdefault(each, []).append(name)
        slopes = torch.autograd.grad(rough[imported.graph.loss], list(named), allow_unused=True)
        kept = {name: each.detach().clone() for name, each in module.named_buffers()}
    wide = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    before = _state(graph)
    with _in_f64(), Draws() as draws:
        results = _returned(graph(**wide))
    loss = results[imported.graph.loss]
    torch.autograd.backward(loss)
    rounding = max(_off(a.detach(), b.detach()) for a, b in zip(rough, results, strict=True))
    for name, buffer in graph.named_buffers():
        if name in kept and _off(kept[name].double(), buffer.double()) > ROUGHLY:
            raise NotUnderstood(f"the module changes `{name}` otherwise than its graph does")
    # Two rows that are normalized leave hardly any gradient, which f32 rounds: the example's sizes say enough.
    if all(program.file.axes.sizes[name] == size for name, size in sizes.items()):
        _same_gradients(list(zip(named.values(), slopes, strict=True)), graph)

    spec = _spec(path, sizes, imported)
    weights = spec.weights["hf"]
    run = VirtualRun(prepare(single(spec)))
    read_tables = {name: each for name, each in run.parameters().items() if INDEX.sub("", name) in program.tables()}
    ours = _ours(weights, before) | read_tables
    run.set_parameters(ours)
    read = {valid(name): wide[name] for name in inputs}
    read |= {each.args["name"]: draws.samples[each.args["number"]] for each in program.samples}
    batch = {each.name: read[each.name].reshape(each.type.shape) for each in run.plan.program.inputs}
    found, _ = run.step(1, batch)
    off = [(_off(torch.tensor(found, dtype=torch.float64), loss.detach()), "the loss")]

    zeros = {name: torch.zeros_like(each) for name, each in before.items()}
    given = {name: each.grad for name, each in graph.named_parameters() if each.grad is not None}
    expected, gradients = _ours(weights, zeros | given), run.gradients()
    norm = float(sum((expected[name].square().sum() for name in gradients), torch.zeros(()))) ** 0.5
    off += [(_off(each, expected[name], LEAST * norm), f"the gradient of `{name}`") for name, each in gradients.items()]

    # Learning rates are 0: a step changes nothing but what keeps statistics.
    after, kept = _ours(weights, _state(graph)) | read_tables, run.parameters()
    off += [(_off(each, after[name]), f"`{name}` after a step") for name, each in kept.items() if name not in gradients]

    if imported.graph.updates or imported.graph.evaluated:  # outputs are those of evaluation
        with restored(module):
            evaluated = exact(module.eval(), inputs, tables)
        with _in_f64(), Draws():
            results = _returned(evaluated(**wide))
    theirs = (results[i].detach() for i in imported.graph.shown)
    made = outputs(spec, ours, batch)
    for (name, output), dims, result in zip(made.items(), program.shown, theirs, strict=True):
        off.append((_off(_as_theirs(name, output, spec, dims, result), result), f"output `{name}`"))
    changed = sum(not torch.equal(each, ours[name]) for name, each in after.items())
    return (*max(off), rounding, len(gradients), changed)


def _same_gradients(found: Sequence[tuple[Sequence[str], Tensor | None]], graph: nn.Module) -> None:
    """Raises NotUnderstood where gradients of the module, in f32, are not at all those of what it computes: an
    `autograd.Function` may have a backward of its own, which is no part of a graph.
    """
    exact = {name: each.grad for name, each in graph.named_parameters() if each.grad is not None}
    norm = float(sum((each.square().sum() for each in exact.values()), torch.zeros(()))) ** 0.5
    for names, own in found:
        theirs = next((exact[name] for name in names if name in exact), None)
        if own is None or theirs is None:
            wrong = (own is not None and bool(own.any())) or (theirs is not None and bool(theirs.any()))
        else:
            wrong = _off(own, theirs, LEAST * norm) > ROUGHLY
        if wrong:
            raise NotUnderstood(
                f"the gradient of `{names[0]}` is not that of what is computed: has it a backward of its own?"
            )


def _state(graph: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in chain(graph.named_buffers(), graph.named_parameters())}


def _as_theirs(name: str, output: Tensor, spec: Spec, dims: Sequence[tuple[str, ...]], result: Tensor) -> Tensor:
    """An output of ours with its axes in their order: what ours lacks is the same along that axis."""
    model, _ = spec.trained
    own = model.answering.types[dict(model.outputs)[name]].names
    wanted = [axis for dim in dims for axis in dim]
    if not {*own} <= {*wanted}:
        if [size for size in output.shape if size > 1] != [size for size in result.shape if size > 1]:
            raise NotUnderstood(f"output `{name}` has other axes than the module's")
        return output.reshape(result.shape)
    ordered = output.permute([own.index(axis) for axis in wanted if axis in own])
    shape = [spec.axes[axis].size if axis in own else 1 for axis in wanted]
    return ordered.reshape(shape).expand([spec.axes[axis].size for axis in wanted]).reshape(result.shape)


def _given(text: str) -> str:
    """A file with inputs in place of its samples."""
    found = re.findall(r"^  sample (.*) ~ .*\n", text, re.MULTILINE)
    text = re.sub(r"^  sample .*\n", "", text, flags=re.MULTILINE)
    return re.sub(
        r"^(model \w+\()", lambda head: head[1] + "".join(f"{each}, " for each in found), text, flags=re.MULTILINE
    )


def _spec(path: Path, sizes: Mapping[str, int], imported: Imported) -> Spec:
    """The file at these sizes, in f64 and without dropout."""
    rates = [name for name in imported.program.file.constants if DROP.fullmatch(name)]
    given = [*(f"{axis}={size}" for axis, size in sizes.items()), *(f"{name}=0" for name in rates)]
    spec, diagnostics = load(path, ("train.precision=f64", *given))
    if spec is None:
        raise NotUnderstood(f"the file is not valid: {diagnostics[0].message}")
    return spec


def _ours(weights: Weights, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of ours, given those of theirs."""
    found: dict[str, Tensor] = {}
    for theirs in weights.tensors():
        whole = next(tensors[name] for name in theirs.names if name in tensors)
        for part in theirs.parts:
            ours = found.setdefault(part.name, torch.empty(part.type.shape, dtype=whole.dtype))
            seen_as_theirs(ours, part).copy_(seen_as_ours(whole.contiguous(), part, theirs.joined))
    return found


def _off(ours: Tensor, theirs: Tensor, least: float = 0.0) -> float:
    if not theirs.numel():
        return 0.0
    return float((ours.double() - theirs.double()).abs().max() / max(float(theirs.abs().max()), least, 1e-30))
