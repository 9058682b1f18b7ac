"""Llama 3.1 is that of `transformers`."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from tests.zoo.against import Against

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


MODEL = Against(file="llama3.par", overrides=SIZES, theirs=lambda: LlamaForCausalLM(CONFIG))
