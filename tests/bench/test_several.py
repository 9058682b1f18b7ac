"""What `bench/several.py` says where there is no GPU: what two ranks on Gloo find, and what is left out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.files import ROOT

LEFT_OUT = ("streams", "queues", "branches", "messages", "priority")


@pytest.mark.soak
@pytest.mark.parametrize("parts", [("communicators", "queues"), ()])
def test_what_needs_no_gpu_runs_and_the_rest_is_named(parts: tuple[str, ...]) -> None:
    command = [sys.executable, str(ROOT / "bench" / "several.py"), "--device", "cpu", *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "| communicators | 1: " in done.stdout
    (left,) = (line for line in done.stdout.splitlines() if line.startswith("left out: "))
    assert {each.partition(" ")[0] for each in left.removeprefix("left out: ").split(", ")} == {
        each for each in LEFT_OUT if not parts or each in parts
    }
