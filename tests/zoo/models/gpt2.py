"""GPT-2 is that of `transformers`."""

from __future__ import annotations

from transformers import GPT2Config, GPT2LMHeadModel

from tests.zoo.against import Against

SIZES = ("batch=2", "seq=12", "heads=3", "key=4", "vocab=29", "layers=3")
CONFIG = GPT2Config(vocab_size=29, n_positions=12, n_embd=12, n_layer=3, n_head=3)
WEIGHTS = """
    gpt.wte = transformer.wte.weight [vocab, embed]
    gpt.wpe = transformer.wpe.weight [seq, embed]
    gpt.layer.attention.scale = transformer.h.{layer}.ln_1.weight [embed]
    gpt.layer.attention.shift = transformer.h.{layer}.ln_1.bias [embed]
    gpt.layer.attention.wq, gpt.layer.attention.wk, gpt.layer.attention.wv = \
        transformer.h.{layer}.attn.c_attn.weight [embed, + heads * key]
    gpt.layer.attention.bq, gpt.layer.attention.bk, gpt.layer.attention.bv = \
        transformer.h.{layer}.attn.c_attn.bias [+ heads * key]
    gpt.layer.attention.wo = transformer.h.{layer}.attn.c_proj.weight [heads * key, embed]
    gpt.layer.attention.bo = transformer.h.{layer}.attn.c_proj.bias [embed]
    gpt.layer.mlp.scale = transformer.h.{layer}.ln_2.weight [embed]
    gpt.layer.mlp.shift = transformer.h.{layer}.ln_2.bias [embed]
    gpt.layer.mlp.up = transformer.h.{layer}.mlp.c_fc.weight [embed, ffn]
    gpt.layer.mlp.bup = transformer.h.{layer}.mlp.c_fc.bias [ffn]
    gpt.layer.mlp.down = transformer.h.{layer}.mlp.c_proj.weight [ffn, embed]
    gpt.layer.mlp.bdown = transformer.h.{layer}.mlp.c_proj.bias [embed]
    gpt.scale = transformer.ln_f.weight [embed]
    gpt.shift = transformer.ln_f.bias [embed]
"""


MODEL = Against(file="gpt2.par", overrides=SIZES, theirs=lambda: GPT2LMHeadModel(CONFIG), weights=WEIGHTS)
