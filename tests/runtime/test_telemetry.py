"""metrics.jsonl: whole lines of valid JSON with the promised keys, whatever was there before."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from partita.runtime.run_directory import RunDirectory
from partita.runtime.telemetry import FILE_NAME, Recorder, Telemetry
from partita.runtime.training import StepResult

NUMBERS = st.floats() | st.integers(-(10**9), 10**9)


def read(path: Path) -> list[dict[str, object]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@given(
    numbers=st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    metrics=st.dictionaries(st.sampled_from(["accuracy", "perplexity"]), NUMBERS),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, numbers: tuple[float, ...], metrics: dict[str, float]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    keys = ("loss", "grad_norm", "learning_rate", "tokens_per_second")
    result = StepResult(1, *numbers[:2], (numbers[2],), numbers[3], "tokens", metrics)
    with RunDirectory.open(folder) as directory:
        recorder, unwritten = (Recorder(where, pytest.fail, lambda: 12.5) for where in (directory, None))
        written = [recorder.step(result), recorder.evaluation(1, numbers[0], metrics)]
        recorder.close()
        assert written == [unwritten.step(result), unwritten.evaluation(1, numbers[0], metrics)]
    found = read(folder / FILE_NAME)
    assert found == written
    expected = {"step": 1, **dict(zip(keys, numbers, strict=True)), "step_seconds": 0.0, **metrics, "unix_time": 12.5}
    finite = {key: value if math.isfinite(value) else None for key, value in expected.items()}
    assert found[0] == finite
    assert list(found[1]) == ["step", "eval_loss", *(f"eval_{name}" for name in metrics), "unix_time"]


def test_the_memory_of_each_rank_is_written_when_it_has_grown() -> None:
    recorder = Recorder(None, pytest.fail)

    def found(*peaks: int) -> dict[str, object]:
        record = recorder.step(StepResult(1, 1.0, 1.0, (0.1,), 1.0, "tokens", peaks=peaks))
        return {name: value for name, value in record.items() if name.startswith("peak_memory")}

    assert found() == {}
    assert found(1000, 2000) == {"peak_memory": 2000, "peak_memory_by_rank": [1000, 2000]}
    assert found(1009, 2001) == {"peak_memory": 2001}
    assert found(1011, 2001) == {"peak_memory": 2001, "peak_memory_by_rank": [1011, 2001]}


def test_what_is_not_known_of_the_devices_is_left_out() -> None:
    result = StepResult(1, 1.0, 1.0, (0.1,), 1.0, "tokens")
    assert "mfu" not in Recorder(None, pytest.fail).step(result)
    assert Recorder(None, pytest.fail).step(evolve(result, mfu=0.25))["mfu"] == 0.25


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    telemetry = Telemetry(RunDirectory.open(folder))
    telemetry.write({"step": 1})
    assert [line["step"] for line in read(folder / FILE_NAME)] == [1]
    telemetry.write({"step": 2})
    assert [line["step"] for line in read(folder / FILE_NAME)] == [1, 2]
    telemetry.close()


@pytest.mark.parametrize("rest", ["", '{"step": 4, "lo', '{"step": 2}', "\0\0\n", "3\n", "\n"])
def test_a_resumed_run_keeps_the_lines_up_to_its_step(tmp_path: Path, rest: str) -> None:
    directory = RunDirectory.open(tmp_path)
    with closing(Telemetry(directory)) as telemetry:
        for step in (1, 2, 3, 4):
            telemetry.write({"step": step})
        telemetry.write({"step": 2, "eval_loss": 3.0})
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write(rest)
    with closing(Telemetry(directory, keep_through=2)) as telemetry:
        telemetry.write({"step": 3})
    assert [line["step"] for line in read(tmp_path / FILE_NAME)] == [1, 2, 2, 3]


def test_a_new_run_begins_anew(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDirectory.open(tmp_path) as directory, closing(Telemetry(directory)) as telemetry:
            telemetry.write({"step": 1})
    assert len(read(tmp_path / FILE_NAME)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.soak
def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """As the system says it of a file that may not grow; later lines are written when there is room again."""
    program = f"""
import resource
from pathlib import Path
from partita.runtime.run_directory import RunDirectory
from partita.runtime.telemetry import Telemetry

telemetry = Telemetry(RunDirectory.open(Path({str(tmp_path)!r})))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
refused = 0
for step in range(1, 21):
    if step == 18:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        telemetry.write(dict(step=step, text="x" * 80))
    except OSError:
        refused += 1
print(refused)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found = read(tmp_path / "metrics.jsonl")
    refused = int(done.stdout)
    assert 0 < refused < 17
    assert [each["step"] for each in found] == [*range(1, 18 - refused), 18, 19, 20]
