"""DeepSeek-V3 is that of `transformers`, where the bias that balances the load stays as it is."""

from __future__ import annotations

from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.zoo.against import Against

SIZES = ("batch=2", "seq=12", "vocab=29", "embed=24", "heads=3", "plain=6", "rotated=4", "value=5", "queries=10")
EXPERTS = ("latent=8", "ffn=40", "inner=12", "shared=24", "nodes=3", "members=3", "kept=2", "chosen=3")
CONFIG = DeepseekV3Config(
    vocab_size=29,
    hidden_size=24,
    intermediate_size=40,
    moe_intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=3,
    n_shared_experts=2,
    n_routed_experts=9,
    routed_scaling_factor=2.5,
    kv_lora_rank=8,
    q_lora_rank=10,
    qk_rope_head_dim=4,
    v_head_dim=5,
    qk_nope_head_dim=6,
    n_group=3,
    topk_group=2,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    rope_interleave=False,
    attn_implementation="eager",
)
ATTENTION = """
    deepseek.{repeat}.attention.scale    = model.layers.{n}.input_layernorm.weight [embed]
    deepseek.{repeat}.attention.q_scale  = model.layers.{n}.self_attn.q_a_layernorm.weight [queries]
    deepseek.{repeat}.attention.kv_scale = model.layers.{n}.self_attn.kv_a_layernorm.weight [latent]
    deepseek.{repeat}.attention.wq_down  = model.layers.{n}.self_attn.q_a_proj.weight [queries, embed]
    deepseek.{repeat}.attention.wq_up    = model.layers.{n}.self_attn.q_b_proj.weight [heads * both, queries]
    deepseek.{repeat}.attention.wkv_down = model.layers.{n}.self_attn.kv_a_proj_with_mqa.weight [compressed, embed]
    deepseek.{repeat}.attention.wkv_up   = model.layers.{n}.self_attn.kv_b_proj.weight [heads * expanded, latent]
    deepseek.{repeat}.attention.wo       = model.layers.{n}.self_attn.o_proj.weight [embed, heads * value]
"""
LAYERS = """
    deepseek.table           = model.embed_tokens.weight [vocab, embed]
    deepseek.head            = lm_head.weight [vocab, embed]
    deepseek.scale           = model.norm.weight [embed]
    deepseek.first.mlp.scale = model.layers.{first}.post_attention_layernorm.weight [embed]
    deepseek.first.mlp.gate  = model.layers.{first}.mlp.gate_proj.weight [ffn, embed]
    deepseek.first.mlp.up    = model.layers.{first}.mlp.up_proj.weight [ffn, embed]
    deepseek.first.mlp.down  = model.layers.{first}.mlp.down_proj.weight [embed, ffn]
    deepseek.layer.moe.scale = model.layers.{n}.post_attention_layernorm.weight [embed]
    deepseek.layer.moe.router.gate = model.layers.{n}.mlp.gate.weight [experts, embed]
    deepseek.layer.moe.router.bias = model.layers.{n}.mlp.gate.e_score_correction_bias [experts]
    deepseek.layer.moe.gate, deepseek.layer.moe.up = model.layers.{n}.mlp.experts.gate_up_proj [experts, + inner, embed]
    deepseek.layer.moe.down  = model.layers.{n}.mlp.experts.down_proj [experts, embed, inner]
    deepseek.layer.moe.shared_gate = model.layers.{n}.mlp.shared_experts.gate_proj.weight [shared, embed]
    deepseek.layer.moe.shared_up   = model.layers.{n}.mlp.shared_experts.up_proj.weight [shared, embed]
    deepseek.layer.moe.shared_down = model.layers.{n}.mlp.shared_experts.down_proj.weight [embed, shared]
"""


def in_layers(text: str, repeat: str, number: str) -> str:
    return text.replace("{repeat}", repeat).replace("{n}", number)


AFTER = "{layer + 1}"  # the first layer is dense
WEIGHTS = (
    in_layers(ATTENTION, "first", "{first}") + in_layers(ATTENTION, "layer", AFTER) + in_layers(LAYERS, "layer", AFTER)
)


def theirs() -> nn.Module:
    """With a bias that decides between experts."""
    model = DeepseekV3ForCausalLM(CONFIG)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.3)
    return model


MODEL = Against(
    file="deepseek_v3.par",
    overrides=(*SIZES, *EXPERTS, "dense=1", "layers=2", "balance=0", "speed=0"),
    theirs=theirs,
    weights=WEIGHTS,
)
