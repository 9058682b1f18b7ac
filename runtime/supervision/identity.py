"""Which rank this process is, which launcher started it, and where it finds the others.

A process is a rank under torchrun (and Kubernetes' PyTorchJob, which sets the same variables), under Slurm's `srun`, or
under the supervisor of `partita.runtime.supervision.launcher`; otherwise it runs alone, started by hand.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from attrs import frozen

RANK, RANKS, RENDEZVOUS = "PARTITA_RANK", "PARTITA_RANKS", "PARTITA_RENDEZVOUS"
DIRECTORY = "PARTITA_DIRECTORY"  # descriptors of the run's directory and its lock
FLIGHT = "PARTITA_FLIGHT"  # the directory of the flight recorders
STANDBY = "PARTITA_STANDBY"  # set if a rank must wait on standard input for WORD before it connects
WORD = b"!"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # the network interface to connect over


@frozen
class Identity:
    """One rank of a run.

    `local_rank` counts the `local_ranks` ranks of one machine, and selects the GPU. `launcher` is `partita`, `torchrun`
    or `slurm`; `rendezvous` is where ranks meet (`meeting`), `file://PATH` or `tcp://HOST:PORT`; `hosted` says that a
    process which is no rank hosts the store there, `local` that all ranks are on this machine, `own_gpu` that each sees
    only its own GPU.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    launcher: str
    rendezvous: str
    local: bool
    own_gpu: bool = False
    hosted: bool = False


def rank_from_environment(environment: Mapping[str, str] | None = None) -> Identity | None:
    """The rank of this process by its environment; None if no launcher started it.

    Raises ValueError, with what is missing or wrong, if a launcher's variables are incomplete.
    """
    variables = os.environ if environment is None else environment
    if RANK in variables:
        return _from_supervisor(variables)
    # torchrun can itself run under srun: its variables then name the ranks.
    if "SLURM_PROCID" in variables and "RANK" not in variables:
        return _from_slurm(variables)
    return _from_torchrun(variables) if "RANK" in variables and "WORLD_SIZE" in variables else None


def wait_for_start() -> bool:
    """Wait until the supervisor lets this rank begin; False if the supervisor has ended instead."""
    return STANDBY not in os.environ or os.read(0, len(WORD)) == WORD


def _from_supervisor(variables: Mapping[str, str]) -> Identity:
    rank = _number(variables, RANK)
    path = _text(variables, RENDEZVOUS)
    ranks = _number(variables, RANKS)
    return Identity(rank, ranks, rank, ranks, "partita", f"file://{path}", local=True)


def _from_torchrun(variables: Mapping[str, str]) -> Identity:
    ranks = _number(variables, "WORLD_SIZE")
    address = _text(variables, "MASTER_ADDR")
    port = _number(variables, "MASTER_PORT")
    # Kubernetes' operators start one rank per pod, without these, and name the first pod to itself as localhost.
    alone = not (variables.get("LOCAL_RANK") or variables.get("LOCAL_WORLD_SIZE"))
    local = not alone and (address in LOOPBACK or variables.get("LOCAL_WORLD_SIZE") == str(ranks))
    rank = _number(variables, "RANK")
    if not 0 <= rank < ranks:
        raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {ranks}")
    local_rank = _number(variables, "LOCAL_RANK", 0 if alone else rank)
    local_ranks = _number(variables, "LOCAL_WORLD_SIZE", ranks if local else local_rank + 1)
    hosted = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = f"tcp://{address}:{port}"
    return Identity(rank, ranks, local_rank, local_ranks, "torchrun", place, local, hosted=hosted)


def _from_slurm(variables: Mapping[str, str]) -> Identity | None:
    # A batch script sees SLURM_PROCID=0 and the whole job's SLURM_NTASKS; only a step (srun) is one of several.
    if "SLURM_STEP_ID" not in variables and "SLURM_STEPID" not in variables:
        return None
    ranks = _number(variables, "SLURM_STEP_NUM_TASKS" if variables.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS")
    if ranks == 1:
        return None  # `srun --pty bash`, or one task on purpose: there are no others
    hosts = variables.get("SLURM_STEP_NODELIST") or _text(variables, "SLURM_JOB_NODELIST")
    address = variables.get("MASTER_ADDR") or first_host(hosts)
    # The same port on every rank, different for other jobs on the machine; below the ephemeral ports.
    port = _number(variables, "MASTER_PORT", 15_000 + _number(variables, "SLURM_JOB_ID", 0) % 15_000)
    local = variables.get("SLURM_STEP_NUM_NODES", variables.get("SLURM_NNODES")) == "1"
    local_rank = _number(variables, "SLURM_LOCALID", 0)
    return Identity(
        _number(variables, "SLURM_PROCID"),
        ranks,
        local_rank,
        ranks if local else _slurm_tasks(variables, local_rank + 1),
        "slurm",
        f"tcp://{address}:{port}",
        local,
        own_gpu=variables.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1",  # `1`, `h100:1`
    )


def _slurm_tasks(variables: Mapping[str, str], otherwise: int) -> int:
    """The number of tasks of this machine: `8(x2),4` lists those of three, in node order."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE") or ""
    counts = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    number = _number(variables, "SLURM_NODEID", 0)
    return counts[number] if number < len(counts) else otherwise


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[003-007,9],login1` gives `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ValueError(f"cannot read the node list {nodes!r}; set MASTER_ADDR to the host of rank 0")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _text(variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise ValueError(f"the environment sets a rank, but {name} is not set")
    return variables[name]


def _number(variables: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """A number; `otherwise` if it is not set and optional."""
    if otherwise is not None and not variables.get(name):
        return otherwise
    value = _text(variables, name)
    if not value.isdigit():
        raise ValueError(f"the environment variable {name} must be a number, not {value!r}")
    return int(value)
