"""Rotary positions are those of `transformers`: scalings of wavelengths, neighbours as pairs, and a part of the key."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from partita.runtime.kernels.positions import SCALINGS, rope, rope_at


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


@pytest.mark.parametrize(
    ("family", "interleaved", "part"), [("gpt_neox", False, 0.25), ("glm", True, 0.5), ("cohere", True, 1)]
)
def test_pairs_are_those_of_the_families(family: str, interleaved: bool, part: float):
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    x = torch.randn(2, 3, 7, 16, dtype=torch.float64)
    turned = round(16 * part)
    rate = 10_000.0 ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    angles = torch.arange(7)[:, None] * rate
    wide = angles.repeat_interleave(2, -1) if family == "cohere" else torch.cat((angles, angles), -1)
    expected, _ = module.apply_rotary_pos_emb(x, x, wide.cos()[None], wide.sin()[None])
    more = {"turned": turned} if part < 1 else {}
    found = rope(x, 0, 10_000.0, False, range(4), interleaved=interleaved, **more)
    single = family == "cohere"  # which turns in f32
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-6 if single else 1e-12)
    ids = torch.randint(7, (2, 7))
    there = rope_at(x, ids[:, None], 10_000.0, False, interleaved=interleaved, **more)
    torch.testing.assert_close(there, found_at(x, ids, interleaved, more), rtol=1e-9, atol=1e-12)
    back = rope(found, 0, 10_000.0, True, (0, 2, 1, 3), interleaved=interleaved, **more)
    torch.testing.assert_close(back, x.transpose(1, 2), rtol=1e-9, atol=1e-12)
    assert back.is_contiguous()


def found_at(x: torch.Tensor, ids: torch.Tensor, interleaved: bool, more: dict[str, int]) -> torch.Tensor:
    """Each row turned by all positions, of which it takes its own."""
    rows = []
    for row, own in zip(x, ids, strict=True):
        everywhere = row[:, :, None].expand(-1, -1, 7, -1).contiguous()  # [heads, rows, positions, key]
        turned = rope(everywhere, 0, 10_000.0, False, range(4), interleaved=interleaved, **more)
        rows.append(turned[:, torch.arange(7), own])
    return torch.stack(rows)


def test_positions_in_sections_are_those_of_qwen2_vl():
    module = import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    sections = [2, 3, 3]
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    config = module.Qwen2VLTextConfig(hidden_size=48, num_attention_heads=3, rope_parameters=rotary)
    x, ids = torch.randn(2, 3, 7, 16), torch.randint(50, (3, 2, 7))
    cos, sin = module.Qwen2VLRotaryEmbedding(config)(x, ids)
    expected, _ = module.apply_rotary_pos_emb(x, x, cos, sin)
    found = rope_at(x, ids.permute(1, 2, 0)[:, None], 10_000.0, False, sections=sections)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
