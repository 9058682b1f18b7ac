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


MODEL = Against(
    file="gemma2.par",
    overrides=(*SIZES, *CAPS),
    theirs=lambda: Gemma2ForCausalLM(CONFIG),
)
