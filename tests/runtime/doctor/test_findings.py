"""What is wrong with a machine is found in its facts, and nothing in those of a sound one."""

from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.runtime.doctor import findings, machine, parts, ranks, selftest
from partita.runtime.doctor.gpus import gpus_of, links_of
from partita.runtime.kernels.native import library
from partita.runtime.transports.collectives import COLLECTIVES
from tests.docs.errors import CODES

# Two GPUs as `nvidia-smi` answers for them.
GPUS = """\
0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 1980, 1980, 31, 700.00, 5, 16, 0, Not Active, Disabled
1, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 345, 1980, 91, 700.00, 5, 16, [N/A], Not Active, [N/A]
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-55
GPU1\tNV18\t X \tSYS\t0-55
NIC0\tPIX\tSYS\t X
"""
GIB = 1 << 30
SOUND: dict[str, Any] = {
    "partita": "0.1.0",
    "device_files": True,
    "system": {"host": "node1", "cores": 16, "quota": None, "python": "3.12.7"},
    "memory": {"shared_free": 64 * GIB},
    "limits": {"files": 1 << 20, "locked": None},
    "disk": {"/work": 900 * GIB},
    "network": {
        "interfaces": {"lo": {"up": True}, "eth0": {"up": True}, "eth1": {"up": False}},
        "fabric": [{"port": "mlx5_0/1", "active": True}],
        "addresses": ["10.0.0.2"],
        "master": "node1",
        "master_addresses": ["10.0.0.2"],
        "asked": {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"},
    },
    "packages": {"torch": "2.11.0"},
    "variables": {},
    "torch": {
        "version": "2.11.0+cu128",
        "cuda": "12.8",
        "NCCL": "2.27.3",
        "distributed": True,
        "problem": None,
        "gpus": [{"name": "H100", "memory": 80 * GIB, "free": 79 * GIB, "problem": None} for _ in range(2)],
        "peers": [[True, True], [True, True]],
    },
    "gpus": gpus_of(GPUS),
}


def codes(facts: dict[str, Any], several: bool = True) -> list[str]:
    found = list(findings.of_machine(facts, {}, 2, 2, several))
    assert {each.code for each in found} <= set(CODES)
    assert all(each.help for each in found)
    return [each.code for each in found]


def test_a_sound_machine_has_no_finding() -> None:
    assert codes(SOUND) == []


@pytest.mark.parametrize(
    ("place", "value", "code"),
    [
        ("torch.version", "2.9.1", "E1101"),
        ("torch_problem", "was killed by SIGSEGV", "E1101"),
        ("torch.distributed", False, "E1101"),
        ("torch.problem", "CUDA driver version is insufficient", "E1102"),
        ("torch.cuda", None, "E1102"),
        ("torch.NCCL", None, "E1102"),
        ("torch.no_kernels", "there is no compiler `c++`", "W1107"),
        ("torch.gpus.1.problem", "no kernel image is available", "E1102"),
        ("driver_problem", "nvidia-smi had not ended after 20 s, and was killed", "E1102"),
        ("network.master_addresses", [], "E1107"),
        ("network.master_addresses", None, "E1107"),
        ("network.asked.GLOO_SOCKET_IFNAME", "eth", "E1107"),  # no prefix, for Gloo
        ("network.asked.NCCL_SOCKET_IFNAME", "=ib0", "E1107"),
        ("network.asked.NCCL_SOCKET_IFNAME", "eth1", "E1107"),
        ("limits.files", 256, "W1101"),
        ("limits.locked", 64 << 10, "W1101"),
        ("memory.shared_free", 64 << 20, "W1101"),
        ("disk./work", GIB, "W1101"),
        ("system.quota", 1.5, "W1101"),
        ("gpus.0.slowed", "Active", "W1103"),
        ("gpus.1.ecc_errors", 3.0, "W1103"),
        ("torch.gpus.0.name", "A100", "W1103"),
        ("torch.gpus.0.free", 40 * GIB, "W1103"),
        ("torch.peers.0.1", False, "W1104"),
        ("network.fabric.0.active", False, "W1104"),
    ],
)
def test_each_fault_is_found(place: str, value: object, code: str) -> None:
    facts = copy.deepcopy(SOUND)
    *path, last = place.split(".")
    where = facts
    for each in path:
        where = where[int(each) if isinstance(where, list) else each]
    where[int(last) if isinstance(where, list) else last] = value  # type: ignore[index]
    assert codes(facts) == [code]


def test_a_host_name_that_means_each_machine_itself_is_found_where_others_connect_to_it() -> None:
    facts = copy.deepcopy(SOUND)
    facts["network"] |= {"addresses": ["127.0.1.1"], "asked": {}}
    assert (codes(facts), codes(facts, several=False)) == (["W1102"], [])


def test_gpus_that_torch_does_not_see_are_found_unless_they_are_hidden_on_purpose() -> None:
    facts = copy.deepcopy(SOUND)
    facts["torch"]["gpus"].pop()
    facts["torch"]["peers"] = [[True]]
    hidden = {**facts, "variables": {"CUDA_VISIBLE_DEVICES": "0"}}
    assert (codes(facts), codes(hidden)) == (["E1102"], [])


def test_answers_of_the_driver_are_read() -> None:
    first, second = gpus_of(GPUS)
    assert (first["name"], first["clock"], first["ecc_errors"]) == ("NVIDIA H100 80GB HBM3", 1980.0, 0.0)
    assert (second["ecc_errors"], second["mig"]) == (None, None)
    assert links_of(TOPOLOGY) == [["X", "NV18"], ["NV18", "X"]]


def test_versions_that_differ_between_machines_are_found() -> None:
    other = copy.deepcopy(SOUND)
    other["torch"]["NCCL"] = "2.21.5"
    other["system"] |= {"python": "3.11.9", "host": "node2"}
    found = list(findings.of_machines([SOUND, other, SOUND]))
    assert [each.code for each in found] == ["E1108", "W1106"]
    assert found[0].notes == ("2.21.5 on node2", "2.27.3 on node1, node1")
    assert list(findings.of_machines([SOUND, SOUND])) == []


def test_kernels_that_are_not_wanted_are_no_finding_but_one_on_some_of_the_machines(monkeypatch) -> None:
    monkeypatch.setenv("PARTITA_NATIVE", "0")
    library._found.cache_clear()
    unwanted, compiled = copy.deepcopy(SOUND), copy.deepcopy(SOUND)
    unwanted["torch"]["no_kernels"], compiled["torch"]["no_kernels"] = library.why_none(), ""
    library._found.cache_clear()
    assert codes(unwanted) == codes(compiled) == []
    assert [each.code for each in findings.of_machines([unwanted, compiled])] == ["E1108"]


# ---------------------------------------------------------------- what ranks measured


def measured(rate: float = 1e12, wrong: str | None = None) -> list[dict[str, Any]]:
    row = {"bytes": 1 << 27, "seconds": 1.0, "rate": rate, "wrong": None}
    return [
        {**row, "test": "product"},
        {**row, "test": "all-reduce", "wrong": wrong},
        {"test": "training", "bytes": 0, "seconds": 0.0, "rate": None, "wrong": wrong},
    ]


def test_wrong_results_and_slow_devices_are_found_with_their_rank() -> None:
    hosts = ["node1", "node1", "node2"]
    assert list(findings.of_ranks([measured()] * 3, hosts, gpu=True)) == []
    wrong, training = findings.of_ranks([measured(), measured(), measured(wrong="12 of 64 numbers")], hosts, gpu=True)
    assert (wrong.code, training.code) == ("E1104", "E1106")
    assert wrong.notes == ("rank 2 on node2: 12 of 64 numbers",)
    (slow,) = findings.of_ranks([measured(), measured(7e11), measured()], hosts, gpu=True)
    assert (slow.code, "rank 1 on node1" in slow.message) == ("W1104", True)
    assert list(findings.of_ranks([measured(), measured(7e11), measured()], hosts, gpu=False)) == []


@pytest.mark.parametrize("kind", selftest.CROSSING)
@pytest.mark.parametrize("count", [2, 3])
def test_expected_results_are_those_of_the_collectives(kind: str, count: int) -> None:
    device = torch.device("cpu")
    size = 300 * count
    given = {"all-reduce": (False,), "all-to-all": (0, 0)}.get(kind, (0,))
    found = COLLECTIVES[kind]([selftest.data(size, rank, device) for rank in range(count)], *given)
    for rank, each in enumerate(found):
        assert selftest.unequal(each, selftest.expected(kind, size, rank, count)) is None
        moved = each.roll(1)
        assert selftest.unequal(moved, selftest.expected(kind, size, rank, count)) is not None


def test_training_is_compared_to_the_last_bit_on_cpus() -> None:
    here, there = torch.device("cpu"), torch.device("cuda")
    numbers = tuple(float(i + 1) for i in range(2 * selftest.STEPS))
    run = selftest.Training(numbers, "a")
    near = selftest.Training((numbers[0], numbers[1] + 1e-9, *numbers[2:]), "b")
    far = selftest.Training((*numbers[:-1], float("nan")), "a")
    assert run.compared(run, here).wrong is None
    assert near.compared(run, here).wrong == "the gradient norm of step 1 is 2.000000001 instead of 2.0"
    assert selftest.Training(numbers, "b").compared(run, here).wrong == "the parameters after step 4 differ"
    assert near.compared(run, there).wrong is None
    assert far.compared(run, there).wrong == "the gradient norm of step 4 is nan, on a CPU 8"


# ---------------------------------------------------------------- processes


def test_a_part_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    program = f"sleep 100 & echo $! > {tmp_path}/child; echo last words >&2; wait"
    ended = parts.run_part(["sh", "-c", program], 100.0, over=(tmp_path / "child").exists)
    assert (ended.status, "was killed" in str(ended.problem)) == (None, True)
    child = int((tmp_path / "child").read_text() or 0)
    until = time.monotonic() + 30
    while child and _running(child) and time.monotonic() < until:  # signals take effect when a core is free
        time.sleep(0.01)
    assert not child or not _running(child)


def _running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_part_that_fails_says_what_it_said_last() -> None:
    ended = parts.run_part(["sh", "-c", "echo no driver >&2; echo >&2; exit 9"], 100.0)
    assert ended.problem == "ended with exit status 9: no driver"


def test_ranks_that_do_not_come_to_the_end_are_named(tmp_path: Path) -> None:
    ended = parts.Ended(3, "", "partita: rank 1 was killed by SIGKILL\n", 4.0)
    (nowhere,) = ranks.unfinished(ended, tmp_path, range(2), "gloo")
    assert nowhere.code == "E1103"
    for rank, problem in enumerate((None, "the all-reduce along data failed")):
        standing = ranks.Standing(ranks.path_of(tmp_path, rank))
        standing.begin(ranks.CONNECTING)
        standing.begin("all-reduce of 4096 bytes")
        standing.state |= {"problem": problem, "host": "node1"}
        standing.write()
    (found,) = ranks.unfinished(ended, tmp_path, range(2), "gloo")
    assert found.code == "E1105"
    assert found.notes == (
        "rank 1 on node1, all-reduce of 4096 bytes: the all-reduce along data failed",
        "rank 0 on node1, all-reduce of 4096 bytes",
        "partita: rank 1 was killed by SIGKILL",
    )


def test_this_machine_can_be_examined() -> None:
    facts, failed = machine.examine({**os.environ, "MASTER_ADDR": "localhost", "NCCL_DEBUG": "INFO"})
    assert failed == {}
    assert json.loads(json.dumps(facts)) == facts
    assert facts["memory"]["total"] > 0
    assert facts["network"]["master_addresses"]
    assert facts["variables"]["NCCL_DEBUG"] == "INFO"
