"""Qwen 3 with experts is that of `transformers`, without its balancing loss, which counts the whole batch at once."""

from __future__ import annotations

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.zoo.against import Against

SIZES = ("batch=2", "seq=12", "embed=24", "groups=2", "heads=3", "key=4", "ffn=40", "vocab=29", "layers=2")
CONFIG = Qwen3MoeConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    moe_intermediate_size=40,
    vocab_size=29,
    num_experts=5,
    num_experts_per_tok=3,
    norm_topk_prob=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    attn_implementation="eager",
)
WEIGHTS = """
    qwen.table                  = model.embed_tokens.weight [vocab, embed]
    qwen.head                   = lm_head.weight [vocab, embed]
    qwen.scale                  = model.norm.weight [embed]
    qwen.layer.attention.scale  = model.layers.{layer}.input_layernorm.weight [embed]
    qwen.layer.attention.q_scale  = model.layers.{layer}.self_attn.q_norm.weight [key]
    qwen.layer.attention.k_scale  = model.layers.{layer}.self_attn.k_norm.weight [key]
    qwen.layer.attention.wq     = model.layers.{layer}.self_attn.q_proj.weight [groups * heads * key, embed]
    qwen.layer.attention.wk     = model.layers.{layer}.self_attn.k_proj.weight [groups * key, embed]
    qwen.layer.attention.wv     = model.layers.{layer}.self_attn.v_proj.weight [groups * key, embed]
    qwen.layer.attention.wo     = model.layers.{layer}.self_attn.o_proj.weight [embed, groups * heads * key]
    qwen.layer.moe.scale        = model.layers.{layer}.post_attention_layernorm.weight [embed]
    qwen.layer.moe.router       = model.layers.{layer}.mlp.gate.weight [experts, embed]
    qwen.layer.moe.gate, qwen.layer.moe.up = model.layers.{layer}.mlp.experts.gate_up_proj [experts, + ffn, embed]
    qwen.layer.moe.down         = model.layers.{layer}.mlp.experts.down_proj [experts, embed, ffn]
"""


MODEL = Against(
    file="qwen3_moe.par",
    overrides=(*SIZES, "experts=5", "chosen=3", "balance=0"),
    theirs=lambda: Qwen3MoeForCausalLM(CONFIG),
    weights=WEIGHTS,
)
