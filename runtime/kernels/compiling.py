"""torch.compile for segments of emitted functions: one graph each, of fixed shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

# Strides may differ between places that call a segment, each of which is then compiled once.
VARIANTS = 64


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch compiles it, when it is first called."""
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = VARIANTS
    torch._dynamo.config.accumulated_recompile_limit = 64 * VARIANTS
    # Ranks compile side by side, one to a core or so: no processes of their own, which would outlive a killed rank.
    torch._inductor.config.compile_threads = 1
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    return torch.compile(function, fullgraph=True, dynamic=False)
