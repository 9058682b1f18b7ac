"""Which cores of this machine each rank computes on.

Ranks that are not bound are moved about: whoever is woken by a message is put beside who sent it, and two ranks then
share a core while another one is idle. On two cores that cost a third of a pipeline's time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def usable() -> list[int]:
    """The cores that this process may use, neighbours in a row: hardware threads of a core, then those of a socket."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0), key=lambda core: (*_place(core), core))


def _place(core: int) -> tuple[int, ...]:
    """Socket and core of a hardware thread; nothing where the system does not say."""
    folder = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return tuple(int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return ()


def share(cores: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """A rank's cores, as many for each; none where there are fewer cores than ranks."""
    each = len(cores) // ranks
    return cores[rank * each : (rank + 1) * each]


def bind(process: int, cores: Sequence[int], threads: str) -> None:
    """Let a process that has just been started, and all its threads to come, use these cores alone.

    Not where it has been told to use more threads than that.
    """
    if not hasattr(os, "sched_setaffinity") or not threads.isdecimal() or int(threads) > len(cores):
        return
    # It may have ended, or the system may forbid it: then it runs wherever there is room.
    with suppress(OSError):
        os.sched_setaffinity(process, cores)
