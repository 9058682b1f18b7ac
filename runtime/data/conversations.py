"""Conversations as ids, and which of these are learned: by the template of the tokenizer, as transformers renders it.

What the assistant says is learned, with the end of its turn. Where the template marks that (`{% generation %}`), its
marks say what; or else the difference of renderings: a turn is what follows the rendering of all before it, with the
prompt to answer. A template may write earlier turns otherwise than the last, without the thoughts of a model, say: what
is written otherwise is not learned.

A conversation is a document (`partita.runtime.data.documents`) whose text is JSON; its ids are one entry of the cache,
and whether each is learned another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from attrs import Factory, field, frozen

from partita.dsl.diagnostic import refuse, shown
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.chat import template_files
from partita.runtime.data.dataset import Input
from partita.runtime.data.documents import check_documents, documents
from partita.runtime.data.encoders import Tokens, encoder_of
from partita.runtime.data.files import matched
from partita.runtime.data.jsonl import kind_of, records
from partita.runtime.data.packages import package
from partita.runtime.data.packing import Packed, open_packed
from partita.runtime.data.registry import Use
from partita.runtime.data.windows import length_of, share_held_out

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}  # of ShareGPT
SPACES = "\u010a\u0120\u2581 \n"  # also as tokenizers of bytes, and of words, write them
FORMS = "a line has `messages`, or `conversations` (ShareGPT), or `instruction` and `output` (Alpaca)"


@frozen(eq=False)
class Template:
    """How a tokenizer writes conversations: a template of Jinja, and what else it reads, the special tokens."""

    text: str
    special: Mapping[str, str]
    span: Span | None
    _render: Any = field(repr=False)

    @property
    def digest(self) -> str:
        """By its text and the special tokens."""
        return hashlib.sha256(json.dumps([self.text, self.special], sort_keys=True).encode()).hexdigest()

    def rendered(self, chat: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and from where to where the template marks it as what the assistant says. Raises
        Refused (E0616).
        """
        return self._written(chat["messages"], chat, return_assistant_tokens_mask=self.marks)

    def turns(self, chat: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        """Of each turn of the assistant the text before it, that with it, and that with the prompt to go on; none if
        the template marks them. Raises Refused (E0616).
        """
        messages = chat["messages"]
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and not self.marks:
                before, _ = self._written(messages[:i], chat, add_generation_prompt=True)
                until, _ = self._written(messages[: i + 1], chat)
                asked, _ = self._written(messages[: i + 1], chat, add_generation_prompt=True)
                yield before, until, asked

    @property
    def marks(self) -> bool:
        """Whether the template marks what the assistant says."""
        return bool(GENERATION.search(self.text))

    def _written(
        self, messages: Sequence[Any], chat: Mapping[str, Any], **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        given = {"tools": chat.get("tools"), "chat_template": self.text, **self.special, **options}
        try:
            (text,), *found = self._render(conversations=[list(messages)], **given)
        except Exception as error:  # whatever a template raises
            reason = shown(str(error).split("\n")[0])
            raise refuse("E0616", f"the template cannot write {chat['where']}: {reason}", self.span) from error
        return text, found[0][0] if found and found[0] else []


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
        return [self._encoded(json.loads(text)) for text in texts]

    def _encoded(self, chat: Mapping[str, Any]) -> np.ndarray:
        text, spans = self.template.rendered(chat)
        whole = self._ids_of(text)
        if self.kind == "ids":
            return np.array(whole.ids, self.dtype)
        learned = np.zeros(len(whole.ids), self.dtype)
        for start, end in spans:
            first, last = whole.char_to_token(start), whole.char_to_token(end - 1)
            if first is not None:
                learned[first : len(learned) if last is None else last + 1] = 1
        for before, until, asked in self.template.turns(chat):
            if text.startswith(before):
                learned[slice(*self._turn(whole, before, until, asked))] = 1
        if not learned.any():
            help = "a conversation has a turn of the assistant, which the template does not write otherwise than alone"
            raise refuse("E0616", f"{chat['where']} has nothing that is learned", self.template.span, help=help)
        return learned

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
        end = min(_same(own, whole.ids), _same(other, whole.ids))
        last = next((i for i in reversed(range(begin, end)) if whole.ids[i] in special), end - 1)
        spaces = all(not token.strip(SPACES) for token in whole.tokens[last + 1 : end])
        return begin, last + 1 if spaces else end

    def _ids_of(self, text: str) -> Any:
        return self.tokens.tokenizer.encode(text, add_special_tokens=False)


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids are the same from the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def open_chats(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Packed:
    """The dataset of conversations, whole ones in rows. Raises Refused (E06xx)."""
    tokens = encoder_of(call, root, special=False)
    assert isinstance(tokens, Tokens)  # a tokenizer is given
    template = _template(call, root)
    files = matched("glob")(call, root)
    pattern = call.arguments["glob"]

    def read(path: Path, name: str) -> Iterator[tuple[str, bool]]:
        for record, where in records(path, name, call.span):
            yield json.dumps({**_conversation(record, where, call.span), "where": where}), True

    corpus, learned = (
        documents(files, read, "chat", Chats(tokens, template, kind), call.span) for kind in ("ids", "learned")
    )
    check_documents(corpus, inputs, f"`{pattern}`", call.span)
    length = length_of(inputs, call.span)
    sizes = np.diff(corpus.ends, prepend=0)
    if len(sizes) and sizes.max() > length and not call.arguments["cut"]:
        raise refuse(
            "E0607",
            f"conversation {int(sizes.argmax())} of `{pattern}` has {int(sizes.max()):,} ids, and a row has {length:,}",
            call.span,
            notes=[f"{int((sizes > length).sum()):,} of {len(sizes):,} are longer than a row"],
            help="a longer sequence; or `cut = true`, by which each is cut into rows, also within an answer",
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
    )


def _template(call: Call, root: Path) -> Template:
    """The template of a call's tokenizer. Raises Refused (E0617, E0619)."""
    name = call.arguments["tokenizer"]
    found = {path.name: path.read_text(encoding="utf-8") for _, path in template_files(name, root, call)}
    config = json.loads(found.get("tokenizer_config.json", "{}"))
    template = found.get("chat_template.jinja", config.get("chat_template"))
    if isinstance(template, list):  # several, by name
        template = next((each["template"] for each in template if each["name"] == "default"), None)
    if not isinstance(template, str):
        help = "`chat_template.jinja` beside it says how conversations are written; `save_pretrained` writes it"
        raise refuse("E0619", f"`{name}` has no template for chats", call.span, help=help)
    library = package("transformers.utils.chat_template_utils", "chat", "`chat`", call.span)
    package("jinja2", "chat", "`chat`", call.span)
    special = {
        key: each["content"] if isinstance(each, dict) else each
        for key, each in config.items()
        if key.endswith("_token") and isinstance(each, str | dict)
    }
    return Template(template, special, call.span, library.render_jinja_template)


def _conversation(record: dict[str, Any], where: str, span: Span | None) -> dict[str, Any]:
    """The messages of a line, and the tools. Raises Refused (E0616)."""
    if "messages" in record:
        found = {"messages": _listed(record["messages"], "messages", where, span)}
        for message in found["messages"]:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise refuse("E0616", f"a message in {where} has no `role`", span, help=FORMS)
        return found | ({"tools": record["tools"]} if record.get("tools") else {})
    if "conversations" in record:
        turns = _listed(record["conversations"], "conversations", where, span)
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
    raise refuse("E0616", f"{where} is no conversation", span, help=FORMS)


def _listed(value: object, name: str, where: str, span: Span | None) -> list[Any]:
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise refuse("E0616", f"`{name}` in {where} is {what}, not a list of messages", span, help=FORMS)
    return value
