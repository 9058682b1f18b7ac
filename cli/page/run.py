"""What is known of a run: its numbers, what its file compiles to, and the measured timeline, if it was traced."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from partita.cli.command import UsageError
from partita.cli.extras import missing
from partita.cli.page.history import History
from partita.cli.source import printable
from partita.compiler.pipeline import compile_run
from partita.compiler.report.causes import Communication, communication
from partita.compiler.report.summary import Summary, summarize
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load, spec_of
from partita.dsl.syntax.reader import Reader
from partita.runtime.metrics import MetricsReader
from partita.runtime.run_directory import FAULT, RECORD, Origin, Record, RunDirectory
from partita.runtime.telemetry import FILE_NAME

if TYPE_CHECKING:
    from partita.runtime.tracing.measurement import Measurement

MOST_FAULT = 1 << 20


@frozen(eq=False)
class Compiled:
    """What the run's file compiles to."""

    state: Compilation
    summary: Summary
    communication: Communication


@define(eq=False)
class Run:
    """A run by its directory, as of the last `refresh`.

    `compiled` is None if the file is not known or cannot be compiled any more, `measured` if there is no whole trace;
    then `uncompiled` and `unmeasured` say why. `fault` is the record of the last failure, if there was one, and `held`
    says whether a run goes on there, if that can be known.
    """

    path: Path
    history: History = field(factory=History, init=False)
    record: Record | None = field(default=None, init=False)
    compiled: Compiled | None = field(default=None, init=False)
    uncompiled: str = field(default="the run has not begun", init=False)
    measured: Measurement | None = field(default=None, init=False)
    unmeasured: str = field(default="", init=False)
    fault: str | None = field(default=None, init=False)
    held: bool | None = field(default=None, init=False)
    version: int = field(default=0, init=False)
    _reader: MetricsReader = field(init=False)
    _trace: object = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = MetricsReader(self.path)

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.path.resolve().name

    @property
    def origin(self) -> Origin | None:
        """The command that began the run; None if that is not known."""
        return self.record.origin if self.record is not None else None

    @property
    def steps(self) -> int | None:
        """How many steps the run has; None if that is not known."""
        return self.compiled.state.train.steps if self.compiled is not None else None

    def refresh(self) -> int:
        """Read what is new; returns a number that grows when there is something. Raises OSError."""
        if self._look():
            self.version += 1
        return self.version

    def _look(self) -> bool:
        changed = False
        with RunDirectory.open(self.path) as directory:
            record, data, held = directory.record(), directory.read(FAULT, MOST_FAULT), directory.held
        fault = None if data is None else data.decode("utf-8", "replace")
        if record != self.record:
            self.record, changed = record, True
            self._compile()
        if (fault, held) != (self.fault, self.held):
            self.fault, self.held, changed = fault, held, True
        trace = self._trace_files()
        if trace != self._trace:
            self._trace, changed = trace, True
            self._measure()
        while True:
            before = self._reader.file, self._reader.first
            records = self._reader.read()
            if not records:
                return changed
            if (self._reader.file, self._reader.first) != before:  # a new file in its place, which has all
                self.history = History()
            self.history.add(records)
            changed = True

    def _compile(self) -> None:
        self.compiled = None
        record, origin = self.record, self.origin
        if record is None or origin is None:
            self.uncompiled = "the directory does not say which command began the run"
            return
        try:
            spec = spec_of(load(origin.file, origin.overrides, origin.root, Reader(record.files)))
            state, _ = compile_run(spec, gpu=origin.gpu)
            self.compiled = Compiled(state, summarize(state), communication(state))
        except Refused as refused:
            first = refused.diagnostics[0].message if refused.diagnostics else "no reason"
            self.uncompiled = f"the file that the run began with does not compile: {first}"

    def _trace_files(self) -> object:
        """What tells one trace from another: the names, sizes and times of its files."""
        paths = self._trace_paths()
        try:
            return tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
        except OSError:
            return ()

    def _trace_paths(self) -> list[Path]:
        origin = self.origin
        if origin is None or origin.trace is None or self.compiled is None:
            return []
        return [Path(origin.trace) / f"rank-{rank}.npz" for rank in range(self.compiled.summary.ranks)]

    def _measure(self) -> None:
        """Read the trace."""
        self.measured, self.unmeasured = None, ""
        if not self._trace or self.compiled is None:
            return
        problem = missing("run", "the measured timeline")
        if problem is not None:
            self.unmeasured = problem
            return
        from partita.runtime.tracing.measurement import measure
        from partita.runtime.tracing.stopwatch import Marks

        try:
            self.measured = measure(self.compiled.state.program, [Marks.read(path) for path in self._trace_paths()])
        except Exception as error:  # files of another run, or of nobody
            self.unmeasured = f"the trace cannot be read: {type(error).__name__}"


def is_run(path: Path) -> bool:
    """Whether a directory is one of a run."""
    return any((path / name).is_file() for name in (RECORD, FILE_NAME))


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """RUN."""
    parser.add_argument("run_dir", metavar="RUN", help="the directory of a run: runs/NAME, or its --run-dir")


def opened(name: str) -> Run:
    """The run of a directory, read as far as it is. Raises UsageError if there is none, or it cannot be read."""
    try:
        problem = _problem(name)
        if problem is None:
            run = Run(Path(name))
            run.refresh()
            return run
    except OSError as error:
        problem = f"cannot read {name}: {error.strerror}"
    raise UsageError(printable(problem))


def _problem(name: str) -> str | None:
    """Why this is not the directory of a run. Raises OSError."""
    if "\0" in name:
        return "the name of a directory has no NUL character"
    path = Path(name)
    if path.is_dir():
        if is_run(path):
            return None
        inside = sorted(each.name for each in path.iterdir() if is_run(each))
        help = f": did you mean {path / inside[0]}?" if inside else "; it has neither run.json nor metrics.jsonl"
        return f"{name} is not the directory of a run{help}"
    if path.suffix == ".par":
        return f"{name} is a file: RUN is the directory of a run, runs/{path.stem} unless --run-dir names another"
    return f"{name} is not a directory" if path.exists() else f"there is no directory {name}"
