"""SmolLM3 is that of `transformers`."""

from __future__ import annotations

from transformers import SmolLM3Config, SmolLM3ForCausalLM

from tests.zoo.against import Against

SIZES = ("batch=2", "seq=12", "embed=24", "groups=2", "heads=3", "key=4", "ffn=40", "vocab=29", "fours=2")
CONFIG = SmolLM3Config(
    hidden_size=24,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=40,
    vocab_size=29,
    pad_token_id=None,  # whose row of the embedding would not be trained
    rope_parameters={"rope_type": "default", "rope_theta": 5e6},
    attn_implementation="eager",
)


MODEL = Against(file="smollm3.par", overrides=SIZES, theirs=lambda: SmolLM3ForCausalLM(CONFIG))
