"""Documents of the hub, read while a run uses them: what `hub` yields (`partita.runtime.data.hub`).

The files of a split are dealt to *lanes*, in an order that is new every epoch; and so are the rows of a batch, so that
a rank reads the lanes of its rows. There are as many lanes as divide the batch, and no more than files: how many ranks
there are does not matter. A lane encodes documents until they are enough for a *block*, or the epoch ends. The rows of
a block come in an order by (seed, lane, block): packed ones; or windows that follow each other, of which the last ends
with the block, and begins before the end of the one in front of it. So a block depends on nothing but the place where
it begins, in a file of an epoch. These places are kept in the cache: a run that resumes reads on from the last one
before its step, and without them counts from the beginning, to the same rows.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from attrs import Factory, asdict, define, field, frozen

from partita.dsl.check.exclusions import OWN_DATA
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Span
from partita.runtime.data import cache
from partita.runtime.data.cache import starts_of
from partita.runtime.data.dataset import Batch, Dataset, Input
from partita.runtime.data.documents import MAX_AT_ONCE, check_separate, encoded, groups, open_corpus
from partita.runtime.data.encoders import Encoder, encoder_of
from partita.runtime.data.epochs import permutation
from partita.runtime.data.hub import what_is_read
from partita.runtime.data.jsonl import text_of, without
from partita.runtime.data.packed_rows import packed
from partita.runtime.data.packing import Packed, check_ignored
from partita.runtime.data.registry import Use
from partita.runtime.data.windows import Windows, length_of
from partita.runtime.hub import opened_dataset, reached
from partita.runtime.philox import stream, words

VERSION = 1  # of what rows there are
BLOCK, ROWS = 1 << 18, 16  # ids, and rows, that a block has at least
AT_ONCE = 64  # documents that are encoded at once


@frozen
class Place:
    """Where a block of a lane begins: its number, that of its first row, an epoch, one of the lane's files in this, and
    a state of the package datasets in the file; None at its beginning.
    """

    block: int = 0
    row: int = 0
    epoch: int = 0
    file: int = 0
    state: Any = None


@frozen(eq=False)
class Block:
    """Rows of a lane: `dataset` cuts them out, by what is in `order`; and where the next block begins."""

    place: Place
    dataset: Packed | Windows
    order: np.ndarray
    next: Place

    def read(self, number: int, count: int) -> Batch:
        """So many rows of the lane."""
        chosen = self.order[number - self.place.row :][:count]
        if isinstance(self.dataset, Packed):
            return self.dataset.filled(self.dataset.training, chosen)
        return self.dataset.cut(self.dataset.training, chosen.tolist())


@frozen(eq=False)
class Reading:
    """Rows of a file, of the package datasets, which have a state; and their documents, a few at a time."""

    rows: Any
    texts: Iterator[list[tuple[str, bool]]]


@frozen(eq=False)
class Split:
    """A split of a dataset, and how its documents become rows."""

    rows: Any  # of the package datasets
    name: str
    field: str
    encoder: Encoder
    inputs: tuple[Input, ...]
    length: int
    pack: bool
    seed: int
    span: Span | None

    def file(self, number: int, state: Any) -> Reading:
        """The rows of a file, from a state on."""
        rows = self.rows.shard(self.rows.num_shards, number)
        if state is not None:
            rows.load_state_dict(state)
        return Reading(rows, groups(self.texts(rows), AT_ONCE))

    def texts(self, rows: Any) -> Iterator[tuple[str, bool]]:
        """The documents of rows. Raises Refused (E0616, E0627)."""
        iterator = iter(rows)
        while True:
            with reached(self.name, self.span):
                row = next(iterator, None)
            if row is None:
                return
            yield text_of(row, f"a row of `{self.name}`", self.field, self.span), True

    def block(self, ids: np.ndarray, ends: np.ndarray) -> tuple[Packed | Windows, np.ndarray]:
        """The rows of the documents of a block, and what each of them is to be cut out by."""
        if not self.pack:
            count = -(-(len(ids) - 1) // self.length)
            starts = np.minimum(np.arange(count) * self.length, len(ids) - 1 - self.length)
            return Windows(self.inputs, ids, ids[:0], self.length, self.seed, self.what, self.span), starts
        rows = packed(starts_of(ends), ends, self.length)
        dataset = Packed(self.inputs, ids, None, rows, rows, self.length, self.seed, self.what, self.span)
        return dataset, np.arange(len(rows))

    @property
    def what(self) -> str:
        """Its name, for messages."""
        return f"`{self.name}`"


@define(eq=False)
class Lane:
    """One of `count` lanes, which threads may share; `path` is of the file that keeps where its blocks begin."""

    split: Split
    number: int
    count: int
    path: Path
    _places: list[Place] = field(init=False, default=Factory(lambda self: kept_places(self.path), takes_self=True))
    _blocks: deque[Block] = field(init=False, factory=lambda: deque(maxlen=2))
    _lock: Lock = field(init=False, factory=Lock)
    _reading: tuple[Place, Reading] | None = field(init=False, default=None)  # at a place

    def read(self, number: int, count: int) -> list[Batch]:
        """So many rows from one on, in parts."""
        parts = []
        with self._lock:
            while count:
                block = self._block_of(number)
                here = min(count, block.next.row - number)
                parts.append(block.read(number, here))
                number, count = number + here, count - here
        return parts

    def _block_of(self, number: int) -> Block:
        for block in self._blocks:
            if block.place.row <= number < block.next.row:
                return block
        place = next(each for each in reversed(self._places) if each.row <= number)
        while True:
            block = self._made(place)
            self._blocks.append(block)
            self._keep(block.next)
            if number < block.next.row:
                return block
            place = block.next

    def _made(self, place: Place) -> Block:
        """The block that begins at a place: documents until they are enough, or the epoch ends."""
        split = self.split
        enough, needed = max(BLOCK, ROWS * split.length), 0 if split.pack else split.length
        parts, ends, size = list[np.ndarray](), list[int](), 0
        epoch, number, state = place.epoch, place.file, place.state
        reading = self._reading[1] if self._reading is not None and self._reading[0] is place else None
        while size <= needed or epoch == place.epoch:
            files = permutation(split.seed, epoch, split.rows.num_shards)[self.number :: self.count]
            reading = reading or split.file(int(files[number]), state)
            for some in reading.texts:
                for ids, _ in encoded(some, split.encoder):
                    size += len(ids)
                    parts.append(ids)
                    ends.append(size)
                if size >= enough:
                    break
            if size >= enough:
                state = reading.rows.state_dict()
                break
            number, state, reading = number + 1, None, None
            if number == len(files):
                if not size and epoch > place.epoch:
                    raise refuse("E0604", f"{split.what} has no documents with text", split.span)
                epoch, number = epoch + 1, 0
        dataset, choices = split.block(np.concatenate(parts), np.array(ends))
        key = stream(split.seed, "block", place.block, str(self.number))
        order = choices[np.argsort(words(key, 0, len(choices)), kind="stable")]
        next = Place(place.block + 1, place.row + len(order), epoch, number, state)
        self._reading = (next, reading) if reading is not None else None
        return Block(place, dataset, order, next)

    def _keep(self, place: Place) -> None:
        """Keep a place, unless a later one is."""
        if place.block > self._places[-1].block:
            self._places.append(place)
            with cache.writable(self.path, self.split.span), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(place)) + "\n")


def kept_places(path: Path) -> list[Place]:
    """The places of a file, and the beginning, in order; without a last line that was not written to its end."""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    places = {place.block: place for line in lines if line.endswith("\n") for place in [Place(**json.loads(line))]}
    return [Place(), *(places[block] for block in sorted(places))]


@frozen(eq=False)
class Streamed(Dataset):
    """A `Dataset` of the rows of lanes, each of which has as many rows of a batch."""

    split: Split
    lanes: Sequence[Lane]

    def batch(self, step: int, rows: range | None = None) -> Batch:
        """The rows of a training step."""
        assert step >= 1, "steps count from 1"
        batch = self.split.inputs[0].batch
        own = batch // len(self.lanes)
        rows = range(batch) if rows is None else rows
        parts = []
        for number in range(rows.start // own, -(-rows.stop // own)):
            first, last = max(rows.start - number * own, 0), min(rows.stop - number * own, own)
            parts += self.lanes[number].read((step - 1) * own + first, last - first)
        return {
            each.name: np.concatenate([part[each.name] for part in parts], each.batch_position)
            for each in self.split.inputs
        }

    def holdout_batch(self, index: int, rows: range | None = None) -> Batch:
        """There are none."""
        raise AssertionError("a stream holds nothing out")

    def row_names(self, step: int) -> list[str]:
        """The lane of each row, and its number there."""
        own = self.split.inputs[0].batch // len(self.lanes)
        return [f"part {lane.number}, row {(step - 1) * own + row}" for lane in self.lanes for row in range(own)]


def open_hub(call: Call, inputs: tuple[Input, ...], seed: int, root: Path, use: Use) -> Dataset:
    """The dataset of a split: a stream, or what is made of all of its documents. Raises Refused (E06xx)."""
    arguments, span = call.arguments, call.span
    check_separate(call, inputs)
    encoder, length = encoder_of(call, root), length_of(inputs, span)
    read, name = what_is_read(call), arguments["repository"]
    how: dict[str, Any] = {**read, "version": VERSION, "field": arguments["field"], "encoder": encoder.digest}
    opened = partial(_opened, call, read["commit"], encoder, inputs, length, seed)
    if use is Use.EVALUATE or not arguments["stream"]:
        corpus = cache.entry(_digest(how), lambda: _parts(opened()), encoder.dtype, span)
        return open_corpus(corpus, call, inputs, seed, use, f"`{name}`")
    if use is Use.HOLD_OUT or arguments["holdout"]:
        help = f"`stream = false`, with a `holdout`; or {OWN_DATA}"
        raise refuse("E0608", "of a stream nothing is held out", span, help=help)
    if arguments["pack"]:
        check_ignored(inputs, "the last id of a document has no target", span)
    split, batch = opened(), inputs[0].batch
    count = next(each for each in range(min(batch, split.rows.num_shards), 0, -1) if batch % each == 0)
    how |= {"seed": seed, "length": length, "pack": split.pack, "lanes": count}
    paths = [cache.directory() / f"{_digest({**how, 'lane': number})}.places" for number in range(count)]
    return Streamed(split, [Lane(split, number, count, path) for number, path in enumerate(paths)])


def _opened(call: Call, commit: str, encoder: Encoder, inputs: tuple[Input, ...], length: int, seed: int) -> Split:
    """The split that a call names. Raises Refused (E0616, E0617, E0627)."""
    arguments, span = call.arguments, call.span
    name, key = arguments["repository"], arguments["field"]
    rows = opened_dataset(name, arguments["config"], arguments["split"], commit, span)
    if rows.column_names is not None:
        if key not in rows.column_names:
            raise without(dict.fromkeys(rows.column_names, ""), f"`{name}`", key, span)
        rows = rows.select_columns([key])
    return Split(rows, name, key, encoder, inputs, length, arguments["pack"], seed, span)


def _parts(split: Split) -> Iterator[cache.Part]:
    for some in groups(split.texts(split.rows), MAX_AT_ONCE):
        yield from encoded(some, split.encoder)


def _digest(what: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:40]
