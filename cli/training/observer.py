"""What a run reports while it goes on: metrics to a file, progress and checkpoints to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from partita.cli.source import printable
from partita.runtime.checkpoint.checkpoints import Resumed
from partita.runtime.pace import Straggler
from partita.runtime.progress import Display
from partita.runtime.rank import CompiledRun
from partita.runtime.run_directory import RunDirectory
from partita.runtime.telemetry import Recorder
from partita.runtime.training import Observer, StepResult


class Recording(Observer):
    """Writes metrics (if there is a directory) and shows progress; an `Observer`, and a context manager."""

    def __init__(self, plan: CompiledRun, directory: RunDirectory | None) -> None:
        self.display = Display(plan.spec.name, plan.train.steps)
        self._recorder = Recorder(directory, lambda lost: print(f"partita: {lost}", file=sys.stderr))
        self._open = False

    def __enter__(self) -> Recording:
        self.display.__enter__()
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal."""
        if self._open:
            self.display.close()
            self._open = False
        self._recorder.close()

    def resumed(self, checkpoint: Resumed) -> None:
        """Continue the metrics of the previous run, and report that."""
        self._recorder.resumed(checkpoint.step)
        self.display.resumed(checkpoint.step, checkpoint.note)

    def step(self, result: StepResult) -> None:
        """Record and show a step."""
        self.display.step(self._recorder.step(result))

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Record and show an evaluation."""
        self.display.evaluation(self._recorder.evaluation(step, loss, metrics))

    def sample(self, step: int, text: str) -> None:
        """Record and show a text that the model has written."""
        record = self._recorder.sample(step, text)
        self.display.sample({**record, "sample": printable(text)})

    def slow(self, step: int, ranks: Sequence[Straggler]) -> None:
        """Record which ranks slowed the others down."""
        self._recorder.slow(step, ranks)
