"""`partita doctor` with real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from partita.cli.main import main
from tests.commands import partita


@pytest.mark.soak
@pytest.mark.parametrize("launched", [None, 3])
def test_this_machine_passes(launched: int | None, tmp_path: Path) -> None:
    start: tuple[str, ...] = (sys.executable,)
    if launched is not None:
        start = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(launched))
    ranks = launched or 2
    done = partita("doctor", "--ranks", "2", "--json", "-o", "out.json", cwd=tmp_path, launcher=start)
    found = json.loads((tmp_path / "out.json").read_text())
    errors = [each for each in found["findings"] if each["severity"] == "error"]
    assert (done.returncode, errors, found["passed"]) == (0, [], True), done.stderr
    assert len(found["ranks"]) == ranks
    assert len(found["machines"]) == 1
    for rank in found["ranks"]:
        kinds = {each["test"] for each in rank["tests"]}
        assert {"product", "all-reduce", "all-to-all", "send and receive", "training"} <= kinds
        assert {each["wrong"] for each in rank["tests"]} == {None}


@pytest.mark.soak
def test_ranks_that_do_not_end_in_time_are_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    monkeypatch.setattr("partita.cli.doctor.gpus.from_driver", lambda: ([], [], "nvidia-smi does not answer"))
    assert main(["doctor", "--timeout", "1"]) == 1
    shown = capsys.readouterr()
    assert "error[E1107]: GLOO_SOCKET_IFNAME names `eth77`, which is no interface" in shown.err
    assert "error[E1102]: the driver does not answer: nvidia-smi does not answer" in shown.err
    assert "the self test had not ended after 1 s, and was killed" in shown.err
    assert "not tested" in shown.out


def test_wrong_variables_of_a_launcher_are_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("partita.cli.doctor._facts", lambda: ({}, {}))
    assert main(["doctor"]) == 1
    assert "error[E1103]: the launcher's variables are wrong: the environment sets a rank, but MASTER_ADDR" in (
        capsys.readouterr().err
    )


def test_a_transport_in_one_process_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--transport", "virtual"]) == 2
    assert "tests none" in capsys.readouterr().err
