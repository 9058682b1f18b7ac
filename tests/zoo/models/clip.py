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
LAYER = """
    clip.{ours}.layer.{attention}.norm.scale = {theirs}.layer_norm1.weight [{embed}]
    clip.{ours}.layer.{attention}.norm.shift = {theirs}.layer_norm1.bias [{embed}]
    clip.{ours}.layer.{attention}.projected.wq = {theirs}.self_attn.q_proj.weight [{heads} * key, {embed}]
    clip.{ours}.layer.{attention}.projected.wk = {theirs}.self_attn.k_proj.weight [{heads} * key, {embed}]
    clip.{ours}.layer.{attention}.projected.wv = {theirs}.self_attn.v_proj.weight [{heads} * key, {embed}]
    clip.{ours}.layer.{attention}.projected.bq = {theirs}.self_attn.q_proj.bias [{heads} * key]
    clip.{ours}.layer.{attention}.projected.bk = {theirs}.self_attn.k_proj.bias [{heads} * key]
    clip.{ours}.layer.{attention}.projected.bv = {theirs}.self_attn.v_proj.bias [{heads} * key]
    clip.{ours}.layer.{attention}.wo = {theirs}.self_attn.out_proj.weight [{embed}, {heads} * key]
    clip.{ours}.layer.{attention}.bo = {theirs}.self_attn.out_proj.bias [{embed}]
    clip.{ours}.layer.mlp.norm.scale = {theirs}.layer_norm2.weight [{embed}]
    clip.{ours}.layer.mlp.norm.shift = {theirs}.layer_norm2.bias [{embed}]
    clip.{ours}.layer.mlp.up = {theirs}.mlp.fc1.weight [{ffn}, {embed}]
    clip.{ours}.layer.mlp.bup = {theirs}.mlp.fc1.bias [{ffn}]
    clip.{ours}.layer.mlp.down = {theirs}.mlp.fc2.weight [{embed}, {ffn}]
    clip.{ours}.layer.mlp.bdown = {theirs}.mlp.fc2.bias [{embed}]
"""
WEIGHTS = (
    """
    clip.sharpness = logit_scale
    clip.look.patch = vision_model.embeddings.patch_embedding.weight [vision, colors, high, wide]
    clip.look.class = vision_model.embeddings.class_embedding [vision]
    clip.look.position = vision_model.embeddings.position_embedding.weight [spots, vision]
    clip.look.norm.scale = vision_model.pre_layrnorm.weight [vision]
    clip.look.norm.shift = vision_model.pre_layrnorm.bias [vision]
    clip.look.end_norm.scale = vision_model.post_layernorm.weight [vision]
    clip.look.end_norm.shift = vision_model.post_layernorm.bias [vision]
    clip.look.projection = visual_projection.weight [joint, vision]
    clip.read.table = text_model.embeddings.token_embedding.weight [vocab, embed]
    clip.read.position = text_model.embeddings.position_embedding.weight [seq, embed]
    clip.read.norm.scale = text_model.final_layer_norm.weight [embed]
    clip.read.norm.shift = text_model.final_layer_norm.bias [embed]
    clip.read.projection = text_projection.weight [joint, embed]
    """
    + LAYER.format(
        ours="look",
        attention="image_attention",
        theirs="vision_model.encoder.layers.{layer}",
        embed="vision",
        heads="eyes",
        ffn="vision_ffn",
    )
    + LAYER.format(
        ours="read",
        attention="text_attention",
        theirs="text_model.encoder.layers.{layer}",
        embed="embed",
        heads="heads",
        ffn="ffn",
    )
)


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch["tokens"], pixel_values=batch["image"]).logits_per_text


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return image_text_contrastive_loss(logits)


MODEL = Against(
    file="clip.par",
    overrides=("batch=5", "joint=6", *IMAGES, *TEXTS),
    theirs=lambda: CLIPModel(CONFIG),
    weights=WEIGHTS,
    logits=logits,
    loss=loss,
)
