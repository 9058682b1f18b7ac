"""Pairs of answers to one prompt, as ids: what `preferences` yields, `chosen_…` and `rejected_…`.

Of each side of a pair there is one row: the prompt, and one answer. It is a document (`partita.runtime.data.documents`)
and a row of its own (`partita.runtime.data.packing`), so each side has `tokens`, `targets`, `segments` and `positions`.
Only the answer has targets, its end included; where a token has parts of both, it belongs to the answer.

Messages are written by the tokenizer's template, as `chat` writes them; a text is taken as it is, and `end` after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.reprs import count
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.cache import Documents
from partita.runtime.data.conversations import Chats, messages_of, read_by_template, written
from partita.runtime.data.dataset import Batch, Dataset, Input
from partita.runtime.data.documents import check_documents, documents
from partita.runtime.data.encoders import Encoder, Tokens, encoder_of
from partita.runtime.data.files import listed, matched, tokenizer_file
from partita.runtime.data.jsonl import kind_of, records
from partita.runtime.data.packed_rows import check_lengths, rows_alone
from partita.runtime.data.packing import Packed, check_ignored
from partita.runtime.data.registry import Use
from partita.runtime.data.templates import json_object, special_tokens, template_if_any
from partita.runtime.data.windows import (
    ONE_SEGMENT,
    SHIFT,
    fitting_holdout,
    length_of,
    other_holdout,
    share_held_out,
)

SIDES = ("chosen", "rejected")
FORMS = "a line has `prompt`, `chosen` and `rejected`; or only these two, with the prompt in both"


@frozen(eq=False)
class Pairs(Dataset):
    """A `Dataset` of pairs: the inputs of one side, or of both."""

    sides: tuple[Packed, ...]

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The pairs of a training step."""
        return {name: array for side in self.sides for name, array in side.batch(step, rows).items()}

    def row_names(self, step: int) -> list[str]:
        """The numbers of the pairs."""
        return [f"pair {number}" for number in self.sides[0].trained(step)]

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """The pairs of an evaluation batch."""
        return {name: array for side in self.sides for name, array in side.holdout_batch(index, rows).items()}

    def holdout_row_names(self, index: int) -> list[str]:
        """The numbers of the pairs."""
        first = len(self.sides[0].training)
        return [f"pair {first + number}" for number in self.sides[0].evaluated(index)]

    @property
    def held_out(self) -> int:
        """The pairs that are held out."""
        return self.sides[0].held_out

    def held_out_rows(self, numbers: Sequence[int]) -> Batch:
        """Pairs that are held out."""
        return {name: array for side in self.sides for name, array in side.held_out_rows(numbers).items()}


