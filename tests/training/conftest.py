"""What tests of training share."""

from __future__ import annotations

import pytest
import torch

from partita.runtime import kernels


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are copies, as on a device with its own memory; what is under way has no content yet."""
    coming: dict[int, torch.Tensor] = {}

    def begin(x: torch.Tensor, context: object) -> torch.Tensor:
        found = torch.full_like(x, 0 if not x.is_floating_point() else float("nan"))
        coming[id(found)] = x
        return found

    def end(x: torch.Tensor, context: object) -> torch.Tensor:
        return x.copy_(coming.pop(id(x)))

    monkeypatch.setattr(kernels, "to_host", torch.clone)
    monkeypatch.setattr(kernels, "to_device", lambda x, context: x.clone())
    for name, instead in (("prefetch", begin), ("arrive", end), ("copy_out", begin), ("land", end)):
        monkeypatch.setattr(kernels, name, instead)
