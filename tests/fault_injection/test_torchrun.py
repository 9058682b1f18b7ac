"""Under torchrun: restarts that recover, with one agent and with two; a culprit on another machine; a second run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from partita.runtime.tracing.flight import BOOT, read
from tests.commands import computed
from tests.fault_injection.processes import PROC, launched, listening, marked, opened, parent_of, wait_until
from tests.fault_injection.runs import RANKS, STEPS, Run
from tests.marks import soak

pytestmark = pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")

NAMES = ("standalone", "static", "two static", "two c10d")


class Agents:
    """Torchrun's agents, of which each starts a share of the ranks; one for each pretended machine."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        *options: str,
        machines: bool = False,
        replaced: bool = False,
        directory: str = "run",
    ) -> None:
        self.folder = folder
        # What new agents need to find the others.
        self.variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if replaced else {}
        self.run = Run(folder, "pipeline")
        self.mark = self.run.mark
        count = 2 if kind.startswith("two") else 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = self.port = probe.getsockname()[1]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.commands: list[list[str]] = []
        for agent in range(count):
            where = {
                "standalone": ["--standalone"],
                "static": ["--node-rank", str(agent), "--master-addr", "127.0.0.1", "--master-port", str(port)],
                "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "7"],
            }[kind.split()[-1]]
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count)]
            command += ["--nproc-per-node", str(RANKS // count), "--max-restarts", "3", *where, "-m", "partita", "run"]
            command += ["m.par", "--run-dir", directory.format(agent), *options]
            if machines:
                (folder / f"boot{agent}").write_text(f"machine {agent}\n")
                pretend = f'mount --bind boot{agent} {BOOT}; exec "$@"'
                command = ["unshare", "--mount", "sh", "-c", pretend, "", *command]
            self.commands.append(command)
            self.processes.append(self.start(agent))

    def start(self, agent: int) -> subprocess.Popen[bytes]:
        """Start an agent, in the place of one that has ended if there was one."""
        name, _, value = self.mark.partition("=")
        environment = {**os.environ, **self.variables, "OMP_NUM_THREADS": "1", name: value}
        with (self.folder / f"said{agent}").open("ab") as said:
            return subprocess.Popen(
                self.commands[agent], cwd=self.folder, env=environment, stdout=said, stderr=subprocess.STDOUT
            )

    def lose(self, agent: int) -> None:
        """Kill an agent and its ranks, as a machine that fails, and what keeps its copies."""
        gone = self.processes[agent]
        ranks = [process for process in self.ranks().values() if parent_of(process) == gone.pid]
        gone.kill()
        for each in ranks:
            os.kill(each, signal.SIGKILL)
        gone.wait()

    def host(self) -> int:
        """The agent that has the store of the rendezvous."""
        inodes = {f"socket:[{inode}]" for inode, where in listening().items() if where.endswith(f":{self.port:04X}")}
        return next(n for n, each in enumerate(self.processes) if inodes & set(opened(each.pid)))

    @property
    def said(self) -> str:
        return "".join(each.read_text() for each in sorted(self.folder.glob("said*")))

    def ranks(self) -> dict[int, int]:
        """The processes of ranks."""
        return launched(self.mark)

    def lines(self) -> int:
        """Lines of metrics so far."""
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait(self) -> list[int]:
        return [each.wait(300) for each in self.processes]

    def clear(self) -> None:
        for each in self.processes:
            each.kill()
            each.wait()
        for process in marked(self.mark):
            os.kill(process, signal.SIGKILL)
        print(self.said)


@pytest.fixture
def expected(undisturbed: Callable[[str], tuple[list[dict], dict]]) -> list[dict]:
    return undisturbed("pipeline")[0]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agents]]:
    found: list[Agents] = []
    yield found
    for each in found:
        each.clear()


def recovers(agents: list[Agents], folder: Path, seed: int, expected: list[dict]) -> None:
    random = Random(seed)
    run = Agents(folder, NAMES[seed % len(NAMES)])
    agents.append(run)
    for number in range(random.choice((1, 1, 2))):
        goal = random.randrange(1, STEPS // 2) + number * 4
        wait_until(lambda goal=goal: run.lines() >= goal and len(run.ranks()) == RANKS, f"line {goal}", 300)
        if all(each.poll() is None for each in run.processes):
            # As a machine that fails: what its owner does to the file meanwhile is not read.
            (folder / "m.par").write_text("train {")
            os.kill(run.ranks()[random.randrange(RANKS)], random.choice((signal.SIGKILL, signal.SIGSEGV)))
            time.sleep(1)
    assert run.wait() == [0] * len(run.processes), run.said
    assert computed(folder / "run") == expected


@pytest.mark.parametrize("seed", soak(2))
def test_a_restart_recovers(seed: int, tmp_path: Path, agents: list[Agents], expected: list[dict]) -> None:
    recovers(agents, tmp_path, seed, expected)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_restarts_recover(seed: int, tmp_path: Path, agents: list[Agents], expected: list[dict]) -> None:
    recovers(agents, tmp_path, seed, expected)


@pytest.mark.soak
def test_machines_with_directories_of_their_own_restart(
    tmp_path: Path, agents: list[Agents], expected: list[dict]
) -> None:
    """The file is that of rank 0's machine, as it was."""
    run = Agents(tmp_path, "two static", 'train.checkpoint.dir="saved"', directory="run{}")
    agents.append(run)
    path = tmp_path / "run0" / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= 5, "some steps are done", 300)
    (tmp_path / "m.par").write_text("train {")
    os.kill(run.ranks()[1], signal.SIGKILL)
    assert run.wait() == [0, 0], run.said
    assert computed(tmp_path / "run0") == expected


