"""How documents become ids: as their bytes, or by a tokenizer.

A tokenizer is a `tokenizer.json` of Hugging Face's `tokenizers`. Its post-processor decides what stands at the ends of
a document (a Llama tokenizer begins each with an id of its own); `end` adds one more token. Its settings to truncate or
to pad are ignored: nothing is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import frozen

from partita.dsl.diagnostic import refuse, shown
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data.files import listed, read, tokenizer_file
from partita.runtime.data.packages import package


class Encoder(Protocol):
    """Turns texts into ids."""

    @property
    def digest(self) -> str:
        """Identifies everything that the ids depend on besides the text."""

    @property
    def last(self) -> np.ndarray:
        """The ids that end every document."""

    @property
    def dtype(self) -> np.dtype:
        """What the ids are stored as."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without those at the end."""


@frozen
class Bytes:
    """UTF-8; `end` ends every document."""

    end: str = ""

    @property
    def digest(self) -> str:
        """By what is appended."""
        return f"bytes {self.end!r}"

    @property
    def last(self) -> np.ndarray:
        """The bytes of `end`."""
        return np.frombuffer(self.end.encode(), np.uint8)

    @property
    def dtype(self) -> np.dtype:
        """A byte."""
        return np.dtype("u1")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


@frozen(eq=False)
class Tokens:
    """A tokenizer's ids; `end`, an id, ends every document. `special`: as its post-processor has it."""

    tokenizer: Any
    file: str
    dtype: np.dtype  # as narrow as the vocabulary permits
    end: int | None
    special: bool

    @property
    def digest(self) -> str:
        """By the tokenizer's file and what is appended."""
        return f"tokenizer {self.file} {self.end} {self.special}"

    @property
    def last(self) -> np.ndarray:
        """`end`."""
        return np.array([] if self.end is None else [self.end], self.dtype)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, on all cores."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=self.special)
        return [np.array(each.ids, self.dtype) for each in encodings]


def encoder_of(call: Call, root: Path, special: bool = True) -> Encoder:
    """What the `tokenizer` and `end` of a call say. Raises Refused (E0601 to E0603, E0617, E0619)."""
    name, end, span = call.arguments.get("tokenizer"), call.arguments.get("end"), call.span
    if name is None:
        return Bytes(end or "")
    content = read(tokenizer_file(name, root, span), span)
    tokenizer = _loaded(content, name, span)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    dtype = np.dtype("<u2" if largest < 1 << 16 else "<u4")
    return Tokens(tokenizer, hashlib.sha256(content).hexdigest(), dtype, _end(tokenizer, end, name, span), special)


def _loaded(content: bytes, name: str, span: Span | None) -> Any:
    tokenizers = package("tokenizers", "data", "`tokenizer`", span)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except Exception as error:  # the library raises nothing narrower
        reason = shown(str(error).split("\n")[0])
        raise refuse(
            "E0619",
            f"`{name}` is not a tokenizer: {reason}",
            span,
            help="`tokenizer.save(path)` of the package tokenizers writes one, and so does `save_pretrained` of a fast "
            "tokenizer of transformers, as tokenizer.json",
        ) from error
    return tokenizer


def _end(tokenizer: Any, end: str | None, name: str, span: Span | None) -> int | None:
    """The id of the token that `end` names."""
    if end is None:
        return None
    token_id: int | None = tokenizer.token_to_id(end)
    if token_id is None:
        special = [each.content for each in tokenizer.get_added_tokens_decoder().values()]
        raise refuse(
            "E0619",
            f"`{name}` has no token `{shown(end)}`",
            span,
            notes=[f"its special tokens: {listed(special)}"] if special else (),
            help="`end` is one token of the vocabulary",
        )
    return token_id
