"""GPT-2 is that of `transformers`."""

from __future__ import annotations

from transformers import GPT2Config, GPT2LMHeadModel

from tests.zoo.against import Against

SIZES = ("batch=2", "seq=12", "heads=3", "key=4", "vocab=29", "layers=3")
CONFIG = GPT2Config(vocab_size=29, n_positions=12, n_embd=12, n_layer=3, n_head=3)


MODEL = Against(file="gpt2.par", overrides=SIZES, theirs=lambda: GPT2LMHeadModel(CONFIG))
