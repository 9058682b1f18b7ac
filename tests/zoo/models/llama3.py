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


MODEL = Against(file="llama3.par", overrides=SIZES, theirs=lambda: LlamaForCausalLM(CONFIG), weights=WEIGHTS)
