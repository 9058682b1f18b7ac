"""Adapters in a checkpoint: added to the matrices that they are beside, or by themselves in the form of PEFT.

PEFT has one adapter for each module: those of our matrices that are joined in one of theirs stand side by side, each in
the rows of what it changes, so that ranks add up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from partita.compiler.passes.adapt import factor_of
from partita.dsl.diagnostic import refuse, shown
from partita.dsl.grouping import grouped
from partita.dsl.names.correspondence import Part, Theirs, Weights
from partita.dsl.names.paths import DOWN, MAGNITUDE, UP, adapters_in
from partita.dsl.spec import Call
from partita.dsl.types import Type
from partita.runtime.addresses import PathOrUrl
from partita.runtime.checkpoint.foreign import FOREIGN_DTYPES, seen_as_ours, seen_as_theirs
from partita.runtime.checkpoint.foreign_files import write_files
from partita.runtime.checkpoint.four_bits import Parameters
from partita.runtime.checkpoint.shards import Entry

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
WEIGHT = ".weight"


@frozen(eq=False)
class Adapters:
    """The adapters of a commit: by the name of each matrix its `lora(…)` or `dora(…)`."""

    parameters: Parameters
    calls: Mapping[str, Call]

    def factor(self, name: str) -> float:
        """What the product of the matrices of an adapter is multiplied by."""
        return factor_of(self.calls[name])

    def read(self, name: str) -> torch.Tensor:
        """A parameter, in f64."""
        return self.parameters.read(name).double()

    def types(self, name: str) -> tuple[Type, Type, Type]:
        """The types of a matrix, and of the two of its adapter."""
        types = self.parameters.types
        return types[name], types[f"{name}.{DOWN}"], types[f"{name}.{UP}"]

    def inner(self, name: str) -> tuple[str, ...]:
        """The axes over which products with a matrix sum: the adapter's first matrix has them, and not the second."""
        matrix, down, up = self.types(name)
        return tuple(axis for axis in matrix.names if down.has(axis) and not up.has(axis))

    def merged(self, name: str) -> torch.Tensor:
        """A matrix with its adapter, in f64."""
        types = self.types(name)
        names = list(dict.fromkeys(axis for type in types for axis in type.names))
        low, high = self.read(f"{name}.{DOWN}"), self.read(f"{name}.{UP}")
        of_matrix, of_down, of_up = ([names.index(axis) for axis in type.names] for type in types)
        both: torch.Tensor = self.read(name) + self.factor(name) * torch.einsum(low, of_down, high, of_up, of_matrix)
        if self.calls[name].name == "dora":
            both = both * self.lengths(name) / length(both, self._over(name))
        return both

    def lengths(self, name: str) -> torch.Tensor:
        """The lengths of the columns of a matrix that `dora` has trained, with the axes that products sum as 1."""
        matrix, *_ = self.types(name)
        trained = self.read(f"{name}.{MAGNITUDE}")
        outer = self.parameters.types[f"{name}.{MAGNITUDE}"].names
        trained = trained.permute([outer.index(axis) for axis in matrix.names if axis in outer])
        for position, axis in enumerate(matrix.names):
            if axis not in outer:
                trained = trained.unsqueeze(position)
        return length(self.read(name), self._over(name)) + trained

    def _over(self, name: str) -> list[int]:
        return [self.types(name)[0].position(axis) for axis in self.inner(name)]


@frozen(eq=False)
class Merged:
    """The parameters of a commit for a program that knows no adapters: these are in what they are beside."""

    adapters: Adapters

    @property
    def types(self) -> dict[str, Type]:
        """Their types, by name."""
        every = self.adapters.parameters.types
        own = adapters_in(every)
        return {name: type for name, type in every.items() if name not in own}

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """A region of a parameter."""
        if name in self.adapters.calls:
            return self.adapters.merged(name)[region]
        return self.adapters.parameters.read(name, region)


def length(tensor: torch.Tensor, over: Sequence[int]) -> torch.Tensor:
    """The length of a tensor along some dimensions, which remain as 1."""
    result: torch.Tensor = torch.linalg.vector_norm(tensor, dim=tuple(over), keepdim=True)
    return result


# ---------------------------------------------------------------- as PEFT has them


@frozen(eq=False)
class _Module:
    """A module of theirs with an adapter: its tensor, those of our matrices in it that have one, and where its weight
    has what is summed over.
    """

    tensor: Theirs
    parts: tuple[Part, ...]
    inner: int

    @property
    def name(self) -> str:
        return self.tensor.names[0].removesuffix(WEIGHT)


def export_peft(
    adapters: Adapters, path: PathOrUrl, weights: Weights, base: str | None, task: str | None, dtype: str | None
) -> tuple[int, int]:
    """Write the adapters as PEFT loads them for a model with tensors as `weights` say: which of them is `base`, if that
    is known, and which `task` it is for. Returns the number of tensors and of bytes. Raises Refused (E0809), OSError.
    """
    modules = _modules(adapters, weights)
    tensors: dict[str, torch.Tensor] = {}
    for module in modules:
        tensors |= {f"base_model.model.{module.name}.{name}": each for name, each in _peft(adapters, module).items()}
    own = dtype or adapters.types(modules[0].parts[0].name)[1].dtype
    entries = [Entry(name, own, tuple(each.shape)) for name, each in tensors.items()]
    config = json.dumps(_config(adapters, weights, modules, base, task), indent=2).encode() + b"\n"

    def read(entry: Entry) -> torch.Tensor:
        return tensors[entry.name].to(FOREIGN_DTYPES[entry.dtype]).contiguous()

    return len(entries), write_files(path, [entries], read, {CONFIG: config}, TENSORS)


