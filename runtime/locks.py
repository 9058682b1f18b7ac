"""A lock file that a run holds while it lives, so that no other run uses the same directory."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from partita.dsl.diagnostic import Diagnostic, refuse

LOCK = "lock"
TIMEOUT_SECONDS = 10.0  # how long to wait for a run that is ending


class Held(Exception):
    """Another run holds the lock."""


def lock(parent: int, patience: float | None = None) -> tuple[int, str | None]:
    """Lock an open directory. Returns a descriptor that holds the lock until it and all its copies are closed, and the
    reason if this file system has no locks. Raises Held, and OSError if the file cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    end = time.monotonic() + (TIMEOUT_SECONDS if patience is None else patience)
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
            # The previous holder removed it, or the directory was emptied: another run may hold the new file.
            os.close(handle)
            handle = os.open(LOCK, flags, 0o666, dir_fd=parent)


def hold(parent: int, path: Path) -> tuple[int, Diagnostic | None]:
    """Lock an open directory, which is at a path, for a run: returns a descriptor, as `lock`, and a warning (W0806) if
    this file system has no locks. Raises Refused (E0803) if another run holds it, and OSError.
    """
    try:
        handle, reason = lock(parent)
    except Held as error:
        help = "wait for it to end, or give this one another directory"
        raise refuse("E0803", f"another run writes to {path}", help=help) from error
    if reason is None:
        return handle, None
    help = "make sure that no second run writes there"
    return handle, Diagnostic("W0806", f"{path} cannot be locked: {reason}", help=help)


def held(parent: int) -> bool | None:
    """Whether a run holds the lock of an open directory; None if that cannot be known. Waits for nothing."""
    try:
        handle = os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=parent)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for an instant: a run that begins waits longer
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False


def still_there(parent: int, handle: int) -> bool:
    """Whether a descriptor still is of the directory's lock file: the directory may have been emptied or removed."""
    try:
        own, current = os.fstat(handle), os.stat(LOCK, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    return (own.st_dev, own.st_ino) == (current.st_dev, current.st_ino)
