"""Fuzzing guided by coverage, for two hours or `FUZZ_SECONDS`. Several shorter runs add up: the totals are printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.soak import WANTED_SECONDS, fuzz, totals, written
from tests.fuzz.targets import TARGETS

SECONDS = float(os.environ.get("FUZZ_SECONDS", WANTED_SECONDS))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 1800)
def test_nothing_but_diagnostics_for_two_hours():
    pytest.importorskip("atheris")
    turns = fuzz(SECONDS)
    print(totals(written()))
    assert {turn.target for turn in turns} == set(TARGETS)
    assert all(turn.executions for turn in turns)
    assert not [turn for turn in turns if turn.found], "what was found stands in .fuzz/TARGET/found"


@pytest.mark.soak
@pytest.mark.parametrize("seed", [b"exception", b"hang", b"memory"])
def test_what_breaks_the_law_is_found_and_counted(seed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An exception, a hang, and more memory than there is."""
    pytest.importorskip("atheris")
    corpus = tmp_path / "broken" / "corpus"
    corpus.mkdir(parents=True)
    (corpus / "it").write_bytes(seed)
    monkeypatch.setattr("tests.fuzz.soak.INPUT_SECONDS", 2)
    (turn,) = fuzz(6.0, ["broken"], tmp_path)
    assert turn.found
    assert {(tmp_path / "broken" / "found" / name).read_bytes() for name in turn.found} == {seed}
    assert [each["found"] for each in written(tmp_path)] == [list(turn.found)]
