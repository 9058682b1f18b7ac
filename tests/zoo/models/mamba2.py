"""Mamba-2 is that of `transformers`."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Mamba2Config, Mamba2ForCausalLM

from tests.zoo.against import Against, Batch

SIZES = ("batch=2", "seq=12", "embed=12", "groups=2", "heads=2", "head=6", "states=5", "vocab=29", "layers=2")
CONFIG = Mamba2Config(
    vocab_size=29,
    hidden_size=12,
    num_hidden_layers=2,
    num_heads=4,
    head_dim=6,
    state_size=5,
    n_groups=2,
    expand=2,
    conv_kernel=4,
    chunk_size=4,
    pad_token_id=None,  # whose row of the embedding would not be trained
    tie_word_embeddings=False,
)


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["tokens"], use_cache=False).logits


MODEL = Against(file="mamba2.par", overrides=SIZES, theirs=lambda: Mamba2ForCausalLM(CONFIG), logits=logits)
