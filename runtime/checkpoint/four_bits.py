"""Matrices in four bits among the parameters of a checkpoint: for other programs they are numbers again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from attrs import frozen

from partita.compiler.ops.four_bits import FOUR_BITS, FourBits, matrix_of
from partita.compiler.program import Program
from partita.dsl.types import Type
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.kernels.four_bits import dequantized


def forms_of(program: Program) -> dict[str, FourBits]:
    """The matrices of a program that are stored in four bits, by full name."""
    forms = {}
    for each in program.parameters:
        if each.initial.name == FOUR_BITS:
            forms[matrix_of(each.name, each.initial)] = FourBits.of(each.initial)[0]
    return forms


def with_wholes(types: Mapping[str, Type], forms: Mapping[str, FourBits]) -> dict[str, Type]:
    """The types of parameters, with matrices in place of their parts."""
    parts = {f"{name}.{part}": name for name, form in forms.items() for part in form.types}
    return {parts.get(name, name): forms[parts[name]].whole if name in parts else type for name, type in types.items()}


@frozen(eq=False)
class Parameters:
    """The parameters of a commit. `source` has the tensor of the commit that has the value of each."""

    commit: Commit
    source: Mapping[str, str]
    forms: Mapping[str, FourBits]

    @cached_property
    def types(self) -> dict[str, Type]:
        """Their types, by name."""
        saved = {each.name: each.type for each in self.commit.manifest.tensors if "/" not in each.name}
        return with_wholes(saved, self.forms)

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A parameter, or a region of it."""
        if name not in self.forms:
            return self.commit.read(self.source[name], region)
        form = self.forms[name]
        whole = dequantized({part: self.commit.read(f"{name}.{part}") for part in form.types}, form)
        return whole if region is None else whole[region]
