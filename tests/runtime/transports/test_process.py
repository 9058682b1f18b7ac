"""The process transport, between real Gloo processes, under each of the launchers that run here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partita.runtime.supervision.identity import LOOPBACK_INTERFACE
from partita.runtime.transports.virtual import VirtualCluster
from tests.files import ROOT
from tests.marks import soak
from tests.runtime.programs.collectives import COLUMNS, LINE, SQUARE, steps

PROGRAMS = ROOT / "tests" / "runtime" / "programs"
EXCHANGE = str(PROGRAMS / "exchange.py")
LAUNCHER_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "OMP_NUM_THREADS",
)


def clean_environment(**more: str) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}, **more}


def supervised(*arguments: str, ranks: int = 2, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAMS / "supervise.py"), str(ranks), "2", *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(**more),
        timeout=120,
    )


def records(*outputs: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda record: record["rank"])


def check_exchange(found: list[dict[str, Any]]) -> None:
    """Everything arrived, the sums agree, and Gloo was told to stay on this machine."""
    assert [record["rank"] for record in found] == [0, 1], found
    for record in found:
        other = 1 - record["rank"]
        expected = {
            f"{way} {i}": [100.0 * other + 10.0 * number + i]
            for number, way in enumerate(("backward", "forward"))
            for i in range(4)
        }
        assert record["got"] == expected
        assert record["interface"] == LOOPBACK_INTERFACE
    assert found[0]["total"] == found[1]["total"]
    assert float.fromhex(found[0]["total"][0]) == pytest.approx(0.3)
    assert float.fromhex(found[0]["total"][1]) == 0.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc to list what listens")
def test_under_the_supervisor_transfers_arrive_and_nothing_listens_beyond_loopback() -> None:
    run = supervised(EXCHANGE, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    found = records(run.stdout)
    check_exchange(found)
    assert [record["shared"] for record in found] == [4, 4]
    for record in found:
        assert record["listening"], "Gloo listens for its peers; if not, this test sees nothing"
        assert set(record["listening"]) == {"0100007F"}, record["listening"]
        assert record["threads"] == 1


@pytest.mark.soak
@pytest.mark.parametrize("threads", ["1", *soak("16")])
def test_many_messages_to_and_fro(threads: str) -> None:
    """Where ranks have more threads than cores, they sleep at once."""
    run = supervised(EXCHANGE, "--pingpong", OMP_NUM_THREADS=threads)
    assert run.returncode == 0, run.stderr
    found = records(run.stdout)
    check_exchange(found)
    for record in found:
        assert record["shared"] == 4
        # Two ranks of 16 threads each have not the cores of any machine that these tests run on.
        assert (record["busy_wait"] > 0) == (2 * int(threads) <= len(os.sched_getaffinity(0)))


@pytest.mark.soak
@pytest.mark.parametrize("case", ["--apart", *soak("--much")])
def test_channels_that_send_much_or_far_go_over_gloo(case: str) -> None:
    run = supervised(EXCHANGE, case, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    found = records(run.stdout)
    check_exchange(found)
    assert [record["shared"] for record in found] == [0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("much", [("--much",), ()])
def test_a_peer_that_leaves_is_reported_and_closing_ends(much: tuple[str, ...]) -> None:
    run = supervised(EXCHANGE, "--leave", *much, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    (record,) = records(run.stdout)
    assert record["rank"] == 0
    assert record["lost"].startswith("the receive from rank 1 (1->0 forward) failed: "), record["lost"]


CLOSES = """
import atexit, time
from contextlib import ExitStack
import torch
from partita.cli.training.rank import status_of_rank
from partita.runtime.supervision.identity import Identity
from partita.runtime.supervision.rendezvous import connect
from partita.runtime.transports import process

process.CLOSE_SECONDS = 0.5
process.dist.destroy_process_group = lambda: time.sleep(600)  # as NCCL's may where a peer is gone
atexit.register(time.sleep, 600)  # as what frees the device at the end
identity = Identity(0, 1, 0, 1, "partita", "file:///{}/store", True)

def act(stack):
    stack.callback(process.ProcessTransport(secret=connect(identity, "gloo").secret).close)
    print("was there")
    return 7

status_of_rank(identity, act)
"""


def test_a_rank_that_cannot_close_its_connections_ends(tmp_path: Path) -> None:
    program = [sys.executable, "-c", CLOSES.format(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, env=clean_environment(), timeout=120)
    assert (done.returncode, done.stdout) == (7, "was there\n"), done.stderr


def test_collectives_on_gloo_and_on_the_virtual_cluster_agree_bit_for_bit() -> None:
    run = supervised(str(PROGRAMS / "collectives.py"), ranks=4, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    found: list[dict[str, list[str]]] = [{} for _ in range(4)]
    for mesh in (SQUARE, LINE, COLUMNS):
        cluster = VirtualCluster(4)
        cluster.run([steps(cluster.transport(rank), mesh, found[rank]) for rank in range(4)])
    gloo = records(run.stdout)
    for record, expected in zip(gloo, found, strict=True):
        assert record["found"] == expected, record["rank"]
    # It notices as it posts the collective, or as it waits for it.
    assert gloo[1]["lost"].startswith("the all-gather along tensor failed: "), gloo[1]["lost"]
    assert "Warning" not in run.stderr


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments, EXCHANGE]


@pytest.mark.soak
def test_under_torchrun() -> None:
    run = subprocess.run(
        torchrun("--nproc-per-node", "2", "--master-port", str(free_port())),
        capture_output=True,
        text=True,
        env=clean_environment(OMP_NUM_THREADS="1"),
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    check_exchange(records(run.stdout))


@pytest.mark.soak
def test_under_torchrun_on_two_nodes() -> None:
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            torchrun(
                *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", node),
                *("--master-addr", "127.0.0.1", "--master-port", port),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(OMP_NUM_THREADS="1"),
        )
        for node in ("0", "1")
    ]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    found = records(*(output for output, _ in outputs))
    check_exchange(found)
    assert [record["shared"] for record in found] == [4, 4], "they are on one machine, whatever they are told"


@pytest.mark.soak
def test_under_slurm() -> None:
    # What `srun --ntasks 2` sets, without srun.
    shared = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": "17",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, EXCHANGE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**{**shared, "SLURM_PROCID": task, "SLURM_LOCALID": task}),
        )
        for task in ("0", "1")
    ]
    outputs = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    check_exchange(records(*(output for output, _ in outputs)))
