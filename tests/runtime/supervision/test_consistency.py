"""Ranks compare what they are about to run, and where it differs one message names them and all end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from attrs import evolve

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load, load_text
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.supervision.consistency import Statement, agree, compared, compared_kernels, digest
from partita.runtime.transports.failures import ConnectionLost
from tests.files import SPECS

TINY = (SPECS / "tiny.par").read_text()
SMALL = ("batch=8", "seq=16", "embed=32", "key=8", "train.steps=2", "train.eval=every(2, batches=1)")
LIMIT = 120.0  # seconds in which all ranks have ended, on a busy machine


# ---------------------------------------------------------------- what counts


def plan_of(text: str, *overrides: str) -> CompiledRun:
    found, diagnostics = load_text(text, "some.par", [*SMALL, *overrides])
    assert found is not None, diagnostics
    return prepare(found)


def hashes(plan: CompiledRun) -> tuple[str, str]:
    return digest(plan.spec), digest(plan.program)


@pytest.mark.soak
def test_how_a_file_is_written_does_not_count(tmp_path: Path):
    plain = hashes(plan_of(TINY))
    moved = TINY.replace("axis", "# elsewhere\n\n   axis", 1).replace("\n}", "  # the end\n}")
    assert moved != TINY
    assert hashes(plan_of(moved)) == plain
    (tmp_path / "other.par").write_text(TINY)
    found, _ = load(tmp_path / "other.par", SMALL)
    assert found is not None
    assert hashes(prepare(found)) == plain


def test_programs_of_both_kinds_of_steps_count():
    plan = plan_of(TINY)
    assert plan.evaluation is not None
    assert digest(plan.evaluation.program) != digest(plan.program)


@pytest.mark.soak
def test_nor_does_where_things_stand_in_any_of_the_models():
    for path in sorted((SPECS / "zoo").glob("*.par")):
        text = path.read_text()
        there, moved = (load_text(each, path.name, path=path)[0] for each in (text, "\n  # moved\n" + text))
        assert there is not None
        assert digest(there) == digest(moved), path.name


def test_nor_does_what_others_call_the_parameters():
    path = SPECS / "zoo" / "gpt2.par"
    text = path.read_text()
    here, there = (load_text(each, path.name, path=path)[0] for each in (text, text.split("weights hf")[0]))
    assert here is not None
    assert here.weights
    assert digest(here) == digest(there)


@pytest.mark.soak
def test_nor_does_the_process():
    """Names are hashed differently in every process, and nothing hangs on that."""
    code = (
        "import sys; from partita.dsl.load import load; from partita.compiler.pipeline import compile_run\n"
        "from partita.runtime.supervision.consistency import digest\n"
        "spec = load(sys.argv[1], sys.argv[2:])[0]; print(digest(spec), digest(compile_run(spec)[0].program))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(SPECS / "tiny.par"), *SMALL],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert found == {" ".join(hashes(plan_of(TINY))) + "\n"}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("override", "program"),
    [
        ("train.seed=1", False),
        ("train.steps=3", False),
        ("train.optimizer.weight_decay=0.5", True),
        ("embed=64", True),
        ("schedule=gpipe", True),
        ("laptop.pipe=1", True),
    ],
)
def test_what_it_means_does(override: str, program: bool):
    before, after = hashes(plan_of(TINY)), hashes(plan_of(TINY, override))
    assert before[0] != after[0]
    assert (before[1] != after[1]) == program


def test_a_schedule_in_a_file_counts_by_its_text(tmp_path: Path):
    def with_schedule(text: str) -> str:
        (tmp_path / "mine.sched").write_text(text)
        (tmp_path / "some.par").write_text(TINY)
        found, diagnostics = load(tmp_path / "some.par", [*SMALL, 'schedule=from_file("mine.sched")'])
        assert found is not None, diagnostics
        return digest(found)

    assert with_schedule("F0.0 BW0.0\nF0.0 BW0.0\n") != with_schedule("F0.0 B0.0 W0.0\nF0.0 BW0.0\n")


def test_records_are_hashed_by_value():
    assert digest({"a": 1, "b": (1.0, None)}) == digest({"b": [1.0, None], "a": 1})
    assert len({digest(each) for each in (1, 1.0, True, "1", (1,), ((1,),), (1, 1), {"1": 1}, None, ())}) == 10


# ---------------------------------------------------------------- what is said

ONE, TWO, THREE = Statement("1" * 64, "a" * 64), Statement("2" * 64, "b" * 64), Statement("1" * 64, "c" * 64)


def said(statements: Sequence[Statement]) -> str:
    found = compared(statements)
    assert found is not None
    return found.diagnostics[0].render()


def test_equal_ranks_agree():
    assert compared([ONE]) is None
    assert compared([ONE] * 9) is None


def test_those_who_differ_from_the_most_are_named():
    assert said([TWO, ONE, ONE]) == (
        "error[E0612]: rank 0 has a different file than ranks 1, 2\n"
        "  = ranks 1, 2: file 111111111111, program aaaaaaaaaaaa\n"
        "  = rank 0: file 222222222222, program bbbbbbbbbbbb\n"
        "  help: copy the same file to all machines, and start all ranks with the same overrides"
    )
    assert "rank 1 has a different file than rank 0" in said([ONE, TWO])
    assert "ranks 1, 2 have a different file than ranks 0, 3" in said([ONE, TWO, THREE, ONE])
    assert "rank 1 has compiled a different program from the same file" in said([ONE, THREE])
    many = said([Statement(str(i) * 64, "a" * 64) for i in range(10, 99)] + [ONE] * 200)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 81 more have a different file than ranks 89, 90" in many
    assert len(many.splitlines()) < 12


def test_ranks_without_kernels_among_others_are_named():
    lacking, other = (evolve(ONE, no_kernels=why) for why in ("there is no compiler `c++`", "PARTITA_NATIVE=0"))
    assert compared_kernels([ONE, ONE]) is None
    assert compared_kernels([lacking, other]) is None
    assert compared([lacking, ONE]) is None  # the same program
    found = compared_kernels([lacking, ONE, lacking, other])
    assert found is not None
    assert found.diagnostics[0].render() == (
        "error[E0625]: ranks 0, 2, 3 have no kernels in C++, and rank 1 has\n"
        "  = ranks 0, 2: there is no compiler `c++`\n"
        "  = rank 3: PARTITA_NATIVE=0\n"
        "  help: install a C++ compiler on all machines, or set PARTITA_NATIVE=0 on all"
    )


class Shelf:
    """A store of one process, in which the other ranks have said something already."""

    def __init__(self, others: Mapping[int, str]) -> None:
        self.values = {f"partita/agreement/{rank}": text for rank, text in others.items()}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def wait(self, keys: list[str], timeout: object) -> None:
        if not set(keys) <= set(self.values):
            raise RuntimeError("too late")


@pytest.mark.soak
def test_ranks_that_have_ended_are_not_waited_for():
    plan = plan_of(TINY)
    own = f"{digest(plan.spec)} {digest([plan.program, plan.evaluation and plan.evaluation.program])}"
    agree(Shelf({1: own}), 0, 2, plan.spec, plan.programs)
    with pytest.raises(Refused, match="rank 1 has a different file than rank 0"):
        agree(Shelf({1: f"{'0' * 64} {'0' * 64}"}), 0, 2, plan.spec, plan.programs)
    with pytest.raises(Refused, match=r"rank 1 has no kernels in C\+\+, and rank 0 has"):
        agree(Shelf({1: f"{own}  no compiler"}), 0, 2, plan.spec, plan.programs)
    agree(Shelf({1: f"{own}  no compiler"}), 0, 2, plan.spec, plan.programs, no_kernels="nor here")


def test_a_store_that_is_gone_is_a_connection_lost():
    plan = plan_of(TINY)

    class Gone(Shelf):
        def get(self, key: str) -> bytes:
            raise RuntimeError("[store.cpp:1] Connection reset by peer. and a stack")

    with pytest.raises(ConnectionLost, match=r"comparing what the ranks run failed: Connection reset by peer$"):
        agree(Gone({}), 1, 2, plan.spec, plan.programs)


# ---------------------------------------------------------------- real processes


def by_port(folder: Path, rank: int) -> dict[str, str]:
    """As other launchers start ranks, with a store that rank 0 keeps; the supervisor's all read one file."""
    port = folder / "port"
    if not port.exists():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port.write_text(str(probe.getsockname()[1]))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port.read_text(),
    }


