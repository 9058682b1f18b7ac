"""What a run says while it goes on: its metrics to a file, its progress and its checkpoints to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from partita.runtime.checkpoint.checkpoints import Resumed
from partita.runtime.pace import Slow
from partita.runtime.progress import Display
from partita.runtime.telemetry import FILE_NAME, Telemetry
from partita.runtime.training import Plan, StepResult


class Watch:
    """Writes metrics (where there is a directory) and shows progress; an `Observer`, and a context manager."""

    def __init__(self, plan: Plan, directory: Path | None) -> None:
        self.directory = directory
        self.display = Display(plan.spec.name, plan.train.steps)
        self._telemetry: Telemetry | None = None
        self._after = 0
        self._open = False
        self._lost = False

    def __enter__(self) -> Watch:
        self.display.__enter__()
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._open:
            self.display.close()
            self._open = False
        if self._telemetry is not None:
            self._telemetry.close()
            self._telemetry = None

    def resumed(self, found: Resumed) -> None:
        """Go on with the metrics of the run before, and say so."""
        self._after = found.step
        self.display.resumed(found.step, found.note)

    def step(self, result: StepResult) -> None:
        """Record and show a step."""
        record: Mapping[str, object] = {
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
        self.display.step(record)

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Record and show an evaluation."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        record: Mapping[str, object] = {"step": step, "eval_loss": loss, **named}
        with self._going_on():
            telemetry = self._writer()
            if telemetry is not None:
                record = telemetry.evaluation(step, loss, metrics)
        self.display.evaluation(record)

    def slow(self, step: int, ranks: Sequence[Slow]) -> None:
        """Record which ranks held up the others."""
        with self._going_on():
            telemetry = self._writer()
            if telemetry is not None:
                telemetry.slow(step, [each.as_json() for each in ranks])

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """A disk that is full costs lines of metrics, and no training: that is said once."""
        try:
            yield
        except OSError as error:
            if not self._lost:
                where = f"{self.directory}/{FILE_NAME}"
                print(f"partita: cannot write to {where}: {error.strerror}; the run goes on", file=sys.stderr)
            self._lost = True

    def _writer(self) -> Telemetry | None:
        """The metrics file, from the first record on: until then it is not known which of its lines stay."""
        if self._telemetry is None and self.directory is not None:
            self._telemetry = Telemetry(self.directory, self._after)
        return self._telemetry
