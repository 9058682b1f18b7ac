"""The supervisor, with real processes and real signals: ranks end together, and nothing remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.runtime.supervision.cores import share, usable
from partita.runtime.supervision.launcher import GRACE_SECONDS, PEER_LOST, death, rank_environment
from tests.files import ROOT

SUPERVISE = str(ROOT / "tests" / "runtime" / "programs" / "supervise.py")
LIMIT = 5.0  # seconds in which all ranks must be gone after one has died
TIMEOUT = 60.0  # seconds that a busy machine may take for what has no limit of its own

# What a rank does first: say where it is (its process, its private directory) in a file of its own.
PREAMBLE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["PARTITA_RANK"])
folder = os.path.dirname(os.environ["PARTITA_RENDEZVOUS"])
def ready():
    with open(f"ready{rank}.new", "w") as file:
        file.write(f"{os.getpid()} {folder} {oct(os.stat(folder).st_mode & 0o777)}")
    os.rename(f"ready{rank}.new", f"ready{rank}")
"""
SLEEP = "ready()\ntime.sleep(600)\n"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP


class Run:
    """A running supervisor and its ranks."""

    def __init__(
        self,
        folder: Path,
        program: str,
        ranks: int,
        prefix: tuple[str, ...] = (),
        grace: float = GRACE_SECONDS,
        saves: bool | None = None,
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        (folder / "program.py").write_text(PREAMBLE + program)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, SUPERVISE, str(ranks), str(grace), "program.py"],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary), "SAVES": json.dumps(saves)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> list[int]:
        """The processes of the ranks, once all of them have said so."""
        wait_until(lambda: all((self.folder / f"ready{rank}").exists() for rank in range(self.ranks)), "ranks start")
        return [self.pid(rank) for rank in range(self.ranks)]

    def pid(self, rank: int) -> int:
        return int((self.folder / f"ready{rank}").read_text().split()[0])

    def finish(self) -> tuple[int, str]:
        """The exit status and standard error, after checking that nothing remains."""
        _, errors = self.process.communicate(timeout=TIMEOUT)
        self.check_nothing_remains()
        return self.process.returncode, errors

    def check_nothing_remains(self) -> None:
        found = [self.pid(rank) for rank in range(self.ranks) if (self.folder / f"ready{rank}").exists()]
        wait_until(lambda: not any(map(alive, found)), f"the ranks {found} end")
        wait_until(lambda: not list(self.temporary.iterdir()), f"{self.temporary} is empty")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = TIMEOUT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain until {what}"
        time.sleep(0.01)


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(program: str, ranks: int = 2, **options: Any) -> Run:
        runs.append(Run(tmp_path, program, ranks, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.wait()


@pytest.mark.soak
def test_success_is_silent(start: Callable[..., Run]) -> None:
    run = start("ready()")
    assert run.finish() == (0, "")
    places = {(run.folder / f"ready{rank}").read_text().split(maxsplit=1)[1] for rank in (0, 1)}
    assert len(places) == 1, "both ranks are told of one private directory"
    assert places.pop().endswith(" 0o700")


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("others", [SLEEP, STUBBORN], ids=["sleeping", "stubborn"])
def test_a_killed_rank_ends_the_others_in_time_and_is_named(start: Callable[..., Run], rank: int, others: str) -> None:
    run = start(others, ranks=3)
    pids = run.wait_ready()
    killed = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    status, errors = run.finish()
    assert time.monotonic() - killed < LIMIT
    assert status == 3
    assert errors == (
        f"partita: rank {rank} was killed by SIGKILL (possibly out of memory); the other ranks were killed\n"
    )


@pytest.mark.soak
def test_a_rank_that_fails_is_named_with_its_status(start: Callable[..., Run]) -> None:
    status, errors = start("ready()\nif rank == 1: sys.exit(7)\ntime.sleep(600)").finish()
    assert (status, errors) == (3, "partita: rank 1 ended with exit status 7; the other ranks were killed\n")


@pytest.mark.soak
def test_a_rank_that_lost_its_peer_is_not_the_cause(start: Callable[..., Run]) -> None:
    program = f"""
if rank == 0:
    ready()
    while not os.path.exists("ready1"): time.sleep(0.001)
    os.kill(os.getppid(), signal.SIGSTOP)  # so that the supervisor finds both dead at once
    os.kill(int(open("ready1").read().split()[0]), signal.SIGKILL)
    sys.exit({PEER_LOST})
{SLEEP}"""
    run = start(program)
    run.wait_ready()
    wait_until(lambda: not alive(run.pid(0)) and not alive(run.pid(1)), "both ranks end")
    os.kill(run.process.pid, signal.SIGCONT)
    status, errors = run.finish()
    assert status == 3
    assert errors.startswith("partita: rank 1 was killed by SIGKILL")


@pytest.mark.soak
def test_a_cause_that_ends_after_its_peer_is_named(start: Callable[..., Run]) -> None:
    """Who fails closes its connections first; who loses one may be gone before it."""
    program = f"""
ready()
if rank == 0: sys.exit({PEER_LOST})
time.sleep(0.2)
sys.exit(7)"""
    status, errors = start(program).finish()
    assert (status, errors) == (3, "partita: rank 1 ended with exit status 7; the other ranks were killed\n")


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("program", [STUBBORN, SLEEP], ids=["stubborn", "sleeping"])
@pytest.mark.parametrize(
    ("number", "line"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")],
    ids=["INT", "TERM"],
)
def test_a_signal_ends_all_ranks_with_one_line(
    start: Callable[..., Run], ranks: int, program: str, number: signal.Signals, line: str
) -> None:
    run = start(program, ranks)
    run.wait_ready()
    run.process.send_signal(number)
    assert run.finish() == (128 + number, f"partita: {line}\n")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "saves", "line"),
    [(signal.SIGTERM, None, "ended by SIGTERM"), (signal.SIGINT, True, "interrupted")],
    ids=["TERM", "INT"],
)
def test_a_second_signal_does_not_wait_for_the_stubborn(
    start: Callable[..., Run], number: signal.Signals, saves: bool | None, line: str
) -> None:
    # The second rank leaves at the first signal, and with it a sign that the supervisor has passed it on. The grace is
    # longer than this test waits.
    run = start(STUBBORN.replace("signal.signal", "if rank == 0: signal.signal"), grace=2 * TIMEOUT, saves=saves)
    pids = run.wait_ready()
    run.process.send_signal(number)
    wait_until(lambda: not alive(pids[1]), "the first signal arrives")
    assert alive(pids[0])
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == (128 + number, f"partita: {line}\n")


@pytest.mark.soak
def test_what_does_not_save_ends_at_the_first_ctrl_c_and_says_so(start: Callable[..., Run]) -> None:
    run = start(STUBBORN, grace=2 * TIMEOUT, saves=False)
    run.wait_ready()
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == (130, "partita: interrupted: nothing is saved\n")


@pytest.mark.soak
def test_ctrl_c_of_a_terminal_reaches_the_supervisor_only(start: Callable[..., Run]) -> None:
    # A terminal signals the foreground group; a rank in it would print a traceback of its own.
    run = start(SLEEP)
    pids = run.wait_ready()
    assert os.getpgid(run.process.pid) not in {os.getpgid(pid) for pid in pids}
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == (130, "partita: interrupted\n")


@pytest.mark.soak
def test_a_hangup_ends_the_run_unless_nohup_says_otherwise(start: Callable[..., Run]) -> None:
    run = start(SLEEP, prefix=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"))
    run.wait_ready()
    run.process.send_signal(signal.SIGHUP)
    run.process.send_signal(signal.SIGINT)  # were the hangup not ignored, it would come first
    assert run.finish() == (130, "partita: interrupted\n")


@pytest.mark.soak
@pytest.mark.parametrize("program", [SLEEP, STUBBORN], ids=["sleeping", "stubborn"])
def test_nothing_remains_when_the_supervisor_is_killed(start: Callable[..., Run], program: str) -> None:
    run = start(program, ranks=3)
    run.wait_ready()
    run.process.kill()
    run.process.wait()
    run.check_nothing_remains()


@pytest.mark.soak
def test_a_supervisor_killed_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    for turn in range(10):
        folder = tmp_path / str(turn)
        folder.mkdir()
        run = Run(folder, SLEEP, 2)
        try:
            time.sleep(0.03 * turn)  # from the interpreter's start to running ranks
        finally:
            run.process.kill()
            run.process.communicate()
        run.check_nothing_remains()
        # A rank that had not said where it is yet is found by its working directory.
        wait_until(lambda folder=folder: not processes_in(folder), f"no process works in {folder}")


def processes_in(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder) and alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.soak
def test_children_of_ranks_end_with_them(start: Callable[..., Run]) -> None:
    program = (
        """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(f"child{rank}", "w") as file: file.write(str(child.pid))
"""
        + SLEEP
    )
    run = start(program)
    pids = run.wait_ready()
    children = [int((run.folder / f"child{rank}").read_text()) for rank in (0, 1)]
    os.kill(pids[0], signal.SIGKILL)
    assert run.finish()[0] == 3
    wait_until(lambda: not any(map(alive, children)), "the ranks' children end")


@pytest.mark.soak
def test_errors_are_passed_through_line_by_line_with_the_rank(start: Callable[..., Run]) -> None:
    program = r"""
for line in range(200):
    os.write(2, b"x" * 50); os.write(2, b"%d\n" % line)
os.write(2, b"no end")
"""
    status, errors = start(program).finish()
    assert status == 0
    for rank in (0, 1):
        mine = [line for line in errors.splitlines() if line.startswith(f"rank {rank}: ")]
        assert mine == [f"rank {rank}: {'x' * 50}{line}" for line in range(200)] + [f"rank {rank}: no end"]
    assert len(errors.splitlines()) == 402


@pytest.mark.soak
def test_a_single_rank_needs_no_prefix(start: Callable[..., Run]) -> None:
    run = start("sys.stderr.write('hello\\n'); sys.exit(1)", ranks=1)
    assert run.finish() == (3, "hello\npartita: rank 0 ended with exit status 1\n")


@pytest.mark.soak
def test_output_of_ranks_is_passed_through(start: Callable[..., Run]) -> None:
    run = start("if rank == 0: print('shown')")
    output, _ = run.process.communicate(timeout=TIMEOUT)
    assert output == "shown\n"


@pytest.mark.soak
def test_a_terminal_gets_its_cursor_back(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PREAMBLE + "os.write(1, b'half a line \\x1b[?25l')\n" + SLEEP)
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, SUPERVISE, "1", "2", "program.py"], cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE
    )
    try:
        wait_until((tmp_path / "ready0").exists, "the rank starts")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        os.close(theirs)
    written = os.read(ours, 4096)
    os.close(ours)
    assert written == b"half a line \x1b[?25l\r\n\x1b[?25h"


