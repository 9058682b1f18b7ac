"""gpt-oss is that of `transformers`, with positions that are stretched."""

from __future__ import annotations

from transformers import GptOssConfig, GptOssForCausalLM

from tests.zoo.against import Against

SIZES = ("batch=2", "seq=12", "embed=24", "groups=2", "heads=3", "key=8", "ffn=20", "vocab=29", "pairs=1", "near=5")
MORE = ("experts=5", "chosen=3", "stretch=4", "original=16", "limit=0.5")
CONFIG = GptOssConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=20,
    vocab_size=29,
    sliding_window=5,
    num_local_experts=5,
    num_experts_per_tok=3,
    swiglu_limit=0.5,
    max_position_embeddings=64,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
    attn_implementation="eager",
)


MODEL = Against(file="gpt_oss.par", overrides=(*SIZES, *MORE), theirs=lambda: GptOssForCausalLM(CONFIG))
