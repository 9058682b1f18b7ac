"""Mixtral is that of `transformers`, without its balancing loss, which counts the whole batch at once."""

from __future__ import annotations

from transformers import MixtralConfig, MixtralForCausalLM

from tests.zoo.against import Against

SIZES = ("batch=2", "seq=12", "embed=24", "groups=2", "heads=3", "key=4", "ffn=40", "vocab=29", "layers=2")
CONFIG = MixtralConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=40,
    vocab_size=29,
    num_local_experts=5,
    num_experts_per_tok=2,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    attn_implementation="eager",
)


MODEL = Against(
    file="mixtral.par",
    overrides=(*SIZES, "experts=5", "chosen=2", "balance=0"),
    theirs=lambda: MixtralForCausalLM(CONFIG),
)
