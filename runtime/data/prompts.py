"""Prompts, each in as many rows as it gets answers; and the inputs of a model once these are written.

Rows are `ids` one longer than the sequence: a prompt, from the first position on, then its answer, then zeros. Nothing
stands before a prompt, whatever its length, so that each id is at the position that it has alone. A model may have
these inputs:

- `tokens`, the ids but for the last; `targets`, the next id where it is of the answer, its end included, and elsewhere
  the id that the loss ignores; `segments` and `positions` of one document;
- `logprobs`, where there are targets: the logarithm of the probability with which each was drawn;
- `rewards`, one for each row, and `advantages`: a reward less the mean of those of the same prompt, divided by their
  standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import Factory, field, frozen

from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.dataset import Batch, Dataset, Input, positions
from partita.runtime.data.encoders import Encoder, encoder_of
from partita.runtime.data.epochs import Order
from partita.runtime.data.files import listed, matched, readable
from partita.runtime.data.jsonl import kind_of, records
from partita.runtime.data.registry import Use
from partita.runtime.data.templates import template_of
from partita.runtime.data.windows import (
    ONE_SEGMENT,
    SHIFT,
    arranged,
    check_largest,
    fitting_holdout,
    ignored_target,
    length_of,
    other_holdout,
    share_held_out,
)
from partita.runtime.dtypes import NUMPY

PROMPT = "prompt"  # the field of a line, and the array with the number of each row's prompt
OF_IDS, OF_ROWS = (*SHIFT, *ONE_SEGMENT, "logprobs"), ("rewards", "advantages")
AROUND_ZERO = 1e-4  # added to the standard deviation of rewards, as TRL does
FORM = 'a line is `{"prompt": "…"}`, with a text or messages'


@frozen(eq=False)
class Prompt:
    """A prompt as its line has it, `shown`, and as ids; the line's other `fields`, and `where` it is."""

    shown: str | list[Any]
    ids: np.ndarray
    fields: Mapping[str, Any]
    where: str


@frozen(eq=False)
class Answers:
    """Rows with what is written in them from `begins` on up to `ends`: `ids` and `logprobs`, [rows, length + 1]; and
    the reward of each row, of which `samples` that follow each other are answers to one prompt.
    """

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    logprobs: np.ndarray
    rewards: np.ndarray
    samples: int

    @property
    def advantages(self) -> np.ndarray:
        """How much better each is than the others to its prompt: equation 1 of Shao et al., arXiv 2402.03300."""
        groups = self.rewards.reshape(-1, self.samples)
        spread = groups.std(1, ddof=1, keepdims=True)
        normalised: np.ndarray = (groups - groups.mean(1, keepdims=True)) / (spread + AROUND_ZERO)
        return normalised.reshape(-1)


