"""The benchmarks are scripts beside each other in `bench`, which import one another as scripts do."""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = str(Path(__file__).parents[2] / "bench")

if BENCH not in sys.path:
    sys.path.append(BENCH)
