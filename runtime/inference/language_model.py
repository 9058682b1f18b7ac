"""What of a file is a language model: an output with logits of the next id, along the sequence of an input of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from attrs import frozen
from torch import Tensor

from partita.compiler.program import InputRecord
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Spec
from partita.dsl.types import INTEGERS, Axis, Type

USUAL = "logits"
# Inputs that describe one document which begins at the first position: what they then hold at a position.
DESCRIBING = ("segments", "positions")


@frozen
class LanguageModel:
    """`output`, of type `logits`, has numbers for `vocab` at each position of `sequence`, from the ids in the input
    `tokens`. `others` are inputs that only say where a document begins.
    """

    output: str
    logits: Type
    tokens: str
    sequence: Axis
    vocab: Axis
    others: tuple[str, ...] = ()

    @property
    def window(self) -> int:
        """The most ids that it sees."""
        return self.sequence.size

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs."""
        return (self.tokens, *self.others)

    def values(self, name: str, ids: Tensor, start: int) -> Tensor:
        """What an input holds at the positions from `start` on at which `ids` are: as many integers."""
        if name == self.tokens:
            return ids
        return torch.arange(start, start + len(ids)) if name == "positions" else torch.zeros_like(ids)

    def in_rows(self, values: Tensor, type: Type) -> Tensor:
        """Integers along the sequence as a tensor of an input's type: the same in each row."""
        shape = [len(values) if name == self.sequence.name else 1 for name in type.names]
        sizes = [-1 if axis.name == self.sequence.name else axis.size for axis in type.axes]
        return values.view(shape).expand(sizes)

    def scores(self, logits: Tensor, position: int) -> Tensor:
        """The logits at a position of the first row: [vocab]."""
        last = (self.sequence.name, self.vocab.name)
        order = [*(name for name in self.logits.names if name not in last), *last]
        rows = logits.permute([self.logits.position(name) for name in order])
        return rows.flatten(0, -3)[0, position] if rows.dim() > 2 else rows[position]


def language_model(given: Spec, read: Sequence[InputRecord], output: str) -> LanguageModel:
    """The language model of a file, whose `output` needs the inputs `read`. Raises Refused (E1001) if it is none."""
    inputs = [each.name for each in read]
    model, _ = given.trained
    over = given.batch
    types: dict[str, Type] = dict(zip(model.body.inputs, model.body.types, strict=False))
    logits = model.answering.types[dict(model.outputs)[output]]

    def refused(why: str, help: str) -> NoReturn:
        notes = [f"output {output}: {logits}", *(f"input {name}: {types[name]}" for name in inputs)]
        raise refuse("E1001", f"`{model.name}` is not a model that writes: {why}", model.span, notes=notes, help=help)

    shape = "it has an input such as `tokens: i64[batch, seq]`"
    ids = [name for name in inputs if name not in DESCRIBING]
    if len(ids) != 1 or types[ids[0]].dtype not in INTEGERS:
        what = ", ".join(f"`{name}`" for name in ids) or "no input"
        refused(f"`{output}` needs {what}, and not ids alone", shape)
    type = types[ids[0]]
    sequence = [axis for axis in type.axes if axis.name != over]
    if len(sequence) != 1:
        refused(f"`{ids[0]}` has not one axis besides `{over}`", shape)
    vocab = [axis for axis in logits.axes if not type.has(axis.name)]
    if not logits.is_float or len(vocab) != 1 or not all(logits.has(axis.name) for axis in type.axes):
        expected = ", ".join([*type.names, "vocab"])
        refused(f"`{output}` does not have logits at each position", f"`output {output}` over [{expected}]")
    limit = next(each.limit for each in read if each.name == ids[0])
    if limit is not None and limit.size < vocab[0].size:
        refused(f"it has logits for {vocab[0]}, and reads ids of {limit}", "the same axis for both")
    for name in set(inputs) - set(ids):
        if types[name].dtype not in INTEGERS or set(types[name].names) != set(type.names):
            refused(f"`{name}` is not integers along `{ids[0]}`", shape)
    others = tuple(name for name in inputs if name in DESCRIBING)
    return LanguageModel(output, logits, ids[0], sequence[0], vocab[0], others)
