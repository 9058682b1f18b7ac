"""The first actions of a supervised rank: it enters the run's private network and ties its life to the supervisor's."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from partita.runtime.supervision.reaper import CLONE_NEWNET, CLONE_NEWUSER

NETWORK = "PARTITA_NETWORK"  # descriptors of the user namespace and the network to enter
SUPERVISOR = "PARTITA_SUPERVISOR"  # its process id
PRIVATE = "PARTITA_PRIVATE_NETWORK"  # `0` in the user's environment: ranks stay in the machine's network
PR_SET_PDEATHSIG = 1  # from Linux's prctl.h


def namespaces(process: int) -> tuple[int, ...]:
    """Descriptors of a process's user namespace and network, to be inherited. Raises OSError."""
    return tuple(os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "net"))


def enter_isolation(variables: Mapping[str, str]) -> None:
    """Enter the network, if there is one, and have this process killed when the supervisor ends. Raises OSError.

    Must be called while the process has a single thread.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if variables.get(NETWORK):
        user, network = map(int, variables[NETWORK].split(","))
        if not os.path.samestat(os.fstat(user), os.stat("/proc/self/ns/user")):
            _enter(libc, user, CLONE_NEWUSER)
        _enter(libc, network, CLONE_NEWNET)
        os.close(user)
        os.close(network)
    if variables.get(SUPERVISOR):
        control(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(variables[SUPERVISOR]):  # it has ended already
            os.kill(os.getpid(), signal.SIGKILL)


def control(option: int, argument: Any) -> None:
    """Call prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def _enter(libc: ctypes.CDLL, namespace: int, kind: int) -> None:
    if libc.setns(namespace, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the network of the run: {os.strerror(number)}")
