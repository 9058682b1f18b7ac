"""Llama 3.1 is that of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from partita.runtime.kernels.positions import SCALINGS
from tests.zoo.against import Against, Batch

SIZES = ("batch=2", "seq=12", "embed=24", "groups=2", "heads=3", "key=4", "ffn=40", "vocab=29", "original=40")
CONFIG = LlamaConfig(
    hidden_size=24,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=40,
    vocab_size=29,
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
)
WEIGHTS = """
    llama.table = model.embed_tokens.weight [vocab, embed]
    llama.layer.attention.scale = model.layers.{layer}.input_layernorm.weight [embed]
    llama.layer.attention.wq = model.layers.{layer}.self_attn.q_proj.weight [groups * heads * key, embed]
    llama.layer.attention.wk = model.layers.{layer}.self_attn.k_proj.weight [groups * key, embed]
    llama.layer.attention.wv = model.layers.{layer}.self_attn.v_proj.weight [groups * key, embed]
    llama.layer.attention.wo = model.layers.{layer}.self_attn.o_proj.weight [embed, groups * heads * key]
    llama.layer.mlp.scale = model.layers.{layer}.post_attention_layernorm.weight [embed]
    llama.layer.mlp.gate = model.layers.{layer}.mlp.gate_proj.weight [ffn, embed]
    llama.layer.mlp.up = model.layers.{layer}.mlp.up_proj.weight [ffn, embed]
    llama.layer.mlp.down = model.layers.{layer}.mlp.down_proj.weight [embed, ffn]
    llama.scale = model.norm.weight [embed]
    llama.head = lm_head.weight [vocab, embed]
"""


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).logits.flatten(0, 1), batch["targets"].flatten())


LLAMA = Against(file="llama3.par", overrides=SIZES, theirs=lambda: LlamaForCausalLM(CONFIG), weights=WEIGHTS, loss=loss)


def test_the_same_numbers():
    LLAMA.same_numbers()


def test_the_same_training():
    LLAMA.same_training()


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
    parameters = {"rope_type": name, "rope_theta": base, "factor": 8.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=128, max_position_embeddings=65_536, rope_parameters={**parameters, **theirs})
    expected, factor = ROPE_INIT_FUNCTIONS[name](config, "cpu")
    rate = base ** (-torch.arange(64, dtype=torch.float64) / 64)
    found, scale = SCALINGS[name](rate, base, 8.0, *ours)
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=0.0)
    assert scale == pytest.approx(factor)
