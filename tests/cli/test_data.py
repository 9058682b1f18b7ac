"""`partita data`: rows of every kind of source, with what of them counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partita.cli.main import main
from tests.files import ROOT
from tests.runtime.data.test_layouts_and_resuming import SOURCES, fill


@pytest.mark.parametrize("source", SOURCES)
def test_rows_of_every_source_are_shown(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fill(tmp_path, source)
    assert main(["data", str(tmp_path / "m.par"), "--show", "3", "--step", "2"]) == 0
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
