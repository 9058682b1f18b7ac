"""`hub`: documents streamed from a hub on this machine. Every id is read once in an epoch, by any ranks, and after a
run that was resumed, with its cache or without; beside the documents, encoded and cut here.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Call
from partita.runtime.data import streamed
from partita.runtime.data.binding import identify
from partita.runtime.data.dataset import Dataset
from partita.runtime.data.registry import Use, open_dataset
from partita.runtime.data.streamed import Block
from tests.hub_server import Hub, hub
from tests.runtime.data.test_data import call
from tests.runtime.data.test_packing import inputs

pytest.importorskip("datasets")

ID = "our/corpus"
README = b"""---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train*}
  - {split: test, path: en/test*}
---
"""


def document(file: int, number: int) -> str:
    return f"[{file}:{number}] " + "abcdefgh"[: (file + number) % 9] * (number % 4)


def lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: each, "n": i}) + "\n" for i, each in enumerate(texts)).encode()


FILES = [[document(file, number) for number in range(20 + 3 * file)] for file in range(5)]
ALL = [each for file in FILES for each in file]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with hub(tmp_path_factory.mktemp("home")) as found:
        files = {f"en/train-{i}.jsonl.gz": gzip.compress(lines(each), mtime=0) for i, each in enumerate(FILES)}
        found.put("datasets", ID, {"README.md": README, **files, "en/test.jsonl": lines(FILES[0])})
        yield found


@pytest.fixture(autouse=True)
def small(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, and an empty cache."""
    monkeypatch.setattr(streamed, "BLOCK", 40)
    monkeypatch.setattr(streamed, "ROWS", 4)
    monkeypatch.setattr(streamed, "AT_ONCE", 3)
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "kept"))


def source(**arguments: Any) -> Call:
    usual = {"split": "train", "field": "text", "config": None, "revision": None, "end": "\n", "stream": True}
    return call("hub", **{"repository": ID, "pack": False, "holdout": 0.0, **usual, **arguments})


def opened(root: Path, seed: int = 3, batch: int = 6, use: Use = Use.TRAIN, **arguments: Any) -> Dataset:
    given = inputs(24, batch=batch) if arguments.get("pack") else inputs(24, batch=batch)[:2]
    return open_dataset(source(**arguments), given, seed, root, use=use)


def documents_in(batches: list[dict[str, np.ndarray]]) -> Counter[str]:
    """The documents of packed rows: those of a row's length and less are whole."""
    found: Counter[str] = Counter()
    for batch in batches:
        for tokens, segments, targets in zip(batch["tokens"], batch["segments"], batch["targets"], strict=True):
            for segment in range(segments.max() + 1):
                ids = tokens[segments == segment]
                assert targets[segments == segment][: len(ids) - 1].tolist() == ids[1:].tolist() or not ids.any()
                found[bytes(ids.astype(np.uint8)).decode()] += bool(ids.any())
    return +found


def test_an_epoch_has_every_document_once(tmp_path: Path):
    short = [each for each in ALL if len(each) < 24]
    data = opened(tmp_path, batch=1, pack=True)
    assert len(data.lanes) == 1
    rows, places = 0, data.lanes[0]._places
    while places[-1].epoch < 2:  # where blocks of two epochs end
        rows += 1
        data.batch(rows)
    epochs = [next(each.row for each in places if each.epoch == epoch) for epoch in range(3)]
    for start, end in pairwise(epochs):
        found = documents_in([data.batch(step) for step in range(start + 1, end + 1)])
        assert {each: found[f"{each}\n"] for each in short} == dict.fromkeys(short, 1)
    first, second = (data.batch(start + 1)["tokens"].tolist() for start in epochs[:2])
    assert first != second


def test_windows_have_all_ids_of_an_epoch(tmp_path: Path):
    data, step = opened(tmp_path, batch=1), 0
    (lane,) = data.lanes
    blocks: dict[int, Block] = {}
    while lane._places[-1].epoch < 2:
        step += 1
        batch = data.batch(step)
        assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
        block = lane._blocks[-1]
        ids = np.asarray(block.dataset.training)
        place = [i for i in range(len(ids) - 24) if np.array_equal(ids[i : i + 24], batch["tokens"][0])]
        blocks[block.place.block] = block
        assert place
    epochs = []
    for epoch in range(2):
        ids = [np.asarray(each.dataset.training) for each in blocks.values() if each.place.epoch == epoch]
        epochs.append(bytes(np.concatenate(ids)).decode().removesuffix("\n").split("\n"))
        assert sorted(epochs[-1]) == sorted(ALL)
    assert epochs[0] != epochs[1]  # files come in another order


@pytest.mark.parametrize("count", [25, 26, 48, 49, 50, 100])
def test_each_id_of_a_block_is_predicted(count: int, tmp_path: Path):
    split = opened(tmp_path, batch=1).split
    ids = np.arange(count)
    windows, starts = split.block(ids, np.array([count]))
    targets = np.concatenate([windows.cut(ids, [start])["targets"][0] for start in starts.tolist()])
    assert sorted(set(targets.tolist())) == list(range(1, count))
    assert len(targets) - len(set(targets.tolist())) < 24


