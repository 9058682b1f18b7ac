"""A conversation with a model: what is said to it becomes a prompt by the template of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import Factory, define, evolve

from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.conversations import end_of_turn
from partita.runtime.data.encoders import Tokens, encoder_of
from partita.runtime.data.templates import Template, template_of
from partita.runtime.inference.encoding import Tokenizer


@define(eq=False)
class Conversation:
    """What has been said. `encoding` ends a text where a turn of the model ends."""

    encoding: Tokenizer
    template: Template
    options: Mapping[str, Any] = Factory(dict)  # what else the template reads
    messages: list[dict[str, str]] = Factory(list)

    def say(self, role: str, content: str) -> None:
        """Add a turn."""
        self.messages.append({"role": role, "content": content})

    def prompt(self, now: datetime) -> list[int]:
        """The ids of the conversation with the beginning of an answer. Raises Refused (E0616)."""
        chat = {"messages": self.messages, "chat_template_kwargs": self.options, "where": "the conversation"}
        text = self.template.prompt(chat, date=now)
        return list(self.encoding.loaded.encode(text, add_special_tokens=False).ids)


def conversation_of(
    encoding: Tokenizer, name: str | Path, folder: Path, span: Span | None, options: Mapping[str, Any]
) -> Conversation:
    """A conversation by the template of a tokenizer. Raises Refused (E0601 to E0603, E0616, E0617, E0619)."""
    tokens = encoder_of(Call("text", {"tokenizer": name}, span), folder)
    assert isinstance(tokens, Tokens)
    template = template_of(name, folder, span)
    end = end_of_turn(tokens, template)
    ends = encoding.ends if end is None else tuple(dict.fromkeys((*encoding.ends, (end,))))
    return Conversation(evolve(encoding, ends=ends), template, options)
