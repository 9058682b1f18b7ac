"""The supervisor: starts a mesh's ranks on this machine, watches them, and ends them all together.

In: a command, run once per rank with `PARTITA_RANK`, `PARTITA_RANKS` and `PARTITA_RENDEZVOUS` (a file in a
private directory) in its environment. Out: an exit status. What holds:

- when one rank dies the others are killed at once, and one message names the rank and what it died of;
- the same when nothing moves any more: ranks record what they do in files that a lookout reads;
- ranks connect over a network of their own, where the system allows it; where it does not, and somebody else reaches
  their ports while they connect, they are started again;
- after either, all ranks begin again as often as was asked for, each time with a rendezvous of their own; those of the
  next attempt are started while this one runs (`attempts`), so that nobody waits for imports then;
- Ctrl-C (or SIGHUP) ends all ranks, with one line; so does SIGTERM, once they have saved, if they do;
- where standard error cannot be written to any more, the run goes on without it;
- nothing remains however the supervisor itself ends, by SIGKILL too: `guardian` sees to that;
- nothing listens beyond the loopback interface.

The ranks share the supervisor's standard output (one of them writes to it, by agreement); their standard
error passes through the supervisor, which puts the rank before each line. torch is not imported here.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

from attrs import define, field

from partita.runtime.supervision.attempts import Attempt, Rank
from partita.runtime.supervision.cores import usable
from partita.runtime.supervision.dumps import Dump
from partita.runtime.supervision.lookout import LOOK_SECONDS, Lookout
from partita.runtime.supervision.processes import piped
from partita.runtime.supervision.rendezvous import INTERFACES, LOOPBACK_INTERFACE, RANKS
from partita.runtime.supervision.statuses import (
    ASKED,
    FAILED,
    FINAL,
    FOLLOWING,
    NOT_FINITE,
    PEER_LOST,
    REFUSED,
    STRANGER,
    UNSAVED,
    WRONG_INPUT,
)

GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
QUIET_SECONDS = 30.0  # that ranks which save before they end may do nothing that is seen
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 1.0  # for a rank to end whose peers have lost it
MOST_STARTS = 3  # of an attempt whose ranks do not come to connect
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LONGEST_LINE = 1 << 16
SAID_BY_RANKS = frozenset((PEER_LOST, ASKED, NOT_FINITE, REFUSED, UNSAVED))
WORDS = {
    PEER_LOST: "lost its connection to another rank",
    ASKED: "ended because another rank was asked to",
    UNSAVED: "could not write its part of the last checkpoint",
    STRANGER: "was connected to a process that is not a rank of this run",
}


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    restarts: int = 0,
    lookout: Lookout | None = None,
    environment: Mapping[str, str] | None = None,
    inherited: Sequence[int] = (),
    saves: bool = False,
    grace: float = GRACE_SECONDS,
    errors: BinaryIO | None = None,
) -> int:
    """Run `command` as each of `ranks` ranks; returns the exit status of the whole.

    0 when every rank ended with 0, 1 when one refused its input, 3 when one failed, 128 + the signal's number when a
    signal ended the run. After a failure that may not happen again all ranks are started anew, up to `restarts` times.
    `lookout` notices stalls, says what ranks were doing, and when they have begun, so that the next ones can be
    prepared. `environment` is what ranks inherit (default: this process's), and `inherited` the descriptors that
    they and all other processes of the run do; `saves` says that ranks save before they end, when they get SIGTERM.
    `errors` is where their standard error and its own lines go (default: standard error).
    """
    variables = rank_environment(os.environ if environment is None else environment, ranks)
    output = sys.stderr.buffer if errors is None else errors
    restart = starts = 0
    with _signals() as received, _Attempts(command, ranks, variables, inherited) as attempts:
        while True:
            ahead = attempts.prepare if restart < restarts else None
            supervision = _Supervision(attempts.begin(), received, grace, saves, output, lookout, ahead)
            status = supervision.run()
            starts += 1
            if received or not supervision.may_go_on:
                return status
            if supervision.may_be_disturbed and starts < MOST_STARTS:
                supervision.say(
                    "restarting all ranks: the ports at which they connect are open to all of this machine, and "
                    "another process may have connected to them"
                )
                continue
            if restart == restarts:
                return status
            restart, starts = restart + 1, 0
            supervision.say(f"restarting all ranks, {restart} of at most {restarts} times")


@define(eq=False)
class _Attempts:
    """The attempt under way, and the next one where it is prepared; a context manager, which ends both."""

    command: Sequence[str]
    ranks: int
    variables: Mapping[str, str]
    inherited: Sequence[int]
    present: Attempt | None = None
    next: Attempt | None = None

    def __enter__(self) -> _Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        for attempt in (self.present, self.next):
            if attempt is not None:
                attempt.end()

    def prepare(self) -> Attempt:
        """Start the ranks of the next attempt, which wait for its beginning; those of one that has failed, anew."""
        if self.next is not None and not self.next.sound:
            failed, self.next = self.next, None
            failed.end()
        if self.next is None:
            self.next = Attempt(self.command, self.ranks, self.variables, self.inherited)
        return self.next

    def begin(self) -> Attempt:
        """The next attempt, begun; the one before ends."""
        before, self.present = self.present, None
        if before is not None:
            before.end()
        self.present = attempt = self.prepare()
        self.next = None
        attempt.go()
        return attempt


def rank_environment(environment: Mapping[str, str], ranks: int) -> dict[str, str]:
    """The variables of all ranks: an equal share of the cores each, and Gloo and NCCL on the loopback interface.

    Thread counts that the user has set stay as they are.
    """
    variables = dict(environment)
    threads = str(max(1, len(usable()) // ranks))
    for name in THREAD_VARIABLES:
        variables.setdefault(name, variables.get("OMP_NUM_THREADS", threads))
    variables |= dict.fromkeys(INTERFACES, LOOPBACK_INTERFACE)
    variables[RANKS] = str(ranks)
    return variables


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that ask for the end of the run, in the order in which they come.

    What was ignored before stays ignored: `nohup` and a shell's background jobs rely on that.
    """
    received: list[int] = []
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@define(eq=False)
class _Supervision:
    """The watch over started ranks until none is left."""

    attempt: Attempt
    received: list[int]
    grace: float
    saves: bool
    output: BinaryIO
    lookout: Lookout | None = None
    prepare: Callable[[], object] | None = None  # called once the ranks have begun: for the next attempt
    deadline: float | None = None  # when what has not ended by itself is killed
    causes: list[Rank] = field(factory=list)
    patience: float | None = None  # until when those that lost a peer are not yet taken for the cause
    stall: str | None = None
    doing: str = ""  # what the ranks did when some died
    connecting: bool = False  # whether they had not come to their first step by then
    next_look: float = 0.0
    dumps: dict[int, Dump] = field(factory=dict)  # by rank

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks that are watched."""
        return self.attempt.ranks

    @property
    def may_go_on(self) -> bool:
        """Whether the run failed, and may do better when it is started again."""
        statuses = {rank.process.returncode for rank in self.causes}
        return self.stall is not None or bool(statuses and not statuses & FINAL)

    @property
    def may_be_disturbed(self) -> bool:
        """Whether the run failed while its ranks connected, over a network that others reach too."""
        if self.attempt.secluded or self.lookout is None:
            return False
        statuses = {rank.process.returncode for rank in self.causes}
        return STRANGER in statuses or (self.connecting and (self.stall is not None or -signal.SIGABRT in statuses))

    def run(self) -> int:
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(piped(rank.process.stderr), selectors.EVENT_READ, rank)
            while any(rank.alive for rank in self.ranks):
                self._forward(selector, POLL_SECONDS)
                self._watch()
            # What the ranks wrote last; their children may hold the pipes open, so there is no waiting for
            # its end.
            self._forward(selector, 0.0)
        self.causes = self.causes or self._failed()  # the last ones may end together, between two looks
        for rank in self.ranks:
            self._write(rank, bytes(rank.rest))
            if rank.process.returncode >= 0 and rank.number in self.dumps and self.dumps[rank.number].text:
                self._print(self.dumps[rank.number].text.encode() + b"\n")  # it has not died of that
        if self.deadline is not None:
            _restore_terminal()
        return self._conclude()

    def _watch(self) -> None:
        if not self.causes and not self.received and self.stall is None:
            failed = self._failed()
            self.causes = [] if self._may_follow(failed) else failed
            if self.lookout is not None:
                self._look(self.lookout)
        if self.deadline is None and (self.causes or self.received or self.stall is not None):
            # Ranks have nothing to put in order, but to save when they are asked to.
            asked = not self.causes and self.received[:1] == [signal.SIGTERM]
            self.deadline = time.monotonic() + (self.grace if asked else 0.0)
            self._signal(signal.SIGTERM if asked else signal.SIGKILL)
            self._signal(signal.SIGCONT)  # a stopped rank hears no other signal
        if self.deadline is not None and len(self.received) < 2 and self._saving():
            self.deadline = time.monotonic() + self.grace
        if self.deadline is not None and (time.monotonic() > self.deadline or len(self.received) > 1):
            self._signal(signal.SIGKILL)

    def _saving(self) -> bool:
        """Whether ranks that were asked to end are still about to save."""
        if not self.saves or self.lookout is None or self.received[:1] != [signal.SIGTERM]:
            return False
        if {rank.process.returncode for rank in self._failed()} - {-signal.SIGTERM, ASKED}:
            return False  # one has failed, for which the others would wait
        positions = self.lookout.positions(self.attempt.directory)
        return bool(positions) and min(each.seconds for each in positions) < QUIET_SECONDS

    def _failed(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.process.poll() not in (None, 0)]

    def _may_follow(self, failed: Sequence[Rank]) -> bool:
        """Whether those that have ended have only lost a peer, which may be about to end and say why."""
        statuses = {rank.process.returncode for rank in failed}
        if not statuses or statuses - FOLLOWING or not any(rank.alive for rank in self.ranks):
            return False
        # Who was asked to end may still be about to commit what all have saved.
        seconds = QUIET_SECONDS if ASKED in statuses else PATIENCE_SECONDS
        self.patience = self.patience or time.monotonic() + seconds
        return time.monotonic() < self.patience

    def _look(self, lookout: Lookout) -> None:
        """What do the flight recorders say: of a death at once, else now and then whether anything moves."""
        directory = self.attempt.directory
        if self.causes:
            self.connecting = lookout.connecting(directory)
            known = all(rank.process.returncode in SAID_BY_RANKS for rank in self.causes)
            dead = [rank.number for rank in self.causes]
            self.doing = "" if known else lookout.died(directory, dead, self._last_words())
        elif time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            self.attempt.guard()
            self.stall = lookout.stalled(directory, self.attempt.begun, self.attempt.processes)
            if self.stall is not None:
                self.connecting = lookout.connecting(directory)
                self.say(f"{self.stall}\n  ending all ranks")
            elif self.prepare is not None and lookout.begun(directory):
                with suppress(OSError):  # this attempt goes on; the next one is then started when it is needed
                    self.prepare()
                self.prepare = None

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.alive:
                rank.process.send_signal(number)

    def _forward(self, selector: selectors.BaseSelector, timeout: float) -> None:
        """Pass on what the ranks have written, line by line."""
        if not selector.get_map():
            time.sleep(timeout)
            return
        for key, _ in selector.select(timeout):
            rank: Rank = key.data
            data = os.read(key.fd, LONGEST_LINE)
            if not data:
                selector.unregister(key.fileobj)
                continue
            rank.rest += data
            end = rank.rest.rfind(b"\n") + 1
            if end == 0 and len(rank.rest) >= LONGEST_LINE:
                end = len(rank.rest)
            self._write(rank, bytes(rank.rest[:end]))
            del rank.rest[:end]

    def _write(self, rank: Rank, lines: bytes) -> None:
        if not lines:
            return
        prefix = f"rank {rank.number}: ".encode() if len(self.ranks) > 1 else b""
        shown = self.dumps.setdefault(rank.number, Dump()).without(lines.splitlines())
        self._print(b"".join(prefix + line + b"\n" for line in shown))

    def _last_words(self) -> dict[int, str]:
        """What ranks that aborted have said of it."""
        return {number: dump.text for number, dump in self.dumps.items() if dump.text}

    def _print(self, data: bytes) -> None:
        """Write to where errors go. A disk that is full, or a reader that has left, ends no run."""
        try:
            self.output.write(data)
            self.output.flush()
        except OSError:
            pass

    def _conclude(self) -> int:
        if self.received:
            number = self.received[0]
            self.say("interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}")
            return 128 + number
        if self.stall is not None:
            return FAILED
        if not self.causes:
            return 0
        # Of several that died together, those that a signal killed come before those that ended by
        # themselves, and those that only lost their peer last.
        first = min(self.causes, key=lambda rank: (rank.process.returncode in FOLLOWING, rank.process.returncode > 0))
        status = first.process.returncode
        if any(rank.process.returncode == REFUSED for rank in self.causes):
            return WRONG_INPUT  # which has been said
        if status == NOT_FINITE:
            self.say("the parameters are unaffected")
            return FAILED
        others = "" if len(self.ranks) == 1 else "; the other ranks were killed"
        cause = self.dumps[first.number].cause if first.number in self.dumps else ""
        lines = [f"rank {first.number} {death(status)}{others}", *filter(None, (cause, self.doing))]
        self.say("\n  ".join(lines))
        return FAILED

    def say(self, text: str) -> None:
        """A line of the supervisor's own."""
        self._print(f"partita: {text}\n".encode())


def _restore_terminal() -> None:
    """Show the cursor, on a new line: a display that was killed leaves it hidden, and its line open."""
    if os.isatty(1):
        with suppress(OSError):
            os.write(1, b"\n\x1b[?25h")


def death(status: int) -> str:
    """What a process died of, by its exit status: `was killed by SIGKILL (…)`, `ended with exit status 1`."""
    if status in WORDS:
        return WORDS[status]
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = " (possibly out of memory)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
