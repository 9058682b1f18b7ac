"""`metrics.jsonl` in the run's directory: one JSON object a line, one line per step or evaluation.

A step's keys are `step, loss, learning_rate, grad_norm, tokens_per_second` (or else `rows_per_second`), `step_seconds`,
where they are known `peak_memory` and `mfu`, the model's metrics, and `unix_time`; an evaluation's are `step,
eval_loss`, each metric as `eval_NAME`, and `unix_time`. If the file lets bad steps pass, a step also has `skipped`, and
a bad one `bad`, `rows` and `rewound_to` (see `StepResult`). The peak memory of each rank is written when it has grown.
Slow ranks have their own lines, with `step` and `slow_ranks`.

Each line is one write, so that a reader who follows the file, or opens it after the run was killed, sees complete lines
only. JSON has no NaN or infinity: they are written as null. Only one rank of a run writes.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from partita.runtime.run_directory import RunDirectory

if TYPE_CHECKING:
    from partita.runtime.pace import Straggler
    from partita.runtime.training import StepResult

FILE_NAME = "metrics.jsonl"
MAX_BYTES = 1 << 36
GROWN = 1.01  # times what was written of it last: then the memory of each rank is written again


class Telemetry:
    """The writer of a run's `metrics.jsonl`."""

    def __init__(self, directory: RunDirectory, keep_through: int = 0) -> None:
        """Open `metrics.jsonl` in a run's directory.

        A run that starts at its first step overwrites the file. One that resumes after step `keep_through` keeps the
        lines up to that step and drops later ones, written by a run that was killed.
        """
        content = directory.read(FILE_NAME, MAX_BYTES) if keep_through > 0 else None
        # Opened for appending, one write per line: lines are never interleaved or split.
        self._file = directory.begin(FILE_NAME, b"".join(_lines_through(content or b"", keep_through)))

    def close(self) -> None:
        """Close the file. Nothing is buffered, so a run that never gets here loses nothing."""
        os.close(self._file)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record. Raises OSError, and leaves complete lines."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        written = os.write(self._file, line)
        if written < len(line):  # a full disk may accept part of a line
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Recorder:
    """Writes what an `Observer` is told to the `metrics.jsonl` of a directory, if there is one.

    If a write fails, lines of metrics are lost but training continues; `lost` is called for the first failure only.
    """

    def __init__(
        self, directory: RunDirectory | None, lost: Callable[[str], None], clock: Callable[[], float] = time.time
    ) -> None:
        self.directory = directory
        self._clock = clock
        self._peaks: Sequence[int] = ()
        self._lost: Callable[[str], None] | None = lost
        self._telemetry: Telemetry | None = None
        self._after = 0

    def resumed(self, step: int) -> None:
        """The run resumes after a step: the lines up to it are kept."""
        self._after = step

    def step(self, result: StepResult) -> Mapping[str, Any]:
        """Record a step; returns the record, written or not."""
        return self._recorded(
            {
                "step": result.step,
                "loss": result.loss,
                "learning_rate": result.learning_rate,
                "grad_norm": result.grad_norm,
                f"{result.unit}_per_second": result.rate,
                "step_seconds": result.seconds,
                **self._memory(result.peaks),
                **({"mfu": result.mfu} if result.mfu is not None else {}),
                **result.metrics,
                **result.more,
                "unix_time": self._clock(),
            }
        )

    def _memory(self, peaks: Sequence[int]) -> Mapping[str, Any]:
        """The largest peak; and that of each rank, if one has grown since it was written last."""
        if not peaks:
            return {}
        if self._peaks and all(new <= GROWN * old for new, old in zip(peaks, self._peaks, strict=True)):
            return {"peak_memory": max(peaks)}
        self._peaks = peaks
        return {"peak_memory": max(peaks), "peak_memory_by_rank": list(peaks)}

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """Record an evaluation; returns the record, written or not."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        return self._recorded({"step": step, "eval_loss": loss, **named, "unix_time": self._clock()})

    def sample(self, step: int, text: str) -> Mapping[str, Any]:
        """Record a text that the model has written; returns the record, written or not."""
        return self._recorded({"step": step, "sample": text, "unix_time": self._clock()})

    def slow(self, step: int, ranks: Sequence[Straggler]) -> None:
        """Record which ranks held up the others."""
        self._recorded({"step": step, "slow_ranks": [each.as_json() for each in ranks]})

    def close(self) -> None:
        """Close the file."""
        if self._telemetry is not None:
            self._telemetry.close()
            self._telemetry = None

    def _recorded(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        record = {name: plain(value) for name, value in values.items()}
        try:
            telemetry = self._writer()
            if telemetry is not None:
                telemetry.write(record)
        except OSError as error:
            if self._lost is not None and self.directory is not None:
                self._lost(f"cannot write to {self.directory.path}/{FILE_NAME}: {error.strerror}; the run continues")
            self._lost = None
        return record

    def _writer(self) -> Telemetry | None:
        """The metrics file, opened at the first record: only then it is known which of its lines to keep."""
        if self._telemetry is None and self.directory is not None:
            self._telemetry = Telemetry(self.directory, self._after)
        return self._telemetry


def plain(value: Any) -> Any:
    """A value as JSON can have it, which has no NaN and no infinity: null in place of these."""
    if isinstance(value, (str, list, Mapping)):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isfinite(value) else None


def _lines_through(content: bytes, step: int) -> list[bytes]:
    """The complete lines of a metrics file for steps up to `step`."""
    lines = []
    for line in content.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else {}
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("step", step + 1) <= step:
            lines.append(line)
    return lines
