"""`partita data`: rows of every kind of source, with what of them counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from partita.cli.data import _text
from partita.cli.main import main
from partita.cli.thumbnail import thumbnail
from partita.runtime.inference.encoding import Tokenizer
from tests.files import ROOT
from tests.runtime.data.test_layouts_and_resuming import SOURCES, fill, our_hub  # noqa: F401


@pytest.mark.parametrize("source", SOURCES)
def test_rows_of_every_source_are_shown(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fill(tmp_path, source)
    assert main(["data", str(tmp_path / "m.par"), "--show", "3", "--step", "2", "--allow-python"]) == 0
    shown = capsys.readouterr().out
    written = "8 ids, of which" in shown
    assert written or "tokens: int64[8] =" in shown
    assert shown.count("ids, of which" if written else "tokens:") == 3


def test_what_counts_is_between_marks_or_in_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    fill(tmp_path, "packed")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "hello"}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "é!"}) + "\n")
    overrides = ["train.data.holdout=0%", "train.eval=none"]
    assert main(["data", str(tmp_path / "m.par"), *overrides]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  8 ids, of which 6 are targets of others:",
        "  h⟦ello⟧\ufffd⟦\ufffd!⟧",
    ]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["data", str(tmp_path / "m.par"), *overrides]) == 0
    assert "h\x1b[32mello\x1b[0m" in capsys.readouterr().out


def test_a_file_of_floats_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["data", str(ROOT / "specs" / "zoo" / "dlrm.par")]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("item ")
    assert [line.split(":")[0].strip() for line in rest] == ["count", "id", "click"]


@pytest.mark.parametrize(
    ("targets", "shown"),
    [
        ([2, 3, -1, 5, -1], "1 ⟦2 3⟧ 4 ⟦5⟧"),
        ([7, -1, 9, -1, -1], "tokens: int64[5] = 1, 2, 3, 4, 5"),  # not the next ones
    ],
)
def test_ids_without_a_text_are_marked_where_they_are_the_next_ones(
    targets: list[int], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tokens = "axis batch = 1, seq = 5, vocab = 10\nmodel m(tokens: i64[batch, seq], targets: i64[batch, seq]) {\n"
    loss = "  loss cross_entropy(embedding(tokens, w, over = vocab), targets, over = wide, ignore = -1)\n}\n"
    file = tokens.replace("vocab = 10", "vocab = 10, wide = 10") + "  param w: [vocab, wide] ~ normal(1.0)\n" + loss
    (tmp_path / "m.par").write_text(file + 'train { data = arrays("a.npz")  optimizer = sgd(lr = 0.1)  steps = 1 }\n')
    np.savez(tmp_path / "a.npz", tokens=[[1, 2, 3, 4, 5]], targets=[targets])
    assert main(["data", str(tmp_path / "m.par")]) == 0
    assert f"  {shown}\n" in capsys.readouterr().out


def test_what_counts_keeps_the_spaces_that_a_tokenizer_writes_within_a_text():
    """Tokenizers of words drop a space at the beginning of what they decode."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "▁c": 2}, "▁a"))
    words.decoder = tokenizers.decoders.Metaspace()
    lines = list(_text(Tokenizer(words), np.array([2, 1, 2]), [False, True, True]))
    assert lines[1] == "c⟦ b c⟧"


def test_an_image_is_drawn():
    image = np.zeros((3, 4, 6), np.float32)
    image[0, :2, 3:] = 1
    plain, colored = (list(thumbnail(image, each)) for each in (False, True))
    assert plain == ["image: float32[3, 4, 6], from 0 to 1, 0.08333 on average", "   ---", ""]
    assert [line.count("▀") for line in colored[1:]] == [6, 6]
    assert colored[1].split("▀")[3] == "\x1b[38;2;255;0;0;48;2;255;0;0m"
    assert len(list(thumbnail(np.zeros((500, 300, 1), np.uint8), False))) <= 25
