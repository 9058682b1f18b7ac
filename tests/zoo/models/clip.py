"""CLIP is that of `transformers`."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel
from transformers.models.clip.modeling_clip import image_text_contrastive_loss

from tests.zoo.against import Against, Batch

IMAGES = ("height=12", "width=12", "vision=12", "eyes=3", "key=4", "vision_ffn=20", "looks=2")
TEXTS = ("seq=10", "heads=2", "embed=8", "ffn=24", "vocab=29", "layers=3")
CONFIG = CLIPConfig(
    vision_config={
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 12,
        "patch_size": 4,
    },
    text_config={
        "vocab_size": 29,
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 10,
        "eos_token_id": 2,  # which means the largest id
    },
    projection_dim=6,
)


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch["tokens"], pixel_values=batch["image"]).logits_per_text


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return image_text_contrastive_loss(logits)


MODEL = Against(
    file="clip.par",
    overrides=("batch=5", "joint=6", *IMAGES, *TEXTS),
    theirs=lambda: CLIPModel(CONFIG),
    logits=logits,
    loss=loss,
)
