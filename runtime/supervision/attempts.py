"""An attempt at a run: its ranks, and the guardian that owns their process group and their private directory.

A rank that is started goes as far as it can without the others, through imports and the compiler, and then waits at its
standard input for the word. So the next attempt can stand ready while this one runs, and after a failure nobody waits
for imports. Where its supervisor ends first, a rank that waits ends too.
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

from partita.runtime.supervision import guardian
from partita.runtime.supervision.cores import bind, share, usable
from partita.runtime.supervision.isolation import NETWORK, PRIVATE, SUPERVISOR, namespaces
from partita.runtime.supervision.processes import is_stopped, piped
from partita.runtime.supervision.rendezvous import FLIGHT, RANK, RENDEZVOUS, STANDBY, WORD

CLEAN_SECONDS = 10.0  # that a guardian may take to remove a directory
POLL_SECONDS = 0.01


@define(eq=False)
class Rank:
    """One rank's process and the part of its standard error that has not made a line yet."""

    number: int
    process: subprocess.Popen[bytes]
    rest: bytearray = field(factory=bytearray)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None


class Attempt:
    """The ranks of one attempt, started and waiting for the word; `directory` is theirs alone, and so is their network
    if they are `secluded`. `inherited` are descriptors that all its processes are to have.

    Whoever makes one must call `end`, which leaves no process and no directory. Raises OSError.
    """

    def __init__(
        self, command: Sequence[str], ranks: int, variables: Mapping[str, str], inherited: Sequence[int] = ()
    ) -> None:
        self.ranks: list[Rank] = []
        self.directory = Path()
        self.begun = time.monotonic()
        self.secluded = False
        self._inherited = tuple(inherited)
        private = "shared" if variables.get(PRIVATE) == "0" else "private"
        self._guardian = self._guarding(0, private, stdout=subprocess.PIPE)
        self._group = self._guardian.pid
        spaces: tuple[int, ...] = ()
        try:
            with piped(self._guardian.stdout) as said:
                lines = [os.fsdecode(said.readline().rstrip(b"\n")) for _ in range(2)]
            if not all(lines):
                raise OSError("the reaper did not start")
            self.directory, self.secluded = Path(lines[0]), lines[1] == "private"
            own = {
                **variables,
                RENDEZVOUS: str(self.directory / "rendezvous"),
                FLIGHT: str(self.directory),
                STANDBY: "yes",
                SUPERVISOR: str(os.getpid()),
            }
            if self.secluded:
                spaces = namespaces(self._guardian.pid)
                own[NETWORK] = ",".join(map(str, spaces))
            cores = usable()
            for number in range(ranks):
                self.ranks.append(self._start(command, number, own, spaces))
                bind(self.ranks[-1].process.pid, share(cores, number, ranks), own.get("OMP_NUM_THREADS", ""))
        except BaseException:
            self.end()
            raise
        finally:
            for each in spaces:
                os.close(each)

    @property
    def sound(self) -> bool:
        """Whether no rank has ended, or is stopped."""
        return all(rank.alive and not is_stopped(rank.process.pid) for rank in self.ranks)

    @property
    def processes(self) -> dict[int, int]:
        """The ranks' processes."""
        return {rank.number: rank.process.pid for rank in self.ranks}

    def go(self) -> None:
        """Give the word."""
        self.begun = time.monotonic()
        for rank in self.ranks:
            # One that has ended is seen soon enough.
            with suppress(BrokenPipeError), piped(rank.process.stdin) as word:
                word.write(WORD)

    def guard(self) -> None:
        """See that there is a guardian: one that was stopped goes on, and one that was killed gets a successor."""
        if self._guardian.poll() is None:
            if is_stopped(self._guardian.pid):
                self._guardian.send_signal(signal.SIGCONT)
        elif any(rank.alive for rank in self.ranks):
            # The group is there as long as any process is in it, and so is its number.
            with suppress(OSError):
                before = self._guardian
                self._guardian = self._guarding(self._group, "", str(self.directory))
                piped(before.stdin).close()

    def end(self) -> None:
        """Kill what still runs, and remove the directory: the guardian does, once nobody holds its input."""
        process = self._guardian
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        limit = time.monotonic() + CLEAN_SECONDS
        while not _ended(process.pid) and time.monotonic() < limit:
            process.send_signal(signal.SIGCONT)
            time.sleep(POLL_SECONDS)
        # Should it not have done so, or have been killed itself, all is still there. Until it is waited for, nobody
        # else gets its number, which is the group's.
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
            [sys.executable, "-I", "-S", str(Path(guardian.__file__).resolve()), *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            pass_fds=self._inherited,
            process_group=group,
        )

    def _start(
        self, command: Sequence[str], number: int, variables: Mapping[str, str], spaces: tuple[int, ...]
    ) -> Rank:
        process = subprocess.Popen(
            command,
            env={**variables, RANK: str(number)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(*self._inherited, *spaces),
            process_group=self._group,
        )
        os.set_blocking(piped(process.stderr).fileno(), False)
        return Rank(number, process)


def _ended(process: int) -> bool:
    """Whether a child has ended; it stays a zombie, whose number is nobody else's."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
