"""Encoders of images."""

from __future__ import annotations

from partita.cli.families.config import Config, File, published
from partita.cli.families.parts import images, patches


def vit(config: Config, file: File) -> None:
    """ViT, with its head for images."""
    image, patch = patches(config, 16)
    file.entries(
        height=image,
        width=image,
        ph=patch,
        pw=patch,
        embed=config.count("hidden_size", 768),
        heads=config.count("num_attention_heads", 12),
        ffn=config.count("intermediate_size", 3072),
        layers=config.count("num_hidden_layers", 12),
        eps=config.number("layer_norm_eps", 1e-12),
    )
    images(config, file)
    config.fixed(hidden_act="gelu", qkv_bias=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def clip(config: Config, file: File) -> None:
    """CLIP, both encoders."""
    text, vision = config.part("text_config"), config.part("vision_config")
    image, patch = patches(vision, 32)
    wide, eyes = vision.count("hidden_size", 768), vision.count("num_attention_heads", 12)
    embed, heads = text.count("hidden_size", 512), text.count("num_attention_heads", 8)
    if wide % eyes or embed % heads or wide // eyes != embed // heads:
        text.problem("num_attention_heads", heads, "and the file has keys of one size in both towers")
    file.entries(
        joint=config.count("projection_dim", 512),
        colors=vision.count("num_channels", 3),
        height=image,
        width=image,
        high=patch,
        wide=patch,
        key=wide // eyes,
        eyes=eyes,
        vision_ffn=vision.count("intermediate_size", 3072),
        looks=vision.count("num_hidden_layers", 12),
        seq=text.count("max_position_embeddings", 77),
        heads=heads,
        ffn=text.count("intermediate_size", 2048),
        vocab=text.count("vocab_size", 49408),
        layers=text.count("num_hidden_layers", 12),
        eps=text.number("layer_norm_eps", 1e-5),
    )
    vision.only("layer_norm_eps", text.get("layer_norm_eps", 1e-5), default=1e-5)
    for part in (text, vision):
        part.fixed(hidden_act="quick_gelu", attention_dropout=0.0, dropout=0.0)
        part.get("projection_dim")  # of models of one tower
        part.settle()
    end = text.get("eos_token_id", 2)
    if end not in (2, text.get("vocab_size", 49408) - 1):
        text.problem("eos_token_id", end, "and the file takes the largest id for the end")
    config.get("logit_scale_init_value")
    for key in ("text_config_dict", "vision_config_dict"):
        config.get(key)  # copies of the others, which older versions wrote


def resnet(config: Config, file: File) -> None:
    """ResNet with bottlenecks."""
    sizes, depths = config.get("hidden_sizes", [256, 512, 1024, 2048]), config.get("depths", [3, 4, 6, 3])
    whole = all(isinstance(each, list) and len(each) == 4 for each in (sizes, depths))
    if not whole or not all(isinstance(each, int) for each in (*sizes, *depths)):
        config.problem("hidden_sizes", [sizes, depths], "and the file has four stages")
        return
    for size in sizes:
        if size % 4:
            config.problem("hidden_sizes", sizes, "and the middle of the file's bottlenecks is a quarter")
    for depth in depths:
        if depth < 2:
            config.problem("depths", depths, "and the file has two layers or more in each stage")
    file.entries(
        pixel_rows=224,
        pixel_columns=224,
        grow=1,
        grow_=1,
        channels=config.count("embedding_size", 64),
        **{f"out{i}": size for i, size in enumerate(sizes, 1)},
        **{f"more{i}": max(depth - 1, 1) for i, depth in enumerate(depths, 1)},
    )
    images(config, file)
    config.fixed(layer_type="bottleneck", hidden_act="relu", downsample_in_first_stage=False)
    config.fixed(downsample_in_bottleneck=False)
    for key in ("out_features", "out_indices", "stage_names"):
        config.get(key)  # of models that give features
    # The block that it imports, in the file itself.
    norms = published("blocks/batch_norm.par")
    own = norms[norms.index("block batch_norm_image") : norms.index("block ghost")]
    file.replace('import "blocks/batch_norm.par"\n', own.rstrip() + "\n")
    file.replace(", group_rows = 1  # of batch_norm.par: any batch divides by it", "")
