"""The state of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def piped(stream: IO[bytes] | None) -> IO[bytes]:
    """This side of a pipe to a process that was started with one."""
    assert stream is not None
    return stream


def is_stopped(process: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a terminal; False if the system does not tell."""
    return _state(process) in ("T", "t")


def is_gone(process: int) -> bool:
    """Whether a process has ended."""
    state = _state(process)
    if state:
        return state in ("Z", "X")
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _state(process: int) -> str:
    """The letter of a process's state; empty if there is no such process, or the system does not tell."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
