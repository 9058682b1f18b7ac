"""Whole runs: the command, real processes, real signals. Few, and end to end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partita.cli.training.room import FORKED
from partita.compiler.passes.place import pipeline_of
from partita.compiler.pipeline import compile_run
from partita.compiler.report.summary import summarize
from partita.compiler.schedules.generator import SCHEDULES, size_of
from partita.dsl.load import load
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.supervision.fork_server import FORKS
from tests.commands import computed, here, partita, records
from tests.fault_injection.processes import rank_of, wait_until
from tests.files import SPECS
from tests.marks import soak

SMALL = ["batch=8", "seq=32", "embed=32", "key=8", "train.steps=20", "train.eval=every(10, batches=2)"]


def ran(tmp_path: Path, name: str, *arguments: str, file: Path = SPECS / "tiny.par") -> list[tuple]:
    done = partita("run", str(file), *SMALL, *arguments, f"--run-dir={name}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return computed(tmp_path / name)


@pytest.mark.parametrize("rule", ["shard vocab -> pipe", *soak("")])
def test_transports_and_schedules_agree_bit_for_bit(tmp_path: Path, rule: str):
    """Also where all ranks share the vocabulary, which trains as it does on the last one."""
    file = tmp_path / "tiny.par"
    file.write_text((SPECS / "tiny.par").read_text().replace("stage layer -> pipe", f"{rule} stage layer -> pipe"))
    gloo = ran(tmp_path, "gloo", file=file)
    assert len(gloo) == 22
    assert ran(tmp_path, "virtual", "--transport", "virtual", "schedule=zb_v", file=file) == gloo
    if rule:
        done = here("run", str(SPECS / "tiny.par"), *SMALL, "--transport", "virtual", "--run-dir=last", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for one, other in zip(gloo, computed(tmp_path / "last"), strict=True):
            assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("threads", ["4,2", *soak("many")])
def test_any_number_of_threads_will_do(tmp_path: Path, threads: str):
    """OpenMP takes a list of them; what is no number is not one of its user's."""
    launcher = ("env", f"OMP_NUM_THREADS={threads}", sys.executable)
    command = ("run", str(SPECS / "mlp.par"), "train.steps=1", "--transport", "virtual", "--run-dir=run")
    done = partita(*command, cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_every_schedule_trains_alike_to_the_last_bit(tmp_path: Path):
    """20 steps in f32 on two processes: whatever the order and the cut, gradients sum the same in the same order.

    The squared norm, in f64, is added up by stages: with another number of stages it may differ by rounding.
    """
    names = sorted(SCHEDULES.keys() - {"from_file"})
    assert len(names) >= 10
    runs = {name: (f"schedule={name}",) for name in names}
    runs["group"] = ("fast.group=4",)
    runs |= {f"auto{chunks}": ("schedule=auto", f"fast.chunks={chunks}") for chunks in (1, 2)}
    first: list[dict] = []
    norms: dict[int, list[float]] = {}
    for name, overrides in runs.items():
        steps = [dict(step) for step in ran(tmp_path, name, *overrides)]
        own = [step.pop("grad_norm") for step in steps if "grad_norm" in step]
        first = first or steps
        assert steps == first, name
        spec, _ = load(SPECS / "tiny.par", [*SMALL, *overrides])
        stages = pipeline_of(spec.layout, spec.mesh, size_of(spec.schedule.call)[0]).stages
        assert own == norms.setdefault(stages, own), name
        assert own == pytest.approx(norms[min(norms)], rel=1e-14), name
    assert len(first) == 22
    assert set(norms) == {2, 4}


def close(found: Path, expected: Path) -> None:
    """Losses, metrics and gradient norms of two runs in f32, to 1e-5."""
    assert len(computed(found)) == 3
    for one, other in zip(computed(found), computed(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)


def llama(tmp_path: Path, *overrides: str) -> None:
    """Eight processes, data 2 × pipe 2 × tensor 2, and one."""
    alone = [f"cluster.{axis}=1" for axis in ("data", "pipe", "tensor")]
    for name, mesh in (("eight", []), ("one", alone)):
        command = ["run", str(SPECS / "llama.par"), *overrides, *mesh, "--transport", "gloo", f"--run-dir={name}"]
        done = partita(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    close(tmp_path / "eight", tmp_path / "one")


@pytest.mark.soak
def test_llama_on_eight_processes_trains_as_on_one(tmp_path: Path):
    llama(tmp_path, "batch=8", "seq=32")


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["everything", "zero1"])
def test_llama_as_it_stands_on_eight_processes_trains_as_on_one(tmp_path: Path, layout: str):
    llama(tmp_path, f"layout={layout}")


@pytest.mark.soak
def test_bf16_trains(tmp_path: Path):
    found = ran(tmp_path, "bf16", "train.precision=bf16", "train.steps=10")
    first, last = dict(found[0])["loss"], dict(found[-2])["loss"]
    assert last < first


def children(supervisor: int) -> dict[int, int]:
    """Rank → process id of a supervisor's ranks."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int(re.search(r"PPid:\s+(\d+)", (entry / "status").read_text())[1])
        except (OSError, TypeError):
            continue
        rank = rank_of(int(entry.name))
        if parent == supervisor and rank is not None:
            found[rank] = int(entry.name)
    return found


@pytest.mark.parametrize("victim", soak(1, 0))
def test_killing_a_rank_ends_the_run(tmp_path: Path, victim: int):
    command = [sys.executable, "-m", "partita", "run", str(SPECS / "tiny.par"), "train.steps=5000", "--run-dir=run"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.1)
        ranks = children(process.pid)
        assert set(ranks) == {0, 1}
        os.kill(ranks[victim], signal.SIGKILL)
        status = process.wait(timeout=30)
    text = (tmp_path / "out").read_text()
    assert status == 3, text
    assert f"rank {victim} was killed by SIGKILL" in text
    assert "Traceback" not in text
    found = records(tmp_path / "run")  # whole lines, whenever it was killed
    assert [each["step"] for each in found] == [*range(1, len(found) + 1)]
    assert len(found[0]["peak_memory_by_rank"]) == 2
    assert all(each["peak_memory"] > 1 << 26 and each["step_seconds"] > 0 for each in found)
    for pid in ranks.values():
        assert not Path(f"/proc/{pid}").exists(), f"process {pid} is left"


@pytest.mark.soak
@pytest.mark.parametrize("checkpoint", ["none", "every(1000)"])
def test_ctrl_c_ends_all_ranks_and_what_is_said_to_be_saved_is(tmp_path: Path, checkpoint: str):
    overrides = [*SMALL, "train.steps=5000", f"train.checkpoint={checkpoint}"]
    command = [sys.executable, "-m", "partita", "run", str(SPECS / "tiny.par"), *overrides, "--run-dir=run"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.1)
        ranks = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
        status = process.wait(timeout=30)
    text = (tmp_path / "out").read_text()
    assert status == 130, text
    assert "Traceback" not in text, text
    for pid in ranks.values():
        assert not Path(f"/proc/{pid}").exists(), f"process {pid} is left"
    said = re.findall(
        r"^partita: interrupted: (?:nothing is saved|saved step (\d+); the same command goes on)$", text, re.M
    )
    assert said == [str(records(tmp_path / "run")[-1]["step"]) if checkpoint != "none" else ""], text
    if checkpoint != "none":
        assert steps_in(tmp_path / "run" / "checkpoints") == list(map(int, said))


@pytest.mark.soak
@pytest.mark.skipif(not FORKS, reason="ranks are forked on Linux")
def test_a_rank_holds_as_much_memory_as_is_said_of_it(tmp_path: Path):
    """Beside its tensors: before a run is started, it is judged by that whether it fits the machine."""
    tiny = [str(SPECS / "tiny.par"), *SMALL, "train.steps=100000", "train.eval=none"]
    bound = max(summarize(compile_run(load(tiny[0], tiny[1:])[0])[0]).peak_memory)
    command = [sys.executable, "-m", "partita", "run", *tiny, "--run-dir=run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "some steps are done")
        maps = [Path(f"/proc/{rank}/smaps_rollup").read_text() for rank in children(process.pid).values()]
        process.send_signal(signal.SIGINT)
    for text in maps:
        own = sum(int(kib) << 10 for kib in re.findall(r"^Private_\w+: +(\d+) kB", text, re.M))
        assert FORKED / 2 < own < FORKED + bound + (4 << 20)


@pytest.mark.soak
def test_under_torchrun_on_two_nodes(tmp_path: Path):
    """Two agents on this machine, one rank each, as on two machines."""
    torchrun = Path(sys.executable).parent / "torchrun"
    port = 29500 + os.getpid() % 2000
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command = [str(torchrun), "--nnodes=2", "--nproc-per-node=1", *rendezvous, "-m", "partita", "run"]
    command += [str(SPECS / "tiny.par"), *SMALL, "train.steps=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [*command, f"--run-dir=node{node}"], cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert all("loss" in output for output in outputs), "each machine shows the loss"


@pytest.mark.soak
def test_wrong_input_is_said_once(tmp_path: Path):
    (tmp_path / "wrong.par").write_text("axis batch = 4\nmodel m(x: [batch]) { loss mean(y) }\n")
    done = partita("run", "wrong.par", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("error[") == 1
    assert "Traceback" not in done.stderr
    done = partita("run", "missing.par", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
