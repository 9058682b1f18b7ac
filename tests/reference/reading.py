"""How a model reads its parameters and inputs: what the language says by it of fans, decay, and limits of integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from attrs import define, evolve, field

from partita.dsl import spec
from partita.runtime.interpreter.named import Named
from partita.runtime.interpreter.walk import Walk

# Functions through which a parameter or an input is still itself.
SHAPING = ("rename", "split", "merge", "slice", "cast")


@define
class Reading:
    """How the model reads a parameter or an input."""

    type: spec.Type
    initial: spec.Call | None = None
    fans: tuple[int, int] | None = None
    decays: bool = False
    matrix: tuple[frozenset[str], frozenset[str]] | None = None  # the axes that a `dot` sums, and those it shares
    rows: frozenset[str] = frozenset()  # of a table
    limits: list[int] = field(factory=list)
    buffer: bool = False
    copied: str | None = None  # of a copy, what it has the initial values of


@define(eq=False)
class Reader(Walk):
    """A walk, with parameters of zeros, that notes how things are read."""

    readings: dict[str, Reading] = field(factory=dict)

    def given(self) -> list[Named]:
        for name, type in zip(self.model.body.inputs, self.model.body.types, strict=False):
            self.readings[name] = Reading(type)
        return [evolve(each, origins=_own(each.axes)) for each in super().given()]

    def parameter(self, step: spec.Parameter, path: str) -> Named:
        self.readings[path] = Reading(step.type, step.initial, buffer=step.buffer)
        dtype = torch.float64 if step.type.is_float else torch.int64
        return Named(torch.zeros(self.shape(step.type), dtype=dtype), step.type.names, path, _own(step.type.names))

    def copy(self, path: str, source: str, decay: float | None) -> None:
        self.readings[path].copied = self.readings[source].copied or source
        super().copy(path, source, decay)

    def applied(self, step: spec.Apply, path: str, operands: Sequence[Named]) -> Named:
        self.note(step, operands)
        return super().applied(step, path, operands)

    def apply(self, step: spec.Apply, path: str, values: Sequence[Named]) -> Named:
        result = super().apply(step, path, values)
        if step.function not in SHAPING or not isinstance(step.operands[0], int):
            return result
        x = values[step.operands[0]]
        if x.source is None:
            return result
        return evolve(result, source=x.source, origins=_origins(step, x.origins, result.axes))

    def read(self, x: Named) -> Reading | None:
        return self.readings.get(x.source) if x.source else None

    def note(self, step: spec.Apply, operands: Sequence[Named]) -> None:
        """Note how parameters and inputs are read."""
        o = step.options
        over = o.get("over")
        if step.function == "conv":
            for x in operands:
                reading = self.read(x)
                if reading is not None:
                    reading.decays = True
            kernel = self.read(operands[1])
            if kernel is not None:
                summed = prod(operands[1].size(name) for name in (*over, *o["size"]))
                kernel.fans = kernel.fans or (summed, operands[1].data.numel() // summed)
                if kernel.matrix is None:
                    x = operands[1]
                    groups = [name for name in x.axes if name in operands[0].axes and name not in over]
                    names = (*over, *step.options["size"])
                    inner, stacked = (frozenset().union(*(x.origins[n] for n in each)) for each in (names, groups))
                    kernel.matrix = inner, stacked - inner
        elif step.function == "dot":
            for x in operands:
                reading = self.read(x)
                if reading is not None:
                    summed = prod(x.size(name) for name in over)
                    reading.fans = reading.fans or (summed, x.data.numel() // summed)
                    reading.decays = True
                    if reading.matrix is None:
                        (other,) = [y for y in operands if y is not x] or [x]
                        shared = [name for name in x.axes if name in other.axes and name not in over]
                        inner, stacked = (frozenset().union(*(x.origins[n] for n in names)) for names in (over, shared))
                        reading.matrix = inner, stacked - inner
        elif step.function == "embedding":
            ids, table = map(self.read, operands)
            if table is not None:
                table.decays = True
                table.rows = table.rows or looked_up(operands[1], operands[0], over)
            if ids is not None:
                ids.limits.append(operands[1].size(over))
        elif step.function == "routed_dot":
            x, w, ids = map(self.read, operands)
            count = operands[1].size(step.options["along"])
            for reading, value, each in ((x, operands[0], 1), (w, operands[1], count)):
                if reading is not None:
                    summed = prod(value.size(name) for name in over)
                    reading.fans = reading.fans or (summed, value.data.numel() // summed // each)
                    reading.decays = True
                    if reading.matrix is None:
                        (other,) = [each for each in operands[:2] if each is not value]
                        along = [step.options["along"]]
                        stack = [n for n in value.axes if n in (*other.axes, *along) and n not in over]
                        inner, stacked = (frozenset().union(*(value.origins[n] for n in m)) for m in (over, stack))
                        reading.matrix = inner, stacked - inner
            if ids is not None:
                ids.limits.append(count)
        elif step.function in ("dispatch", "combine", "load"):
            ids = self.read(operands[0 if step.function == "load" else 1])
            if ids is not None:
                sizes = dict(zip(step.type.names, self.shape(step.type), strict=True))
                axis = step.options.get("experts", step.type.names[-1])
                ids.limits.append(sizes[axis] if axis in sizes else operands[0].size(axis))
        elif step.function in ("sum_by", "mean_by", "max_by"):
            ids = self.read(operands[1])
            if ids is not None:
                ids.limits.append(self.shape(step.type)[step.type.names.index(o["into"])])
        elif step.function in ("gather", "one_hot"):
            table = self.read(operands[0]) if step.function == "gather" else None
            if table is not None:
                table.decays = True
                table.rows = table.rows or looked_up(operands[0], operands[-1], o["along"])
            ids = self.read(operands[-1])
            if ids is not None:
                ids.limits.append(
                    operands[0].size(o["along"]) if step.function == "gather" else self.shape(step.type)[-1]
                )
        elif step.function in ("cross_entropy", "token_nll", "accuracy"):
            targets = self.read(operands[1])
            if targets is not None:
                targets.limits.append(operands[0].size(over))


def forwards(model: spec.Model) -> dict[str, Any]:
    """The forward passes of operations of a file's own."""
    found = {}
    for name, declared in model.operations.items():
        scope: dict[str, Any] = {}
        exec(declared.forward.source.text, scope)
        found[name] = scope[declared.forward.name]
    return found