def _modules(adapters: Adapters, weights: Weights) -> list[_Module]:
    """The modules with adapters. Raises Refused (E0809) for what PEFT has no adapters for."""
    modules = []
    left = dict.fromkeys(adapters.calls)
    for name, (tensor, *_) in grouped(weights.tensors(), lambda each: each.names[0]).items():
        parts = tuple(part for part in tensor.parts if part.name in adapters.calls)
        places = list[int]()
        for part in parts:
            left.pop(part.name, None)
            inner = set(adapters.inner(part.name))
            places = [place for place, group in enumerate(part.groups) if inner & set(group)]
            matrix = len(part.groups) == 2 and len(places) == 1 and inner == set(part.groups[places[0]])
            if not matrix or not name.endswith(WEIGHT) or inner & part.index.keys():
                message = f"`{part.name}` is {tensor.axes} in `{shown(name)}`, for which PEFT has no adapters"
                raise refuse("E0809", message, help="`--merge` writes the sums of matrices and adapters")
        if parts:
            modules.append(_Module(tensor, parts, places[0]))
    if left:
        message = f"`weights {weights.name}` say nothing of `{next(iter(left))}`, which has an adapter"
        raise refuse("E0809", message, weights.span)
    return modules


def _peft(adapters: Adapters, module: _Module) -> dict[str, torch.Tensor]:
    """The tensors of a module's adapter."""
    factor = adapters.factor(module.parts[0].name)
    downs, ups = [], []
    for part in module.parts:
        matrix, down, up = adapters.types(part.name)
        (rank,) = (axis for axis in down.axes if not matrix.has(axis.name))
        inner = part.groups[module.inner]
        low = seen_as_theirs(adapters.read(f"{part.name}.{DOWN}"), _of(part, down, [(rank.name,), inner]))
        downs.append(low.reshape(rank.size, -1))
        groups = [(rank.name,) if place == module.inner else group for place, group in enumerate(part.groups)]
        of = _of(part, up, groups)
        shape = [rank.size if place == module.inner else size for place, size in enumerate(module.tensor.shape)]
        high = torch.zeros(shape, dtype=torch.float64)
        ours = seen_as_theirs(adapters.read(f"{part.name}.{UP}"), of)
        seen_as_ours(high, evolve(of, index=dict.fromkeys(of.index, 0)), module.tensor.joined).copy_(ours)
        ups.append((high if module.inner else high.T) * adapters.factor(part.name) / factor)
    tensors = {"lora_A.weight": torch.cat(downs), "lora_B.weight": torch.cat(ups, dim=1)}
    if adapters.calls[module.parts[0].name].name == "dora":
        whole = torch.zeros(module.tensor.shape, dtype=torch.float64)
        for part in module.tensor.parts:
            plain = adapters.read(part.name)
            own = part.name in adapters.calls  # one without an adapter keeps its lengths
            over = [part.type.position(axis) for axis in part.groups[module.inner]]
            lengths = adapters.lengths(part.name) if own else length(plain, over)
            ours = lengths.expand_as(plain)
            alone = evolve(part, index=dict.fromkeys(part.index, 0))
            seen_as_ours(whole, alone, module.tensor.joined).copy_(seen_as_theirs(ours, part))
        tensors["lora_magnitude_vector"] = whole.select(module.inner, 0)
    return tensors


def _of(part: Part, type: Type, groups: Sequence[tuple[str, ...]]) -> Part:
    """The part of a tensor of an adapter that belongs to one of its matrix."""
    return Part(part.name, type, tuple(groups), part.index, part.start)


def _config(
    adapters: Adapters, weights: Weights, modules: Sequence[_Module], base: str | None, task: str | None
) -> dict[str, Any]:
    """What PEFT's LoraConfig says of the modules. One suffix of names stands for all modules that have it, if these
    have adapters of one kind.
    """
    own: dict[str, tuple[int, float]] = {}
    for module in modules:
        rank = sum(int(adapters.calls[part.name].arguments["rank"]) for part in module.parts)
        own[module.name] = rank, rank * adapters.factor(module.parts[0].name)
    named = [name.removesuffix(WEIGHT) for each in weights.tensors() for name in each.names if name.endswith(WEIGHT)]
    targets: dict[str, tuple[int, float]] = {}
    for name, form in own.items():
        end = name.rpartition(".")[2]
        alike = [other for other in named if other.rpartition(".")[2] == end]
        targets[end if all(own.get(other) == form for other in alike) else name] = form
    rank, alpha = next(iter(targets.values()))
    calls = list(adapters.calls.values())
    kinds = {each.name for each in calls}
    if len(kinds) > 1:
        raise refuse("E0809", "some adapters are `lora` and some `dora`, and PEFT has one kind in a folder")
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": max(float(each.arguments["dropout"]) for each in calls),
        "target_modules": list(targets),
        "rank_pattern": {name: form[0] for name, form in targets.items() if form[0] != rank},
        "alpha_pattern": {name: form[1] for name, form in targets.items() if form[1] != alpha},
        "fan_in_fan_out": any(not module.inner for module in modules),
        "use_dora": kinds == {"dora"},
        "bias": "none",
    }
