"""Trackers get each number of a run once, and whatever they do, the run goes on."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.run import get_args_parser

from partita.cli.command import COMMANDS
from partita.cli.main import main
from partita.runtime.metrics import MetricsReader, numbers
from partita.runtime.run_directory import RunDirectory
from partita.runtime.telemetry import FILE_NAME, Telemetry
from partita.runtime.tracking import launch
from partita.runtime.tracking.__main__ import KEPT, Following
from partita.runtime.tracking.tracker import TRACKERS, TrackedRun, TrackerKind, register
from tests.commands import here, records

FILE = """
axis batch = 8, embed = 6

model m(x: [batch, embed]) {
  param w: [embed] ~ normal(1.0)
  loss mean(x * w)
  metric size = mean(abs(w))
}

train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 6
  eval = every(2)
  checkpoint = every(4)
}
"""
# Two steps, an evaluation, and a comparison of ranks.
RECORDS: list[dict[str, Any]] = [
    {"step": 1, "loss": 2.5, "rates": [0.1, 0.2], "unix_time": 100.0},
    {"step": 2, "loss": None, "bad": "the loss of step 2 is nan", "unix_time": 101.0},
    {"step": 2, "slow_ranks": [{"rank": 1}]},
    {"step": 2, "eval_loss": 3.5, "unix_time": 102.0},
]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads of a run, by tag."""
    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.soak
def test_tensorboard_has_the_numbers_of_a_run_that_was_resumed(tmp_path: Path) -> None:
    (tmp_path / "m.par").write_text(FILE)
    run = ["run", "m.par", "--transport", "virtual", "--track", "tensorboard"]
    first = here(*run, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    written = tmp_path / "runs" / "m"
    # As a kill in step 6 leaves it, with the checkpoint of step 4 as the newest: step 5 and 6 are computed again.
    for path in (written / "checkpoints").glob("*6"):
        path.rename(path.with_name("away"))
    again = here(*run, "train.steps=8", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    found = scalars(written)
    for name in ("loss", "grad_norm", "size", "learning_rate", "eval_loss", "eval_size"):
        expected = [(each["step"], each[name]) for each in records(written) if name in each]
        assert [step for step, _ in found[name]] == [step for step, _ in expected]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in expected])
    events = EventAccumulator(str(written / "tensorboard")).Reload()
    (text,) = events.Tensors("text")
    assert b"    param w: [embed]" in text.tensor_proto.string_val[0]


def test_tensorboard_of_a_run_that_begins_anew_begins_anew(tmp_path: Path) -> None:
    for last in (3, 1):
        tracker = TRACKERS["tensorboard"].open(TrackedRun("run", tmp_path, {}, None))
        for number in range(1, last + 1):
            tracker.log({"step": number, "loss": 1.0, "unix_time": 100.0})
        tracker.close()
    assert scalars(tmp_path) == {"loss": [(1, 1.0)]}
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "tensorboard").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is a link"):
        TRACKERS["tensorboard"].open(TrackedRun("run", tmp_path / "linked", {}, None))


# ---------------------------------------------------------------- what is handed over


class Kept:
    """A tracker that keeps what it gets in memory, and fails at a step if told to."""

    runs: list[Kept] = []  # noqa: RUF012
    fails_at = 0

    def __init__(self, run: TrackedRun) -> None:
        self.identity = run.identity or f"run-{len(Kept.runs)}"
        self.run, self.taken, self.closed = run, list[Mapping[str, Any]](), False
        Kept.runs.append(self)

    def log(self, record: Mapping[str, Any]) -> None:
        if record["step"] == Kept.fails_at:
            raise RuntimeError("no connection\nand more")
        self.taken.append(record)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kept() -> Iterator[type[Kept]]:
    Kept.runs, Kept.fails_at = [], 0
    register(TrackerKind("kept", Kept))
    yield Kept
    TRACKERS.unregister("kept")


