"""Mamba-2 is that of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
INNER, STATES, HEADS = 24, 10, 4
WEIGHTS = """
    mamba.table = backbone.embeddings.weight [vocab, embed]
    mamba.layer.mixer.scale = backbone.layers.{layer}.norm.weight [embed]
    mamba.layer.mixer.wz = backbone.layers.{layer}.mixer.in_proj.parts.0.weight [groups * heads * head, embed]
    mamba.layer.mixer.wx = backbone.layers.{layer}.mixer.in_proj.parts.1.weight [groups * heads * head, embed]
    mamba.layer.mixer.wb = backbone.layers.{layer}.mixer.in_proj.parts.2.weight [groups * states, embed]
    mamba.layer.mixer.wc = backbone.layers.{layer}.mixer.in_proj.parts.3.weight [groups * states, embed]
    mamba.layer.mixer.wt = backbone.layers.{layer}.mixer.in_proj.parts.4.weight [groups * heads, embed]
    mamba.layer.mixer.kx = backbone.layers.{layer}.mixer.conv1d.parts.0.weight [groups * heads * head, 1, taps]
    mamba.layer.mixer.kb = backbone.layers.{layer}.mixer.conv1d.parts.1.weight [groups * states, 1, taps]
    mamba.layer.mixer.kc = backbone.layers.{layer}.mixer.conv1d.parts.2.weight [groups * states, 1, taps]
    mamba.layer.mixer.bx = backbone.layers.{layer}.mixer.conv1d.parts.0.bias [groups * heads * head]
    mamba.layer.mixer.bb = backbone.layers.{layer}.mixer.conv1d.parts.1.bias [groups * states]
    mamba.layer.mixer.bc = backbone.layers.{layer}.mixer.conv1d.parts.2.bias [groups * states]
    mamba.layer.mixer.step = backbone.layers.{layer}.mixer.dt_bias [groups * heads]
    mamba.layer.mixer.rate = backbone.layers.{layer}.mixer.A_log [groups * heads]
    mamba.layer.mixer.skip = backbone.layers.{layer}.mixer.D [groups * heads]
    mamba.layer.mixer.gain = backbone.layers.{layer}.mixer.norm.weight [groups * heads * head]
    mamba.layer.mixer.wo = backbone.layers.{layer}.mixer.out_proj.weight [embed, groups * heads * head]
    mamba.scale = backbone.norm_f.weight [embed]
    mamba.head_table = lm_head.weight [vocab, embed]
"""


class Parts(nn.Module):
    """A layer of theirs that makes several things at once, in parts of which ours are one each. `taken`: a part takes
    its own channels, the second dimension.
    """

    def __init__(self, parts: Sequence[nn.Module], taken: Sequence[int] = ()) -> None:
        super().__init__()
        self.parts, self.taken = nn.ModuleList(parts), tuple(taken)

    def forward(self, x: Tensor) -> Tensor:
        if not self.taken:
            return torch.cat([part(x) for part in self.parts], -1)
        return torch.cat([part(y) for part, y in zip(self.parts, x.split(self.taken, 1), strict=True)], 1)

    @property
    def weight(self) -> Tensor:
        return torch.cat([part.weight for part in self.parts])

    @property
    def bias(self) -> Tensor | None:
        return torch.cat([part.bias for part in self.parts]) if self.taken else None


def theirs() -> nn.Module:
    model = Mamba2ForCausalLM(CONFIG)
    for layer in model.backbone.layers:
        rows = (INNER, INNER, STATES, STATES, HEADS)
        layer.mixer.in_proj = Parts([nn.Linear(12, count, bias=False) for count in rows])
        channels = (INNER, STATES, STATES)
        layer.mixer.conv1d = Parts([nn.Conv1d(n, n, 4, groups=n, padding=3) for n in channels], channels)
    return model


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["tokens"], use_cache=False).logits


MODEL = Against(file="mamba2.par", overrides=SIZES, theirs=theirs, weights=WEIGHTS, logits=logits)
