"""The supervisor: starts a mesh's ranks on this machine, watches them, and ends them all together.

It runs a command once per rank with `PARTITA_RANK`, `PARTITA_RANKS` and `PARTITA_RENDEZVOUS` (a file in a private
directory) in its environment, and returns an exit status. Invariants:

- when one rank dies the others are killed at once, and one message names the rank and the cause;
- the same if the run stalls: ranks record their progress in files that a watchdog reads;
- ranks connect over a private network, if the system permits; otherwise, if another process reaches their ports while
  they connect, they are restarted;
- after a failure all ranks restart, as often as requested, each time with a new rendezvous; the ranks of the next
  attempt are started while this one runs (`attempts`), so that no time is spent on imports then;
- if their number may change (`fleet`), the next attempt is of the ranks that are left, or that have returned;
- Ctrl-C, SIGTERM and SIGUSR1 end all ranks after they have saved, if they do; a second signal ends them at once, and so
  does SIGHUP;
- if standard error can no longer be written to, the run continues without it;
- nothing remains however the supervisor itself ends, including by SIGKILL (`reaper`);
- nothing listens beyond the loopback interface.

The ranks share the supervisor's standard output (by convention only one writes to it); their standard error passes
through the supervisor, which prefixes each line with the rank. torch is not imported here.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

from attrs import define, field

from partita.runtime.naming import ranks_text
from partita.runtime.supervision.attempts import Attempt, RankProcess
from partita.runtime.supervision.cores import usable
from partita.runtime.supervision.dumps import Dump
from partita.runtime.supervision.fleet import ElasticGroup, WorkerGroup
from partita.runtime.supervision.fork_server import ForkServer
from partita.runtime.supervision.identity import INTERFACES, LOOPBACK_INTERFACE, RANKS
from partita.runtime.supervision.processes import piped
from partita.runtime.supervision.statuses import (
    ASKED,
    ASKING,
    FAILED,
    FINAL,
    NOT_FINITE,
    PEER_LOST,
    REFUSED,
    SAVING,
    SECONDARY,
    UNSAVED,
    UNTRUSTED_PEER,
    WRONG_INPUT,
    ending,
)
from partita.runtime.supervision.watchdog import LOOK_SECONDS, Watchdog
from partita.runtime.tracing.flight import ENDED, READY

GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
QUIET_SECONDS = 30.0  # without visible progress, for ranks that save before they end
POLL_SECONDS = 0.02
PEER_TIMEOUT_SECONDS = 1.0  # for a rank to end after its peers lost it
MAX_STARTS = 3  # of an attempt whose ranks fail to connect
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LONGEST_LINE = 1 << 16
SAID_BY_RANKS = frozenset((PEER_LOST, ASKED, NOT_FINITE, REFUSED, UNSAVED))
SAVED = frozenset((*SECONDARY, *(-number for number in ASKING)))  # of ranks that were asked to save and end
WORDS = {
    PEER_LOST: "lost its connection to another rank",
    ASKED: "ended because another rank was asked to",
    UNSAVED: "could not write its part of the last checkpoint",
    UNTRUSTED_PEER: "was connected to a process that is not a rank of this run",
}


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    restarts: int = 0,
    watchdog: Watchdog | None = None,
    environment: Mapping[str, str] | None = None,
    inherited: Sequence[int] = (),
    saves: bool | None = None,
    grace: float | None = None,
    errors: BinaryIO | None = None,
    fleet: ElasticGroup | None = None,
    server: ForkServer | None = None,
) -> int:
    """Run `command` as each of `ranks` ranks; returns the exit status of the whole.

    That is 0 if every rank ended with 0, 1 if one refused its input, 3 if one failed, 128 + the signal's number if a
    signal ended the run. After a failure that may not repeat, all ranks are restarted, up to `restarts` times.
    `watchdog` detects stalls, says what ranks were doing, and when they have begun, so that the next ones can be
    prepared. `environment` is what ranks inherit (default: this process's), `inherited` the descriptors that all
    processes of the run do. `saves` says whether ranks save when they are asked to end (None: they have nothing to
    save); they are killed after `grace` seconds (default: 2, and as long as saving makes progress). `errors` receives
    their standard error and the supervisor's own lines (default: standard error). With a `fleet` the number of ranks
    may change, and `restarts` is how often each may fail. With a `server`, ranks are forked.
    """
    variables = os.environ if environment is None else environment
    output = sys.stderr.buffer if errors is None else errors
    crew = WorkerGroup(command, ranks, watchdog)
    restart = starts = 0
    with _signals() as received, _Attempts(variables, inherited, server) as attempts:
        while True:
            again = crew if restart < restarts else None
            supervision = _Supervision(attempts, crew, received, grace, saves, output, fleet, again)
            status = supervision.run()
            starts += 1
            if received:
                return status
            if supervision.next is not None:
                crew, restart, starts = supervision.next, 0, 0
                continue
            if not supervision.may_restart:
                return status
            if supervision.may_be_interference and starts < MAX_STARTS:
                supervision.say(
                    "restarting all ranks: the ports at which they connect are open to all of this machine, and "
                    "another process may have connected to them"
                )
                continue
            if fleet is not None and supervision.failed_ranks:
                lost = fleet.lose(supervision.failed_ranks)
                left = fleet.crew(fleet.size)
                if left is None:
                    few = f"no mesh of {fleet.least} to {fleet.size} ranks fits the file"
                    if fleet.size < fleet.least:
                        few = f"of the ranks {fleet.size} are left, and at least {fleet.least} are needed"
                    supervision.say(few)
                    return status
                crew, starts = left, 0
                what = f"{ranks_text(lost)} {'is' if len(lost) == 1 else 'are'} gone for good; " if lost else ""
                supervision.say(f"{what}restarting on {crew.mesh}")
                continue
            if restart == restarts:
                return status
            restart, starts = restart + 1, 0
            supervision.say(f"restarting all ranks, {restart} of at most {restarts} times")


@define(eq=False)
class _Attempts:
    """The current attempt, and the next one if it is prepared; a context manager, which ends both."""

    environment: Mapping[str, str]
    inherited: Sequence[int]
    server: ForkServer | None = None
    present: Attempt | None = None
    next: Attempt | None = None
    crew: WorkerGroup | None = None  # of the next one

    def __enter__(self) -> _Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        for attempt in (self.present, self.next):
            if attempt is not None:
                attempt.end()

    def prepare(self, crew: WorkerGroup) -> Attempt:
        """Start the ranks of the next attempt, which wait for its start; again if they failed, or others are due."""
        if self.next is not None and not (self.next.healthy and self.crew is crew):
            failed, self.next = self.next, None
            failed.end()
        if self.next is None:
            variables = rank_environment(self.environment, crew.ranks)
            self.next = Attempt(crew.command, crew.ranks, variables, self.inherited, self.server)
            self.crew = crew
        return self.next

    def begin(self, crew: WorkerGroup) -> Attempt:
        """End the current attempt, and begin the next."""
        before, self.present = self.present, None
        if before is not None:
            before.end()
        self.present = attempt = self.prepare(crew)
        self.next = None
        attempt.go()
        return attempt


def rank_environment(environment: Mapping[str, str], ranks: int) -> dict[str, str]:
    """The variables of all ranks: an equal share of the cores each, and Gloo and NCCL on the loopback interface.

    Thread counts that the user has set are kept.
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
    """Collects the signals that ask the run to end, in order of arrival.

    Signals that were ignored before stay ignored: `nohup` and a shell's background jobs rely on that.
    """
    received: list[int] = []
    signals = (signal.SIGINT, *ASKING, signal.SIGHUP)
    numbers = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@define(eq=False)
class _Supervision:
    """Watches started ranks until all have ended."""

    attempts: _Attempts
    crew: WorkerGroup
    received: list[int]
    grace: float | None  # from the signal that asks the run to end until the ranks are killed
    saves: bool | None
    output: BinaryIO
    fleet: ElasticGroup | None = None
    again: WorkerGroup | None = None  # the next attempt's, if this one fails: prepared once the ranks have begun
    attempt: Attempt = field(init=False)
    next: WorkerGroup | None = None  # which takes over as soon as it is ready, and these have saved
    released: bool = False  # whether these were told to
    begun: bool = False
    deadline: float | None = None  # when ranks that still run are killed
    causes: list[RankProcess] = field(factory=list)
    following: float | None = None  # since when there are only ranks that lost a peer or were asked to end
    stall: str | None = None
    doing: str = ""  # what the ranks were doing when some died
    connecting: bool = False  # whether none had reached its first step by then
    next_look: float = 0.0
    dumps: dict[int, Dump] = field(factory=dict)  # by rank

    def __attrs_post_init__(self) -> None:
        self.attempt = self.attempts.begin(self.crew)

    @property
    def watchdog(self) -> Watchdog | None:
        """What reads the ranks' flight recorders."""
        return self.crew.watchdog

    @property
    def failed_ranks(self) -> list[int]:
        """The ranks that failed, without those that only lost one."""
        statuses = {rank.number: rank.process.returncode for rank in self.causes}
        return [rank for rank, status in statuses.items() if status not in SECONDARY] if self.stall is None else []

    @property
    def ranks(self) -> Sequence[RankProcess]:
        """The watched ranks."""
        return self.attempt.ranks

    @property
    def may_restart(self) -> bool:
        """Whether the run failed, and may succeed if restarted."""
        statuses = {rank.process.returncode for rank in self.causes}
        return self.stall is not None or bool(statuses and not statuses & FINAL)

    @property
    def may_be_interference(self) -> bool:
        """Whether the run failed while its ranks connected over a network that other processes can reach."""
        if self.attempt.private_network or self.watchdog is None:
            return False
        statuses = {rank.process.returncode for rank in self.causes}
        return UNTRUSTED_PEER in statuses or (
            self.connecting and (self.stall is not None or -signal.SIGABRT in statuses)
        )

    def run(self) -> int:
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(piped(rank.process.stderr), selectors.EVENT_READ, rank)
            while any(rank.alive for rank in self.ranks):
                self._forward(selector, POLL_SECONDS)
                self._watch()
            # The ranks' last output; their children may hold the pipes open, so do not wait for end of file.
            self._forward(selector, 0.0)
        self.causes = self.causes or self._failed()  # the last ones may end together, between two polls
        if self.causes or self.stall is not None or not self.released:
            self.next = None
        for rank in self.ranks:
            self._write(rank, bytes(rank.rest))
            if rank.process.returncode >= 0 and rank.number in self.dumps and self.dumps[rank.number].text:
                self._print(self.dumps[rank.number].text.encode() + b"\n")  # not the cause of its end
        if self.deadline is not None:
            _restore_terminal()
        return self._conclude()

    def _watch(self) -> None:
        if not self.causes and not self.received and self.stall is None:
            failed = self._failed()
            statuses = {rank.process.returncode for rank in failed}
            ending = [number for number in ASKING if -number in statuses]
            if self.saves and ending and statuses <= SAVED:
                self.received.append(ending[0])  # by a signal to one rank, with which all have saved and end
                failed = []
            self.causes = [] if self._may_follow(failed) else failed
            if self.watchdog is not None:
                self._look(self.watchdog)
        if self.next is not None and not self.released and self.deadline is None and self._ready():
            self.released = True
            self._signal(signal.SIGTERM)
        if self.deadline is None and (self.causes or self.received or self.stall is not None):
            # Ranks have nothing to clean up, but save when asked to.
            graceful = not self.causes and self._asked
            if graceful and self.saves and self.begun and self.received[0] == signal.SIGINT:
                self.say(SAVING)
            grace = GRACE_SECONDS if self.grace is None else self.grace
            self.deadline = time.monotonic() + (grace if graceful else 0.0)
            self._signal(signal.SIGTERM if graceful else signal.SIGKILL)
            self._signal(signal.SIGCONT)  # a stopped rank receives no other signal
        if self.deadline is not None and self.grace is None and len(self.received) < 2 and self._saving():
            self.deadline = time.monotonic() + GRACE_SECONDS
        if self.deadline is not None and (time.monotonic() > self.deadline or len(self.received) > 1):
            self._signal(signal.SIGKILL)

    @property
    def _asked(self) -> bool:
        """Whether the run was asked to save and end, by the first signal that it got."""
        first = self.received[0] if self.received else None
        return first in ASKING or (first == signal.SIGINT and bool(self.saves))

    @property
    def _saved(self) -> int | None:
        """The step that the run has saved before it ended early."""
        positions = self.watchdog.positions(self.attempt.directory) if self.watchdog is not None else []
        return next((each.step for each in positions if each.rank == 0 and each.activity == ENDED), None)

    def _saving(self) -> bool:
        """Whether ranks that were asked to end are still saving."""
        if not self.saves or self.watchdog is None or not self._asked:
            return False
        if {rank.process.returncode for rank in self._failed()} - SAVED:
            return False  # one has failed, and the others would wait for it
        positions = self.watchdog.positions(self.attempt.directory)
        return bool(positions) and min(each.seconds for each in positions) < QUIET_SECONDS

    def _failed(self) -> list[RankProcess]:
        expected = (None, 0, *SAVED) if self.released else (None, 0)
        return [rank for rank in self.ranks if rank.process.poll() not in expected]

    def _may_follow(self, failed: Sequence[RankProcess]) -> bool:
        """Whether the ranks that ended have only lost a peer, which may be about to end and say why."""
        statuses = {rank.process.returncode for rank in failed}
        if not statuses or statuses - SECONDARY or not any(rank.alive for rank in self.ranks):
            return False
        # The rank that was asked to end may still be committing what all have saved.
        seconds = QUIET_SECONDS if ASKED in statuses else PEER_TIMEOUT_SECONDS
        self.following = self.following or time.monotonic()
        return time.monotonic() < self.following + seconds

    def _look(self, watchdog: Watchdog) -> None:
        """Read the flight recorders: after a death at once, otherwise periodically to detect a stall."""
        directory = self.attempt.directory
        if self.causes:
            self.connecting = watchdog.connecting(directory)
            known = all(rank.process.returncode in SAID_BY_RANKS for rank in self.causes)
            dead = [rank.number for rank in self.causes]
            self.doing = "" if known else watchdog.died(directory, dead, self._last_words())
        elif time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            self.attempt.ensure_reaper()
            self.stall = watchdog.stalled(directory, self.attempt.begun, self.attempt.processes)
            if self.stall is not None:
                self.connecting = watchdog.connecting(directory)
                self.say(f"{self.stall}\n  ending all ranks")
            elif self.begun or watchdog.begun(directory):
                self._look_ahead()

    def _look_ahead(self) -> None:
        """Prepare the attempt after a failure, or that of another number of ranks, if somebody has asked for one."""
        first, self.begun = not self.begun, True
        if self.fleet is not None and not self.released:
            number, problem = self.fleet.asked()
            if problem:
                self.say(problem)
            if number is not None:
                crew = self.fleet.crew(number)
                self.next = crew if crew is not None and crew.ranks != self.crew.ranks else None
                first = True
        if first:
            again = self.again if self.fleet is None else self.fleet.likely()
            crew = self.next or again
            if crew is not None:
                with suppress(OSError):  # this attempt continues; the next is then started when needed
                    self.attempts.prepare(crew)

    def _ready(self) -> bool:
        """Whether the ranks that take over are ready, or will not be before they are needed."""
        ahead = self.attempts.next
        if ahead is None or self.next is None or self.next.watchdog is None or not ahead.healthy:
            return True
        positions = self.next.watchdog.positions(ahead.directory)
        return len(positions) == self.next.ranks and all(each.activity == READY for each in positions)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.alive:
                rank.process.send_signal(number)

    def _forward(self, selector: selectors.BaseSelector, timeout: float) -> None:
        """Pass on the ranks' output, line by line."""
        if not selector.get_map():
            time.sleep(timeout)
            return
        for key, _ in selector.select(timeout):
            rank: RankProcess = key.data
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

    def _write(self, rank: RankProcess, lines: bytes) -> None:
        if not lines:
            return
        prefix = f"rank {rank.number}: ".encode() if len(self.ranks) > 1 else b""
        shown = self.dumps.setdefault(rank.number, Dump()).without(lines.splitlines())
        self._print(b"".join(prefix + line + b"\n" for line in shown))

    def _last_words(self) -> dict[int, str]:
        """The dumps of ranks that aborted."""
        return {number: dump.text for number, dump in self.dumps.items() if dump.text}

    def _print(self, data: bytes) -> None:
        """Write to the error output. A full disk, or a reader that has left, does not end the run."""
        try:
            self.output.write(data)
            self.output.flush()
        except OSError:
            pass

    def _conclude(self) -> int:
        if self.received:
            self.say(ending(self.received[0], self.saves, self._saved))
            return 128 + self.received[0]
        if self.stall is not None:
            return FAILED
        if not self.causes:
            if self.next is not None:
                self.say(f"going on with {self.next.mesh}")
            return 0
        # If several died together, ranks killed by a signal come first, and ranks that only lost a peer last.
        first = min(self.causes, key=lambda rank: (rank.process.returncode in SECONDARY, rank.process.returncode > 0))
        status = first.process.returncode
        if any(rank.process.returncode == REFUSED for rank in self.causes):
            return WRONG_INPUT  # the rank has printed it
        if status == NOT_FINITE:
            self.say("the parameters are unaffected")
            return FAILED
        others = "" if len(self.ranks) == 1 else "; the other ranks were killed"
        cause = self.dumps[first.number].cause if first.number in self.dumps else ""
        lines = [f"rank {first.number} {death(status)}{others}", *filter(None, (cause, self.doing))]
        self.say("\n  ".join(lines))
        return FAILED

    def say(self, text: str) -> None:
        """Print a line of the supervisor's own."""
        self._print(f"partita: {text}\n".encode())


def _restore_terminal() -> None:
    """Show the cursor, on a new line: a killed display leaves it hidden, in an open line."""
    if os.isatty(1):
        with suppress(OSError):
            os.write(1, b"\n\x1b[?25h")


def death(status: int) -> str:
    """What a process died of, by exit status: `was killed by SIGKILL (…)`, `ended with exit status 1`."""
    if status in WORDS:
        return WORDS[status]
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = " (possibly out of memory)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
