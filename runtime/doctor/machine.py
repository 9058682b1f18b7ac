"""What this machine has, asked of the system alone: neither torch nor a driver, which may hang, is touched.

Facts are JSON objects, so that ranks can send each other theirs. What the system does not tell is None.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

from partita.runtime.supervision import capacity
from partita.runtime.supervision.cores import usable
from partita.runtime.supervision.identity import INTERFACES

Facts = dict[str, Any]

NAME_SECONDS = 5.0  # a resolver that does not answer would take minutes
SIOCGIFADDR = 0x8915  # from Linux's sockios.h
NETWORKS, FABRIC = Path("/sys/class/net"), Path("/sys/class/infiniband")
SHARED = "/dev/shm"
UNLIMITED = resource.RLIM_INFINITY
PACKAGES = ("torch", "numpy", "safetensors", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
# What changes how ranks connect and compute, and is set for many a forgotten reason.
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_", "NVIDIA_VISIBLE")
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PARTITA_NATIVE", "CXX")


def examine(environment: Mapping[str, str]) -> tuple[Facts, dict[str, str]]:
    """The facts by section; and why a section could not be examined, by its name."""
    parts: Mapping[str, Callable[[], Facts]] = {
        "system": _system,
        "memory": _memory,
        "limits": _limits,
        "disk": _disk,
        "network": lambda: _network(environment),
        "packages": _packages,
        "variables": lambda: _variables(environment),
    }
    facts: Facts = {}
    failed: dict[str, str] = {}
    for name, part in parts.items():
        try:
            facts[name] = part()
        except Exception as error:  # whatever is odd about a machine is a finding
            facts[name] = {}
            failed[name] = f"{type(error).__name__}: {error}"
    return facts, failed


def _system() -> Facts:
    return {
        "host": socket.gethostname(),
        "system": f"{os.uname().sysname} {os.uname().release}",
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(usable()),
        "all_cores": os.cpu_count(),
        "quota": capacity.quota(),
    }


def _processor() -> str:
    """The name of the processor."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> Facts:
    """Bytes; `available` is less where the container has a limit."""
    kib = {line.partition(":")[0]: line.split()[1] for line in _lines("/proc/meminfo")}
    available = int(kib["MemAvailable"]) * 1024 if "MemAvailable" in kib else None
    bound = capacity.limit()
    if bound is not None and available is not None:
        available = min(available, bound.bytes - bound.used)
    shared = shutil.disk_usage(SHARED) if Path(SHARED).is_dir() else None
    return {
        "total": capacity.total(),
        "limit": bound.bytes if bound is not None else None,
        "available": available,
        "shared": shared.total if shared else None,
        "shared_free": shared.free if shared else None,
    }


def _limits() -> Facts:
    """The soft limits; None where there is none."""
    resources = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(number)[0] for name, number in resources.items()}
    return {name: None if value == UNLIMITED else value for name, value in soft.items()}


def _disk() -> Facts:
    """Free bytes where a run would write."""
    return {str(path): shutil.disk_usage(path).free for path in (Path.cwd(), Path(tempfile.gettempdir()))}


def _network(environment: Mapping[str, str]) -> Facts:
    host = socket.gethostname()
    master = environment.get("MASTER_ADDR")
    return {
        "interfaces": {name: _interface(name) for _, name in socket.if_nameindex()},
        "fabric": _fabric(),
        "addresses": resolved(host),
        "master": master,
        "master_addresses": resolved(master) if master else None,
        "asked": {name: environment[name] for name in INTERFACES if environment.get(name)},
    }


def resolved(host: str) -> list[str] | None:
    """The addresses of a host by name; none if it has none, None if nobody answers in time."""
    answers: list[list[str]] = []

    def ask() -> None:
        try:
            answers.append(sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)}))
        except OSError:
            answers.append([])

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(NAME_SECONDS)
    return answers[0] if answers else None


def _interface(name: str) -> Facts:
    """Whether it is up, its IPv4 address, and its speed in bytes per second."""
    state = "".join(_lines(NETWORKS / name / "operstate"))
    speed = "".join(_lines(NETWORKS / name / "speed"))
    return {
        "up": state in ("up", "unknown"),  # the loopback interface and tunnels do not know
        "address": _address(name),
        "speed": int(speed) * 125_000 if speed.isdigit() else None,
    }


def _address(name: str) -> str | None:
    if not sys.platform.startswith("linux"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            answer = fcntl.ioctl(control, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None  # it has none
    return socket.inet_ntoa(answer[20:24])


def _fabric() -> list[Facts]:
    """The ports of InfiniBand and RoCE, with their state and rate as the driver says them."""
    return [
        {
            "port": f"{port.parent.parent.name}/{port.name}",
            "active": "ACTIVE" in "".join(_lines(port / "state")),
            "rate": "".join(_lines(port / "rate")),
        }
        for port in sorted(FABRIC.glob("*/ports/*"))
    ]


def _packages() -> Facts:
    """Versions of what is installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _variables(environment: Mapping[str, str]) -> Facts:
    return {
        name: value for name, value in sorted(environment.items()) if name.startswith(PREFIXES) or name in VARIABLES
    }


def _lines(path: str | Path) -> list[str]:
    """The lines of one of the system's files; none if it is not there, or says nothing."""
    return capacity.read(Path(path)).splitlines()
