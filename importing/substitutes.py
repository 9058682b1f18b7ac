"""What exports badly, by what computes the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer


def exported(module: nn.Module, inputs: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
    """A module's `forward` with these keyword arguments, exported. Raises what `torch.export` raises."""
    with _substituted(module):
        return torch.export.export(module, (), kwargs=dict(inputs), strict=False)


@contextmanager
def _substituted(module: nn.Module) -> Iterator[None]:
    """Experts of transformers do not sort, and torch's encoders do not compare their masks with causal ones: that is a
    hint, and the mask is applied.
    """
    for part in module.modules():
        config = getattr(part, "config", None)
        if hasattr(part, "set_experts_implementation") and getattr(config, "_experts_implementation", None):
            cast("Any", part).set_experts_implementation("batched_mm")
    inner = cast("Any", transformer)
    detect = inner._detect_is_causal_mask
    inner._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        inner._detect_is_causal_mask = detect