def test_numbers_of_a_record() -> None:
    assert numbers(RECORDS[0]) == {"loss": 2.5, "rates.0": 0.1, "rates.1": 0.2}
    assert math.isnan(numbers(RECORDS[1])["loss"])
    assert numbers(RECORDS[2]) == {}
    assert numbers(RECORDS[3]) == {"eval_loss": 3.5}


def test_each_record_is_handed_over_once_whatever_the_file_does(tmp_path: Path, kept: type[Kept]) -> None:
    with RunDirectory.open(tmp_path) as directory:
        following = Following(directory, ["kept"])
        assert not following.look()
        with closing(Telemetry(directory)) as telemetry:
            for record in RECORDS:
                telemetry.write(record)
                assert following.look()
            (tracker,) = kept.runs
            assert tracker.taken == [RECORDS[0], RECORDS[1], RECORDS[3]]
        with closing(Telemetry(directory, keep_through=1)) as telemetry:  # resumed: a new file, and step 2 again
            for record in [*RECORDS[1:], {"step": 3, "loss": 1.0}]:
                telemetry.write(record)
                following.look()
        assert tracker.taken[3:] == [{"step": 3, "loss": 1.0}]
        following.close()
        assert tracker.closed
        # Another process goes on with what the file `tracking.json` says.
        with closing(Telemetry(directory, keep_through=3)) as telemetry:
            telemetry.write({"step": 4, "loss": 0.5})
            later = Following(directory, ["kept"])
            later.look()
        assert [each.identity for each in kept.runs] == ["run-0", "run-0"]
        assert kept.runs[1].taken == [{"step": 4, "loss": 0.5}]
        with closing(Telemetry(directory)) as telemetry:  # begun anew
            telemetry.write({"step": 1, "loss": 9.0})
            later.look()
        assert kept.runs[1].closed
        assert [each.identity for each in kept.runs] == ["run-0", "run-0", "run-2"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"first": 1, "trackers": {"kept": 3}}', "\0"])
def test_what_is_kept_of_trackers_may_be_anything(tmp_path: Path, kept: type[Kept], text: str) -> None:
    (tmp_path / KEPT).write_text(text)
    with RunDirectory.open(tmp_path) as directory, closing(Telemetry(directory)) as telemetry:
        telemetry.write(RECORDS[0])
        Following(directory, ["kept"]).look()
    assert len(kept.runs) == 1


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(
    tmp_path: Path, kept: type[Kept], capsys: pytest.CaptureFixture[str]
) -> None:
    register(TrackerKind("other", Kept))
    try:
        with RunDirectory.open(tmp_path) as directory, closing(Telemetry(directory)) as telemetry:
            following = Following(directory, ["kept", "other"])
            telemetry.write({"step": 1, "loss": 1.0})
            following.look()
            kept.fails_at = 2
            telemetry.write({"step": 2, "loss": 1.0})
            kept.runs[1].log = kept.runs[1].taken.append  # type: ignore[method-assign]
            following.look()
            telemetry.write({"step": 3, "loss": 1.0})
            following.look()
            following.close()
    finally:
        TRACKERS.unregister("other")
    assert capsys.readouterr().err == "partita: tracking by kept failed: no connection; the run continues\n"
    assert [len(each.taken) for each in kept.runs] == [1, 3]
    found = json.loads((tmp_path / KEPT).read_text())["trackers"]
    assert [found[name]["after"] for name in ("kept", "other")] == [1, 3]


def test_the_reader_of_metrics_gives_whole_lines_only(tmp_path: Path) -> None:
    reader, path = MetricsReader(tmp_path), tmp_path / FILE_NAME
    assert reader.read() == []
    path.write_bytes(b'{"step": 1}\n[]\n{"step": "x"}\n\xff\n{"step": 2')
    assert reader.read() == [{"step": 1}]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(b"}\n")
    assert reader.read() == [{"step": 2}]
    path.write_bytes(b'{"step": 7}\n')  # shorter: another file
    assert reader.read() == [{"step": 7}]


