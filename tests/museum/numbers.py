"""The documented random numbers and plain training, in numpy and torch alone: nothing of Partita is used here.

`docs/random.md` says how a file's initial values and data follow from its seed; so a script can begin where a run
begins, and go on with autograd, in float64, in one process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]
Update = Callable[[Parameters, Parameters, int], dict[str, Tensor]]


@dataclass
class Numbers:
    """What a run must report, by step from the first on, and the parameters at its end."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: float | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)


def words(purpose: str, step: int, name: str, count: int) -> np.ndarray:
    """The stream of 64-bit words of a purpose, with seed 0."""
    digest = hashlib.blake2b(f"0/{purpose}/{step}/{name}".encode(), digest_size=16).digest()
    return np.random.Philox(key=np.frombuffer(digest, "<u8"), counter=0).random_raw(count).astype(np.uint64)


def normals(purpose: str, step: int, name: str, *shape: int) -> Tensor:
    """Normal numbers, by Box and Muller."""
    word = words(purpose, step, name, math.prod(shape))
    u = ((word >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    v = (word & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
    return torch.from_numpy(np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)).reshape(shape)


def initial(name: str, *shape: int, std: float) -> Tensor:
    """What `param … ~ normal(std)` begins with."""
    return normals("initial", 0, name, *shape) * std


def drawn(step: int, name: str, *shape: int) -> Tensor:
    """A float input of `random()`."""
    return normals("batch", step, name, *shape)


def integers(step: int, name: str, below: int, *shape: int) -> Tensor:
    """An integer input of `random()`."""
    word = words("batch", step, name, math.prod(shape))
    return torch.from_numpy((((word >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32)).astype(np.int64)).view(
        shape
    )


def order(count: int, epochs: int) -> np.ndarray:
    """The items of `arrays` in the order of training."""
    return np.concatenate([np.argsort(words("epoch", i, "", count), kind="stable") for i in range(epochs)])


def kept(name: str, step: int, rate: float, *shape: int) -> Tensor:
    """What a dropout multiplies by: zero, or one over the share that is kept."""
    mask = (1 << 64) - 1

    def mixed(x: int) -> int:
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & mask
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & mask
        return x ^ x >> 33

    key = 0
    for n in (0, step, int.from_bytes(hashlib.blake2b(f"{name}.keep".encode(), digest_size=8).digest(), "little") >> 1):
        key = (key ^ n) * 0x9E3779B97F4A7C15 & mask
        key ^= key >> 29
    places = range(math.prod(shape))
    unit = [(mixed((2 * i + 1) * 0x9E3779B97F4A7C15 + key & mask) >> 11) / 2**53 for i in places]
    return (torch.tensor(unit, dtype=torch.float64).view(shape) >= rate).double() / (1 - rate)


def sgd(rate: float) -> Update:
    return lambda p, gradients, step: {name: value - rate * gradients[name] for name, value in p.items()}


def adamw(rate: float, decay: float = 0.0, decayed: Callable[[str], bool] = lambda name: True) -> Update:
    """AdamW with the usual betas, of Loshchilov and Hutter, arXiv 1711.05101."""
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    updates = 0

    def update(p: Parameters, gradients: Parameters, step: int) -> dict[str, Tensor]:
        nonlocal updates
        updates += 1
        new = {}
        for name, value in p.items():
            g = gradients[name]
            first[name] = 0.9 * first.get(name, torch.zeros_like(g)) + 0.1 * g
            second[name] = 0.999 * second.get(name, torch.zeros_like(g)) + 0.001 * g * g
            direction = first[name] / (1 - 0.9**updates) / ((second[name] / (1 - 0.999**updates)).sqrt() + 1e-8)
            new[name] = value * (1 - rate * (decay if decayed(name) else 0.0)) - rate * direction
        return new

    return update


def trained(
    parameters: Parameters,
    loss: Callable[[Parameters, int], Tensor],
    steps: int,
    update: Update,
    clip: float = math.inf,
) -> Numbers:
    """Train in one process, by autograd. A step whose loss is not finite updates nothing."""
    p = {name: value.double() for name, value in parameters.items()}
    losses, norms = list[float](), list[float]()
    for step in range(1, steps + 1):
        leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
        value = loss(leaves, step)
        found = torch.autograd.grad(value, list(leaves.values()))
        norm = math.sqrt(sum(float((g * g).sum()) for g in found))
        losses.append(float(value))
        norms.append(norm)
        if math.isfinite(norm):
            factor = min(1.0, clip / (norm + 1e-6))
            p = update(p, {name: g * factor for name, g in zip(leaves, found, strict=True)}, step)
    return Numbers(losses, norms, p)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
