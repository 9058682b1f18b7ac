"""Flight recorders, and what is read from them: who holds a run up, and where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, note
from hypothesis import strategies as st

from partita.compiler.instructions import WaitReceive
from partita.dsl.load import load
from partita.runtime.rank import CompiledRun, Rank, prepare
from partita.runtime.run_directory import RunDirectory
from partita.runtime.supervision.diagnosis import Diagnosis, blame, source_lines
from partita.runtime.supervision.processes import piped
from partita.runtime.supervision.statuses import PEER_LOST
from partita.runtime.supervision.views import LocalView
from partita.runtime.supervision.watchdog import ENDING_SECONDS, Watchdog
from partita.runtime.tracing import flight
from partita.runtime.tracing.flight import (
    AGREEING,
    BETWEEN,
    EVALUATING,
    RING,
    SAVING,
    TRAINING,
    Flight,
    Position,
    path_of,
    read,
)
from partita.runtime.transports.virtual import Deadlock, VirtualCluster
from partita.runtime.verification.experiment import experiments
from tests.fault_injection.processes import wait_until
from tests.files import ROOT, SPECS
from tests.marks import examples


@given(st.lists(st.one_of(st.integers(0, 600), st.sampled_from([TRAINING, EVALUATING, BETWEEN]).map(str)), max_size=6))
def test_a_recorder_is_read_as_it_was_written(does: list[int | str]):
    with TemporaryDirectory() as name:
        directory = Path(name)
        assert read(directory, 3) is None
        recorder = Flight(path_of(directory, 3))
        total, marks, activity, step = 1, 1, flight.STARTING, 0
        for each in does:
            if isinstance(each, str):
                activity, step, marks, total = int(each), step + 1, 1, total + 1
                recorder.begin(activity, step)
            else:
                for _ in range(each):
                    recorder.mark()
                marks, total = marks + each, total + each
        found = read(directory, 3)
        assert found is not None
        assert (found.rank, found.activity, found.step) == (3, activity, step)
        assert (found.marks, found.total) == (marks, total)
        assert len(found.ages) == min(total, RING)
        assert list(found.ages) == sorted(found.ages)


def test_marks_are_those_that_a_device_has_come_to(tmp_path: Path):
    """The host runs ahead: what stands still on the device is the first mark whose event has not occurred."""
    recorder, done = Flight(path_of(tmp_path, 0)), [0]
    recorder.begin(TRAINING, 1)
    enqueued = count(1)

    def behind() -> Callable[[], bool]:
        number = next(enqueued)
        return lambda: number <= done[0]

    recorder.follow(behind)
    for _ in range(5):
        recorder.mark()

    def marks() -> int:
        found = read(tmp_path, 0)
        assert found is not None
        return found.marks

    assert marks() == 1
    done[0] = 3
    wait_until(lambda: marks() > 3, "the device is seen", 60)
    time.sleep(4 * flight.LOOK_SECONDS)
    assert marks() == 4
    assert recorder.marks == 7
    done[0] = 5
    wait_until(lambda: marks() == 6, "it is seen to have done all", 60)


def test_what_a_device_has_not_done_is_said_once_it_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flight, "QUIET_SECONDS", 2 * flight.LOOK_SECONDS)
    text = "nccl:broadcast 7 of the tensor axis, Float 4x5, scheduled\n" * 100
    recorder, done = Flight(path_of(tmp_path, 0)), [False]
    recorder.begin(TRAINING, 7)
    recorder.follow(lambda: lambda: done[0], lambda: text)

    def found() -> Position:
        position = read(tmp_path, 0)
        assert position is not None
        return position

    time.sleep(4 * flight.LOOK_SECONDS)
    assert found().undone == ""  # nothing is enqueued
    recorder.mark()
    wait_until(lambda: found().undone != "", "the device is seen to stand still", 60)
    assert found().undone == text[: flight.TEXT]
    watchdog = Watchdog(Diagnosis(plan_of("tiny.par").program), 1, 1.0, RunDirectory.open(tmp_path))
    assert watchdog.stall_of(LocalView([evolve(found(), seconds=1000.0)], {}), 1000.0)
    (rank,) = json.loads((tmp_path / "fault.json").read_text())["ranks"]
    assert rank["undone"][0] == text.partition("\n")[0]


@pytest.mark.soak
def test_operations_that_are_not_done_are_named_by_torch():
    """Gloo's, of which torch does not say when they are: the line is that of NCCL's."""
    code = (
        "import torch; from torch import distributed as d;"
        "from partita.runtime.transports.nccl import pending_operations;"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1);"
        "d.new_group([0], group_desc='the axis `tensor`').allreduce([torch.ones(4, 5)]).wait();"
        "print(pending_operations())"
    )
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "10"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "gloo:all_reduce 1 of the axis `tensor`, Float 4x5, scheduled\n"


def test_a_recorder_does_not_take_anothers_file(tmp_path: Path):
    Flight(path_of(tmp_path, 0))
    with pytest.raises(FileExistsError):
        Flight(path_of(tmp_path, 0))


def test_a_file_that_is_not_written_yet_is_no_position(tmp_path: Path):
    path_of(tmp_path, 0).write_bytes(b"")
    assert read(tmp_path, 0) is None
    path_of(tmp_path, 0).write_bytes(bytes(flight.SIZE))
    assert read(tmp_path, 0) is None


# ---------------------------------------------------------------- who holds a run up


class _Frozen(Exception):
    pass


class _Freezing(Flight):
    """Stops its rank where it would take mark number `limit`."""

    limit = -1

    def mark(self) -> None:
        if self._next == self.limit:
            raise _Frozen
        super().mark()


def _until_frozen(step: Iterator[None]) -> Iterator[None]:
    try:
        yield from step
    except _Frozen:
        return


@cache
def plan_of(name: str) -> CompiledRun:
    spec, _ = load(SPECS / name, ())
    assert spec is not None
    return next(experiments(spec)).plan


@given(st.sampled_from(["tiny.par", "llama.par", "gpt.par"]), st.data())
@examples(8, suppress_health_check=list(HealthCheck))
def test_the_rank_that_stands_still_is_named(name: str, data: st.DataObject):
    """Wherever a rank freezes, the others come to wait for it, and it is the one that is named."""
    plan = plan_of(name)
    program = plan.program
    victim = data.draw(st.integers(0, plan.ranks - 1))
    record = program.ranks[program.mesh.pipe_rank(victim)]
    # Marks: the recorder's own, two while the rank is made, the step's beginning, its prologue, one for each
    # instruction, and three endings before the sum over all ranks; what follows holds nobody up within the step.
    limit = data.draw(st.integers(4, len(record.instructions) + 7))
    with TemporaryDirectory() as name:
        directory = Path(name)
        flights = [_Freezing(path_of(directory, rank)) for rank in range(plan.ranks)]
        flights[victim].limit = limit
        cluster = VirtualCluster(plan.ranks, strict=True)
        ranks = [Rank(plan, r, cluster.transport(r), torch.device("cpu"), flight=flights[r]) for r in range(plan.ranks)]
        generator = torch.Generator().manual_seed(0)
        batch = {each.name: torch.randint(0, 2, each.type.shape, generator=generator) for each in program.inputs}
        with pytest.raises(Deadlock):
            cluster.run([_until_frozen(rank.step(1, batch, (0.1,))) for rank in ranks])
        positions = Watchdog(Diagnosis(program), plan.ranks, 1.0, RunDirectory.open(directory)).positions(directory)
    # They train: the other program is none of theirs.
    diagnosis = Diagnosis(program, plan.evaluation.program if plan.evaluation is not None else None)
    states = diagnosis.states(positions)
    note("\n".join(diagnosis.lines(states)))
    assert [each.rank for each in blame(states)] == [victim]
    for each in states:
        assert each.rank == victim or each.waits_for, f"rank {each.rank} does not wait"
    json.dumps(diagnosis.as_json(states))


def test_the_dead_are_named_before_those_that_wait(tmp_path: Path):
    plan = plan_of("tiny.par")
    for rank in range(2):
        recorder = Flight(path_of(tmp_path, rank))
        recorder.begin(TRAINING, 7)
    watchdog = Watchdog(Diagnosis(plan.program), 2, 1.0, RunDirectory.open(tmp_path))
    text = watchdog.died(tmp_path, [1])
    assert text.startswith("rank 1 was at the start (step 7)")
    report = json.loads((tmp_path / "fault.json").read_text())
    assert report["cause"] == "death"
    assert [each["condition"] for each in report["ranks"]] == ["", "dead"]


def test_all_machines_are_told_of_a_death(tmp_path: Path):
    """Where no connection tells of it: all that wait for the dead end within seconds, of 600 without progress, and one
    says why.
    """
    text = (SPECS / "tiny.par").read_text().replace("repeat 4", "repeat 6").replace("pipe = 2", "pipe = 3")
    (file := tmp_path / "three.par").write_text(text)
    program = [sys.executable, str(ROOT / "tests/runtime/programs/waiting.py"), str(file)]
    for machine in "01":
        (tmp_path / machine).mkdir()
    ranks = [
        subprocess.Popen(
            [*program, str(rank), "001", tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    try:
        for each in ranks:
            assert piped(each.stdout).readline() == "waits\n"
        ranks[1].kill()
        said = [each.communicate(timeout=120)[1] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [PEER_LOST, -signal.SIGKILL, PEER_LOST]
    (text,) = (each for each in said if each)
    assert text.startswith("partita: rank 1 died\n  rank 1 was at the start (step 3)\n")


def test_who_is_behind_is_told_by_turns(tmp_path: Path):
    """Batches of an evaluation are numbered downwards, and what follows has the numbers of steps again."""
    plan = plan_of("tiny.par")
    instructions = plan.program.ranks[1].instructions
    waits = next(i for i, each in enumerate(instructions) if isinstance(each, WaitReceive))
    behind, ahead = (Flight(path_of(tmp_path, rank)) for rank in range(2))
    for each in (behind, ahead):
        each.begin(EVALUATING, -1)
    ahead.begin(EVALUATING, -2)
    for _ in range(waits + 1):
        ahead.mark()

    def blamed() -> tuple[list[int], str]:
        diagnosis = Diagnosis(plan.program)
        states = diagnosis.states(Watchdog(diagnosis, 2, 1.0, RunDirectory.open(tmp_path)).positions(tmp_path))
        return [each.rank for each in blame(states)], diagnosis.lines(states)[-1]

    assert blamed()[0] == [0]
    behind.begin(EVALUATING, -2)
    for each in (behind, ahead):
        each.begin(BETWEEN, 6)
    with behind.within(SAVING):
        ahead.begin(SAVING, 6)
        ahead.begin(AGREEING, 6)
        ranks, line = blamed()
        assert ranks == [0]
        assert line.startswith("rank 1 waits for other ranks, to agree on a checkpoint for 0 s (after step 6)")


def test_recorders_of_other_machines_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their clocks are others, and so are their processes."""
    Flight(path_of(tmp_path, 0))
    assert read(tmp_path, 0) is not None
    monkeypatch.setattr(flight, "machine", lambda: 1)
    assert read(tmp_path, 0) is None