def outcomes(
    folder: Path, start: object, *files: str, overrides: Sequence[str] = (), small: bool = True
) -> list[tuple[int, str]]:
    """The exit status and the standard error of ranks, of which each has a file in a folder of its own."""
    assert callable(start)
    processes = []
    for rank, text in enumerate(files):
        own = folder / str(rank)
        own.mkdir(exist_ok=True)
        (own / "net.par").write_text(text)
        command = [sys.executable, "-m", "partita", "run", str(own / "net.par"), *(SMALL if small else ())]
        command += [*overrides, "--run-dir=run"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **start(folder, rank)}
        processes.append(
            subprocess.Popen(
                command, cwd=own, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        )
    try:
        found = [process.communicate(timeout=LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, errors) for process, errors in zip(processes, found, strict=True)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("old", "new"),
    [("mesh laptop(pipe = 2", "mesh laptop(pipe = 1"), ("peak = 3e-3", "peak = 2e-3")],
)
def test_a_rank_with_another_file_ends_the_run(tmp_path: Path, old: str, new: str):
    changed = TINY.replace(old, new)
    assert changed != TINY
    (first, shown), (second, silent) = outcomes(tmp_path, by_port, TINY, changed)
    assert (first, second) == (1, 1), shown + silent
    assert shown.count("error[E0612]: rank 1 has a different file than rank 0") == 1
    assert "Traceback" not in shown + silent
    assert "error" not in silent  # said once
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.soak
@pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "c++") is None, reason="no C++ compiler")
def test_a_rank_without_kernels_among_others_ends_the_run(tmp_path: Path):
    def start(folder: Path, rank: int) -> dict[str, str]:
        return by_port(folder, rank) | {"PARTITA_NATIVE": str(1 - rank)}

    (first, shown), (second, silent) = outcomes(tmp_path, start, TINY, TINY)
    assert (first, second) == (1, 1), shown + silent
    assert shown.count("error[E0625]: rank 1 has no kernels in C++, and rank 0 has\n  = rank 1: PARTITA_NATIVE=0") == 1
    assert "error" not in silent


@pytest.mark.soak
def test_ranks_with_files_that_mean_the_same_run(tmp_path: Path):
    found = outcomes(tmp_path, by_port, TINY, "# my own copy\n" + TINY)
    assert [status for status, _ in found] == [0, 0], found
