"""How a tokenizer writes conversations: by its template of Jinja, as transformers renders it.

A template may ask for the date. Where conversations are data it is always `DATE`, so that their ids are the same on all
machines and days.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import field, frozen

from partita.dsl.diagnostic import refuse, shown
from partita.dsl.syntax.source import Span
from partita.runtime.data.files import read, tokenizer_file
from partita.runtime.data.packages import package

DATE = datetime(2025, 1, 1)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = re.compile(r"strftime_now\(\s*(['\"])([^'\"]*)\1\s*\)")


@frozen(eq=False)
class Template:
    """How a tokenizer writes conversations: a template of Jinja, and what else it reads, the special tokens."""

    text: str
    special: Mapping[str, str]
    span: Span | None
    _render: Any = field(repr=False)

    @property
    def digest(self) -> str:
        """By its text, the special tokens and the date."""
        parts = [self.text, self.special, DATE.isoformat()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def rendered(self, chat: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and from where to where the template marks it as what the assistant says, from the
        message `first` on. Raises Refused (E0616).
        """
        messages, first = chat["messages"], chat.get("first", 0)
        text, spans = self._written(messages, chat, return_assistant_tokens_mask=self.marks)
        if not first or not spans:
            return text, spans
        _, earlier = self._written(messages[:first], chat, return_assistant_tokens_mask=True)
        return text, spans[len(earlier) :]

    def turns(self, chat: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        """Of each turn of the assistant, from the message `first` on, the text before it, that with it, and that with
        the prompt to go on; none if the template marks them. Raises Refused (E0616).
        """
        messages, first = chat["messages"], chat.get("first", 0)
        for i, message in enumerate(messages):
            if i >= first and message["role"] == "assistant" and not self.marks:
                before = self.prompt(chat, i)
                until, _ = self._written(messages[: i + 1], chat)
                yield before, until, self.prompt(chat, i + 1)

    def prompt(self, chat: Mapping[str, Any], count: int | None = None, date: datetime = DATE) -> str:
        """The first messages of a conversation (default: all), and the beginning of an answer to them. Raises Refused
        (E0616).
        """
        return self._written(chat["messages"][:count], chat, date, add_generation_prompt=True)[0]

    @property
    def marks(self) -> bool:
        """Whether the template marks what the assistant says."""
        return bool(GENERATION.search(self.text))

    def _written(
        self, messages: Sequence[Any], chat: Mapping[str, Any], date: datetime = DATE, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        text = CLOCK.sub(lambda call: json.dumps(date.strftime(call[2])), self.text)
        given = {**chat.get("chat_template_kwargs", {}), "tools": chat.get("tools"), "chat_template": text}
        try:
            (text,), *found = self._render(**{**given, **self.special, **options, "conversations": [list(messages)]})
        except Exception as error:  # whatever a template raises
            reason = shown(str(error).split("\n")[0])
            raise refuse("E0616", f"the template cannot write {chat['where']}: {reason}", self.span) from error
        return text, found[0][0] if found and found[0] else []


def template_of(tokenizer: str | Path, root: Path, span: Span | None) -> Template:
    """The template of a tokenizer, which is a folder, or a file in one. Raises Refused (E06xx)."""
    found = template_if_any(tokenizer, root, span)
    if found is None:
        help = "`chat_template.jinja` beside it says how conversations are written; `save_pretrained` writes it"
        raise refuse("E0619", f"`{tokenizer}` has no template for chats", span, help=help)
    return found


def template_if_any(tokenizer: str | Path, root: Path, span: Span | None) -> Template | None:
    """The same, or None where there is none. Raises Refused (E06xx)."""
    folder = tokenizer_file(tokenizer, root, span).parent
    config, own = json_object(folder / "tokenizer_config.json", span), folder / "chat_template.jinja"
    template = read(own, span).decode(errors="replace") if own.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((each["template"] for each in template if each["name"] == "default"), None)
    if not isinstance(template, str):
        return None
    library = package("transformers.utils.chat_template_utils", "chat", "a template for chats", span)
    package("jinja2", "chat", "a template for chats", span)
    return Template(template, special_tokens(config), span, library.render_jinja_template)


def json_object(path: Path, span: Span | None) -> dict[str, Any]:
    """The object in a file, empty where there is no file. Raises Refused (E0603, E0619)."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(read(path, span))
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        help = "`save_pretrained` of transformers writes it"
        raise refuse("E0619", f"cannot read `{path.name}` beside the tokenizer: {error}", span, help=help) from error
    return found


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by their names, such as `eos_token`, of a `tokenizer_config.json`."""
    return {
        key: each["content"] if isinstance(each, dict) else each
        for key, each in config.items()
        if key.endswith("_token") and isinstance(each, str | dict)
    }
