"""`metrics.jsonl` in the run's directory: one JSON object a line, one line a step or an evaluation.

A step's keys are `step, loss, learning_rate, grad_norm, tokens_per_second` and the model's metrics; an
evaluation's `step, eval_loss` and each metric as `eval_NAME`. Where the file lets bad steps pass, a step has `skipped`
too, and a bad one `bad`, `rows` and `rewound_to` (see `StepResult`). Slow ranks have lines of their own, with `step`
and `slow_ranks`. Each line is written whole and at once, so that a reader that follows the file, or finds it after the
run was killed, sees whole lines only. JSON has no NaN and no infinity: they are written as null. One rank of a run
writes.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from partita.runtime.run_directory import RunDirectory

if TYPE_CHECKING:
    from partita.runtime.pace import Slow
    from partita.runtime.training import StepResult

FILE_NAME = "metrics.jsonl"
MOST_BYTES = 1 << 36


class Telemetry:
    """The writer of a run's `metrics.jsonl`; a context manager."""

    def __init__(self, directory: RunDirectory, keep_through: int = 0) -> None:
        """Open `metrics.jsonl` in a run's directory.

        A run that begins at its first step begins the file anew. One that resumes after step `keep_through`
        keeps the lines up to that step and drops what a run that was killed has written after it.
        """
        found = directory.read(FILE_NAME, MOST_BYTES) if keep_through > 0 else None
        # Appended to, one write a line: a line is never interleaved with another or written in parts.
        self._file = directory.begin(FILE_NAME, b"".join(_lines_through(found or b"", keep_through)))

    def step(
        self,
        step: int,
        loss: float,
        learning_rate: float,
        grad_norm: float,
        tokens_per_second: float,
        metrics: Mapping[str, float] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write a step, and what `more` there is to say of it; returns what was written.

        Raises OSError, and leaves whole lines.
        """
        record = {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "tokens_per_second": tokens_per_second,
        }
        return self._write({**record, **(metrics or {}), **(more or {})})

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Write an evaluation; returns what was written. Raises OSError, and leaves whole lines."""
        named = {f"eval_{name}": value for name, value in (metrics or {}).items()}
        return self._write({"step": step, "eval_loss": loss, **named})

    def slow(self, step: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Write which ranks held up the others. Raises OSError, and leaves whole lines."""
        self._write({"step": step, "slow_ranks": list(ranks)})

    def close(self) -> None:
        """Close the file. Nothing is buffered, so a run that never gets here loses nothing."""
        os.close(self._file)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        plain = {name: _plain(value) for name, value in record.items()}
        line = (json.dumps(plain, allow_nan=False) + "\n").encode()
        written = os.write(self._file, line)
        if written < len(line):  # a full disk may take a part
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain


class Recorder:
    """Writes what an `Observer` is told into the `metrics.jsonl` of a directory, if there is one.

    A disk that is full costs lines of metrics, and no training: `lost` is told once.
    """

    def __init__(self, directory: RunDirectory | None, lost: Callable[[str], None]) -> None:
        self.directory = directory
        self._lost: Callable[[str], None] | None = lost
        self._telemetry: Telemetry | None = None
        self._after = 0

    def resumed(self, step: int) -> None:
        """The run goes on after a step: the lines up to there stay."""
        self._after = step

    def step(self, result: StepResult) -> Mapping[str, Any]:
        """Record a step; returns what was recorded, or would have been."""
        record: Mapping[str, Any] = {
            "step": result.step,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens_per_second": result.tokens_per_second,
        }
        figures = result.loss, result.learning_rate, result.grad_norm, result.tokens_per_second
        with self._going_on():
            telemetry = self._writer()
            if telemetry is not None:
                record = telemetry.step(result.step, *figures, result.metrics, result.more)
        return record

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """Record an evaluation; returns what was recorded, or would have been."""
        record: Mapping[str, Any] = {"step": step, "eval_loss": loss, **{f"eval_{k}": v for k, v in metrics.items()}}
        with self._going_on():
            telemetry = self._writer()
            if telemetry is not None:
                record = telemetry.evaluation(step, loss, metrics)
        return record

    def slow(self, step: int, ranks: Sequence[Slow]) -> None:
        """Record which ranks held up the others."""
        with self._going_on():
            telemetry = self._writer()
            if telemetry is not None:
                telemetry.slow(step, [each.as_json() for each in ranks])

    def close(self) -> None:
        """Close the file."""
        if self._telemetry is not None:
            self._telemetry.close()
            self._telemetry = None

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._lost is not None and self.directory is not None:
                self._lost(f"cannot write to {self.directory.path}/{FILE_NAME}: {error.strerror}; the run continues")
            self._lost = None

    def _writer(self) -> Telemetry | None:
        """The metrics file, from the first record on: until then it is not known which of its lines stay."""
        if self._telemetry is None and self.directory is not None:
            self._telemetry = Telemetry(self.directory, self._after)
        return self._telemetry


def _plain(value: Any) -> Any:
    if isinstance(value, (str, list, Mapping)):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isfinite(value) else None


def _lines_through(found: bytes, step: int) -> list[bytes]:
    """The whole lines of a metrics file that are of a step up to `step`."""
    kept = []
    for line in found.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else {}
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("step", step + 1) <= step:
            kept.append(line)
    return kept
