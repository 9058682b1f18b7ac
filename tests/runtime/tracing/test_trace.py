"""`run --trace`: marks are taken where they should be, costs come out of them again, and whole runs in processes."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.cli import measured
from partita.cli.main import main
from partita.compiler.instructions import Compute, PostReceive, PostSend, WaitReceive, WaitSend
from partita.compiler.program import Program
from partita.compiler.schedules.simulator import Costs, simulate
from partita.runtime.rank import prepare
from partita.runtime.tracing import stopwatch
from partita.runtime.tracing.measurement import measure
from partita.runtime.tracing.stopwatch import MAX_STEPS, WARM_UP_STEPS, Marks, Stopwatch, path_of
from tests.commands import partita
from tests.files import SPECS, checked
from tests.marks import every, examples

TINY = SPECS / "tiny.par"
SMALL = ["batch=8", "seq=32", "embed=32", "key=8"]
# Meshes of more ranks than stages, with the pipeline first, last and between: the axes, and the layout's rules.
MESHES = {
    "data = 2, pipe = 2": "shard batch -> data",
    "pipe = 2, data = 2": "shard batch -> data",
    "data = 2, pipe = 2, tensor = 2": "shard batch -> data  shard ffn -> tensor",
    "pipe = 2, data = 2, tensor = 2": "shard batch -> data  shard ffn -> tensor",
    "data = 2, tensor = 2, pipe = 2": "shard batch -> data  shard ffn -> tensor",
}


def program(*overrides: str, mesh: str = "data = 2, pipe = 2", rules: str = "") -> Program:
    text = TINY.read_text().replace("laptop(pipe = 2)", f"laptop({mesh})")
    text = text.replace("stage layer", f"{MESHES[mesh]}  {rules}  stage layer")
    return prepare(checked(text, "columns.par", ["batch=16", *SMALL[1:], *overrides])).program


# ---------------------------------------------------------------- costs → marks → costs


@st.composite
def runs(draw):
    """A program on a mesh of two columns, and marks of three steps that its ranks would take at random costs. Each
    column has costs of its own; each rank a clock of its own, the first two share one."""
    made = program(draw(st.sampled_from(["schedule=gpipe", "schedule=one_f_one_b", "fast.group=4", "fast.chunks=1"])))
    seconds = st.integers(1, 1_000_000).map(lambda micro: micro / 1e6)
    transfer, tied, summing = draw(seconds), draw(seconds), draw(seconds)
    ready = [draw(seconds) for _ in range(4)]  # the ranks begin their steps at different times
    own = {(rank, what): draw(seconds) for rank in range(4) for what in ("reduce", "finish", "update")}
    times: dict[int, list[float]] = {}
    for column in range(2):
        costs = {(s.index, kind): draw(seconds) for s in made.stages for kind in ("F", "BW")}
        lists = [rank.instructions for rank in made.ranks]
        timeline = simulate(lists, Costs(lambda *key, of=costs: of[key], lambda message: transfer))
        through = {each.work: each.end for line in timeline.transfers.values() for each in line}
        for pipe_rank, record in enumerate(made.ranks):
            ends = (interval.end for interval in timeline.actions[pipe_rank])
            marks = [max(ready) - ready[2 * column + pipe_rank], max(ready)]
            for instruction in record.instructions:
                now = marks[-1]
                if isinstance(instruction, Compute):
                    now = next(ends) + max(ready)
                elif isinstance(instruction, (WaitReceive, WaitSend)):
                    now = max(now, through[instruction.transfer] + max(ready))
                marks.append(now)
            times[made.mesh.peer(2 * column, pipe_rank)] = marks
    for rank, marks in times.items():
        marks.append(marks[-1] + own[rank, "reduce"])
    for column in ((0, 1), (2, 3)):
        exchanged = max(times[rank][-1] for rank in column) + tied
        for rank in column:
            times[rank] += [exchanged, exchanged + own[rank, "finish"]]
    summed = max(marks[-1] for marks in times.values()) + summing
    for rank, marks in times.items():
        marks += [summed, summed + own[rank, "update"]]
    clocks = [0.0, 0.0, draw(seconds), draw(seconds)]
    return made, [
        Marks(
            (2, 3, 4),
            np.array([[round((clocks[rank] + 100 * i + t) * 1e9) for t in times[rank]] for i in range(3)]),
            f"machine {max(rank, 1)}",
        )
        for rank in range(4)
    ]


@examples(3)
@given(runs())
def test_the_simulation_from_the_costs_of_a_simulated_run_is_that_run(run):
    made, marks = run
    found = measure(made, marks)
    assert [step.number for step in found.steps] == [2, 3, 4]
    assert [step.start for step in found.steps] == pytest.approx([0.0, 100.0, 200.0])
    assert abs(found.difference) < 1e-6
    for step in found.steps:
        for taken, simulated in zip(step.timeline.actions, found.simulated.actions, strict=True):
            assert [each.work for each in taken] == [each.work for each in simulated]
            for key in ("rank", "start", "end"):
                assert [getattr(e, key) for e in taken] == pytest.approx([getattr(e, key) for e in simulated])
        assert step.timeline.transfers.keys() == found.simulated.transfers.keys()


def test_a_step_that_begins_again_has_its_marks_once(tmp_path: Path) -> None:
    watch = Stopwatch(path_of(tmp_path, 0), 3, torch.device("cpu"))
    for step, taken in ((1, 9), (2, 9), (3, 4), (2, 9), (3, 9)):
        watch.begin(step)
        for _ in range(taken if watch.recording else 0):
            watch.mark()
        if taken < 9:
            watch.discard()
    watch.finish()
    found = Marks.read(path_of(tmp_path, 0))
    assert found.steps == (2, 2, 3)
    assert (np.diff(found.times.flatten()) > 0).all()


def test_costs_are_those_of_the_middle_half_of_the_steps():
    made = program("schedule=gpipe")
    count = len(made.ranks[0].instructions) + stopwatch.MARKS_OF_A_STEP
    lengths = [9, 4, 1, 5]  # of an interval between marks, by step
    times = np.array([[1000 * i + length * j for j in range(count)] for i, length in enumerate(lengths)]) * 10**9
    found = measure(made, [Marks((2, 3, 4, 5), times, "machine")] * 4)
    first = found.simulated.actions[0][0]
    assert (first.work.kind, first.duration) == ("P", 4.5)
    # What is not waited for is computed: the actions, the posts around them, and P, R, S and U.
    for rank, line in enumerate(found.simulated.actions):
        instructions = made.ranks[made.mesh.pipe_rank(rank)].instructions
        counted = sum(isinstance(each, (Compute, PostSend, PostReceive)) for each in instructions)
        assert sum(interval.duration for interval in line) == pytest.approx(4.5 * (counted + 4))
    assert found.seconds == pytest.approx(4.5 * (count - 1))
    assert found.typical.number in (3, 5)


# ---------------------------------------------------------------- pictures


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("mesh", "rules", "sync"),
    every(3, [*product(MESHES, ["", "shard vocab -> pipe"], ["none", "local(groups = 2, every = 2)"])]),
)
def test_a_measured_run_is_drawn_with_a_row_for_each_rank_of_any_mesh(tmp_path: Path, capsys, mesh, rules, sync):
    made = program(f"train.sync={sync}", "schedule=one_f_one_b", mesh=mesh, rules=rules)
    ranks = range(made.mesh.ranks)
    for rank in ranks:
        count = len(made.ranks[made.mesh.pipe_rank(rank)].instructions) + stopwatch.MARKS_OF_A_STEP
        times = np.arange(3 * count, dtype=np.int64).reshape(3, count) * 10**6
        Marks((2, 3, 4), times, "machine").write(path_of(tmp_path, rank))
    measured.draw(tmp_path, made)
    assert "measured step" in capsys.readouterr().out
    texts = Counter(e.text for e in ElementTree.parse(tmp_path / "timeline.svg").iter() if e.text is not None)
    assert [texts[f"rank {rank}"] for rank in ranks] == [2] * len(ranks), "measured and simulated"
    texts = {text.rstrip("0123456789") for text in texts if text}
    assert ({"S", "T"} <= texts) == bool(rules), "the passes over a vocabulary that the pipeline shares"


# ---------------------------------------------------------------- marks


def test_a_stopwatch_leaves_out_the_first_step_and_ends_with_the_last_that_it_has_room_for(tmp_path):
    watch = Stopwatch(path_of(tmp_path, 0), 2, torch.device("cpu"))
    for step in range(5, 5 + WARM_UP_STEPS + MAX_STEPS + 3):
        assert not path_of(tmp_path, 0).exists() or step > 5 + WARM_UP_STEPS + MAX_STEPS
        watch.begin(step)
        for _ in range(2 + stopwatch.MARKS_OF_A_STEP - 1) if watch.recording else ():
            watch.mark()
    watch.finish()
    found = Marks.read(path_of(tmp_path, 0))
    assert found.steps == tuple(range(5 + WARM_UP_STEPS, 5 + WARM_UP_STEPS + MAX_STEPS))
    assert found.times.shape == (MAX_STEPS, 2 + stopwatch.MARKS_OF_A_STEP)
    assert (np.diff(found.times.ravel()) >= 0).all()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.npz"]


def test_events_of_a_gpu_are_read_by_the_step(monkeypatch):
    """As on a GPU whose clock runs beside the host's; times between events are single floats in milliseconds."""
    now = [0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return float(np.float32((end.at - self.at) / 1e6))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(stopwatch, "perf_counter_ns", lambda: now[0] + 10**15)
    clock = stopwatch._EventClock(3)
    expected = []
    for step in range(1, 6):
        clock.begin()
        for mark in range(3):
            now[0] = step * 2 * 10**9 + mark * 1_234_567
            clock.mark()
            expected.append(now[0] + 10**15)
    assert np.abs(np.array(clock.read()) - expected).max() < 2000  # nanoseconds, of ten seconds


# ---------------------------------------------------------------- whole runs


def hold_trace(directory: Path, steps: int) -> None:
    """The files of a run of tiny.par are there, and say of every action when it ran in every step."""
    assert {path.name for path in directory.iterdir()} == {"rank-0.npz", "rank-1.npz", "trace.json", "timeline.svg"}
    texts = "".join(element.text or "" for element in ElementTree.parse(directory / "timeline.svg").iter())
    assert "measured: " in texts
    assert "simulated from" in texts
    trace = json.loads((directory / "trace.json").read_text())
    events = trace["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in rows}) == len(rows)
    (measured, simulated) = processes
    assert measured == "measured"
    slices: dict[tuple[int, str], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], rows[event["pid"], event["tid"]]), []).append(event)
    for own in slices.values():
        own.sort(key=lambda event: event["ts"])
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(own))
    actions = [f"{kind}{chunk}.{microbatch}" for kind in ("F", "BW") for chunk in (0, 1) for microbatch in range(8)]
    ends = ["batch and prologue", "reductions", "statistics", "update"]
    for title, times in ((measured, steps), (simulated, 1)):
        for rank in (0, 1):
            found = Counter(event["name"] for event in slices[processes[title], f"rank {rank}"])
            assert found == dict.fromkeys([*actions, *ends], times)
    assert [e["name"] for e in slices[processes[measured], "steps"]] == [f"step {n}" for n in range(2, steps + 2)]
    # Of 4 stages on 2 ranks: 3 messages there and 3 back for each microbatch; tied totals have no arrows.
    transfers = [own for (process, row), own in slices.items() if process == processes[measured] and "->" in row]
    crossing = [e for own in transfers for e in own if "microbatch" in e["args"]]
    arrows = Counter(event["ph"] for event in events if event["ph"] in "sf" and event["pid"] == processes[measured])
    assert arrows["s"] == arrows["f"] == 6 * 8 * steps
    assert len(crossing) >= 6 * 8 * steps


