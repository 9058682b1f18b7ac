"""An attempt at a run: its ranks, and the guardian that owns their process group and their private directory.

A rank that is started goes as far as it can without the others, through imports and the compiler, and then waits at its
standard input for the word. So the next attempt can stand ready while this one runs, and after a failure nobody waits
for imports. Where its supervisor ends first, a rank that waits ends too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import define, field

from partita.runtime.supervision import guardian
from partita.runtime.supervision.cores import bind, share, usable
from partita.runtime.supervision.rendezvous import FLIGHT, RANK, RENDEZVOUS, STANDBY, WORD


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
    """The ranks of one attempt, started and waiting for the word; `directory` is theirs alone.

    Whoever makes one must call `end`, which leaves no process and no directory. Raises OSError.
    """

    def __init__(self, command: Sequence[str], ranks: int, variables: Mapping[str, str]) -> None:
        self.ranks: list[Rank] = []
        self.directory = Path()
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        try:
            assert self._guardian.stdout is not None
            name = os.fsdecode(self._guardian.stdout.readline().rstrip(b"\n"))
            if not name:
                raise OSError("the guardian did not start")
            self.directory = Path(name)
            own = {**variables, RENDEZVOUS: os.path.join(name, "rendezvous"), FLIGHT: name, STANDBY: "yes"}
            cores = usable()
            for number in range(ranks):
                self.ranks.append(_start(command, number, own, self._guardian.pid))
                bind(self.ranks[-1].process.pid, share(cores, number, ranks), own.get("OMP_NUM_THREADS", ""))
        except BaseException:
            self.end()
            raise

    @property
    def alive(self) -> bool:
        """Whether no rank has ended."""
        return all(rank.alive for rank in self.ranks)

    def go(self) -> None:
        """Give the word."""
        for rank in self.ranks:
            assert rank.process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, which is seen soon enough
                rank.process.stdin.write(WORD)
                rank.process.stdin.close()

    def end(self) -> None:
        """Kill what still runs, and remove the directory: the guardian does, once nobody holds its input."""
        for pipe in (self._guardian.stdin, self._guardian.stdout):
            assert pipe is not None
            pipe.close()
        self._guardian.wait()
        # Should the guardian itself have been killed, both are still there.
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()
            for pipe in (rank.process.stdin, rank.process.stderr):
                assert pipe is not None
                pipe.close()
        if self.directory.is_absolute():
            shutil.rmtree(self.directory, ignore_errors=True)


def _start(command: Sequence[str], number: int, variables: Mapping[str, str], group: int) -> Rank:
    process = subprocess.Popen(
        command,
        env={**variables, RANK: str(number)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        process_group=group,
    )
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    return Rank(number, process)
