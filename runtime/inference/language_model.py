"""The inputs of a language model as tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from partita.compiler.program import Program
from partita.dsl.check.language_model import LanguageModel
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Model
from partita.dsl.types import Type


def check_ids_of(model: LanguageModel, program: Program, declared: Model) -> None:
    """Refuse (E1001) a model that writes ids which it cannot read, by a program of it."""
    limit = next((each.limit for each in program.inputs if each.name == model.tokens), None)
    if limit is not None and limit.size < model.vocab.size:
        raise refuse(
            "E1001",
            f"`{declared.name}` is not a model that writes: it has logits for {model.vocab}, and reads ids of {limit}",
            declared.span,
            help="the same axis for both",
        )


def inputs_at(model: LanguageModel, types: Mapping[str, Type], ids: Tensor, start: int) -> dict[str, Tensor]:
    """The inputs by name, of these types, at the positions from `start` on at which `ids` are; the same in each row."""
    return {name: _in_rows(model, _values(model, name, ids, start), types[name]) for name in model.names}


def _values(model: LanguageModel, name: str, ids: Tensor, start: int) -> Tensor:
    """What an input holds at these positions, in a document that begins at the first: as many integers."""
    if name == model.tokens:
        return ids
    return torch.arange(start, start + len(ids)) if name == "positions" else torch.zeros_like(ids)


def _in_rows(model: LanguageModel, values: Tensor, type: Type) -> Tensor:
    """Integers along the sequence as a tensor of an input's type."""
    shape = [len(values) if name == model.sequence.name else 1 for name in type.names]
    sizes = [-1 if axis.name == model.sequence.name else axis.size for axis in type.axes]
    return values.view(shape).expand(sizes)
