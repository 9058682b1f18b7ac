"""Logits of the next id: one rank of what computes them (`partita.compiler.state.Scoring`)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from partita.compiler.layout import global_type
from partita.compiler.passes.decode import STATE
from partita.compiler.pipeline import AT_ONCE
from partita.compiler.state import Scoring
from partita.dsl.check.language_model import LanguageModel
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type
from partita.runtime.executor import Executor
from partita.runtime.inference.choice import Choice
from partita.runtime.inference.ranks import ForwardRank
from partita.runtime.outputs import output_of
from partita.runtime.regions import region_of
from partita.runtime.transports.collectives import ALL_GATHER
from partita.runtime.transports.transport import awaited

# How much the logits at a position may change with ids after it, relative to the largest.
UNCHANGED = 1e-4
# At how many positions they are compared, and how far apart the ids there are.
COMPARED, STRIDE = 32, 7919


@frozen(eq=False)
class Rows:
    """Logits of some texts, [rows, vocab], from the `first` of them on."""

    first: int
    logits: Tensor


class Scorer:
    """One rank that computes the logits of the id that follows some ids, of which there are from one to as many as the
    sequence is long. A longer text is seen from later on, by half a window each time that it grows beyond it.
    """

    def __init__(self, scoring: Scoring, rank: ForwardRank) -> None:
        self.scoring = scoring
        self.rank = rank
        self._seen: list[int] = []
        self._cached = 0  # positions that are computed

    @property
    def model(self) -> LanguageModel:
        """The model."""
        return self.scoring.model

    def choose(self, text: Sequence[int], index: int, choice: Choice) -> Generator[None, None, int]:
        """The id that follows a text of at least one, the choice at an `index`: the same on all ranks."""
        logits = yield from self.logits(seen(text, self.model.window))
        chosen = choice.of(logits, index) if logits is not None else 0
        total = yield from self.rank.sum(torch.tensor([chosen], dtype=torch.float64))  # exact: below 2^53
        return int(total)

    def logits(self, ids: Sequence[int]) -> Generator[None, None, Tensor | None]:
        """The logits after `ids`, on the CPU of one rank: [vocab]. None on all others."""
        cached = len(self._seen)
        if cached >= len(ids) or self._seen != list(ids[:cached]):
            self.forget()
        self._seen = list(ids)
        text = torch.tensor(ids)
        yield from self.advance(text)
        rows = yield from self.last()
        # The next step overwrites it.
        return None if rows is None or rows.first else rows.logits[0].cpu().clone()

    def forget(self) -> None:
        """Begin other texts."""
        self._cached = 0
        for name, tensor in self.rank.memory.masters.items():
            if name.startswith(STATE):
                tensor.zero_()

    def advance(self, ids: Tensor) -> Generator[None, None, None]:
        """Compute the positions of texts up to their last: those that it has not seen. Of one text, or of each row:
        [positions], [rows, positions].
        """
        count = ids.shape[-1]
        if self.scoring.anew is not None:
            yield from self._whole(ids, 0)
        else:
            one, several = self.rank.executors
            while count - self._cached > AT_ONCE:
                yield from self._step(several, ids[..., self._cached : self._cached + AT_ONCE], self._cached)
                self._cached += AT_ONCE
            for position in range(self._cached, count):
                yield from self._step(one, ids[..., position : position + 1], position)
        self._cached = count

    def last(self) -> Generator[None, None, Rows | None]:
        """The logits after the last position that was computed."""
        executor = self.rank.executors[0]
        return (yield from self._rows(executor, 0 if self.scoring.anew is None else self._cached - 1))

    def check_causal(self) -> Generator[None, None, None]:
        """Refuse (E1001), on all ranks, a model whose logits in the first half of its window change with what is in the
        second. Experts without a free slot show why one position is too few: later choices take only some away.
        """
        if self.scoring.anew is None or self.model.window == 1:
            return
        half, ids = self.model.window // 2, self.model.vocab.size
        text = [position * STRIDE % ids for position in range(half)]
        compared = range(0, half, -(-half // COMPARED))
        scores = []
        for padding in (0, ids - 1):
            yield from self._whole(torch.tensor(text), padding)
            scores.append((yield from self._scores_at(compared)))
        changed = any(
            float((one - other).abs().max()) > UNCHANGED * float(one.abs().max())
            for one, other in zip(*scores, strict=True)
            if one is not None and other is not None
        )
        wrong = yield from self.rank.sum(torch.tensor([float(changed)]))
        if wrong:
            what = f"`{self.model.output}` at a position depend on later `{self.model.tokens}`"
            raise refuse(
                "E1001",
                f"the model sees what follows: {what}",
                self.scoring.anew.span,
                help="attention that looks back only: `causal = true`",
            )

    def _whole(self, ids: Tensor, padding: int) -> Generator[None, None, None]:
        """Compute the whole window of some ids; positions after them hold the id `padding`."""
        (whole,) = self.rank.executors
        filled = torch.nn.functional.pad(ids, (0, self.model.window - ids.shape[-1]), value=padding)
        yield from self._step(whole, filled, 0)

    def _scores_at(self, positions: Iterable[int]) -> Generator[None, None, list[Tensor | None]]:
        """The logits of the first row at positions of the whole window that was computed last."""
        (whole,) = self.rank.executors
        scores = []
        for position in positions:
            rows = yield from self._rows(whole, position)
            scores.append(None if rows is None or rows.first else rows.logits[0].cpu().clone())
        return scores

    def _step(self, executor: Executor, ids: Tensor, position: int) -> Generator[None, None, None]:
        """Compute the positions of some ids, from a position on."""
        executor.context.position = position
        types = {each.name: each.type for each in executor.program.inputs}
        yield from executor.step(0, inputs_at(self.model, types, ids, position))

    def _rows(self, executor: Executor, position: int) -> Generator[None, None, Rows | None]:
        """The logits at a position of what an executor has computed, on the first rank with these rows."""
        model, program, own = self.model, executor.program, self.rank.coordinates
        stage, record = output_of(program, model.output)
        total = executor.totals.get((stage, record.name))
        if total is None:
            return None
        sizes = program.mesh.sizes
        region = region_of(global_type(record.type, record.layout, sizes), record.layout, sizes, own)
        first = all(
            own[over] == 0 for over in program.mesh.sharding if record.layout.state(over) in (None, model.vocab.name)
        )
        parts = dict(zip(record.type.names, region, strict=True))
        part = parts[model.sequence.name]
        first = first and part.start <= position < part.stop
        place = min(max(position - part.start, 0), record.type.axis(model.sequence.name).size - 1)
        names = [name for name in record.type.names if name != model.sequence.name]
        total = total.select(record.type.position(model.sequence.name), place)
        total = total.movedim(names.index(model.vocab.name), 0)
        total = total.reshape(len(total), -1)  # [vocab, rows]
        rows = next((parts[name] for name in names if name != model.vocab.name), slice(0, 1))
        total = total[:, : rows.stop - rows.start]
        for over in reversed(record.layout.over(model.vocab.name)):  # the innermost split first
            (total,) = yield from awaited(
                self.rank.transport.collective(ALL_GATHER, over, (total.contiguous(),), ((0,),))
            )
        return Rows(rows.start, total.T) if first else None


def seen(text: Sequence[int], window: int) -> Sequence[int]:
    """The part of a text that a model with a window sees."""
    beyond, shortest = len(text) - window - 1, max(1, window // 2)
    return text if beyond < 0 else text[-shortest - beyond % (window + 1 - shortest) :]


def check_prompt(model: LanguageModel, ids: Sequence[int], span: Span | None = None, name: str = "the prompt") -> None:
    """Refuse (E1002) a prompt that the model cannot take, at its place in the file if it has one."""
    if not ids:
        raise refuse("E1002", "the prompt is empty", span, help="give at least one character, or leave out the prompt")
    if len(ids) > model.window:
        what = f"{name} has {len(ids):,} tokens, and `{model.sequence.name}` has {model.window:,}"
        raise refuse("E1002", what, span, help=f"shorten {name}")
    if max(ids) >= model.vocab.size:
        what = f"{name} has the id {max(ids)}, and `{model.vocab.name}` has size {model.vocab.size}"
        raise refuse("E1002", what, span, help="the tokenizer must be that with which the model was trained")


# ---------------------------------------------------------------- inputs


def inputs_at(model: LanguageModel, types: Mapping[str, Type], ids: Tensor, start: int) -> dict[str, Tensor]:
    """The inputs by name, of these types, at the positions from `start` on at which `ids` are: the same in each row, or
    of each row its own.
    """
    return {name: _in_rows(model, _values(model, name, ids, start), types[name]) for name in model.names}


def _values(model: LanguageModel, name: str, ids: Tensor, start: int) -> Tensor:
    """What an input holds at these positions, in a document that begins at the first: as many integers."""
    if name == model.tokens:
        return ids
    places = torch.arange(start, start + ids.shape[-1])
    return places if name == "positions" else torch.zeros_like(places)


def _in_rows(model: LanguageModel, values: Tensor, type: Type) -> Tensor:
    """Integers along the sequence, of all rows or of each, as a tensor of an input's type."""
    rows = [axis.size for axis in type.axes if axis.name != model.sequence.name]
    values = values.expand(*rows, -1) if rows else values
    return values if type.names[-1] == model.sequence.name else values.T
