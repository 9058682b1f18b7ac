"""A file that a run holds for as long as it lives, so that no other one uses the same directory."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from partita.dsl.diagnostic import Diagnostic, Refused, refuse

LOCK = "lock"
PATIENCE_SECONDS = 10.0  # how long a run that is being ended may still hold it


class Held(Exception):
    """Another run holds the lock."""


def lock(parent: int, patience: float | None = None) -> tuple[int, str | None]:
    """Hold the lock of an open directory: a descriptor that holds it until it and all its copies are closed, and why
    there is no lock, where this file system has none. Raises Held, and OSError where no file can be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    end = time.monotonic() + (PATIENCE_SECONDS if patience is None else patience)
    handle = os.open(LOCK, flags, 0o666, dir_fd=parent)
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > end:
                os.close(handle)
                raise Held from error
            time.sleep(0.1)
        except OSError as error:
            return handle, str(error.strerror)
        else:
            if still_there(parent, handle):
                return handle, None
            # Whoever held it has removed it, or the directory was emptied: another run may hold the new one.
            os.close(handle)
            handle = os.open(LOCK, flags, 0o666, dir_fd=parent)


def still_there(parent: int, handle: int) -> bool:
    """Whether what a descriptor holds is still the lock of the directory, which may have been emptied or removed."""
    try:
        own, there = os.fstat(handle), os.stat(LOCK, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)


def refused(path: Path) -> Refused:
    """What is said (E0803) where another run holds a directory."""
    return refuse(
        "E0803", f"another run writes to {path}", help="wait for it to end, or give this one another directory"
    )


def missing(path: Path, reason: str) -> Diagnostic:
    """The warning (W0806) of a file system that has no locks."""
    help = "make sure that no second run writes there"
    return Diagnostic("W0806", f"{path} cannot be locked: {reason}", help=help)
