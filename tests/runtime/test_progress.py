"""The display: what a person reads, on a terminal and elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console

from partita.runtime.progress import Display, duration
from tests.marks import soak


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


TRAINING = """
import sys
from partita.runtime.progress import Display
times = iter(range(10_000))
with Display(sys.argv[1], 3000, clock=lambda: next(times)) as display:
    for step in range(1, 31):
        display.step({"step": step, "loss": 2.5, "learning_rate": 1e-3, "tokens_per_second": 12345.6})
        if step == 15:
            display.evaluation({"step": 15, "eval_loss": 3.25, "eval_accuracy": 0.5})
"""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def on_a_terminal(columns: int, name: str) -> str:
    """What is written to a real terminal of so many columns; 0 where it does not say how many it has."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", TRAINING, name]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            written += part
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode()


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tiny", "a_name_that_is_longer_than_many_a_terminal_is_wide"])
@pytest.mark.parametrize("columns", [0, 40, 80, *soak(1, 5, 10, 20, 71, 72, 110, 300)])
def test_the_bar_stays_on_its_line(columns: int, name: str) -> None:
    written = on_a_terminal(columns, name)
    assert re.search(r"\x1b\[[0-9]*A", written) is None, "the cursor goes up: the bar took more than one line"
    lines = [CONTROL.sub("", line) for line in re.split(r"[\r\n]+", written)]
    bars = [line for line in lines if "eval loss" not in line]
    assert all(len(line) <= (columns or 80) for line in bars), bars
    assert any("step 15/3000  eval loss 3.2500  accuracy 0.5000" in line for line in lines)
    last = ["", *(line for line in bars if line.strip())][-1]
    if columns == 0 or columns >= 20:
        assert "30/3000" in last
        assert "loss 2.5000" in last
    if columns == 0 or columns >= 40:
        assert "49m 30s left" in last
    assert ("━" in last) == ((name == "tiny" and (columns == 0 or columns >= 72)) or columns >= 118)