@pytest.mark.soak
def test_ranks_go_on_where_their_agent_is_killed(tmp_path: Path, agents: list[Agents], expected: list[dict]) -> None:
    """The other machine's agent waits for it as long as torchrun has it wait, behind the end of the run."""
    run = Agents(tmp_path, "two static")
    agents.append(run)
    wait_until(lambda: run.lines() >= 3 and len(run.ranks()) == RANKS, "some steps are done", 300)
    run.processes[1].kill()
    wait_until(lambda: not run.ranks(), "all ranks are at their end", 300)
    assert computed(tmp_path / "run") == expected


@pytest.mark.parametrize("lost", soak("rank", "machine"))
def test_what_is_lost_is_read_from_copies_in_memory(
    lost: str, tmp_path: Path, agents: list[Agents], expected: list[dict]
) -> None:
    """Of a rank from its own machine, of a machine from the other; no step is ever saved to disk."""
    run = Agents(tmp_path, "two c10d", "train.checkpoint=every(1000, copies = 2)", replaced=True)
    agents.append(run)
    wait_until(lambda: len(run.ranks()) == RANKS, "all ranks are there", 300)
    ranks, other = run.ranks(), 1 - run.host()  # to know takes as long as some steps
    wait_until(lambda: run.lines() >= 7, "line 7", 300)
    if lost == "rank":
        os.kill(ranks[1], signal.SIGKILL)
    else:
        run.lose(other)
        run.processes[other] = run.start(other)
    assert run.wait() == [0] * 2, run.said
    (step,) = set(re.findall(r"step (\d+)/16  resumed from copies in memory", run.said))
    assert int(step) >= 4
    assert computed(tmp_path / "run") == expected


@pytest.mark.soak
def test_a_second_run_neither_ends_nor_misleads_the_first(
    tmp_path: Path, agents: list[Agents], expected: list[dict]
) -> None:
    first = Agents(tmp_path, "standalone")
    agents.append(first)
    wait_until(lambda: first.lines() >= 2, "some steps are done", 300)
    os.kill(first.processes[0].pid, signal.SIGCONT)
    second = tmp_path / "second"
    second.mkdir()
    shutil.copy(tmp_path / "m.par", second)
    (second / "run").symlink_to(tmp_path / "run")  # the same directory, from elsewhere
    before = (tmp_path / "run" / "run.json").read_bytes()
    for process in first.ranks().values():
        os.kill(process, signal.SIGSTOP)  # so that it is still there when the second one looks
    other = Agents(second, "standalone")
    agents.append(other)
    assert other.wait() != [0]
    assert "error[E0803]: another run writes to run" in other.said
    for process in first.ranks().values():
        os.kill(process, signal.SIGCONT)
    assert first.wait() == [0], first.said
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert computed(tmp_path / "run") == expected


def mounts() -> bool:
    """Whether this process may pretend to be on another machine."""
    done = subprocess.run(["unshare", "--mount", "mount", "--bind", "/dev/null", str(BOOT)], capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize("victim", soak(0, 1))
def test_machines_compare_before_one_of_them_speaks(tmp_path: Path, agents: list[Agents], victim: int) -> None:
    """The rank that is stopped is named, whichever machine it is on. Alone there, it is the machine that is silent."""
    if not mounts():
        pytest.skip("this user cannot pretend to be on two machines")
    run = Agents(tmp_path, "two static", "--stall-timeout", "5", machines=True)
    agents.append(run)
    wait_until(lambda: run.lines() >= 2 and len(run.ranks()) == RANKS, "some steps are done", 300)
    process = run.ranks()[victim]
    os.kill(process, signal.SIGSTOP)
    wait_until(lambda: "no progress for" in run.said, "it is noticed", 300)
    wait_until(lambda: f"rank {victim} does not answer" in run.said, "it is named", 10)
    said = run.said
    assert said.count("no progress for") == 1
    assert f"no progress for 5 s\n  rank {victim} does not answer, nor does any other rank of its machine" in said
    assert read(tmp_path / "run" / "flight", victim) is None  # it was another machine
    os.kill(process, signal.SIGCONT)
