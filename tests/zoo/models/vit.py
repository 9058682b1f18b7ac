"""ViT is that of `transformers`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from tests.zoo.against import Against, Batch

SIZES = ("batch=3", "colors=3", "height=8", "width=8", "ph=2", "pw=2", "embed=24", "heads=3", "ffn=40", "classes=7")
CONFIG = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=3,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=40,
    num_labels=7,
)


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["image"].reshape(-1, 3, 8, 8)).logits


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["label"])


MODEL = Against(
    file="vit.par",
    overrides=SIZES,
    theirs=lambda: ViTForImageClassification(CONFIG),
    logits=logits,
    loss=loss,
)
