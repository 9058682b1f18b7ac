"""Scalings of wavelengths are those of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partita.runtime.kernels.positions import SCALINGS


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, (8192, 1.0, 4.0)),
        ("llama3", {"low_freq_factor": 2.0, "high_freq_factor": 3.0}, (8192, 2.0, 3.0)),
        ("yarn", {}, (8192, 32.0, 1.0, None, True)),
        ("yarn", {"truncate": False, "beta_fast": 20.0}, (8192, 20.0, 1.0, None, False)),
        ("yarn", {"attention_factor": 1.25}, (8192, 32.0, 1.0, 1.25, True)),
    ],
)
def test_scalings_of_wavelengths_are_the_same(base: float, name: str, theirs: dict[str, Any], ours: tuple[Any, ...]):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": name, "rope_theta": base, "factor": 8.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=128, max_position_embeddings=65_536, rope_parameters={**parameters, **theirs})
    expected, factor = ROPE_INIT_FUNCTIONS[name](config, "cpu")
    rate = base ** (-torch.arange(64, dtype=torch.float64) / 64)
    found, scale = SCALINGS[name](rate, base, 8.0, *ours)
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=0.0)
    assert scale == pytest.approx(factor)
