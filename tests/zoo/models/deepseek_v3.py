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
)
