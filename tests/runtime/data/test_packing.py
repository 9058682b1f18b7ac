"""Packed rows: every id of every document once an epoch, with its position, its segment and its next id."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from partita.dsl.diagnostic import Refused
from partita.runtime.data import packed_rows
from partita.runtime.data.dataset import Dataset, Input
from partita.runtime.data.packed_rows import Rows, packed, packed_once
from partita.runtime.data.packing import Packed, open_packed
from partita.runtime.data.registry import Use, open_dataset
from tests.runtime.data.test_data import SPAN, call, equal, ids, shaped

NAMES = ("tokens", "targets", "segments", "positions")


def inputs(length: int = 7, batch: int = 3, positions: int | None = None) -> tuple[Input, ...]:
    limits = {"tokens": 256, "targets": 256, "segments": None, "positions": positions or length}
    found = [ids(name, batch, length, limits[name]) for name in NAMES]
    return tuple(evolve(each, ignored=(-100,)) if each.name == "targets" else each for each in found)


def of(lengths: list[int], length: int = 7, holdout: float = 0.0, seed: int = 0, batch: int = 3) -> Packed:
    """Documents whose ids count up, over all of them."""
    use, whole = Use.HOLD_OUT if holdout else Use.TRAIN, np.arange(sum(lengths)) % 256
    return open_packed(whole, np.cumsum(lengths), "`x`", inputs(length, batch), seed, holdout, use, SPAN)


def documents(batch: dict[str, np.ndarray]) -> list[tuple[list[int], list[int]]]:
    """The ids of each piece of a batch with their targets, by its segments; positions are checked."""
    found = []
    for tokens, targets, segments, positions in zip(*(batch[name] for name in NAMES), strict=True):
        assert (np.diff(segments) >= 0).all()
        for segment in range(segments.max() + 1):
            own = segments == segment
            assert positions[own].tolist() == list(range(own.sum()))
            if (targets[own] != -100).any() or tokens[own].any():  # no padding
                found.append((tokens[own].tolist(), targets[own].tolist()))
    return found


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda each: sum(each) > 0)


@given(LENGTHS, st.integers(1, 12), st.integers(0, 3))
def test_an_epoch_has_every_id_once_with_the_next_one(lengths: list[int], length: int, seed: int):
    dataset = of(lengths, length, seed=seed, batch=1)
    rows = len(dataset.training)
    pairs = []
    for step in range(rows + 1, 2 * rows + 1):  # the second epoch
        for tokens, targets in documents(dataset.batch(step)):
            assert targets[:-1] == tokens[1:]
            pairs += zip(tokens, targets, strict=True)
    ends = set(np.cumsum(lengths).tolist())
    expected = [(i % 256, -100 if i + 1 in ends else (i + 1) % 256) for i in range(sum(lengths))]
    # A zero without a target alone in its segment cannot be told from padding.
    assert sorted(set(pairs)) == sorted(set(expected) - ({(0, -100)} - set(pairs)))
    assert len(pairs) >= len(expected) - expected.count((0, -100))


@given(LENGTHS, st.integers(1, 12))
def test_no_two_rows_could_be_one(lengths: list[int], length: int):
    ends = np.cumsum(lengths)
    rows = packed(ends - lengths, ends, length)
    filled = np.add.reduceat(rows.lengths, rows.first[:-1])
    assert (filled <= length).all()
    assert len(rows) < 2 or sum(sorted(filled)[:2]) > length
    # Only what is longer than a row is cut, and into as few pieces as there can be.
    assert len(rows.lengths) == sum(-(-each // length) for each in lengths)


def test_rows_are_almost_full():
    lengths = np.random.default_rng(0).lognormal(4, 1, 5_000).astype(int) + 1
    assert len(of(lengths.tolist(), 512).training) * 512 / lengths.sum() < 1.01


def test_a_long_document_goes_on_in_other_rows():
    found = documents(of([10], 4, batch=3).batch(1))
    assert sorted(found) == [([0, 1, 2, 3], [1, 2, 3, 4]), ([4, 5, 6, 7], [5, 6, 7, 8]), ([8, 9], [9, -100])]


def test_held_out_documents_are_whole_and_never_trained_on():
    # 40 ids: the last quarter begins at 30; the first document that begins there or later, at 32.
    dataset = of([5, 9, 3, 8, 7, 2, 6], 7, holdout=0.25)
    trained = {i for step in range(1, 30) for tokens, _ in documents(dataset.batch(step)) for i in tokens}
    held = {i for index in range(3) for tokens, _ in documents(dataset.holdout_batch(index)) for i in tokens}
    assert (trained, held) == (set(range(32)), set(range(32, 40)))
    assert dataset.held_out == len(dataset.holdout) == 2
    assert equal(dataset.held_out_rows([0, 1, 0]), dataset.holdout_batch(0))
    assert dataset.holdout_row_names(0) == ["row 0 (documents 6)", "row 1 (documents 5)", "row 0 (documents 6)"]


def test_a_document_that_begins_where_the_holdout_does_is_held_out():
    (row,) = documents(of([5, 5], 7, holdout=0.5, batch=1).holdout_batch(0))
    assert row == ([5, 6, 7, 8, 9], [6, 7, 8, 9, -100])


def written(root: Path) -> None:
    texts = [f"document {i} " * (i % 9) for i in range(40)]
    (root / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))


def opened(root: Path, inputs: tuple[Input, ...], use: Use = Use.TRAIN, **arguments: object) -> Dataset:
    given = {"glob": "a.jsonl", "field": "text", "pack": True, "holdout": 0.0, **arguments}
    return open_dataset(call("jsonl", **given), inputs, 3, root, use=use)


def test_what_a_model_does_not_read_is_not_needed(tmp_path: Path):
    written(tmp_path)
    whole = opened(tmp_path, inputs(60)).batch(4)
    for some in (("tokens",), ("tokens", "segments"), ("positions", "targets", "tokens")):
        part = opened(tmp_path, tuple(each for each in inputs(60) if each.name in some)).batch(4)
        assert equal(part, {name: each for name, each in whole.items() if name in some})


def test_a_window_of_a_text_is_one_document(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a text is one document, and so are its windows " * 9)
    whole = open_dataset(call("text", glob="a.txt", alphabet="bytes"), inputs(7), 0, tmp_path).batch(2)
    assert (whole["segments"] == 0).all()
    assert (whole["positions"] == np.arange(7)).all()
    plain = open_dataset(call("text", glob="a.txt", alphabet="bytes"), inputs(7)[:2], 0, tmp_path).batch(2)
    assert equal(plain, {"tokens": whole["tokens"], "targets": whole["targets"]})


WRONG: dict[str, tuple[tuple[Input, ...], dict[str, object], str, str, str]] = {
    "no ignored target": ((*inputs(20)[:1], ids("targets", 3, 20)), {}, "E0607", "ignores none", "ignore = -1"),
    "positions beyond the table": (inputs(60, positions=50), {}, "E0605", "out of range for `positions`", ""),
    "another length": (inputs(20)[:1] + inputs(21)[1:2], {}, "E0607", "`tokens` and `targets` must have", ""),
    "no such input": (
        (*inputs(20), Input("mask", shaped("i64", batch=3, seq=20), "batch")), {}, "E0606", "called `mask`", ""),
    "segments without pack": (inputs(20)[:3], {"pack": False}, "E0606", "called `segments`", "`pack = true` fills"),
    "nothing": (inputs(20), {"glob": "empty.jsonl"}, "E0604", "has no documents to train on", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(WRONG))
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path):
    given, arguments, code, message, help = WRONG[name]
    written(tmp_path)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(Refused) as caught:
        opened(tmp_path, given, **arguments).batch(1)
    diagnostic = caught.value.diagnostics[0]
    assert (diagnostic.code, diagnostic.span) == (code, SPAN), diagnostic.render()
    assert message in diagnostic.message
    assert help in (diagnostic.help or "")


@pytest.mark.parametrize(
    ("documents", "holdout", "help"),
    [
        (1, 0.1, "evaluate data of its own: `eval = every(…, data = …)`; or use more documents"),
        (3, 0.05, "`holdout = 33%`, or evaluate data of its own: `eval = every(…, data = …)`"),
    ],
)
def test_a_holdout_of_documents_that_would_do_is_named(documents: int, holdout: float, help: str, tmp_path: Path):
    (tmp_path / "few.jsonl").write_text('{"text": "a document of a length"}\n' * documents)
    with pytest.raises(Refused) as caught:
        opened(tmp_path, inputs(20), Use.HOLD_OUT, glob="few.jsonl", holdout=holdout)
    assert caught.value.diagnostics[0].help == help


FIELDS = ("first", "starts", "numbers", "lengths", "goes_on")


@pytest.mark.parametrize("damage", [None, b"", b"cut off"])
def test_many_documents_are_packed_once_by_a_machine(
    damage: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each rank has the same rows as if it had packed them; also if a file was cut off since."""
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    monkeypatch.setattr(packed_rows, "MIN_DOCUMENTS", 10)
    ends = np.cumsum(np.random.default_rng(0).integers(0, 40, 200))
    starts = np.concatenate([[0], ends[:-1]])
    wanted = packed(starts, ends, 16, 7)
    calls = []
    monkeypatch.setattr(packed_rows, "packed", lambda *given: calls.append(1) or packed(*given))

    def same(found: Rows) -> bool:
        return all(np.array_equal(getattr(found, name), getattr(wanted, name)) for name in FIELDS)

    assert all(same(packed_once(starts, ends, 16, 7, None)) for _ in range(3))
    assert len(calls) == 1
    (kept,) = tmp_path.glob("*.rows")
    if damage is not None:
        kept.write_bytes(damage)
        assert same(packed_once(starts, ends, 16, 7, None))
        assert len(calls) == 2
    for other in ((starts, ends, 17, 7), (starts, ends, 16, 8), (starts[1:], ends[1:], 16, 7)):
        packed_once(*other, None)
    assert len({*tmp_path.glob("*.rows")}) == 4
