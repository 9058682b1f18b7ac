"""How text becomes ids and ids text: bytes, the characters of the training text, or a `tokenizer.json`.

Each has `ends`: ids that end a text, one after the other. They are what the data calls `end`, and what the folder of a
tokenizer says of its model: the `eos_token` of tokenizer_config.json, the `eos_token_id` of generation_config.json.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from attrs import frozen

from partita.dsl.check.language_model import spelling_of
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.addresses import PathOrUrl
from partita.runtime.data.encoders import Tokens, encoder_of
from partita.runtime.data.files import tokenizer_file
from partita.runtime.data.registry import with_training_arguments
from partita.runtime.data.templates import json_object, special_tokens
from partita.runtime.data.text import alphabet_of

# Sequences of ids, each of which ends a text.
Ends: TypeAlias = tuple[tuple[int, ...], ...]


@frozen
class Bytes:
    """UTF-8: an id is a byte. What is not UTF-8 becomes U+FFFD."""

    ends: Ends = ()

    def ids(self, text: str, place: Span | None = None) -> list[int]:
        """The ids of a text, which stands at a place: its bytes."""
        return list(text.encode("utf-8", "surrogateescape"))

    def text(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids, in pieces, each as soon as it is certain: a character when its last byte is there."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for id in ids:
            yield decoder.decode(bytes([id]) if id < 256 else b"\xff")
        yield decoder.decode(b"", final=True)


@frozen
class Characters:
    """An id is the number of a character in a sorted alphabet."""

    alphabet: str
    ends: Ends = ()

    def ids(self, text: str, place: Span | None = None) -> list[int]:
        """The characters' numbers. Raises Refused (E1002) for one that the alphabet lacks."""
        numbers = {character: number for number, character in enumerate(self.alphabet)}
        for character in text:
            if character not in numbers:
                what = f"the prompt has {character!r}, which is not in the text that the model learns"
                raise refuse("E1002", what, place)
        return [numbers[character] for character in text]

    def text(self, ids: Iterable[int]) -> Iterator[str]:
        """Each character."""
        for id in ids:
            yield self.alphabet[id] if id < len(self.alphabet) else "\ufffd"


@frozen(eq=False)
class Tokenizer:
    """A tokenizer of the `tokenizers` library."""

    loaded: Any
    ends: Ends = ()

    def ids(self, text: str, place: Span | None = None) -> list[int]:
        """Its ids, with the special ones that it puts around a text."""
        return list(self.loaded.encode(text).ids)

    def text(self, ids: Iterable[int]) -> Iterator[str]:
        """What is certain of the text: all but what may still be a part of a character."""
        all: list[int] = []
        shown = ""
        for id in ids:
            all.append(id)
            now = self.loaded.decode(all)
            if now.startswith(shown) and not now.endswith("\ufffd"):
                yield now[len(shown) :]
                shown = now
        now = self.loaded.decode(all)
        yield now[len(shown) :] if now.startswith(shown) else ""


# How a text becomes ids, and ids text.
Encoding: TypeAlias = Bytes | Characters | Tokenizer


def encoding_of(data: Call, folder: Path, tokenizer: PathOrUrl | None) -> Encoding:
    """The encoding of a file's data, which lies in a folder, or that of a `tokenizer`.

    Raises Refused (E1003; E0601 to E0603, E0617, E0619).
    """
    if tokenizer is not None:
        return _tokenizer(tokenizer if isinstance(tokenizer, Path) else str(tokenizer), folder, None)
    trained = data
    data = spelling_of(trained, help="name a tokenizer: `--tokenizer tokenizer.json`")
    arguments = data.arguments
    end = arguments.get("end")
    if arguments.get("tokenizer") is not None:
        return _tokenizer(arguments["tokenizer"], folder, data.span, end)
    if arguments.get("alphabet") == "chars":
        return Characters(alphabet_of(with_training_arguments(data, trained, folder), folder))
    return Bytes((tuple(end.encode()),) if end else ())


def _tokenizer(name: str | Path, folder: Path, span: Span | None, end: str | None = None) -> Tokenizer:
    """The encoding of a `tokenizer.json`, or of one in a folder."""
    encoder = encoder_of(Call("text", {"tokenizer": name, "end": end}, span), folder)
    assert isinstance(encoder, Tokens)
    ends = [] if encoder.end is None else [encoder.end]
    return Tokenizer(
        encoder.tokenizer, tuple((id,) for id in dict.fromkeys((*ends, *_eos(name, folder, span, encoder))))
    )


def _eos(name: str | Path, folder: Path, span: Span | None, encoder: Tokens) -> Iterator[int]:
    """The ids that the files beside a tokenizer say end a text."""
    beside = tokenizer_file(name, folder, span).parent
    eos = special_tokens(json_object(beside / "tokenizer_config.json", span)).get("eos_token")
    id = encoder.tokenizer.token_to_id(eos) if eos is not None else None
    if id is not None:
        yield id
    ids = json_object(beside / "generation_config.json", span).get("eos_token_id")
    yield from (each for each in (ids if isinstance(ids, list) else [ids]) if isinstance(each, int))