@pytest.mark.soak
def test_a_traced_run(tmp_path: Path):
    arguments = [str(TINY), *SMALL, "train.steps=5", "train.eval=every(3, batches=1)", "--trace", "trace"]
    done = partita("run", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    line = r"measured step [\d.]+ \w+ \(median of 4\), simulated from its action costs [\d.]+ \w+ \([+-][\d.]+%\); "
    assert re.fullmatch(line + "trace/trace.json", done.stdout.splitlines()[-1]), done.stdout
    hold_trace(tmp_path / "trace", 4)


@pytest.mark.soak
def test_torchrun_hands_the_option_over(tmp_path: Path):
    torchrun = str(Path(sys.executable).parent / "torchrun")
    launcher = (torchrun, "--standalone", "--nproc-per-node=2")
    done = partita("run", str(TINY), *SMALL, "train.steps=3", "--trace", "trace", cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("measured step") == 1
    hold_trace(tmp_path / "trace", 2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace=t", "--transport", "virtual"], "--transport virtual runs them one after another"),
        (["--trace=t", "train.steps=1"], "raise train.steps"),
        (["--trace=tiny.par/t"], "cannot write to tiny.par/t"),
        (["--trace=t", "train.sync=local(groups = 2, every = 2)", "batch=16"], "each trains 2"),
    ],
)
def test_what_cannot_be_traced_is_said(tmp_path: Path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("tiny.par").write_text(TINY.read_text())
    assert main(["run", "tiny.par", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_is_not_whole_is_not_drawn(tmp_path: Path, capsys):
    measured.draw(tmp_path, program())
    assert "has no rank-0.npz and 3 more" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