@pytest.mark.parametrize("pack", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_rows_are_the_same_whoever_reads_them_and_after_resuming(
    pack: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = opened(tmp_path, pack=pack)
    assert len(whole.lanes) == 3  # of five files, as many as divide six rows
    wanted = [whole.batch(step) for step in range(1, 16)]
    assert {lane._places[-1].epoch for lane in whole.lanes} != {0}

    def same(data: Dataset, step: int, rows: range | None = None) -> None:
        batch = data.batch(step, rows)
        for name, array in wanted[step - 1].items():
            assert np.array_equal(batch[name], array if rows is None else array[rows.start : rows.stop])

    for ranks in (2, 3, 4):  # four: not all of the same number of rows
        for rank in range(ranks):
            own = range(6 * rank // ranks, 6 * (rank + 1) // ranks)
            monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / f"{ranks} {rank}"))
            data = opened(tmp_path, pack=pack)
            for step in (1, 9):
                same(data, step, own)
            if ranks == 3:
                assert sum(len(lane._places) > 1 for lane in data.lanes) == 1
    for cached in (True, False):
        monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / ("kept" if cached else "nowhere")))
        resumed = opened(tmp_path, pack=pack)
        assert all((len(lane._places) > 1) is cached for lane in resumed.lanes)
        for step in (14, 15, 5):
            same(resumed, step)
    assert not np.array_equal(opened(tmp_path, seed=4, pack=pack).batch(1)["tokens"], wanted[0]["tokens"])


def test_a_resumed_run_reads_on_from_where_it_was(server: Hub, tmp_path: Path):
    steps = 12
    first = opened(tmp_path, batch=1)
    wanted = [first.batch(step) for step in range(1, steps + 1)]
    server.requests.clear()
    resumed = opened(tmp_path, batch=1)
    assert np.array_equal(resumed.batch(steps)["tokens"], wanted[-1]["tokens"])
    assert sum(each.startswith("GET") and ".jsonl.gz" in each for each in server.requests) <= 2
    with (resumed.lanes[0].path).open("a") as file:
        file.write('{"block": 99, "row"')  # of a process that was killed
    assert np.array_equal(opened(tmp_path, batch=1).batch(3)["tokens"], wanted[2]["tokens"])


def test_what_is_evaluated_is_read_whole_and_kept(server: Hub, tmp_path: Path):
    tests = opened(tmp_path, batch=2, use=Use.EVALUATE, split="test")
    text = "".join(f"{each}\n" for each in FILES[0])
    windows = [tests.held_out_rows([number]) for number in range(tests.held_out)]
    ids = np.concatenate([batch["tokens"][0] for batch in windows])
    assert bytes(ids.astype(np.uint8)).decode().startswith(text[: 24 * (len(text) // 24)])
    held = opened(tmp_path, use=Use.HOLD_OUT, stream=False, holdout=0.2, pack=True)
    whole = documents_in([held.batch(step) for step in range(1, 40)]).keys()
    assert {each for each in whole if each.startswith("[") and each.endswith("\n")} < {f"{each}\n" for each in ALL}
    server.requests.clear()
    again = opened(tmp_path, stream=False, revision=server.commit("datasets", ID))
    assert len(again.training) == sum(len(each) + 1 for each in ALL)
    assert not [each for each in server.requests if ".jsonl" in each and "GET /datasets" in each]


def test_the_identity_is_the_commit(server: Hub, tmp_path: Path):
    before = identify(source(), tmp_path)
    assert identify(source(), tmp_path) == before
    files = server.repositories["datasets", ID]
    try:
        server.put("datasets", ID, {**files, "more.txt": b"more"})
        assert identify(source(), tmp_path) != before
    finally:
        server.put("datasets", ID, files)
    assert identify(source(split="test"), tmp_path) != before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ({"repository": "our/other"}, "E0627", "nothing here is called `our/other`, and nothing on the hub"),
        ({"split": "dev"}, "E0627", "`our/corpus` on the hub: Bad split: dev"),
        ({"config": "de"}, "E0627", "BuilderConfig 'de' not found"),
        ({"revision": "v9"}, "E0627", "`our/corpus` on the hub has no such revision"),
        ({"field": "content"}, "E0616", "`our/corpus` has no field `content`"),
        ({"field": "n"}, "E0616", "`n` in a row of `our/corpus` is a number, not a string"),
        ({"holdout": 0.1}, "E0608", "of a stream nothing is held out"),
    ],
)
def test_what_is_wrong_is_said(arguments: dict[str, Any], code: str, words: str, tmp_path: Path):
    with pytest.raises(Refused) as refused:
        opened(tmp_path, **arguments).batch(1)
    assert [each.code for each in refused.value.diagnostics] == [code]
    assert words in refused.value.diagnostics[0].message


def test_a_dataset_without_text_ends(server: Hub, tmp_path: Path):
    server.put("datasets", "our/empty", {"train.jsonl": lines([""] * 9)})
    with pytest.raises(Refused, match=r"error\[E0604\]: `our/empty` has no documents with text"):
        opened(tmp_path, repository="our/empty", end="").batch(1)
