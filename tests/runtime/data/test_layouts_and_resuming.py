"""What a run reads does not depend on how it is split, nor on whether it was interrupted.

A checksum of each batch, with a weight for every place in it, is that of the dataset's batches under every layout, and
after resuming under another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from partita.cli.main import main
from partita.dsl.config.builtins import DATA
from partita.dsl.load import load, spec_of
from partita.runtime.data.binding import bind
from partita.runtime.rank import prepare
from tests.commands import partita, records
from tests.hub_server import hub
from tests.runtime.data.test_data import CHAT
from tests.runtime.data.test_documents import tokenizer

MODEL = """axis batch = 8, seq = 8, vocab = 512, embed = 4
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.1)
  let x = embedding(tokens, table, over = vocab)
  repeat 2 as layer {
    param w: [embed] ~ ones()
    let x = x * w
  }
  loss cross_entropy(dot(x, table, over = embed), targets, over = vocab, ignore = -1)
  let places = expand(iota(batch) * 8, seq) + expand(iota(seq), batch) + 1
  metric seen = sum(cast(tokens * places, f32))
  metric wanted = sum(cast(targets * places, f32))
}
mesh alone(data = 1)
layout one on alone { }
mesh pair(data = 2)
layout two on pair { shard batch -> data }
mesh four(data = 2, pipe = 2)
layout both on four { shard batch -> data   stage layer -> pipe }
schedule s = one_f_one_b(microbatches = 4)
train {
  layout = one
  data = DATA
  optimizer = sgd(lr = 0.1)
  precision = f64
  steps = 6
  checkpoint = every(2)
  eval = every(3, EVAL)
}
"""
SOURCES = {
    "text": ('text("*.txt", holdout = 20%)', "batches = 2"),
    "a tokenizer": ('text("*.txt", tokenizer = "t.json")', 'data = text("a.txt", tokenizer = "t.json"), batches = all'),
    "tokens": ('tokens("*.npy", holdout = 20%)', "batches = all"),
    "jsonl": ('jsonl("*.jsonl", end = "<|endoftext|>", tokenizer = "t.json", holdout = 20%)', "batches = 2"),
    "packed": ('jsonl("*.jsonl", pack = true, holdout = 20%)', "batches = all"),
    "parquet": ('parquet("*.parquet", pack = true)', 'data = parquet("*.parquet"), batches = 3'),
    "chat": ('chat("chats.json", tokenizer = "t.json", cut = true, holdout = 20%)', "batches = all"),
    "mix": (
        'mix([jsonl("*.jsonl", pack = true, holdout = 20%) -> 60%, tokens("*.npy", holdout = 20%) -> 40%])',
        "batches = all",
    ),
    "mix of packed": (
        'mix([jsonl("*.jsonl", pack = true, holdout = 9%) -> 2, parquet("*.parquet", pack = true, holdout = 9%) -> 1])',
        "batches = 3",
    ),
    "preferences": (
        'preferences("pairs.json", tokenizer = "t.json", end = "<|endoftext|>", cut = true, holdout = 20%)',
        "batches = all",
    ),
    "mix of texts": (
        'mix([text("*.txt", tokenizer = "t.json", holdout = 9%) -> 1, '
        'jsonl("*.jsonl", tokenizer = "t.json", holdout = 9%) -> 1])',
        "batches = 2",
    ),
    "mix of characters": (
        'mix([text("a.txt", alphabet = chars, holdout = 9%) -> 1, text("b.txt", alphabet = chars, holdout = 9%) -> 1])',
        "batches = 2",
    ),
    "characters": ('text("*.txt", alphabet = chars, holdout = 20%)', "batches = all"),
    "stdlib": ("stdlib(holdout = 1%)", "batches = 2"),
    "hub": ('hub("our/corpus", pack = true)', 'data = hub("our/corpus", split = "test"), batches = 3'),
    "whole hub": ('hub("our/corpus", stream = false, holdout = 20%)', "batches = 2"),
    "images": ('images("photos", captions = "captions.csv", cut = true, holdout = 20%)', "batches = all"),
    "python": ('python("source.py:row", rows = 40, holdout = 20%)', "batches = all"),
    "endless python": ('python("source.py:row")', 'data = python("source.py:row"), batches = 2'),
    "arrays": ('arrays("items.npz", holdout = 20%)', "batches = all"),
    "random": ("random()", "batches = 2"),
}  # fmt: skip


# A row of eight ids, and the next ones.
PYTHON = """import numpy
def row(seed, number):
    ids = numpy.random.default_rng((seed, number)).integers(0, 256, 9)
    return {"tokens": ids[:-1], "targets": ids[1:]}
