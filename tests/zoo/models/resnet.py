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


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["image"].reshape(-1, 3, 32, 32).double()).logits


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["label"])


MODEL = Against(
    file="resnet.par",
    overrides=SIZES,
    theirs=lambda: ResNetForImageClassification(CONFIG).double(),
    logits=logits,
    loss=loss,
    training=True,
)
