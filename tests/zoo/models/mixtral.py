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
WEIGHTS = """
    mixtral.table                  = model.embed_tokens.weight [vocab, embed]
    mixtral.head                   = lm_head.weight [vocab, embed]
    mixtral.scale                  = model.norm.weight [embed]
    mixtral.layer.attention.scale  = model.layers.{layer}.input_layernorm.weight [embed]
    mixtral.layer.attention.wq     = model.layers.{layer}.self_attn.q_proj.weight [groups * heads * key, embed]
    mixtral.layer.attention.wk     = model.layers.{layer}.self_attn.k_proj.weight [groups * key, embed]
    mixtral.layer.attention.wv     = model.layers.{layer}.self_attn.v_proj.weight [groups * key, embed]
    mixtral.layer.attention.wo     = model.layers.{layer}.self_attn.o_proj.weight [embed, groups * heads * key]
    mixtral.layer.moe.scale        = model.layers.{layer}.post_attention_layernorm.weight [embed]
    mixtral.layer.moe.router       = model.layers.{layer}.mlp.gate.weight [experts, embed]
    mixtral.layer.moe.gate, mixtral.layer.moe.up = model.layers.{layer}.mlp.experts.gate_up_proj [experts, + ffn, embed]
    mixtral.layer.moe.down         = model.layers.{layer}.mlp.experts.down_proj [experts, embed, ffn]
"""


MODEL = Against(
    file="mixtral.par",
    overrides=(*SIZES, "experts=5", "chosen=2", "balance=0"),
    theirs=lambda: MixtralForCausalLM(CONFIG),
    weights=WEIGHTS,
)