def test_cores_are_shared_and_the_users_threads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.runtime.supervision.launcher.usable", lambda: list(range(12)))
    assert rank_environment({}, 4)["OMP_NUM_THREADS"] == "3"
    assert rank_environment({}, 16)["OMP_NUM_THREADS"] == "1"
    mine = rank_environment({"OMP_NUM_THREADS": "7"}, 4)
    assert (mine["OMP_NUM_THREADS"], mine["MKL_NUM_THREADS"]) == ("7", "7")


@pytest.mark.soak
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no processes")
@pytest.mark.parametrize("threads", ["1", "4096"])
def test_ranks_are_bound_to_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    """Unless they are to have more threads than their share."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    # They are bound before they get the word.
    program = "sys.stdin.buffer.read(1)\nprint(*sorted(os.sched_getaffinity(0)), file=sys.stderr)\n"
    status, errors = Run(tmp_path, program, 2).finish()
    assert status == 0
    own = [sorted(share(usable(), rank, 2)) if threads == "1" else sorted(usable()) for rank in range(2)]
    assert sorted(errors.splitlines()) == [f"rank {rank}: {' '.join(map(str, each))}" for rank, each in enumerate(own)]


def test_cores_are_shared_in_equal_parts_of_neighbours() -> None:
    assert [list(share(range(12), rank, 5)) for rank in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert list(share(range(2), 1, 3)) == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, "ended with exit status 1"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (PEER_LOST, "lost its connection to another rank"),
        (-60, "was killed by signal 60"),
    ],
)
def test_causes_of_death(status: int, words: str) -> None:
    assert death(status) == words
