"""What is wrong with a machine, by its facts; and with ranks, by what they measured: diagnostics with cause and fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from partita.dsl.diagnostic import Diagnostic
from partita.runtime.doctor.machine import Facts

GIB = 1 << 30
OLDEST_TORCH = (2, 11)
# NCCL allocates up to some 10 MiB of shared memory for each pair of connected ranks; containers have 64 MiB by default.
SHARED_OF_RANK = 256 << 20
MIN_DISK = 5 * GIB
FILES, FILES_OF_RANK = 512, 16  # what a process has open by itself, and for each rank: a socket a group, and its files
MIN_LOCKED = GIB  # registered for transfers by RDMA
TAKEN = 0.05  # of a GPU's memory, by others
SLOW = 0.8  # of the median
UNWANTED = "PARTITA_NATIVE=0"  # as `why_none` of the library of kernels says it


def of_machine(
    facts: Facts, failed: Mapping[str, str], ranks: int, local_ranks: int, several: bool
) -> Iterator[Diagnostic]:
    """Of a machine with `local_ranks` of `ranks` ranks, one of `several`. Order: what hurts most first."""
    for name, why in failed.items():
        yield Diagnostic("W1105", f"{name} could not be examined: {why}", help="look at it by hand")
    yield from _of_torch(facts)
    yield from _of_kernels(facts)
    yield from _of_gpus(facts)
    yield from _of_network(facts, several)
    yield from _of_limits(facts, ranks, local_ranks)


def _of_torch(facts: Facts) -> Iterator[Diagnostic]:
    problem, torch = facts.get("torch_problem"), facts.get("torch") or {}
    if problem is not None:
        fix = "pip install 'partita[run]'" if "torch" not in facts.get("packages", {}) else "python -c 'import torch'"
        yield Diagnostic("E1101", f"torch cannot be used: its process {problem}", help=fix)
        return
    version = tuple(int(each) for each in re.findall(r"\d+", torch.get("version", ""))[:2])
    if torch and version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        help = f"pip install 'torch>={oldest}'"
        yield Diagnostic("E1101", f"torch {torch['version']} is too old; {oldest} is needed", help=help)
    if torch and not torch.get("distributed"):
        yield Diagnostic("E1101", "torch was built without torch.distributed", help="install torch from pytorch.org")


def _of_kernels(facts: Facts) -> Iterator[Diagnostic]:
    why = (facts.get("torch") or {}).get("no_kernels")
    # That none are wanted is no finding.
    if why and why != UNWANTED:
        message = f"there are no kernels in C++: {why}; torch's operations are used, which are slower"
        yield Diagnostic("W1107", message, help="install g++ or clang++, or name one in CXX")


def _of_gpus(facts: Facts) -> Iterator[Diagnostic]:
    driver, torch = facts.get("gpus") or [], facts.get("torch") or {}
    gpus = torch.get("gpus", [])
    if facts.get("driver_problem"):
        fix = "dmesg | grep -i nvrm; reload the driver, or restart the machine"
        yield Diagnostic("E1102", f"the driver does not answer: {facts['driver_problem']}", help=fix)
    if torch.get("problem"):
        version = f"; the driver is {driver[0]['driver']}" if driver else ""
        notes = (f"torch {torch['version']} for CUDA {torch['cuda']}{version}",)
        fix = "a driver that supports this CUDA, or torch built for an older one"
        if driver or facts.get("device_files"):
            yield Diagnostic("E1102", f"torch cannot use the GPUs: {torch['problem']}", notes=notes, help=fix)
    elif torch and torch.get("cuda") is None and (driver or facts.get("device_files")):
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        yield Diagnostic("E1102", "this machine has GPUs, but torch was built without CUDA", help=fix)
    # Unless they are hidden on purpose.
    elif torch and len(gpus) < len(driver) and "CUDA_VISIBLE_DEVICES" not in facts.get("variables", {}):
        message = f"the driver has {len(driver)} GPUs, torch sees {len(gpus)}"
        yield Diagnostic("E1102", message, help="unset CUDA_VISIBLE_DEVICES; in a container, --gpus all")
    for i, gpu in enumerate(gpus):
        if gpu.get("problem"):
            yield Diagnostic("E1102", f"GPU {i} does not compute: {gpu['problem']}", help="nvidia-smi -q; exchange it")
    if gpus and torch.get("NCCL") is None:
        yield Diagnostic("E1102", "torch was built without NCCL", help="install torch from pytorch.org")
    yield from _of_state(driver, gpus)
    peers = torch.get("peers") or []
    apart = [f"{a}-{b}" for a, row in enumerate(peers) for b, near in enumerate(row) if a < b and not near]
    if apart:
        yield Diagnostic(
            "W1104",
            f"GPUs {', '.join(apart[:8])}{' …' * (len(apart) > 8)} have no direct access to each other",
            help="their transfers pass through the host: check ACS in the BIOS, and NCCL_P2P_DISABLE",
        )


def _of_state(driver: Sequence[Facts], gpus: Sequence[Facts]) -> Iterator[Diagnostic]:
    kinds = sorted({str(gpu["name"]) for gpu in gpus})
    if len(kinds) > 1:
        fix = "CUDA_VISIBLE_DEVICES to take those of one kind: the slowest sets the pace"
        yield Diagnostic("W1103", f"the GPUs differ: {', '.join(kinds)}", help=fix)
    for i, gpu in enumerate(gpus):
        free = gpu.get("free")
        if free is not None and gpu["memory"] - free > max(TAKEN * gpu["memory"], 2 * GIB):
            used = (gpu["memory"] - free) / GIB
            yield Diagnostic("W1103", f"{used:.0f} GiB of GPU {i} are taken", help="nvidia-smi shows by which process")
    for gpu in driver:
        name = f"GPU {gpu['index']:.0f}" if isinstance(gpu["index"], float) else f"GPU {gpu['index']}"
        if gpu.get("slowed") == "Active":
            fix = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER: cooling, or the power supply"
            yield Diagnostic("W1103", f"{name} is slowed down by its hardware", help=fix)
        if gpu.get("ecc_errors"):
            fix = "reset it, or exchange it"
            yield Diagnostic(
                "W1103", f"{name} had {gpu['ecc_errors']:.0f} memory errors that it could not correct", help=fix
            )


def _of_network(facts: Facts, several: bool) -> Iterator[Diagnostic]:
    network = facts.get("network") or {}
    known = network.get("interfaces", {})
    for variable, text in network.get("asked", {}).items():
        # NCCL: `^docker` excludes, `=eth0` is exact, and a plain name is a prefix.
        if text.startswith("^"):
            continue
        for name in text.removeprefix("=").split(","):
            same = [each for each in known if each == name or (variable.startswith("NCCL") and each.startswith(name))]
            if not same:
                interfaces = ", ".join(sorted(known))
                yield Diagnostic(
                    "E1107", f"{variable} names `{name}`, which is no interface", help=f"there are {interfaces}"
                )
            elif not any(known[each]["up"] for each in same):
                yield Diagnostic("E1107", f"{variable} names `{name}`, which is down", help=f"ip link set {name} up")
    master = network.get("master")
    if master and not network.get("master_addresses"):
        how = "has no address" if network["master_addresses"] is not None else "is not resolved in time"
        fix = "MASTER_ADDR must be the name or address of the first machine, as this one knows it"
        yield Diagnostic("E1107", f"MASTER_ADDR is `{master}`, which {how}", help=fix)
    own, host = network.get("addresses"), facts.get("system", {}).get("host")
    named = any("GLOO" in each for each in network.get("asked", {}))
    if several and not named and (not own or all(each.startswith("127.") or each == "::1" for each in own)):
        how = f"resolves to {', '.join(own)}" if own else "does not resolve"
        yield Diagnostic(
            "W1102",
            f"the name of this machine, `{host}`, {how}: Gloo connects to others there",
            help="GLOO_SOCKET_IFNAME=eth0, or correct /etc/hosts",
        )
    down = [each["port"] for each in network.get("fabric", []) if not each["active"]]
    if several and down:
        fix = "ibstat; without them NCCL uses the others, or TCP"
        yield Diagnostic("W1104", f"ports {', '.join(down)} are not active", help=fix)


def _of_limits(facts: Facts, ranks: int, local_ranks: int) -> Iterator[Diagnostic]:
    limits, memory = facts.get("limits") or {}, facts.get("memory") or {}
    files, needed = limits.get("files"), FILES + FILES_OF_RANK * ranks
    if files is not None and files < needed:
        message = f"a process may open {files} files; with {ranks} ranks it may need {needed}"
        yield Diagnostic("W1101", message, help=f"ulimit -n {max(needed, 65_536)}")
    locked = limits.get("locked")
    if facts.get("network", {}).get("fabric") and locked is not None and locked < MIN_LOCKED:
        message = f"a process may lock {locked >> 10} KiB of memory, and InfiniBand needs it"
        yield Diagnostic("W1101", message, help="ulimit -l unlimited; in a container, --ulimit memlock=-1")
    shared, needed = memory.get("shared_free"), SHARED_OF_RANK * local_ranks
    gpus = (facts.get("torch") or {}).get("gpus")
    if gpus and local_ranks > 1 and shared is not None and shared < needed:
        message = f"/dev/shm has {shared >> 20} MiB free; NCCL may need {needed >> 20} MiB for {local_ranks} ranks"
        yield Diagnostic("W1101", message, help="in a container, --ipc=host or --shm-size=16g")
    for path, free in (facts.get("disk") or {}).items():
        if free < MIN_DISK:
            message = f"{path} has {free / GIB:.1f} GiB free: a checkpoint may not fit"
            yield Diagnostic("W1101", message, help="free some, or run elsewhere")
    system = facts.get("system") or {}
    cores, quota = system.get("cores"), system.get("quota")
    if cores is not None and min(cores, quota or cores) < local_ranks:
        have = f"{min(cores, quota or cores):g}"
        message = f"{local_ranks} ranks share {have} cores"
        yield Diagnostic("W1101", message, help="fewer ranks a machine, or more cores in the container or the job")


# ---------------------------------------------------------------- several ranks

SAME = ("torch", "cuda", "NCCL", "partita", "python", "driver", "kernels")


def versions(facts: Facts) -> dict[str, str]:
    """What must be the same on all machines."""
    torch, driver = facts.get("torch") or {}, facts.get("gpus") or []
    values = {
        "torch": torch.get("version"),
        "cuda": torch.get("cuda"),
        "NCCL": torch.get("NCCL"),
        "partita": facts.get("partita"),
        "python": facts.get("system", {}).get("python"),
        "driver": driver[0]["driver"] if driver else None,
        "kernels": None if torch.get("no_kernels") is None else "torch's" if torch["no_kernels"] else "C++",
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def of_machines(machines: Sequence[Facts]) -> Iterator[Diagnostic]:
    """Where the machines of a run differ."""
    for name in SAME:
        by_version: dict[str, list[str]] = {}
        for facts in machines:
            by_version.setdefault(versions(facts).get(name, "none"), []).append(str(facts["system"].get("host")))
        if len(by_version) > 1:
            notes = tuple(f"{version} on {_few(hosts)}" for version, hosts in sorted(by_version.items()))
            help = "install the same everywhere, such as from one image"
            # Python's and the driver's need not be equal, but seldom differ on purpose.
            code = "W1106" if name in ("python", "driver") else "E1108"
            yield Diagnostic(code, f"the machines have several versions of {name}", notes=notes, help=help)


def of_ranks(tests: Sequence[Sequence[Facts]], hosts: Sequence[str], gpu: bool) -> Iterator[Diagnostic]:
    """Of what each rank measured, in rank order, on its host. Only GPUs are compared in speed: ranks on CPUs share
    them.
    """
    for i, test in enumerate(tests[0]):
        wrong = {rank: own[i]["wrong"] for rank, own in enumerate(tests) if own[i]["wrong"]}
        name = test["test"] + (f" of {test['bytes']} bytes" if test["bytes"] else "")
        if wrong:
            notes = tuple(f"rank {rank} on {hosts[rank]}: {problem}" for rank, problem in list(wrong.items())[:8])
            if test["test"] == "training":
                fix = (
                    "`partita verify` a file of your own; compare with another machine: memory or a core may be faulty"
                )
                yield Diagnostic("E1106", "a tiny training run does not compute what it must", notes=notes, help=fix)
            else:
                fix = "NCCL_DEBUG=INFO shows which way NCCL takes; try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1"
                yield Diagnostic("E1104", f"{name} brings wrong numbers", notes=notes, help=fix)
        rates = [own[i]["rate"] for own in tests]
        if gpu and not test["bytes"] < 1 << 20 and all(rates):
            usual = median(rates)
            slow = [f"rank {rank} on {hosts[rank]}" for rank, rate in enumerate(rates) if rate < SLOW * usual]
            if slow and test["test"] in ("product", "copy", "copy from the host"):
                notes = (f"{min(rates):.3g} a second, elsewhere {usual:.3g}",)
                fix = "nvidia-smi -q -d CLOCK,PERFORMANCE there; numactl for copies from the host"
                yield Diagnostic("W1104", f"{name} is slow on {_few(slow)}", notes=notes, help=fix)


def _few(names: Iterable[str]) -> str:
    all_names = list(names)
    return ", ".join(all_names[:4]) + (f" and {len(all_names) - 4} more" if len(all_names) > 4 else "")
