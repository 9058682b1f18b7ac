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
LAYER = "vit.layers.{layer}"
WEIGHTS = f"""
    vit.first = vit.embeddings.cls_token [1, start, embed]
    vit.position = vit.embeddings.position_embeddings [1, positions, embed]
    vit.kernel = vit.embeddings.patch_embeddings.projection.weight [embed, colors, ph, pw]
    vit.bias = vit.embeddings.patch_embeddings.projection.bias [embed]
    vit.layer.attention.scale = {LAYER}.layernorm_before.weight [embed]
    vit.layer.attention.shift = {LAYER}.layernorm_before.bias [embed]
    vit.layer.attention.wq = {LAYER}.attention.q_proj.weight [heads * key, embed]
    vit.layer.attention.wk = {LAYER}.attention.k_proj.weight [heads * key, embed]
    vit.layer.attention.wv = {LAYER}.attention.v_proj.weight [heads * key, embed]
    vit.layer.attention.bq = {LAYER}.attention.q_proj.bias [heads * key]
    vit.layer.attention.bk = {LAYER}.attention.k_proj.bias [heads * key]
    vit.layer.attention.bv = {LAYER}.attention.v_proj.bias [heads * key]
    vit.layer.attention.wo = {LAYER}.attention.o_proj.weight [embed, heads * key]
    vit.layer.attention.bo = {LAYER}.attention.o_proj.bias [embed]
    vit.layer.mlp.scale = {LAYER}.layernorm_after.weight [embed]
    vit.layer.mlp.shift = {LAYER}.layernorm_after.bias [embed]
    vit.layer.mlp.up = {LAYER}.mlp.fc1.weight [ffn, embed]
    vit.layer.mlp.bu = {LAYER}.mlp.fc1.bias [ffn]
    vit.layer.mlp.down = {LAYER}.mlp.fc2.weight [embed, ffn]
    vit.layer.mlp.bd = {LAYER}.mlp.fc2.bias [embed]
    vit.scale = vit.layernorm.weight [embed]
    vit.shift = vit.layernorm.bias [embed]
    vit.head = classifier.weight [classes, embed]
    vit.bh = classifier.bias [classes]
"""


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["image"].reshape(-1, 3, 8, 8)).logits


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["label"])


MODEL = Against(
    file="vit.par",
    overrides=SIZES,
    theirs=lambda: ViTForImageClassification(CONFIG),
    weights=WEIGHTS,
    logits=logits,
    loss=loss,
)
