"""Gemma 2 is that of `transformers`."""

from __future__ import annotations

from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.zoo.against import Against

SIZES = ("batch=2", "seq=12", "embed=24", "groups=2", "heads=3", "key=4", "ffn=40", "vocab=29", "window=5", "pairs=2")
CAPS = ("attention_cap=2", "logit_cap=3")
CONFIG = Gemma2Config(
    hidden_size=24,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    query_pre_attn_scalar=4,
    intermediate_size=40,
    vocab_size=29,
    pad_token_id=None,  # whose row of the embedding would not be trained
    sliding_window=5,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    attn_implementation="eager",
)
ATTENTION = """
    gemma.pair.{ours}.norm.scale = model.layers.{theirs}.input_layernorm.weight [embed]
    gemma.pair.{ours}.norm_2.scale = model.layers.{theirs}.post_attention_layernorm.weight [embed]
    gemma.pair.{ours}.projected.wq = model.layers.{theirs}.self_attn.q_proj.weight [groups * heads * key, embed]
    gemma.pair.{ours}.projected.wk = model.layers.{theirs}.self_attn.k_proj.weight [groups * key, embed]
    gemma.pair.{ours}.projected.wv = model.layers.{theirs}.self_attn.v_proj.weight [groups * key, embed]
    gemma.pair.{ours}.wo = model.layers.{theirs}.self_attn.o_proj.weight [embed, groups * heads * key]
"""
MLP = """
    gemma.pair.{ours}.norm.scale = model.layers.{theirs}.pre_feedforward_layernorm.weight [embed]
    gemma.pair.{ours}.norm_2.scale = model.layers.{theirs}.post_feedforward_layernorm.weight [embed]
    gemma.pair.{ours}.gate = model.layers.{theirs}.mlp.gate_proj.weight [ffn, embed]
    gemma.pair.{ours}.up = model.layers.{theirs}.mlp.up_proj.weight [ffn, embed]
    gemma.pair.{ours}.down = model.layers.{theirs}.mlp.down_proj.weight [embed, ffn]
"""
FIRST, SECOND = "{2 * pair}", "{2 * pair + 1}"
WEIGHTS = (
    "gemma.table = model.embed_tokens.weight [vocab, embed]\ngemma.norm.scale = model.norm.weight [embed]"
    + ATTENTION.format(ours="local_attention", theirs=FIRST)
    + MLP.format(ours="mlp", theirs=FIRST)
    + ATTENTION.format(ours="global_attention", theirs=SECOND)
    + MLP.format(ours="mlp_2", theirs=SECOND)
)


MODEL = Against(
    file="gemma2.par",
    overrides=(*SIZES, *CAPS),
    theirs=lambda: Gemma2ForCausalLM(CONFIG),
    weights=WEIGHTS,
)
