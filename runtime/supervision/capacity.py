"""What a run on this machine may use: memory and processor time, by the system and by the limits of a container or job.

Limits are those of the control groups (cgroup v2, then v1) that this process is in: its own and those around it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from partita.runtime.supervision.cores import usable

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@frozen
class Limit:
    """The bytes that a control group may use, and those that it uses."""

    bytes: int
    used: int


def cores() -> int:
    """The cores that this process may keep busy, at least one."""
    allowed = quota()
    return max(1, min(len(usable()), len(usable()) if allowed is None else round(allowed)))


def quota() -> float | None:
    """The processor time that the container may use, in cores; None without a limit."""
    quotas = []
    for group in _groups("cpu"):
        share, _, period = read(group / "cpu.max").partition(" ")
        if not share:
            share, period = read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us")
        if share.isdecimal() and period.isdecimal():
            quotas.append(int(share) / int(period))
    return min(quotas, default=None)


def memory() -> int:
    """The bytes of memory that this process may use together with all others."""
    bound = limit()
    return total() if bound is None else min(total(), bound.bytes)


def total() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit() -> Limit | None:
    """The lowest limit of memory; None without one."""
    limits = []
    for group in _groups("memory"):
        for maximum, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if read(group / maximum).isdecimal():
                limits.append(Limit(int(read(group / maximum)), int(read(group / used) or 0)))
    # Where there is none, v1 has one of exabytes.
    return min((each for each in limits if each.bytes < total()), key=lambda each: each.bytes, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that limit this process, from its own outwards. A container may not see them, but has
    its own at the root.
    """
    for line in read(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controller if controllers else GROUPS
        own = root / path.lstrip("/")
        yield from (own, *(each for each in own.parents if each.is_relative_to(root)))


def read(path: Path) -> str:
    """The text of one of the system's files; "" where it is not there, or says nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
