"""Tests in several processes, forked when all is collected: what tests import is imported once, and compiled once.

`pytest --workers 3`. Neighbours in a file mostly stay in one process, which then keeps what they share; a process that
has nothing left takes tests from the file of which most are left.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from io import StringIO
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any
from warnings import WarningMessage

import pytest
from _pytest.config import create_terminal_writer
from attrs import define, field

TOGETHER = 8  # tests that a process is given at a time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="how many processes run the tests (1)")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """As pytest does, but for who runs the tests."""
    options = session.config.option
    if options.workers < 2 or options.collectonly or session.testsfailed:
        return None
    _prepare()
    Workers(session).run(options.workers)
    return True


def _prepare() -> None:
    """What each process would make for itself is made before they are forked."""
    from partita.runtime.kernels.native.library import library

    library()
    gc.collect()
    gc.freeze()


@define(eq=False)
class Worker:
    """A process, the way to it, the tests that it was given and has not finished, and the file that it is at."""

    process: int
    connection: Connection
    given: list[int] = field(factory=list)
    file: str = ""


@define(eq=False)
class Workers:
    """The side of the process that collected, reports, and gives out the tests by their numbers."""

    session: pytest.Session
    _left: dict[str, list[int]] = field(init=False)
    _started: set[str] = field(factory=set, init=False)
    _working: dict[Connection, Worker] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        numbered = enumerate(self.session.items)
        files = groupby(numbered, key=lambda each: each[1].nodeid.partition("::")[0])
        self._left = {file: [number for number, _ in tests] for file, tests in files}

    def run(self, count: int) -> None:
        """Run all tests. Raises what a run in one process raises."""
        try:
            for _ in range(count):
                self._start()
            while self._working:
                for connection in wait(list(self._working)):
                    assert isinstance(connection, Connection)
                    self._hear(self._working[connection])
                for why, error in ((self.session.shouldfail, self.session.Failed), (self.session.shouldstop, None)):
                    if why:
                        raise (error or self.session.Interrupted)(why)
        finally:
            for worker in self._working.values():
                os.kill(worker.process, 9)
                os.waitpid(worker.process, 0)

    def _start(self) -> None:
        ours, theirs = Pipe()
        process = os.fork()
        if process == 0:
            status = 1
            try:
                _work(self.session, theirs)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()
        self._working[ours] = Worker(process, ours)

    def _hear(self, worker: Worker) -> None:
        """What a process says: that it needs tests, has finished one, or reports."""
        hook = self.session.config.hook
        try:
            kind, said = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._ended(worker)
            return
        match kind:
            case "next":
                more = self._tests_for(worker)
                worker.given += more
                worker.connection.send(more)
            case "finished":
                worker.given.remove(said)
            case "report":
                config = self.session.config
                report = hook.pytest_report_from_serializable(config=config, data=said)
                hook.pytest_runtest_logreport(report=report)
            case "start":
                hook.pytest_runtest_logstart(nodeid=said[0], location=said[1])
            case "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=said)

    def _tests_for(self, worker: Worker) -> list[int]:
        """Of the file that a process is at; else of one that none has begun; else of that of which most are left."""
        left = {file: numbers for file, numbers in self._left.items() if numbers}
        if not left:
            return []
        if worker.file not in left:
            fresh = [file for file in left if file not in self._started]
            worker.file = fresh[0] if fresh else max(left, key=lambda file: len(left[file]))
        self._started.add(worker.file)
        numbers = self._left[worker.file]
        self._left[worker.file] = numbers[TOGETHER:]
        return numbers[:TOGETHER]

    def _ended(self, worker: Worker) -> None:
        """A process has ended: well, or in the midst of a test, which then failed; another takes its place."""
        del self._working[worker.connection]
        _, status = os.waitpid(worker.process, 0)
        if status == 0 and not worker.given:
            return
        if worker.given:
            number, *others = worker.given
            item = self.session.items[number]
            what = f"the process that ran it has ended: status {os.waitstatus_to_exitcode(status)}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "call")
            self.session.config.hook.pytest_runtest_logreport(report=report)
            self._left[f"what is left of {number}"] = others
        self._start()


def _work(session: pytest.Session, connection: Connection) -> None:
    """What a forked process does: run tests as they are given, and say what came of them."""
    config = session.config
    _leave_to_the_parent(config)
    speaker = Speaker(config, connection)
    config.pluginmanager.register(speaker)
    speaker.ready = True

    def given() -> Iterator[int]:
        while True:
            connection.send(("next", None))
            numbers = connection.recv()
            if not numbers:
                return
            yield from numbers

    numbers = given()
    number = next(numbers, None)
    while number is not None:
        following = next(numbers, None)  # fixtures that it shares stay
        item, other = session.items[number], None if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=item, nextitem=other)
        connection.send(("finished", number))
        number = following


def _leave_to_the_parent(config: pytest.Config) -> None:
    """A forked process has a directory for temporary files and a place for captured output of its own; it prints
    nothing.
    """
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"worker-{os.getpid()}"
    factory._basetemp.mkdir()
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    reporter = config.pluginmanager.getplugin("terminalreporter")
    reporter._tw = create_terminal_writer(config, StringIO())


@define(eq=False)
class Speaker:
    """Passes on what pytest reports in a forked process."""

    config: pytest.Config
    connection: Connection
    ready: bool = False  # what is registered is told of all warnings up to then

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.connection.send(("start", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_warning_recorded(self, warning_message: WarningMessage, when: Any, nodeid: str, location: Any) -> None:
        if not self.ready:
            return
        text = Warning(f"{warning_message.category.__name__}: {warning_message.message}")
        plain = WarningMessage(text, Warning, warning_message.filename, warning_message.lineno)
        said = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self.connection.send(("warning", said))
