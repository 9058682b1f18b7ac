"""The benchmark of what optimizers reach runs, and says what it measured."""

from __future__ import annotations

import re

import optimizers
import pytest


@pytest.mark.soak
def test_every_run_says_its_loss(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["optimizers.py", "--steps", "10"])
    optimizers.main()
    printed = capsys.readouterr().out
    losses = [float(each) for each in re.findall(r"eval loss (\d+\.\d+)", printed)]
    assert len(losses) == 8
    assert all(2 < loss < 6 for loss in losses), losses
    assert len(re.findall(r"update, embed .*: \d+\.\d ms, at most", printed)) == 4