@frozen(eq=False)
class Prompts(Dataset):
    """A `Dataset` of rows without answers; those of a prompt follow each other. Later prompts are held out."""

    inputs: tuple[Input, ...]
    prompts: tuple[Prompt, ...]
    training: int
    samples: int
    reuse: int
    length: int
    ignored: int
    seed: int
    _order: Order = field(init=False, default=Factory(lambda self: Order(self.seed, self.training), takes_self=True))

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The prompts of a training step."""
        return self._unanswered(self._trained(step, rows))

    def row_names(self, step: int) -> list[str]:
        """The line of each row's prompt."""
        return self._named(self._trained(step, None))

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The prompts of an evaluation batch."""
        return self._unanswered(self._held_out(index, rows))

    def holdout_row_names(self, index: int) -> list[str]:
        """The line of each row's prompt."""
        return self._named(self._held_out(index, None))

    def _trained(self, step: int, rows: range | None) -> np.ndarray:
        assert step >= 1, "steps count from 1"
        return self._order.at(positions(self.inputs, (step - 1) // self.reuse, rows) // self.samples)

    def _held_out(self, index: int, rows: range | None) -> np.ndarray:
        held_out = len(self.prompts) - self.training
        assert held_out > 0, "data that is opened to be evaluated has a holdout"
        return self.training + positions(self.inputs, index, rows) // self.samples % held_out

    @property
    def conversing(self) -> bool:
        """Whether a prompt has messages."""
        return any(not isinstance(each.shown, str) for each in self.prompts)

    def _named(self, numbers: np.ndarray) -> list[str]:
        return [f"{self.prompts[each].where}, answer {row % self.samples + 1}" for row, each in enumerate(numbers)]

    def rows_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows with these prompts alone, and how many ids each has."""
        ids = np.zeros((len(numbers), self.length + 1), np.int64)
        for row, number in zip(ids, numbers, strict=True):
            own = self.prompts[number].ids
            row[: len(own)] = own
        return ids, np.array([len(self.prompts[each].ids) for each in numbers], np.int64)

    def _unanswered(self, numbers: np.ndarray) -> Batch:
        ids, ends = self.rows_of(numbers)
        nothing = np.zeros(len(numbers))
        batch = self.answered(Answers(ids, ends, ends, np.zeros(ids.shape), nothing, 1))
        return {**batch, PROMPT: numbers}

    def answered(self, answers: Answers) -> Batch:
        """The inputs of the model, of rows with their answers."""
        places = np.arange(self.length + 1)
        counts = ((places >= answers.begins[:, None]) & (places < answers.ends[:, None]))[:, 1:]
        shape = counts.shape
        values = {
            "tokens": answers.ids[:, :-1],
            "targets": np.where(counts, answers.ids[:, 1:], self.ignored),
            "segments": np.zeros(shape, np.int64),
            "positions": np.broadcast_to(places[:-1], shape),
            "logprobs": np.where(counts, answers.logprobs[:, 1:], 0.0),
            "rewards": answers.rewards,
        }
        if answers.samples > 1:
            values["advantages"] = answers.advantages
        else:
            values["advantages"] = np.zeros(shape[0])
        return {
            each.name: arranged(values[each.name], each)
            if each.name in OF_IDS
            else np.asarray(values[each.name], NUMPY[each.type.dtype])
            for each in self.inputs
        }


def open_prompts(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Prompts:
    """The prompts of a call. Raises Refused (E06xx)."""
    span, samples = call.span, call.arguments["samples"]
    length = _length(inputs, span)
    encoder = encoder_of(call, root)
    prompts = tuple(_prompts(call, root, encoder))
    pattern = call.arguments["glob"]
    held = round(len(prompts) * share_held_out(call, use))
    fits = other_holdout(fitting_holdout(lambda share: 0 < round(len(prompts) * share) < len(prompts)), "more prompts")
    if held == len(prompts) and use is not Use.EVALUATE:
        raise refuse("E0604", f"`{pattern}` has no prompts to train on", span, help=fits if prompts else FORM)
    if use and not held:
        raise refuse("E0604", f"the holdout of `{pattern}` has no prompts", span, help=fits)
    longest = max(prompts, key=lambda each: len(each.ids))
    most = length + 1 - int(call.arguments["tokens"])
    if len(longest.ids) > most:
        own, answer = len(longest.ids), call.arguments["tokens"]
        raise refuse(
            "E0607",
            f"{longest.where} has {own:,} ids, which with an answer of {answer:,} are more than a row of {length:,}",
            span,
            notes=[f"{sum(len(each.ids) > most for each in prompts):,} of {len(prompts):,} prompts are too long"],
            help=f"a sequence of {own + answer - 1:,}, fewer `tokens`, or shorter prompts",
        )
    largest = max(int(each.ids.max()) for each in prompts)
    for each in inputs:
        if each.name in SHIFT:
            check_largest(largest, each, f"`{pattern}`", span)
    if inputs[0].batch % samples:
        message = (
            f"a batch has {inputs[0].batch} rows, which are no whole number of prompts with {samples} answers each"
        )
        raise refuse(
            "E0607", message, span, help=f"`samples` that divide the batch, or a batch of {samples}, {2 * samples}, …"
        )
    ignored = ignored_target(inputs)
    return Prompts(
        inputs,
        prompts,
        len(prompts) - held,
        samples,
        call.arguments["reuse"],
        length,
        -1 if ignored is None else ignored,
        seed,
    )


def _length(inputs: tuple[Input, ...], span: Span | None) -> int:
    """The number of ids of a row. Raises Refused (E0606, E0607) for inputs that rollouts do not have."""
    for each in inputs:
        if each.name not in (*OF_IDS, *OF_ROWS):
            yields = f"it yields: {', '.join((*OF_IDS, *OF_ROWS))}"
            help = "name the model's inputs after what the data yields"
            raise refuse("E0606", f"the data has no input called `{each.name}`", span, notes=[yields], help=help)
    ids = tuple(each for each in inputs if each.name in (*SHIFT, *ONE_SEGMENT))
    tokens = next((each for each in ids if each.name == "tokens"), None)
    if tokens is None:
        raise refuse("E0606", "the model does not read `tokens`, which it is to write", span)
    length = length_of(ids, span)
    for each in inputs:
        expected = set(tokens.type.names) if each.name in OF_IDS else {tokens.batch_axis}
        if each not in ids and (not each.type.is_float or set(each.type.names) != expected):
            names = [name for name in tokens.type.names if name in expected]
            message = f"`{each.name}` of rollouts are floats over [{', '.join(names)}]"
            raise refuse("E0607", message, span, notes=[f"{each.name}: {each.type}"])
    for each in ids:
        if each.name == "targets" and each.limit is not None and not each.ignored:
            message = "what is no answer has no target, and this model ignores none"
            raise refuse("E0607", message, span, help="`token_nll(…, ignore = -1)` where `targets` is used")
    return length


def _prompts(call: Call, root: Path, encoder: Encoder) -> Iterator[Prompt]:
    """The prompts of all files, in order. Raises Refused (E0601 to E0603, E0616)."""
    template = bare = None
    for name, path in matched("glob")(call, root):
        with readable(name, call.span):
            for record, where in records(path, name, call.span):
                shown = record.get(PROMPT)
                if not isinstance(shown, str | list) or not shown:
                    what = (
                        f"`{PROMPT}` in {where} is {kind_of(shown)}"
                        if PROMPT in record
                        else f"{where} has no `{PROMPT}`"
                    )
                    what = f"`{PROMPT}` in {where} is empty" if shown in ("", []) else what
                    notes = [f"its fields: {listed(list(record))}"]
                    raise refuse("E0616", what, call.span, notes=notes, help=FORM)
                if isinstance(shown, str):
                    text, own = shown, encoder
                else:
                    if call.arguments["tokenizer"] is None:
                        help = '`tokenizer = "folder"`, in which there is a template for chats'
                        raise refuse(
                            "E0619", f"`{PROMPT}` in {where} has messages, and bytes no template", call.span, help=help
                        )
                    if template is None or bare is None:
                        template = template_of(call.arguments["tokenizer"], root, call.span)
                        bare = encoder_of(call, root, special=False)
                    text, own = template.prompt({**record, "messages": shown, "where": where}), bare
                (ids,) = own.encode([text])
                fields = {key: value for key, value in record.items() if key != PROMPT}
                yield Prompt(shown, np.asarray(ids, np.int64), fields, where)
