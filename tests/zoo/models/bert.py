"""BERT is that of `transformers`, given the masks that ours draws."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

from partita.runtime.interpreter import drawn
from tests.zoo.against import Against, Batch

BATCH, SEQ, VOCAB, MASK = 3, 16, 31, 30
SIZES = ("batch=3", "seq=16", "heads=3", "key=4", "vocab=31", "mask_id=30", "layers=2")
CONFIG = BertConfig(
    vocab_size=VOCAB,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=48,
    max_position_embeddings=SEQ,
    pad_token_id=None,  # whose row of the embedding would not be trained
)


def batch(step: int) -> Batch:
    """Tokens; and what becomes of them, from the samples of the language."""
    tokens = torch.randint(0, VOCAB - 1, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))

    def sample(name: str, *shape: int) -> Tensor:
        return drawn.sample("uniform", 1.0, 0, step, f"bert.{name}", shape)

    chosen, kind, other = (sample(name, BATCH, SEQ) for name in ("chosen", "kind", "other"))
    present = torch.arange(SEQ) < ((0.75 + 0.25 * sample("length", BATCH)) * SEQ)[:, None]
    masked = present & (chosen.abs() < 0.15)
    any_ = ((other + 1) / 2 * VOCAB).long().clamp(0, VOCAB - 1)
    replaced = torch.where(kind.abs() < 0.8, MASK, torch.where(kind.abs() < 0.9, any_, tokens))
    assert bool(masked.any())
    return {"tokens": tokens, "shown": torch.where(masked, replaced, tokens), "present": present, "masked": masked}


def logits(model: nn.Module, batch: Batch) -> Tensor:
    sentence = (torch.arange(SEQ) * 2 >= SEQ).long().expand(BATCH, SEQ)
    return model(batch["shown"], attention_mask=batch["present"].long(), token_type_ids=sentence).logits


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits[batch["masked"]], batch["tokens"][batch["masked"]])


MODEL = Against(
    file="bert.par",
    overrides=SIZES,
    theirs=lambda: BertForMaskedLM(CONFIG),
    logits=logits,
    loss=loss,
    padding=lambda batch: ~batch["present"][:, :, None],
    batch=batch,
)