"""


@pytest.fixture(autouse=True)
def our_hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A hub with the documents, for sources that read it."""
    if "hub" not in request.node.name:
        yield
        return
    pytest.importorskip("datasets")
    with hub(tmp_path_factory.mktemp("home")) as server:
        parts = {
            f"{split}-{i}.jsonl": part for split in ("train", "test") for i, part in enumerate((TEXTS[:20], TEXTS[20:]))
        }
        files = {name: "".join(json.dumps({"text": each}) + "\n" for each in part) for name, part in parts.items()}
        server.put("datasets", "our/corpus", {name: text.encode() for name, text in files.items()})
        yield


TEXTS = [f"{i}: " + "every text is another one " * (i % 5) for i in range(60)]


def fill(root: Path, source: str) -> None:
    for name, part in (("a", TEXTS[:20]), ("b", TEXTS[20:])):
        (root / f"{name}.txt").write_text("\n".join(part))
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in part))
        pyarrow.parquet.write_table(pyarrow.table({"text": part}), root / f"{name}.parquet")
        np.save(root / f"{name}.npy", np.frombuffer("\n".join(part).encode(), np.uint8))
    chats = ({"instruction": each, "output": each[::-1]} for each in TEXTS)
    (root / "chats.json").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (root / "chat_template.jinja").write_text(CHAT)
    pairs = ({"prompt": str(i), "chosen": each, "rejected": each[::-1]} for i, each in enumerate(TEXTS))
    (root / "pairs.json").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    rows = np.random.default_rng(0).integers(0, 512, (40, 2, 8))
    np.savez(root / "items.npz", tokens=rows[:, 0], targets=rows[:, 1])
    (root / "photos").mkdir()
    Image.new("L", (4, 4)).save(root / "photos" / "a.png")
    (root / "captions.csv").write_text("".join(["file_name,text\n", *(f"a.png,{each}\n" for each in TEXTS)]))
    (root / "source.py").write_text(PYTHON)
    tokenizer().save(str(root / "t.json"))
    data, eval = SOURCES[source]
    model = re.sub(r"\b(tokens|targets)\b", r"rejected_\1", MODEL) if source == "preferences" else MODEL
    (root / "m.par").write_text(model.replace("DATA", data).replace("EVAL", eval))


def expected(root: Path) -> list[tuple[float, float]]:
    """The checksums of the batches of all steps."""
    plan = prepare(spec_of(load(root / "m.par")))
    data = bind(plan.program, plan.train, root, allow_python=True).dataset
    assert data is not None
    places = np.arange(64).reshape(8, 8) + 1
    batches = [data.batch(step) for step in range(1, 7)]
    names = ("tokens", "targets") if "tokens" in batches[0] else ("rejected_tokens", "rejected_targets")
    seen, wanted = ([float((batch[name] * places).sum()) for batch in batches] for name in names)
    return list(zip(seen, wanted, strict=True))


def told(run: Path) -> tuple[dict[int, tuple[float, float]], dict[int, float]]:
    """The checksums of each step, and the losses of evaluations."""
    found = records(run)
    steps = {each["step"]: (each["seen"], each["wanted"]) for each in found if "seen" in each}
    return steps, {each["step"]: each["eval_loss"] for each in found if "eval_loss" in each}


def test_every_source_is_tried() -> None:
    """But for the one whose rows the model writes: tests/runtime/inference/test_rollouts.py."""
    tried = " ".join(data for data, _ in SOURCES.values()) + "rollouts("
    assert [name for name in DATA if f"{name}(" not in tried] == []


@pytest.mark.soak
@pytest.mark.parametrize("source", SOURCES)
def test_a_run_reads_the_same_under_every_layout_and_after_resuming(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, source)
    wanted = dict(enumerate(expected(tmp_path), 1))
    losses = []
    for run, parts in {"plain": ("one",), "resumed": ("both", "two")}.items():
        for part, layout in enumerate(parts):
            steps = 6 if part == len(parts) - 1 else 3
            command = ["run", "m.par", "--transport", "virtual", "--run-dir", run, "--allow-python", f"layout={layout}"]
            assert main([*command, f"train.steps={steps}"]) == 0
        seen, evaluated = told(tmp_path / run)
        assert seen == wanted
        assert evaluated.keys() == {3, 6}
        losses.append(list(evaluated.values()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.soak
@pytest.mark.parametrize("source", ["mix", "hub", "images"])
def test_processes_read_the_same(source: str, tmp_path: Path):
    fill(tmp_path, source)
    wanted = dict(enumerate(expected(tmp_path), 1))
    for run, parts in {"one": ("one",), "two": ("two", "both"), "four": ("both", "one")}.items():
        for part, layout in enumerate(parts):
            steps = 6 if part == len(parts) - 1 else 3
            command = ["run", "m.par", f"layout={layout}", f"train.steps={steps}", "--run-dir", run]
            done = partita(*command, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        assert told(tmp_path / run)[0] == wanted
