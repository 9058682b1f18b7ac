"""A process with all of a rank's imports done, from which ranks are forked: importing torch takes seconds, a fork
milliseconds. So the next attempt stands ready soon after this one has begun.

The supervisor starts this module as a program and asks it for ranks over a socket. A rank becomes the supervisor's own
child: it is forked twice, and the supervisor is the subreaper of its orphans (prctl(2)). The server has one thread and
has computed nothing, so that what is forked is as good as new; where it has more threads it ends, and the supervisor
starts its ranks as programs.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from runpy import run_module
from typing import IO, Any, TypeAlias

from attrs import define, field

from partita.runtime.supervision.identity import RANK
from partita.runtime.supervision.isolation import PR_SET_PDEATHSIG, control

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # from Linux's prctl.h
LENGTH = struct.Struct("<Q")
PROCESS = struct.Struct("<i")
POLL_SECONDS = 0.005
MAX_FILES = 250  # the kernel passes on 253 descriptors in one message
FORKS = sys.platform.startswith("linux")
NAME = "partita-"  # of a forked process, before the number of its rank
THREADS = "OMP_NUM_THREADS"
# What a rank imports.
MODULES = (
    "partita.cli.run",
    "partita.cli.training.rank",
    "partita.cli.training.observer",
    "partita.runtime.checkpoint.checkpoints",
    "partita.runtime.checkpoint.snapshots",
    "partita.runtime.data.prefetcher",
    "partita.runtime.data.binding",
    "partita.runtime.rank",
    "partita.runtime.tracing.stopwatch",
    "partita.runtime.training",
    "partita.runtime.transports.process",
)
COMMAND = [sys.executable, "-m", "partita"]  # what is forked runs its arguments


# ---------------------------------------------------------------- the supervisor's side


@define(eq=False)
class ForkServer:
    """The supervisor's end. Started by `serving`."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    _asked: deque[Forked] = field(factory=deque, init=False)  # of which the process ids are still to come
    _said: bytearray = field(factory=bytearray, init=False)

    def can_start(self, command: Sequence[str], inherited: Sequence[int]) -> bool:
        """Whether a command can be forked."""
        forked = list(command[: len(COMMAND)]) == COMMAND
        return forked and len(inherited) + 2 <= MAX_FILES and self.process.poll() is None

    def start(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        inherited: Sequence[int],
        group: int,
        cores: Sequence[int],
    ) -> Forked:
        """Fork a rank of a command, with these variables, descriptors, process group and cores. Raises OSError."""
        ends = [os.pipe(), os.pipe()]
        (stdin, write), (read, stderr) = ends
        files = {0: stdin, 2: stderr, **{each: each for each in inherited}}
        request = {
            "arguments": command[len(COMMAND) :],
            "variables": dict(variables),
            "files": list(files),
            "group": group,
            "cores": list(cores),
        }
        text = json.dumps(request).encode("utf-8", "surrogateescape")
        try:
            socket.send_fds(self.connection, [LENGTH.pack(len(text))], list(files.values()))
            self.connection.sendall(text)
        except OSError:
            os.close(write)
            os.close(read)
            raise
        finally:
            os.close(stdin)
            os.close(stderr)
        forked = Forked(self, os.fdopen(write, "wb", 0), os.fdopen(read, "rb", 0))
        self._asked.append(forked)
        return forked

    def hear(self) -> None:
        """Take the process ids that the server has sent. If it has ended, the others have failed."""
        while self._asked and select.select([self.connection], [], [], 0.0)[0]:
            try:
                data = self.connection.recv(PROCESS.size - len(self._said))
            except OSError:
                data = b""
            self._said += data
            if not data:
                for forked in self._asked:
                    forked.returncode = 1 if forked.returncode is None else forked.returncode
                self._asked.clear()
            elif len(self._said) == PROCESS.size:
                (self._asked.popleft().number,) = PROCESS.unpack(self._said)
                self._said.clear()