# ---------------------------------------------------------------- the command


def test_no_option_is_one_of_torchruns_for_short() -> None:
    """torchrun takes an option that is the beginning of one of its own for itself."""
    parser = ArgumentParser()
    COMMANDS["run"].add_arguments(parser)
    options = {each for action in parser._actions for each in action.option_strings if each.startswith("--")}
    assert "--track" in options
    theirs = [each for action in get_args_parser()._actions for each in action.option_strings]
    taken = [(own, other) for own in options - {"--help"} for other in theirs if other.startswith(own)]
    assert taken == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("tensorbord", "there is no tracker `tensorbord`; did you mean `tensorboard`?"),
        ("wandb,", "there is no tracker ``; there are tensorboard, wandb, mlflow, trackio"),
        ("neptune", "there is no tracker `neptune`; there are tensorboard, wandb, mlflow, trackio"),
    ],
)
def test_a_tracker_that_there_is_not(names: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "m.par", "--track", names])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_tracker_that_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.cli.extras._there", lambda name: name != "wandb")
    assert main(["run", "m.par", "--track", "tensorboard,wandb"]) == 2
    assert capsys.readouterr().err == "partita: --track wandb needs wandb: pip install 'partita[wandb]'\n"


# ---------------------------------------------------------------- their process


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started, with little patience."""
    found: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", start)  # type: ignore[attr-defined]
    monkeypatch.setattr(launch, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(launch, "FINISH_SECONDS", 0)
    return found


def test_a_tracker_that_hangs_is_ended(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with launch.tracked(tmp_path, ["tensorboard"]):
        os.kill(started[0].pid, signal.SIGSTOP)
    assert started[0].returncode == -signal.SIGKILL
    assert capsys.readouterr().err.splitlines() == [
        "partita: waiting for trackers to take what is left; Ctrl-C ends them",
        "partita: trackers did not finish within 0 s, and were ended",
    ]


def test_a_tracker_that_dies_does_not_end_the_run(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with launch.tracked(tmp_path, ["tensorboard"]):
        started[0].kill()
        started[0].wait()
    assert capsys.readouterr().err == "partita: the process of the trackers has failed\n"


def test_a_process_that_cannot_be_started_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "none"))  # type: ignore[attr-defined]
    with launch.tracked(tmp_path, ["tensorboard"]):
        pass
    message = "partita: cannot start the process of the trackers: No such file or directory\n"
    assert capsys.readouterr().err == message


# ---------------------------------------------------------------- the others, offline


@pytest.mark.soak
def test_the_other_trackers_offline(tmp_path: Path) -> None:
    """Each writes to its own local store: two processes, as of a run that was resumed."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    environment = ours | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    run = tmp_path / "run"
    for keep, steps in ((0, (1, 2)), (2, (3, 4))):
        with RunDirectory.open(run) as directory, closing(Telemetry(directory, keep)) as telemetry:
            for step in steps:
                telemetry.write({"step": step, "loss": step + 0.25, "unix_time": 1e9 + step})
        command = [sys.executable, "-m", "partita.runtime.tracking", str(run), "-", "wandb", "mlflow", "trackio"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "partita:" not in done.stderr
    expected = [(1, 1.25), (2, 2.25), (3, 3.25), (4, 4.25)]
    with sqlite3.connect(tmp_path / "mlflow.db") as database:  # where MLflow keeps runs if nobody says otherwise
        found = database.execute(
            "select run_uuid, step, value from metrics where key = 'loss' order by step"
        ).fetchall()
    assert [(step, value) for _, step, value in found] == expected
    assert len({name for name, _, _ in found}) == 1
    with sqlite3.connect(tmp_path / "trackio" / "partita.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(values)["loss"]) for _, step, values in rows] == expected
    assert len({name for name, _, _ in rows}) == 1
    parts = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.name for path in parts}) == 1  # one run, in two parts
    text = b"".join(path.read_bytes() for path in parts)
    assert all(str(value).encode() in text for _, value in expected)
