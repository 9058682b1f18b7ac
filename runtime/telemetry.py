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
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


class Telemetry:
    """The writer of a run's `metrics.jsonl`; a context manager."""

    def __init__(self, directory: Path, keep_through: int = 0) -> None:
        """Open `directory/metrics.jsonl`, which is made where it is missing.

        A run that begins at its first step begins the file anew. One that resumes after step `keep_through`
        keeps the lines up to that step and drops what a run that was killed has written after it.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE_NAME
        kept = _lines_through(self.path, keep_through)
        aside = self.path.with_suffix(".jsonl.new")
        aside.write_bytes(b"".join(kept))
        aside.replace(self.path)
        # O_APPEND and one write a line: a line is never interleaved with another or written in parts.
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

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


def _plain(value: Any) -> Any:
    if isinstance(value, (str, list, Mapping)):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isfinite(value) else None


def _lines_through(path: Path, step: int) -> list[bytes]:
    """The whole lines of a metrics file that are of a step up to `step`."""
    if step <= 0 or not path.exists():
        return []
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else {}
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("step", step + 1) <= step:
            kept.append(line)
    return kept
