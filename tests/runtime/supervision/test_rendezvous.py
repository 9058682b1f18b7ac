"""Which rank the environment says a process is."""

from __future__ import annotations

import pytest

from partita.runtime.supervision.identity import Identity, first_host, rank_from_environment

OURS = {"PARTITA_RANK": "1", "PARTITA_RANKS": "4", "PARTITA_RENDEZVOUS": "/private/rendezvous"}
TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
POD = {key: value for key, value in TORCHRUN.items() if not key.startswith("LOCAL")}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[012-015]",
    "SLURM_JOB_NODELIST": "gpu[010-015]",
    "SLURM_JOB_ID": "40017",
}


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({}, None),
        ({"PATH": "/bin", "SLURM_JOB_ID": "17"}, None),
        (OURS, Identity(1, 4, 1, 4, "partita", "file:///private/rendezvous", True)),
        ({**SLURM, **OURS}, Identity(1, 4, 1, 4, "partita", "file:///private/rendezvous", True)),
        (TORCHRUN, Identity(9, 16, 1, 8, "torchrun", "tcp://node7:29500", False)),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, Identity(9, 16, 1, 16, "torchrun", "tcp://node7:29500", True)),
        ({**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}, Identity(9, 16, 1, 8, "torchrun", "tcp://127.0.0.1:29500", True)),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Identity(9, 16, 1, 8, "torchrun", "tcp://node7:29500", False, hosted=True),
        ),
        ({**SLURM, **TORCHRUN}, Identity(9, 16, 1, 8, "torchrun", "tcp://node7:29500", False)),
        (SLURM, Identity(3, 8, 1, 2, "slurm", "tcp://gpu012:25017", False)),
        (
            {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "4000"},
            Identity(3, 8, 1, 2, "slurm", "tcp://head:4000", False),
        ),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, Identity(3, 8, 1, 8, "slurm", "tcp://gpu012:25017", True)),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,3(x2),1", "SLURM_NODEID": "2"},
            Identity(3, 8, 1, 3, "slurm", "tcp://gpu012:25017", False),
        ),
        (
            {**SLURM, "SLURM_GPUS_PER_TASK": "1"},
            Identity(3, 8, 1, 2, "slurm", "tcp://gpu012:25017", False, own_gpu=True),
        ),
        (
            {**SLURM, "SLURM_GPUS_PER_TASK": "h100:1"},
            Identity(3, 8, 1, 2, "slurm", "tcp://gpu012:25017", False, own_gpu=True),
        ),
        (
            {**SLURM, "SLURM_GPUS_PER_TASK": "h100:2"},
            Identity(3, 8, 1, 2, "slurm", "tcp://gpu012:25017", False),
        ),
        # A pod of a Kubernetes job that has one rank, and the first one.
        (POD, Identity(9, 16, 0, 1, "torchrun", "tcp://node7:29500", False)),
        (
            {**POD, "RANK": "0", "MASTER_ADDR": "localhost"},
            Identity(0, 16, 0, 1, "torchrun", "tcp://localhost:29500", False),
        ),
        # A batch script, and a shell from `srun --pty`: no others are there.
        ({key: value for key, value in SLURM.items() if "STEP" not in key}, None),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_launchers_are_told_apart(environment: dict[str, str], identity: Identity | None) -> None:
    assert rank_from_environment(environment) == identity


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        (OURS, "PARTITA_RANKS"),
        (OURS, "PARTITA_RENDEZVOUS"),
        (TORCHRUN, "MASTER_ADDR"),
        (TORCHRUN, "MASTER_PORT"),
    ],
)
def test_incomplete_environments_say_what_is_missing(environment: dict[str, str], missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        rank_from_environment({key: value for key, value in environment.items() if key != missing})
    with pytest.raises(ValueError, match=missing):
        rank_from_environment({**environment, missing: ""})


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (OURS, "PARTITA_RANK"),
        (TORCHRUN, "LOCAL_RANK"),
        (TORCHRUN, "LOCAL_WORLD_SIZE"),
        (SLURM, "SLURM_LOCALID"),
        (SLURM, "SLURM_NODEID"),
        (SLURM, "SLURM_STEP_NUM_TASKS"),
        (SLURM, "MASTER_PORT"),
    ],
)
def test_numbers_are_checked(environment: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number, not 'one'"):
        rank_from_environment({**environment, name: "one"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alone", "alone"),
        ("a,b", "a"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("gpu[7]", "gpu7"),
        ("r1-n[2,4]-ib,x", "r1-n2-ib"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
