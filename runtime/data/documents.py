"""Documents: what `jsonl` and `parquet` read, and `text` with a tokenizer; encoded once and kept as ids.

Each file is an entry of the cache (`partita.runtime.data.cache`) by its content, how documents are read from it, and
how they are encoded. A changed file is another entry, and so is one read with another tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data import cache
from partita.runtime.data.cache import Documents
from partita.runtime.data.dataset import Input
from partita.runtime.data.encoders import Encoder, encoder_of
from partita.runtime.data.files import matched, readable
from partita.runtime.data.ids import joined
from partita.runtime.data.packing import Packed, open_packed
from partita.runtime.data.registry import Use
from partita.runtime.data.windows import ONE_SEGMENT, SHIFT, Windows, check_largest, open_windows, share_held_out
from partita.runtime.data_files import WHOLE, hashed

if TYPE_CHECKING:
    from partita.runtime.data.dataset import Dataset

VERSION = 1  # of what is kept
# How much is encoded at once: documents, and characters.
MAX_AT_ONCE, MAX_CHARACTERS = 4096, 1 << 21

# The documents of a file, by its path and its name in messages: texts, and whether a document ends with them. Raises
# Refused and OSError.
Reader: TypeAlias = Callable[[Path, str], Iterator[tuple[str, bool]]]


def documents(
    files: Sequence[tuple[str, Path]], read: Reader, how: str, encoder: Encoder, span: Span | None
) -> Documents:
    """The documents of files, by name and path, in order. `how` identifies what `read` does.

    Raises Refused (E0603, E0616, E0618).
    """
    entries = [_entry(name, path, read, how, encoder, span) for name, path in files]
    starts = np.cumsum([0, *(len(each.ids) for each in entries)])
    ends = np.concatenate([each.ends + start for each, start in zip(entries, starts[:-1], strict=True)])
    return Documents(joined([each.ids for each in entries]), ends, max(each.largest for each in entries))


def check_documents(corpus: Documents, inputs: Sequence[Input], what: str, span: Span | None) -> None:
    """Refuse (E0605) a largest id that is out of range for an input."""
    for model_input in inputs:
        if model_input.column in SHIFT:
            check_largest(corpus.largest, model_input, what, span)


def open_documents(
    call: Call,
    inputs: tuple[Input, ...],
    seed: int,
    root: Path,
    use: Use,
    files: Sequence[tuple[str, Path]],
    read: Reader,
    how: str,
    separate: bool = True,
) -> Dataset:
    """The dataset of a source of documents: packed rows, or windows of all of them, one after the other.

    `separate`: they are documents, and not one continuous text.
    """
    check_separate(call, inputs, separate)
    corpus = documents(files, read, how, encoder_of(call, root, separate), call.span)
    return open_corpus(corpus, call, inputs, seed, use, f"`{call.arguments['glob']}`")


def open_corpus(
    corpus: Documents, call: Call, inputs: tuple[Input, ...], seed: int, use: Use, what: str
) -> Packed | Windows:
    """The dataset of documents: packed rows, or windows, as a call says; `what` they are in messages."""
    check_documents(corpus, inputs, what, call.span)
    holdout = share_held_out(call, use)
    if call.arguments.get("pack", False):
        return open_packed(corpus.ids, corpus.ends, what, inputs, seed, holdout, use, call.span)
    return open_windows(corpus.ids, what, inputs, seed, holdout, use, call.span)


def open_records(
    call: Call,
    inputs: tuple[Input, ...],
    seed: int,
    root: Path,
    use: Use,
    read: Callable[[Path, str, str, Span | None], Iterator[str]],
    argument: str,
) -> Dataset:
    """The dataset of a source whose files have records, of which what an `argument` of the call names is a document.
    `read` gives those of a file, by its path, its name in messages, and that name.
    """
    key = call.arguments[argument]

    def documents(path: Path, name: str) -> Iterator[tuple[str, bool]]:
        return ((text, True) for text in read(path, name, key, call.span))

    files = matched("glob")(call, root)
    return open_documents(call, inputs, seed, root, use, files, documents, f"{call.name} {key}")


def check_separate(call: Call, inputs: tuple[Input, ...], separate: bool = True) -> None:
    """Refuse (E0606) what only packed rows have: windows of separate documents would pass them off as one."""
    unsupported = [each.name for each in inputs if each.name in ONE_SEGMENT]
    if separate and unsupported and not call.arguments.get("pack", False):
        raise refuse(
            "E0606",
            f"the data has no input called `{unsupported[0]}`",
            call.span,
            help="`pack = true` fills rows with whole documents, and yields it",
        )


def _entry(name: str, path: Path, read: Reader, how: str, encoder: Encoder, span: Span | None) -> Documents:
    with readable(name, span):
        status = path.stat()
        content = hashed(path, status.st_size)
    # Of a large file only blocks are hashed: an edit between them is known by the time at which it was made.
    modified = status.st_mtime_ns if status.st_size > WHOLE else 0
    identity = json.dumps([VERSION, content, status.st_size, modified, how, encoder.digest])
    key = hashlib.sha256(identity.encode()).hexdigest()[:40]
    return cache.entry(key, lambda: _encoded(path, name, read, encoder, span), encoder.dtype, span)


def _encoded(path: Path, name: str, read: Reader, encoder: Encoder, span: Span | None) -> Iterator[cache.Part]:
    """The ids of a file's documents."""
    with readable(name, span):
        for some in groups(read(path, name), MAX_AT_ONCE):
            yield from encoded(some, encoder)


def groups(texts: Iterable[tuple[str, bool]], count: int) -> Iterator[list[tuple[str, bool]]]:
    """Texts, and whether documents end with them, a few at a time: so many, or those that make up a few megabytes."""
    some: list[tuple[str, bool]] = []
    size = 0
    for text, last in texts:
        some.append((text, last))
        size += len(text)
        if size >= MAX_CHARACTERS or len(some) >= count:
            yield some
            some, size = [], 0
    if some:
        yield some


def encoded(texts: Sequence[tuple[str, bool]], encoder: Encoder) -> Iterator[cache.Part]:
    """The ids of texts, and whether documents end with them."""
    for ids, (_, last) in zip(encoder.encode([text for text, _ in texts]), texts, strict=True):
        yield np.concatenate([ids, encoder.last]) if last and len(encoder.last) else ids, last
