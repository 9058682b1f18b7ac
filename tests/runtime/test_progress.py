"""The display: what a person reads, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from partita.runtime.progress import Display, duration


def shown(*, terminal: bool, steps: int, first: int = 1, seconds: float = 2.0, loss: float | None = 2.5) -> str:
    times = iter(seconds * i for i in range(10_000))
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=110, color_system=None, legacy_windows=False)
    with Display("tiny", steps, first, console, clock=lambda: next(times)) as display:
        for step in range(first, steps + 1):
            display.step({"step": step, "loss": loss, "learning_rate": 1e-3, "tokens_per_second": 12345.6})
            if step == 15:
                display.evaluation({"step": 15, "eval_loss": 3.25, "eval_accuracy": 0.5})
    return output.getvalue()


def test_plain_lines() -> None:
    assert shown(terminal=False, steps=25).splitlines() == [
        "step 1/25  loss 2.5000  12,346 tokens/s  lr 1.00e-03",
        "step 10/25  loss 2.5000  12,346 tokens/s  lr 1.00e-03  30s left",
        "step 15/25  eval loss 3.2500  accuracy 0.5000",
        "step 20/25  loss 2.5000  12,346 tokens/s  lr 1.00e-03  10s left",
        "step 25/25  loss 2.5000  12,346 tokens/s  lr 1.00e-03",
    ]


def test_a_resumed_run_estimates_from_its_own_steps() -> None:
    lines = shown(terminal=False, steps=120, first=101).splitlines()
    assert lines[0].startswith("step 101/120  loss")
    assert lines[1].endswith("20s left")


def test_a_terminal_shows_the_same_and_the_evaluations_stay() -> None:
    text = shown(terminal=True, steps=25)
    assert "step 15/25  eval loss 3.2500  accuracy 0.5000" in text
    last = text[text.rindex("25/25") :]
    assert "loss 2.5000  12,346 tokens/s  lr 1.00e-03" in last


def test_a_loss_that_is_not_finite_is_said_so() -> None:
    assert "loss not finite" in shown(terminal=False, steps=1, loss=None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (185, "3m 05s"), (7620, "2h 07m"), (442_800, "5d 03h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
