"""Qwen3-Next is that of `transformers`."""

from __future__ import annotations

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.zoo.against import Against

SIZES = ("batch=2", "seq=12", "embed=24", "groups=2", "heads=3", "key=8", "ffn=20", "vocab=29", "rounds=1", "shared=12")
MORE = ("sources=3", "readers=2", "inner=32", "value=5", "experts=5", "chosen=3")
CONFIG = Qwen3NextConfig(
    hidden_size=24,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=29,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=32,
    linear_value_head_dim=5,
    num_experts=5,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    shared_expert_intermediate_size=12,
    attn_implementation="eager",
)

# Keys and queries are normed after a gate that closes where they are small, which magnifies what is rounded: the module
# itself is as far from the same module in f64.
MODEL = Against(
    file="qwen3_next.par",
    overrides=(*SIZES, *MORE),
    theirs=lambda: Qwen3NextForCausalLM(CONFIG),
    tolerance=1e-4,
)
