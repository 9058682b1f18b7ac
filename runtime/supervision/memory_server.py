"""The process that keeps the copies of a machine's ranks under torchrun, whose agent restarts them.

A rank runs this file as a separate program, in a session of its own, so that it outlives the rank. It creates files in
memory, hands their descriptors to every process of this user that connects to it, and ends when the agent does: with
the last descriptor the memory is gone, and nothing has to be removed. It listens at an abstract Unix socket, which
cannot be reached from another machine.
"""

import os
import select
import socket
import struct
import sys

AT_ONCE = 250  # descriptors in a message: the kernel passes on 253
CREDENTIALS = struct.Struct("3i")  # process, user and group


def address_of(agent: int) -> str:
    """The socket of the memory server of an agent's ranks."""
    return f"\0partita-keeper-{os.getuid()}-{agent}"


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(credentials)[1])


def main() -> None:
    """Keep so many files in memory until a process ends."""
    agent, count = map(int, sys.argv[1:])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address_of(agent))
        except OSError:
            return  # another rank was first
        watched = os.pidfd_open(agent)
        files = [os.memfd_create("partita-copies") for _ in range(count)]
        listener.listen(1024)
        while watched not in select.select([listener.fileno(), watched], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if user_of(connection) == os.getuid():
                    hand_over(connection, files)


def hand_over(connection: socket.socket, files: list[int]) -> None:
    """Send all descriptors."""
    try:
        for start in range(0, len(files), AT_ONCE):
            socket.send_fds(connection, [b"!"], files[start : start + AT_ONCE])
    except OSError:
        pass  # it has ended


if __name__ == "__main__":
    main()
