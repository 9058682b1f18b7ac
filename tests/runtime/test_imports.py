"""What surrounds the program starts without torch: the supervisor, and the data."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "module",
    [
        "partita.runtime.data.registry",
        "partita.runtime.initial",
        "partita.runtime.supervision.launcher",
        "partita.runtime.telemetry",
    ],
)
def test_torch_is_not_imported(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