@define(eq=False)
class Forked:
    """A forked rank: a child process, with what is used of `subprocess.Popen`."""

    server: ForkServer
    stdin: IO[bytes]
    stderr: IO[bytes]
    number: int = 0  # its process id, once it is known
    returncode: int | Any = None  # None before it is known

    @property
    def pid(self) -> int:
        """Its process id; as long as it is not forked, that of the server."""
        if not self.number:
            self.server.hear()
        return self.number or self.server.process.pid

    def poll(self) -> int | None:
        """Its exit status; None if it runs."""
        if not self.number:
            self.server.hear()
        if self.number and self.returncode is None:
            self._reap(os.WNOHANG)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end."""
        while (status := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return status

    def kill(self) -> None:
        """Kill the rank."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send it a signal. One that ends a rank before it is forked ends the server."""
        if self.poll() is not None:
            return
        if self.number:
            os.kill(self.number, number)
        elif number != signal.SIGCONT:
            self.server.process.kill()
            self.returncode = -number

    def _reap(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self.number, options)
        except ChildProcessError:
            pid, status = self.number, 0
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


Process: TypeAlias = subprocess.Popen[bytes] | Forked


@contextmanager
def serving(variables: Mapping[str, str]) -> Iterator[ForkServer | None]:
    """Start a server, whose ranks have the threads that these variables say; None where ranks cannot be forked."""
    if not FORKS:
        yield None
        return
    ours, theirs = socket.socketpair()
    control(PR_SET_CHILD_SUBREAPER, 1)
    try:
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                    env={**variables, "OPENBLAS_NUM_THREADS": "1"},  # numpy's, which starts its threads at once
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
            try:
                yield ForkServer(process, ours)
            finally:
                process.kill()
                process.wait()
    finally:
        control(PR_SET_CHILD_SUBREAPER, 0)


# ---------------------------------------------------------------- the server


def serve(connection: socket.socket, supervisor: int) -> int:
    """Fork ranks until the supervisor ends; returns, in a rank, its exit status."""
    control(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        return 0
    for each in MODULES:
        import_module(each)
    if len(os.listdir("/proc/self/task")) > 1:
        return 0
    gc.freeze()  # a collection in a rank would copy all pages
    threads = os.environ.get(THREADS)
    while True:
        try:
            header, files, _, _ = socket.recv_fds(connection, LENGTH.size, MAX_FILES)
            if not header:
                return 0
            request = json.loads(_read(connection, *LENGTH.unpack(header)))
        except (ConnectionError, EOFError):
            return 0  # the supervisor was killed, and this process soon is
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            own = os.getpid()
            rank = os.fork()
            if rank:
                os.write(writer, PROCESS.pack(rank))
                os._exit(0)
            while os.getppid() == own:  # until the supervisor has it
                time.sleep(POLL_SECONDS)
            connection.detach()  # `_run` closes it
            return _run(request, files, threads)
        os.waitpid(middle, 0)
        with suppress(ConnectionError):
            connection.sendall(os.read(reader, PROCESS.size))
        for file in (reader, writer, *files):
            os.close(file)


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        block = connection.recv(count - len(data))
        if not block:
            raise EOFError("the supervisor has ended")
        data += block
    return bytes(data)


def _run(request: Mapping[str, Any], files: Sequence[int], threads: str | None) -> int:
    """Run what was requested in this forked process; returns its exit status."""
    try:
        os.setpgid(0, request["group"])
    except PermissionError:
        return 1  # the run has ended meanwhile, and with it the group
    if request["cores"]:
        with suppress(OSError):
            os.sched_setaffinity(0, request["cores"])
    _take(dict(zip(request["files"], files, strict=True)))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["variables"])
    control(PR_SET_NAME, f"{NAME}{os.environ[RANK]}".encode())
    if os.environ.get(THREADS) != threads and os.environ.get(THREADS, "").isdecimal():
        import torch

        torch.set_num_threads(int(os.environ[THREADS]))
    sys.argv = [COMMAND[-1], *request["arguments"]]
    try:
        run_module(COMMAND[-1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _take(files: Mapping[int, int]) -> None:
    """Give descriptors the numbers that they have in the supervisor, and close all others but standard output."""
    first = max(files) + 1
    duplicates = {number: fcntl.fcntl(each, fcntl.F_DUPFD, first) for number, each in files.items()}
    kept = {1, *duplicates.values()}
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in kept:
            with suppress(OSError):  # the one of this list
                os.close(each)
    for number, each in duplicates.items():
        os.dup2(each, number)
        os.close(each)


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