def scopes(body: spec.Body, path: str) -> dict[str, str]:
    """Names of blocks and repeats in the file, by path without iterations."""
    found: dict[str, str] = {}
    for step in body.steps:
        if isinstance(step, spec.CallBlock):
            instance = isinstance(step, spec.InstanceParameters)
            found[f"{path}.{step.scope}"] = step.scope if instance else step.block
            found |= scopes(step.body, f"{path}.{step.scope}")
        elif isinstance(step, spec.Repeat):
            found[f"{path}.{step.scope}"] = step.name
            found |= scopes(step.body, f"{path}.{step.scope}")
        elif isinstance(step, spec.Scan):
            found |= scopes(step.body, path)
    return found


def looked_up(table: Named, ids: Named, along: str) -> frozenset[str]:
    """The axes of a parameter that tell its rows apart: those of the ids too, if it is a stack of tables."""
    return frozenset().union(*(table.origins[name] for name in table.axes if name == along or name in ids.axes))


def _own(names: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """The origins of the axes of a parameter or an input as it is."""
    return {name: frozenset((name,)) for name in names}


def _origins(
    step: spec.Apply, origins: Mapping[str, frozenset[str]], axes: Sequence[str]
) -> Mapping[str, frozenset[str]]:
    """The origins of the axes of a parameter in another shape."""
    o = step.options
    match step.function:
        case "rename":
            names = {new: old for old, new in dict(o["pairs"]).items()}
            return {name: origins[names.get(name, name)] for name in axes}
        case "split":
            return {name: origins[o["axis"]] if name in o["into"] else origins[name] for name in axes}
        case "merge":
            merged = frozenset().union(*(origins[name] for name in o["axes"]))
            return {name: merged if name == o["into"] else origins[name] for name in axes}
        case "slice":
            return {name: origins[o["axis"]] if name == o["into"] else origins[name] for name in axes}
    return origins
