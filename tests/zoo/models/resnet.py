"""ResNet is that of `transformers`: in f64, since norms over few rows multiply rounding."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

from tests.zoo.against import Against, Batch

SIZES = (
    *(
        "batch=8",
        "train.precision=f64",
        "colors=3",
        "pixel_rows=32",
        "pixel_columns=32",
        "grow=1",
        "grow_=1",
        "classes=7",
    ),
    *("channels=8", "out1=16", "out2=24", "out3=32", "out4=40"),
)
CONFIG = ResNetConfig(
    num_channels=3,
    embedding_size=8,
    hidden_sizes=[16, 24, 32, 40],
    depths=[2, 2, 2, 2],
    layer_type="bottleneck",
    num_labels=7,
)


def norm(ours: str, theirs: str, axis: str) -> str:
    return f"""
        {ours}.scale = {theirs}.weight [{axis}]
        {ours}.shift = {theirs}.bias [{axis}]
        {ours}.running_mean = {theirs}.running_mean [{axis}]
        {ours}.running_variance = {theirs}.running_var [{axis}]
    """


def layers(ours: str, theirs: str, stage: int, before: str) -> str:
    """Three convolutions of a bottleneck."""
    mid, after, out = f"mid{stage}", f"next{stage}", f"out{stage}"
    lines = [
        f"{ours}.first = {theirs}.layer.0.convolution.weight [{mid}, {before}, 1, 1]",
        f"{ours}.second = {theirs}.layer.1.convolution.weight [{after}, {mid}, kh, kw]",
        f"{ours}.third = {theirs}.layer.2.convolution.weight [{out}, {after}, 1, 1]",
    ]
    for i, (name, axis) in enumerate(
        (("batch_norm_image", mid), ("batch_norm_image_2", after), ("batch_norm_image_3", out))
    ):
        lines.append(norm(f"{ours}.{name}", f"{theirs}.layer.{i}.normalization", axis))
    return "\n".join(lines)


def stage(number: int) -> str:
    """The entry into a stage, and its other layers."""
    before = f"out{number - 1}" if number > 1 else "channels"
    theirs, entry = f"resnet.encoder.stages.{number - 1}.layers", f"entry_{number}" if number > 1 else "entry"
    past = f"resnet.{entry}.past = {theirs}.0.shortcut.convolution.weight [out{number}, {before}, one, one_]"
    return "\n".join(
        [
            layers(f"resnet.{entry}", f"{theirs}.0", number, before),
            past,
            norm(f"resnet.{entry}.batch_norm_image_4", f"{theirs}.0.shortcut.normalization", f"out{number}"),
            layers(f"resnet.stage{number}.bottleneck", f"{theirs}.{{stage{number} + 1}}", number, f"out{number}"),
        ]
    )


WEIGHTS = "\n".join(
    [
        "resnet.kernel = resnet.embedder.embedder.convolution.weight [channels, colors, big_h, big_w]",
        norm("resnet.batch_norm_image", "resnet.embedder.embedder.normalization", "channels"),
        *map(stage, (1, 2, 3, 4)),
        "resnet.head = classifier.1.weight [classes, out4]",
        "resnet.bias = classifier.1.bias [classes]",
    ]
)


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["image"].reshape(-1, 3, 32, 32).double()).logits


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["label"])


MODEL = Against(
    file="resnet.par",
    overrides=SIZES,
    theirs=lambda: ResNetForImageClassification(CONFIG).double(),
    weights=WEIGHTS,
    logits=logits,
    loss=loss,
    training=True,
)
