"""The benchmarks are scripts beside each other in `bench`, which import one another as scripts do."""

from __future__ import annotations

import sys

from tests.files import ROOT

BENCH = str(ROOT / "bench")

if BENCH not in sys.path:
    sys.path.append(BENCH)
