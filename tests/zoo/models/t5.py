"""T5 is that of `transformers`, given the lengths that ours draws."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

from partita.runtime.interpreter import drawn
from tests.zoo.against import Against, Batch

BATCH, SOURCE, TARGET, VOCAB = 3, 20, 16, 31
SIZES = ("batch=3", "source=20", "target=16", "embed=12", "heads=3", "key=4", "ffn=24", "vocab=31")
BUCKETS = ("buckets=8", "farthest=12")
CONFIG = T5Config(
    vocab_size=VOCAB,
    d_model=12,
    d_kv=4,
    d_ff=24,
    num_layers=2,
    num_heads=3,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    decoder_start_token_id=0,
)


def batch(step: int) -> Batch:
    """Texts; and which positions of the source are there, from the sample of the language."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(0, VOCAB, (BATCH, SOURCE + TARGET), generator=generator) for _ in range(2))
    length = drawn.sample("uniform", 1.0, 0, step, "t5.length", (BATCH,))
    present = torch.arange(SOURCE) < ((0.75 + 0.25 * length) * SOURCE)[:, None]
    assert not bool(present.all())
    return {"tokens": tokens, "targets": targets, "present": present}


def logits(model: nn.Module, batch: Batch) -> Tensor:
    source, target = batch["tokens"].split([SOURCE, TARGET], 1)
    return model(source, attention_mask=batch["present"].long(), decoder_input_ids=target).logits


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"][:, SOURCE:].flatten())


MODEL = Against(
    file="t5.par",
    overrides=(*SIZES, *BUCKETS),
    theirs=lambda: T5ForConditionalGeneration(CONFIG),
    logits=logits,
    loss=loss,
    batch=batch,
)
