"""Conversations as ids, and which of these are learned: by the template of the tokenizer, as transformers renders it.

What the assistant says is learned, with the end of its turn. Where the template marks that (`{% generation %}`), its
marks say what; or else the difference of renderings: a turn is what follows the rendering of all before it, with the
prompt to answer. A template may write earlier turns otherwise than the last, without the thoughts of a model, say: what
is written otherwise is not learned.

A conversation is a document (`partita.runtime.data.documents`) whose text is JSON; its ids are one entry of the cache,
and whether each is learned another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from attrs import Factory, field, frozen

from partita.dsl.diagnostic import Diagnostic, refuse, shown
from partita.dsl.reprs import count
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.cache import Documents
from partita.runtime.data.dataset import Input
from partita.runtime.data.documents import check_documents, documents
from partita.runtime.data.encoders import Tokens, encoder_of
from partita.runtime.data.files import matched
from partita.runtime.data.jsonl import check_unicode, kind_of, records
from partita.runtime.data.packed_rows import check_lengths
from partita.runtime.data.packing import Packed, open_packed
from partita.runtime.data.registry import Use
from partita.runtime.data.templates import Template, template_of
from partita.runtime.data.windows import length_of, share_held_out

LEFT_OUT = 2  # at the first id of a conversation: some of its turns are not learned
SHOWN = 400  # characters of each end of a long conversation
ALONE = "a line for each such answer, which ends with it; or a template that marks answers by `{% generation %}`"
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}  # of ShareGPT
SPACES = "\u010a\u0120\u2581 \n"  # also as tokenizers of bytes, and of words, write them
FORMS = "a line has `messages`, or `conversations` (ShareGPT), or `instruction` and `output` (Alpaca)"


@frozen(eq=False)
class Chats:
    """An `Encoder` of conversations: their `ids`, or whether each is `learned`."""

    tokens: Tokens
    template: Template
    kind: str
    _special: Mapping[int, Any] = field(
        init=False, default=Factory(lambda self: self.tokens.tokenizer.get_added_tokens_decoder(), takes_self=True)
    )

    @property
    def digest(self) -> str:
        """By the tokenizer, the template, and what of conversations it is."""
        return f"{self.tokens.digest} {self.template.digest} {self.kind}"

    @property
    def last(self) -> np.ndarray:
        """None: the template ends conversations."""
        return np.array([], self.dtype)

    @property
    def dtype(self) -> np.dtype:
        """What is stored for each id."""
        return self.tokens.dtype if self.kind == "ids" else np.dtype("u1")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Of each conversation its ids, or 1 where they are learned and 0 where not. Raises Refused (E0616)."""
        return [self.encoded(json.loads(text)) for text in texts]

    def encoded(self, chat: Mapping[str, Any]) -> np.ndarray:
        """Of one conversation the same."""
        text, spans = self.template.rendered(chat)
        whole = self._ids_of(text)
        if self.kind == "ids":
            return np.array(whole.ids, self.dtype)
        learned = np.zeros(len(whole.ids), self.dtype)
        left_out = False
        for start, end in spans:
            first, last = whole.char_to_token(start), whole.char_to_token(end - 1)
            if first is not None:
                learned[first : len(learned) if last is None else last + 1] = 1
        for before, until, asked in self.template.turns(chat):
            first, end = self._turn(whole, before, until, asked) if text.startswith(before) else (0, 0)
            learned[first:end] = 1
            left_out |= first == end
        if not learned[1:].any() or (learned[1:].all() and not left_out):
            part, help = ("everything", "see what the template marks") if learned[1:].any() else ("nothing", ALONE)
            if not any(each["role"] == "assistant" for each in chat["messages"]):
                help = "a conversation has a turn of the assistant"
            notes = [self.shown(whole.ids, learned)]
            raise refuse("E0616", f"of {chat['where']} {part} is learned", self.template.span, notes=notes, help=help)
        if left_out:
            learned[0] = LEFT_OUT  # it is no target of any other
        return learned

    def shown(self, ids: Sequence[int], learned: np.ndarray) -> str:
        """The text of ids in one line, in which what is learned stands in ⟦⟧; of a long one the ends."""
        counted = (learned > 0) & (np.arange(len(ids)) > 0)
        parts = []
        for counts, part in groupby(zip(counted.tolist(), ids, strict=True), key=lambda each: each[0]):
            text = self.tokens.tokenizer.decode([id for _, id in part], skip_special_tokens=False)
            parts.append(f"⟦{text}⟧" if counts else text)
        text = shown("".join(parts))
        return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} … {text[-SHOWN:]}"

    def _turn(self, whole: Any, before: str, until: str, asked: str) -> tuple[int, int]:
        """Where a turn is among the ids of a whole conversation: to its last special token, if it has one, without line
        breaks behind that, nor what ends conversations. None of it, if there is more in it than in the conversation.
        """
        special = self._special
        own, other = (self._ids_of(each).ids for each in (until, asked))
        first = whole.char_to_token(len(before))
        begin = len(whole.ids) if first is None else first
        if any(each not in special for each in own[_same(own, whole.ids) :]):
            return begin, begin
        same = _same(own, whole.ids)
        end = min(same, _same(other, whole.ids))
        last = next((i for i in reversed(range(begin, end)) if whole.ids[i] in special), end - 1)
        if all(not token.strip(SPACES) for token in whole.tokens[last + 1 : end]):
            return begin, last + 1
        ends = end < same and whole.ids[end] in special  # only the last turn ends so
        return begin, end + ends

    def _ids_of(self, text: str) -> Any:
        return self.tokens.tokenizer.encode(text, add_special_tokens=False)


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids are the same from the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def open_chats(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Packed:
    """The dataset of conversations, one in a row or whole ones packed. Raises Refused (E06xx)."""
    (corpus, learned), chats = _opened(call, root, "ids", "learned")
    pattern = call.arguments["glob"]
    check_documents(corpus, inputs, f"`{pattern}`", call.span)
    if not call.arguments["cut"]:
        check_lengths(
            corpus,
            length_of(inputs, call.span),
            lambda number: f"conversation {number} of `{pattern}`",
            "each is cut into rows, also within an answer",
            call.span,
            partial(_row, corpus, learned, chats),
        )
    return open_packed(
        corpus.ids,
        corpus.ends,
        f"`{pattern}`",
        inputs,
        seed,
        share_held_out(call, use),
        use,
        call.span,
        learned=learned.ids,
        alone=not call.arguments["pack"],
    )


def turns_left_out(call: Call, root: Path) -> list[Diagnostic]:
    """A warning (W0609) of conversations some of whose turns are not learned. Raises Refused (E06xx)."""
    (learned,), _ = _opened(call, root, "learned")
    if learned.largest != LEFT_OUT:
        return []
    numbers = np.flatnonzero(np.asarray(learned.ids)[learned.starts] == LEFT_OUT)
    what = f"{len(numbers):,} of {count(len(learned.ends), 'conversation')} in `{call.arguments['glob']}`"
    what += " have turns of the assistant that are not learned: the template writes them otherwise than alone"
    (corpus,), chats = _opened(call, root, "ids")
    first = _row(corpus, learned, chats, int(numbers[0]))
    return [Diagnostic("W0609", what, call.span, notes=(f"conversation {numbers[0]}: {first}",), help=ALONE)]


def _opened(call: Call, root: Path, *kinds: str) -> tuple[list[Documents], Chats]:
    """What of a call's conversations, by its kind, and what has made the last of it. Raises Refused (E06xx)."""
    tokens = encoder_of(call, root, special=False)
    assert isinstance(tokens, Tokens)  # a tokenizer is given
    template = template_of(call.arguments["tokenizer"], root, call.span)
    files = matched("glob")(call, root)

    def read(path: Path, name: str) -> Iterator[tuple[str, bool]]:
        for record, where in records(path, name, call.span):
            yield written(_conversation(record, where, call.span), where, call.span), True

    chats = [Chats(tokens, template, kind) for kind in kinds]
    return [documents(files, read, "chat", each, call.span) for each in chats], chats[-1]


def written(chat: Mapping[str, Any], where: str, span: Span | None) -> str:
    """A conversation, or what else a line has, as a document. Raises Refused (E0616)."""
    text = json.dumps({**chat, "where": where}, ensure_ascii=False)
    check_unicode(text, where, span, "correct that line")
    return text


def end_of_turn(tokens: Tokens, template: Template) -> int | None:
    """The special token with which a turn of the assistant ends, if there is one. Raises Refused (E0616)."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = json.dumps({"messages": messages, "where": "a turn"})
    (ids,), (learned,) = (Chats(tokens, template, kind).encode([text]) for kind in ("ids", "learned"))
    last = int(ids[np.flatnonzero(learned)[-1]])
    return last if last in tokens.tokenizer.get_added_tokens_decoder() else None


def _row(corpus: Documents, learned: Documents, chats: Chats, number: int) -> str:
    """A conversation, for messages."""
    part = slice(int(corpus.starts[number]), int(corpus.ends[number]))
    return chats.shown(np.asarray(corpus.ids[part]).tolist(), np.asarray(learned.ids[part]))


def _conversation(record: dict[str, Any], where: str, span: Span | None) -> dict[str, Any]:
    """The messages of a line, and the tools. Raises Refused (E0616)."""
    if "messages" in record:
        found = {"messages": messages_of(record["messages"], "messages", where, span, FORMS)}
        return found | read_by_template(record, where, span)
    if "conversations" in record:
        turns = _listed(record["conversations"], "conversations", where, span, FORMS)
        if not all(isinstance(each, dict) and {"from", "value"} <= each.keys() for each in turns):
            raise refuse("E0616", f"a turn in {where} has no `from` and `value`", span, help=FORMS)
        return {
            "messages": [{"role": ROLES.get(each["from"], each["from"]), "content": each["value"]} for each in turns]
        }
    if {"instruction", "output"} <= record.keys():
        asked = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
        answer = {"role": "assistant", "content": record["output"]}
        system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
        return {"messages": [*system, {"role": "user", "content": asked}, answer]}
    help = '`preferences("…")` reads pairs of answers' if {"chosen", "rejected"} <= record.keys() else FORMS
    raise refuse("E0616", f"{where} is no conversation", span, help=help)


def read_by_template(record: Mapping[str, Any], where: str, span: Span | None) -> dict[str, Any]:
    """What else of a line a template reads. Raises Refused (E0616)."""
    kwargs = record.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise refuse("E0616", f"`chat_template_kwargs` in {where} is {kind_of(kwargs)}, not an object", span)
    return {"chat_template_kwargs": kwargs} | ({"tools": record["tools"]} if record.get("tools") else {})


def messages_of(value: object, name: str, where: str, span: Span | None, help: str) -> list[Any]:
    """What is a list of messages. Raises Refused (E0616)."""
    messages = _listed(value, name, where, span, help)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise refuse("E0616", f"a message in {where} has no `role`", span, help=help)
    return messages


def _listed(value: object, name: str, where: str, span: Span | None, help: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise refuse("E0616", f"`{name}` in {where} is {what}, not a list of messages", span, help=help)
    return value
