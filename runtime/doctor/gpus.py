"""What GPUs this machine has, as `nvidia-smi` and as torch see them. Both may hang with a driver that does not answer,
so each runs as a process of its own, with a limit of time.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Mapping
from typing import Any

from partita.runtime.doctor.machine import Facts
from partita.runtime.doctor.parts import run_part

SMI_SECONDS = 20.0
# Of `nvidia-smi --query-gpu`, and what we call it. Clocks in MHz, memory in MiB, power in W, temperature in °C.
QUERIES: Mapping[str, str] = {
    "index": "index",
    "name": "name",
    "driver_version": "driver",
    "memory.total": "memory",
    "memory.used": "used",
    "clocks.sm": "clock",
    "clocks.max.sm": "highest_clock",
    "temperature.gpu": "temperature",
    "power.limit": "power",
    "pcie.link.gen.current": "pcie",
    "pcie.link.width.current": "pcie_width",
    "ecc.errors.uncorrected.volatile.total": "ecc_errors",
    "clocks_throttle_reasons.hw_slowdown": "slowed",
    "mig.mode.current": "mig",
}


def from_driver() -> tuple[list[Facts], list[list[str]], str | None]:
    """The GPUs, how each pair of them is connected (`NV18`, `PIX`, `SYS`), and what is wrong with `nvidia-smi`; nothing
    at all where there is no `nvidia-smi`.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], [], None
    query = run_part([program, f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader,nounits"], SMI_SECONDS)
    if query.problem is not None:
        return [], [], f"nvidia-smi {query.problem}"
    topology = run_part([program, "topo", "-m"], SMI_SECONDS)
    return gpus_of(query.output), links_of(topology.output), None


def gpus_of(text: str) -> list[Facts]:
    """The GPUs of a query's answer."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(QUERIES.values(), map(_value, row), strict=True)) for row in rows if len(row) == len(QUERIES)]


def _value(text: str) -> str | float | None:
    """A number where it is one; None for `[N/A]`, `[Not Supported]` and the like."""
    if text.startswith("["):
        return None
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text


def links_of(text: str) -> list[list[str]]:
    """The matrix of `nvidia-smi topo -m`, of the GPUs alone."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return [row[1 : 1 + len(rows)] for row in rows]


def from_torch() -> dict[str, Any]:
    """What torch sees, and on a CPU why there are no kernels in C++, if so; in a process of its own."""
    import torch

    from partita.runtime.kernels.native.library import why_none

    nccl = None
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem = None
    if torch.version.cuda is not None and count == 0:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # which says what is the matter
            problem = str(error).strip().split("\n")[0]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "NCCL": nccl,
        "distributed": torch.distributed.is_available(),
        "problem": problem,
        "no_kernels": why_none() if count == 0 else None,
        "gpus": [_seen(number) for number in range(count)],
        "peers": [
            [a == b or bool(torch.cuda.can_device_access_peer(a, b)) for b in range(count)] for a in range(count)
        ],
    }


def _seen(number: int) -> Facts:
    """A GPU, on which a small product is computed: drivers that are too old for the build fail only here."""
    import torch

    own = torch.cuda.get_device_properties(number)
    problem = None
    try:
        with torch.cuda.device(number):
            ones = torch.ones(64, 64, device="cuda")
            if not bool(((ones @ ones) == 64.0).all()):
                problem = "a product of ones is wrong"
            free, _ = torch.cuda.mem_get_info()
    except RuntimeError as error:
        problem, free = str(error).strip().split("\n")[0], None
    return {
        "name": own.name,
        "memory": own.total_memory,
        "free": free,
        "capability": f"{own.major}.{own.minor}",
        "processors": own.multi_processor_count,
        "problem": problem,
    }
