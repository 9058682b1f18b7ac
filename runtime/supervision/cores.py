"""Assigns cores of this machine to ranks.

Without affinity the scheduler migrates ranks: it places a process woken by a message next to the sender, and two ranks
then share a core while another is idle. On two cores that cost a third of a pipeline's time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def usable() -> list[int]:
    """The cores that this process may use, ordered by locality: hardware threads of a core, then cores of a socket."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0), key=lambda core: (*_place(core), core))


def _place(core: int) -> tuple[int, ...]:
    """Socket and core of a hardware thread; empty if the system does not tell."""
    folder = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return tuple(int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return ()


def share(cores: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """A rank's cores, the same number for each rank; none if there are fewer cores than ranks."""
    each = len(cores) // ranks
    return cores[rank * each : (rank + 1) * each]


def bindable(cores: Sequence[int], threads: str) -> Sequence[int]:
    """The cores to bind a process to that is to use so many threads: none if it is to use more threads than cores."""
    fits = hasattr(os, "sched_setaffinity") and threads.isdecimal() and int(threads) <= len(cores)
    return cores if fits else ()


def bind(process: int, cores: Sequence[int]) -> None:
    """Bind a newly started process, and all its future threads, to these cores, if there are any."""
    if cores:
        # It may have ended, or the system may forbid it: then it runs unbound.
        with suppress(OSError):
            os.sched_setaffinity(process, cores)
