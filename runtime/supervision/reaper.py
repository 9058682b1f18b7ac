"""The process that outlives the supervisor: it owns the ranks' process group and their private directory.

The launcher runs this file as a separate program, the leader of the process group that every rank joins. It creates the
directory (mode 700) and, if the system permits, a network namespace with nothing but the loopback interface: ranks that
enter it can reach each other, and nobody else on the machine can reach their ports. It prints the directory's path and
whether the network is private, and reads its standard input, whose other end only the supervisor holds. When that
closes, because the supervisor exited or was killed, the reaper removes the directory and kills the whole group, itself
included. So nothing has to run in a dying supervisor, and nothing remains after it.

Given a directory as argument it replaces a reaper that was killed: it is in the group already, and prints nothing.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile

# From Linux's sched.h, sockios.h and if.h.
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
LOOPBACK = b"lo"


def main() -> None:
    """Create the directory, wait for the supervisor to end, clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    private, *arguments = sys.argv[1:]
    directory = arguments[0] if arguments else tempfile.mkdtemp(prefix="partita-")
    try:
        if not arguments:
            network = private == "private" and sys.platform == "linux" and enter_private_network()
            sys.stdout.write(f"{directory}\n{'private' if network else 'shared'}\n")
            sys.stdout.flush()
        while os.read(0, 4096):
            pass
    except OSError:
        pass  # the supervisor was killed before it read the path
    # Renamed first: a rank that is still alive can no longer create files in it.
    renamed = directory + ".gone"
    try:
        os.rename(directory, renamed)
        shutil.rmtree(renamed, ignore_errors=True)
    except OSError:
        pass  # somebody has removed it
    if arguments or os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def enter_private_network() -> bool:
    """Move to a new network namespace with its loopback interface up; False if the system forbids it.

    A user who may not create network namespaces may do so in a new user namespace, in which the user id stays the same.
    The superuser does not use one: it would lose privileges outside of the namespace.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET) != 0:
            if user == 0 or libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
                return False
            as_before = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
            for name, text in as_before.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            request = struct.pack("16sh14x", LOOPBACK, 0)
            _, flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", LOOPBACK, flags | IFF_UP))
    except (OSError, AttributeError):
        return False
    return True


if __name__ == "__main__":
    main()
