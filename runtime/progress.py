"""What a user sees of a run: a live line on a terminal, plain lines elsewhere.

The live line shows step, loss (and the reward of rollouts), tokens per second, learning rate and time left. If standard
output is no terminal, a line is printed for the first step, every tenth and the last. Evaluations always get their own
line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

EVERY = 10  # steps from one plain line to the next
BAR = 24  # columns
WIDE = 68  # columns in addition to the name from which the name and the bar fit
FIRST_TO_GO = (2, 1, 1)  # indices into loss, speed, learning rate, time left: dropped in turn on a narrow terminal


class Display:
    """Shows the records that `Telemetry` returns; a context manager.

    `steps` is the number of the last step, `first` that of this run's first (later than 1 if it resumes).
    """

    def __init__(
        self,
        name: str,
        steps: int,
        first: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.steps = steps
        self.first = first
        self._console = Console() if console is None else console
        self._clock = clock
        self._started: tuple[int, float] | None = None  # the first step seen, and when
        self._live: Progress | None = None
        if self._console.is_terminal:
            wide = self._console.width >= len(name) + WIDE
            self._live = Progress(
                *((TextColumn("[bold]{task.description}"), BarColumn(bar_width=BAR)) if wide else ()),
                TaskProgressColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[record]}"),
                console=self._console,
                refresh_per_second=4,
            )
            self._taken = len(name) + BAR + 2 if wide else 0  # columns of name and bar
            self._task = self._live.add_task(name, total=steps, completed=first - 1, record="")

    def resumed(self, step: int, note: str) -> None:
        """The run resumes after `step`; `note` says from what."""
        self.first = step + 1
        if self._live is not None:
            self._live.update(self._task, completed=min(step, self.steps))
        self._say(f"step {step}/{self.steps}  {note}")

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a step."""
        step = record["step"]
        left = self._time_left(step)
        figures = [
            "  ".join(f"{name} {_number(record[name])}" for name in ("loss", "reward") if name in record),
            *(
                f"{_rate(record[key])} {unit}/s"
                for unit in ("tokens", "rows")
                if (key := f"{unit}_per_second") in record
            ),
            f"lr {_number(record['learning_rate'], '.2e')}",
            *([f"{duration(left)} left"] if left is not None and step < self.steps else []),
        ]
        if self._live is not None:
            width = self._console.width - self._taken - len(f"{step}/{self.steps} ")
            self._live.update(self._task, completed=step, record=_fitting(figures, width))
        elif step == self.first or step % EVERY == 0 or step == self.steps:
            self._say(f"step {step}/{self.steps}  {'  '.join(figures)}")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show an evaluation."""
        others = [
            f"{name.removeprefix('eval_')} {_number(value)}"
            for name, value in record.items()
            if name.startswith("eval_") and name != "eval_loss"
        ]
        self._say("  ".join([f"step {record['step']}/{self.steps}  eval loss {_number(record['eval_loss'])}", *others]))

    def sample(self, record: Mapping[str, Any]) -> None:
        """Show a text that the model has written."""
        self._say(f"step {record['step']}/{self.steps}  sample")
        self._say(indent(record["sample"], "  ", lambda _: True))

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _time_left(self, step: int) -> float | None:
        """Seconds, by the mean over all steps after the first, whose time includes startup."""
        now = self._clock()
        if self._started is None:
            self._started = (step, now)
        first, since = self._started
        return (now - since) / (step - first) * (self.steps - step) if step > first else None


def _fitting(figures: Sequence[str], width: int) -> str:
    """The numbers in one line, without the less important ones if there is no room for all."""
    left = list(figures)
    for position in FIRST_TO_GO:
        if len("  ".join(left)) <= width:
            break
        if position < len(left):
            del left[position]
    return "  ".join(left)


def duration(seconds: float) -> str:
    """`48s`, `3m 05s`, `2h 07m`, `5d 03h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"


def _number(value: float | None, form: str = ".4f") -> str:
    return "not finite" if value is None else format(value, form)


def _rate(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"
