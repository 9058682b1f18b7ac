"""`bench/models/linear.par` written by hand in torch, in pieces that can be pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partita.runtime.learning_rates import learning_rate


class Piece(nn.Module):
    """Some layers of the model in a row. `first` and `last` make no difference: there is nothing but layers."""

    def __init__(self, weights: Mapping[str, Tensor], layers: Sequence[int], first: bool, last: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights[f"linear.layer.{i}.w"].detach().clone() for i in layers)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, embed] to the same."""
        for weight in self.weights:
            x = x @ weight
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all elements."""
    return F.mse_loss(output, target)


def optimizer_of(modules: Sequence[nn.Module], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """SGD in torch's fused form."""
    parameters = [each for module in modules for each in module.parameters()]
    return torch.optim.SGD(parameters, lr=learning_rate(settings["lr"], 1), fused=True)