def test_a_run_that_moves_does_not_stall(tmp_path: Path):
    watchdog = Watchdog(Diagnosis(plan_of("tiny.par").program), 2, 1e-3, RunDirectory.open(tmp_path))
    long_ago, own = time.monotonic() - 100.0, {0: os.getpid(), 1: os.getpid()}
    assert watchdog.stalled(tmp_path, long_ago, own) is None  # they are being started, which may take longer
    first = Flight(path_of(tmp_path, 0))
    assert watchdog.stalled(tmp_path, long_ago, own) is None
    second = Flight(path_of(tmp_path, 1))
    assert watchdog.stalled(tmp_path, long_ago, own) is None
    first.begin(TRAINING, 1)
    second.begin(TRAINING, 1)
    patient = Watchdog(watchdog.diagnosis, 2, 60.0, RunDirectory.open(tmp_path))
    assert patient.stalled(tmp_path, long_ago, own) is None
    assert watchdog.stalled(tmp_path, time.monotonic(), own) is None  # they have been told to begin just now
    text = None
    while text is None:
        text = watchdog.stalled(tmp_path, long_ago, own)
    assert "is at the start for 0 s (step 1)" in text


@pytest.mark.soak
@pytest.mark.parametrize(
    "activity", [None, flight.STARTING, flight.READY, flight.CONNECTING, flight.LOADING, flight.ENDED]
)
def test_a_rank_that_is_stopped_outside_of_steps_is_named(tmp_path: Path, activity: int | None):
    """Also before it has a recorder, and after its last step."""
    watchdog = Watchdog(Diagnosis(plan_of("tiny.par").program), 2, 1e-3, RunDirectory.open(tmp_path))
    first = Flight(path_of(tmp_path, 0))
    for each in (flight.READY, flight.CONNECTING, flight.LOADING, flight.AGREEING):
        first.begin(each)
    record = "" if activity is None else f"Flight(path_of(Path({str(tmp_path)!r}), 1)).begin({activity})"
    program = f"""
import os, signal
from pathlib import Path
from partita.runtime.tracing.flight import Flight, path_of
{record}
os.kill(os.getpid(), signal.SIGSTOP)
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        since, text = time.monotonic() - ENDING_SECONDS, None
        while text is None:
            text = watchdog.stalled(tmp_path, since, {0: os.getpid(), 1: process.pid})
    finally:
        process.kill()
        process.wait()
    doing = flight.ACTIVITIES[activity or flight.STARTING]
    assert text.splitlines()[1].startswith(f"  rank 1 is stopped, {doing}")
    assert text.splitlines()[2].startswith("  rank 0 waits for other ranks, to agree")


@pytest.mark.parametrize("timeout", [1e-3, 600.0])
def test_the_last_rank_is_watched_to_its_end(tmp_path: Path, timeout: float):
    """Whatever the stall timeout is: a busy machine may take long to end a process."""
    watchdog = Watchdog(Diagnosis(plan_of("tiny.par").program), 1, timeout, RunDirectory.open(tmp_path))
    Flight(path_of(tmp_path, 0)).begin(flight.ENDED)
    (position,) = watchdog.positions(tmp_path)
    early, late = (LocalView([evolve(position, seconds=ENDING_SECONDS + more)], {}) for more in (-1.0, 1.0))
    assert watchdog.stall_of(early, 1000.0) is None
    assert "rank 0 is ending" in str(watchdog.stall_of(late, 1000.0))


def test_lines_of_the_file_are_those_of_what_a_function_calls():
    program = prepare(load(SPECS / "tiny.par", ())[0]).program
    function = program.stages[1].functions["F"]
    assert source_lines(program.source, function) == f" ({SPECS / 'tiny.par'}:9 to 18)"
