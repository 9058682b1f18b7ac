"""An attempt at a run: its ranks, and the reaper that owns their process group and their private directory.

A rank proceeds as far as it can alone, through imports and the compiler, and then waits on its standard input for the
start signal. So the next attempt can be on standby while this one runs, and after a failure no time is spent on
imports. If its supervisor exits first, a waiting rank exits too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import define, field

from partita.runtime.supervision import reaper
from partita.runtime.supervision.cores import bind, bindable, share, usable
from partita.runtime.supervision.fork_server import ForkServer, Process
from partita.runtime.supervision.identity import FLIGHT, RANK, RENDEZVOUS, STANDBY, WORD
from partita.runtime.supervision.isolation import NETWORK, PRIVATE, SUPERVISOR, namespaces
from partita.runtime.supervision.processes import is_stopped, piped

CLEAN_SECONDS = 10.0  # for a reaper to remove a directory
POLL_SECONDS = 0.01


@define(eq=False)
class RankProcess:
    """One rank's process and the incomplete last line of its standard error."""

    number: int
    process: Process
    rest: bytearray = field(factory=bytearray)

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None


class Attempt:
    """The ranks of one attempt, started and waiting for the start signal. `directory` is theirs alone, and so is their
    network if they are `secluded`. All processes of the attempt inherit the descriptors `inherited`. The `server` forks
    the ranks if it can.

    The creator must call `end`, which leaves no process and no directory. Raises OSError.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: int,
        variables: Mapping[str, str],
        inherited: Sequence[int] = (),
        server: ForkServer | None = None,
    ) -> None:
        self.ranks: list[RankProcess] = []
        self.directory = Path()
        self.begun = time.monotonic()
        self.private_network = False
        self._inherited = tuple(inherited)
        self._server = server
        private = "shared" if variables.get(PRIVATE) == "0" else "private"
        self._reaper = self._guarding(0, private, stdout=subprocess.PIPE)
        self._group = self._reaper.pid
        spaces: tuple[int, ...] = ()
        try:
            with piped(self._reaper.stdout) as output:
                lines = [os.fsdecode(output.readline().rstrip(b"\n")) for _ in range(2)]
            if not all(lines):
                raise OSError("the reaper did not start")
            self.directory, self.private_network = Path(lines[0]), lines[1] == "private"
            own = {
                **variables,
                RENDEZVOUS: str(self.directory / "rendezvous"),
                FLIGHT: str(self.directory),
                STANDBY: "yes",
                SUPERVISOR: str(os.getpid()),
            }
            if self.private_network:
                spaces = namespaces(self._reaper.pid)
                own[NETWORK] = ",".join(map(str, spaces))
            cores = usable()
            for number in range(ranks):
                bound = bindable(share(cores, number, ranks), own.get("OMP_NUM_THREADS", ""))
                self.ranks.append(RankProcess(number, self._start(command, {**own, RANK: str(number)}, spaces, bound)))
        except BaseException:
            self.end()
            raise
        finally:
            for each in spaces:
                os.close(each)

    @property
    def healthy(self) -> bool:
        """Whether all ranks are running: none has ended or is stopped."""
        return all(rank.alive and not is_stopped(rank.process.pid) for rank in self.ranks)

    @property
    def processes(self) -> dict[int, int]:
        """The ranks' process ids."""
        return {rank.number: rank.process.pid for rank in self.ranks}

    def go(self) -> None:
        """Send the start signal."""
        self.begun = time.monotonic()
        for rank in self.ranks:
            # A rank that has ended is noticed soon enough.
            with suppress(BrokenPipeError), piped(rank.process.stdin) as word:
                word.write(WORD)

    def ensure_reaper(self) -> None:
        """Keep a reaper running: resume one that was stopped, replace one that was killed."""
        if self._reaper.poll() is None:
            if is_stopped(self._reaper.pid):
                self._reaper.send_signal(signal.SIGCONT)
        elif any(rank.alive for rank in self.ranks):
            # The group, and with it its id, exists as long as any process is in it.
            with suppress(OSError):
                before = self._reaper
                self._reaper = self._guarding(self._group, "", str(self.directory))
                piped(before.stdin).close()

    def end(self) -> None:
        """Kill what still runs and remove the directory. The reaper does both when its standard input closes."""
        process = self._reaper
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        limit = time.monotonic() + CLEAN_SECONDS
        while not _ended(process.pid) and time.monotonic() < limit:
            process.send_signal(signal.SIGCONT)
            time.sleep(POLL_SECONDS)
        # If the reaper failed, or was itself killed, do its work. Until it is waited for, its process id, which is the
        # group's, is not reused.
        if process.returncode is None and process.pid == self._group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()
            for pipe in (rank.process.stdin, rank.process.stderr):
                piped(pipe).close()
        if self.directory.is_absolute():
            shutil.rmtree(self.directory, ignore_errors=True)
            shutil.rmtree(f"{self.directory}.gone", ignore_errors=True)

    def _guarding(self, group: int, *arguments: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(reaper.__file__).resolve()), *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            pass_fds=self._inherited,
            process_group=group,
        )

    def _start(
        self, command: Sequence[str], variables: Mapping[str, str], spaces: tuple[int, ...], cores: Sequence[int]
    ) -> Process:
        inherited = (*self._inherited, *spaces)
        process: Process | None = None
        if self._server is not None and self._server.can_start(command, inherited):
            with suppress(OSError):  # it has just ended
                process = self._server.start(command, variables, inherited, self._group, cores)
        if process is None:
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=inherited,
                process_group=self._group,
            )
            bind(process.pid, cores)
        os.set_blocking(piped(process.stderr).fileno(), False)
        return process


def _ended(process: int) -> bool:
    """Whether a child has ended; it remains a zombie, so its process id is not reused."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