@frozen(eq=False)
class Answers:
    """An `Encoder` of prompts with an answer each: their `ids`, or whether each is `learned`. `text` encodes plain
    text, `chats` messages, if there is a template; `call` is where errors are.
    """

    text: Encoder
    chats: Chats | None
    kind: str
    call: Call

    @property
    def digest(self) -> str:
        """By the encoders, and what of answers it is."""
        return f"{self.text.digest} {self.chats and self.chats.digest} {self.kind}"

    @property
    def last(self) -> np.ndarray:
        """None: an answer has its end already."""
        return np.array([], self.dtype)

    @property
    def dtype(self) -> np.dtype:
        """What is stored for each id."""
        return self.text.dtype if self.kind == "ids" else np.dtype("u1")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Of each answer its ids with those of its prompt, or 1 where they are learned and 0 where not. Raises Refused
        (E0616).
        """
        return [self._encoded(json.loads(text)) for text in texts]

    def _encoded(self, row: Mapping[str, Any]) -> np.ndarray:
        if "messages" not in row:
            return self._plain(row["prompt"], row["answer"], row["where"])
        if self.chats is not None:
            return self.chats.encoded(row)
        help = '`tokenizer = "folder"`, in which `chat_template.jinja` says how; `save_pretrained` writes it'
        raise refuse("E0616", f"{row['where']} has messages, and no template writes them", self.call.span, help=help)

    def _plain(self, prompt: str, answer: str, where: str) -> np.ndarray:
        """The answer begins with the first id that has any of it; what ends it is not there twice."""
        if isinstance(self.text, Tokens):
            found = self.text.tokenizer.encode(prompt + answer, add_special_tokens=self.text.special)
            ids = np.array(found.ids, self.text.dtype)
            begin = next((i for i, (_, end) in enumerate(found.offsets) if end > len(prompt)), len(ids))
        else:
            (ids,), begin = self.text.encode([prompt + answer]), len(prompt.encode())
        last = self.text.last
        if not np.array_equal(ids[max(begin, len(ids) - len(last)) :], last):
            ids = np.concatenate([ids, last])
        if max(begin, 1) >= len(ids):
            help = "an answer has text, or `end` says what ends it"
            raise refuse("E0616", f"of {where} nothing is learned", self.call.span, help=help)
        return ids if self.kind == "ids" else (np.arange(len(ids)) >= begin).astype(self.dtype)


def open_pairs(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Pairs:
    """The dataset of pairs, one in a row of each side. Raises Refused (E06xx)."""
    yields = {f"{side}_{name}": name for side in SIDES for name in (*SHIFT, *ONE_SEGMENT)}
    help = "name the model's inputs after what the data yields"
    notes = (f"it yields: {listed(list(yields))}",)
    unknown = [each.name for each in inputs if each.name not in yields]
    if unknown:
        text = "the data has no input called"
        raise Refused(Diagnostic("E0606", f"{text} `{name}`", call.span, notes, help) for name in unknown)
    files, encoders, holdout = matched("glob")(call, root), _encoders(call, root), share_held_out(call, use)
    sides = []
    for side in SIDES:
        own = tuple(evolve(each, column=yields[each.name]) for each in inputs if each.name.startswith(side))
        if own:
            sides.append(_side(call, own, side, seed, files, encoders, holdout, use))
    return Pairs(tuple(sides))


def _side(
    call: Call,
    inputs: tuple[Input, ...],
    side: str,
    seed: int,
    files: Sequence[tuple[str, Path]],
    encoders: Sequence[Answers],
    holdout: float,
    use: Use,
) -> Packed:
    """The rows of one side."""
    what = f"`{call.arguments['glob']}`"
    length = length_of(inputs, call.span)
    check_ignored(inputs, "a prompt has no targets", call.span)

    def read(path: Path, name: str) -> Iterator[tuple[str, bool]]:
        for record, where in records(path, name, call.span):
            yield written(_pair(record, where, call.span)[side], f"`{side}` in {where}", call.span), True

    ids, learned = (documents(files, read, f"preferences {side}", each, call.span) for each in encoders)
    check_documents(ids, inputs, what, call.span)
    _check_lengths(ids, learned, side, length, call)
    pairs = len(ids.ends)
    held_out = round(pairs * holdout)
    fits = other_holdout(fitting_holdout(lambda share: 0 < round(pairs * share) < pairs), "use more pairs")
    if held_out == pairs and use is not Use.EVALUATE:
        message = f"{what} has no pairs to train on: {held_out} of {count(pairs, 'pair')} held out"
        raise refuse("E0604", message, call.span, help=fits)
    if use and not held_out:
        message = f"{what} has no pairs" if use is Use.EVALUATE else f"`holdout` is less than one pair of {what}"
        raise refuse("E0604", message, call.span, help=fits)
    numbers, training = np.arange(pairs), pairs - held_out
    trained, evaluated = (rows_alone(ids, each, length) for each in (numbers[:training], numbers[training:]))
    return Packed(inputs, ids.ids, learned.ids, trained, evaluated, length, seed, what, call.span)


def _check_lengths(ids: Documents, learned: Documents, side: str, length: int, call: Call) -> None:
    """Refuse (E0607) pairs that are longer than a row, or whose prompt alone is if they are to be cut."""
    what = f"`{call.arguments['glob']}`"
    if not call.arguments["cut"]:
        called = f"`{side}`, with its prompt, of pair"
        check_lengths(ids, length, lambda number: f"{called} {number} of {what}", "answers end with the row", call.span)
    for number in np.flatnonzero(ids.sizes > length).tolist():
        begin = int(ids.starts[number])
        if not np.any(learned.ids[begin + 1 : begin + length]):
            message = f"the prompt of pair {number} of {what} fills a row of {length:,}, and leaves no room for answers"
            raise refuse("E0607", message, call.span, help="a longer sequence, or leave it out")


def _encoders(call: Call, root: Path) -> tuple[Answers, Answers]:
    """The encoders of ids, and of what of them is learned. Raises Refused (E0601 to E0603, E0617, E0619)."""
    chats: Any = {}
    if (name := call.arguments["tokenizer"]) is not None:
        template = template_if_any(name, root, call.span)
        if template is not None:
            tokens = encoder_of(call, root, special=False)
            assert isinstance(tokens, Tokens)  # a tokenizer is given
            chats = {kind: Chats(tokens, template, kind) for kind in ("ids", "learned")}
        if call.arguments["end"] is None:
            config = tokenizer_file(name, root, call.span).parent / "tokenizer_config.json"
            end = special_tokens(json_object(config, call.span)).get("eos_token")
            call = evolve(call, arguments={**call.arguments, "end": end})
    text = encoder_of(call, root)
    ids, learned = (Answers(text, chats.get(kind), kind, call) for kind in ("ids", "learned"))
    return ids, learned


def _pair(record: dict[str, Any], where: str, span: Span | None) -> dict[str, dict[str, Any]]:
    """Of a line both answers with their prompt: texts, or messages of which those from `first` on are the answer.
    Raises Refused (E0616).
    """
    if not record.keys() >= {*SIDES}:
        notes = [f"its fields: {listed(list(record))}"]
        raise refuse("E0616", f"{where} is no pair of answers", span, notes=notes, help=FORMS)
    names = ("prompt", *SIDES) if "prompt" in record else SIDES
    for name in names:
        if not isinstance(record[name], str | list):
            what = f"`{name}` in {where} is {kind_of(record[name])}, not a text or a list of messages"
            raise refuse("E0616", what, span, help=FORMS)
    if all(isinstance(record[name], str) for name in names):
        return _texts(record)
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    found = {name: _messages(record[name], name, roles[name], where, span) for name in names}
    answers = [found[side] for side in SIDES]
    within = _shared(*(each[:-1] for each in answers))
    prompt = found.get("prompt", within)
    if within[len(within) - len(prompt) :] == prompt:
        prompt, answers = within, [each[len(within) :] for each in answers]
    more = {"first": len(prompt)} | read_by_template(record, where, span)
    return {side: {"messages": [*prompt, *own], **more} for side, own in zip(SIDES, answers, strict=True)}


def _texts(record: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    if "prompt" in record:
        return {side: {"prompt": record["prompt"], "answer": record[side]} for side in SIDES}
    both = [record[side] for side in SIDES]
    shared = _shared(*both)
    begin = max((i for i, each in enumerate(shared) if each.isspace()), default=0)  # no word is cut
    return {side: {"prompt": text[:begin], "answer": text[begin:]} for side, text in zip(SIDES, both, strict=True)}


def _messages(value: str | list[Any], name: str, role: str, where: str, span: Span | None) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return messages_of(value, name, where, span, FORMS)


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> list[Any]:
    """What both begin with."""
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
