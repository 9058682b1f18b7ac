"""What optimizers do to a parameter in a step, by their papers, element by element and matrix by matrix; in float64.

Nothing here is shared with the compiler or the runtime. `tests/training/test_optimizers.py` compares the runtime's
kernels with implementations of others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod, sqrt
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from partita.dsl import spec
from tests.reference.reading import Reading

CODES = 256


@define(eq=False)
class State:
    """What an optimizer keeps of a parameter, and how the parameter is read."""

    reading: Reading
    decay: float
    kept: dict[str, Any] = field(factory=dict)

    def zeros(self, name: str, like: Tensor) -> Tensor:
        return self.kept.setdefault(name, torch.zeros_like(like))

    def matrices(self, value: Tensor, split: tuple[frozenset[str], frozenset[str]]) -> Tensor:
        """A tensor as a stack of matrices, with the summed axes as rows; `split` are these, and those stacked."""
        names = self.reading.type.names
        inner, stacked = split
        parts = [
            [name for name in names if name in stacked],
            [name for name in names if name in inner],
            [name for name in names if name not in inner | stacked],
        ]
        order = [names.index(name) for part in parts for name in part]
        return value.permute(order).reshape([prod(value.shape[names.index(name)] for name in part) for part in parts])

    def unfolded(self, matrices: Tensor, split: tuple[frozenset[str], frozenset[str]], like: Tensor) -> Tensor:
        """The other way."""
        places = self.matrices(torch.arange(like.numel(), dtype=torch.float64).view(like.shape), split).long()
        flat = torch.empty(like.numel(), dtype=torch.float64)
        flat[places.reshape(-1)] = matrices.reshape(-1)
        return flat.view(like.shape)


def adamw(s: State, o: Mapping[str, Any], value: Tensor, gradient: Tensor, rate: float, number: int) -> None:
    mean, square = s.zeros("mean", value), s.zeros("square", value)
    first, second = o["betas"]
    mean.copy_(first * mean + (1 - first) * gradient)
    square.copy_(second * square + (1 - second) * gradient**2)
    root = (square / (1 - second**number)).sqrt() + o["eps"]
    value.sub_(rate * s.decay * value + rate * mean / (1 - first**number) / root)


def sgd(s: State, o: Mapping[str, Any], value: Tensor, gradient: Tensor, rate: float, number: int) -> None:
    gradient = gradient + s.decay * value
    if o["momentum"]:
        buffer = s.zeros("buffer", value)
        buffer.copy_(o["momentum"] * buffer + gradient)
        gradient = gradient + o["momentum"] * buffer if o["nesterov"] else buffer
    value.sub_(rate * gradient)


def lion(s: State, o: Mapping[str, Any], value: Tensor, gradient: Tensor, rate: float, number: int) -> None:
    mean = s.zeros("mean", value)
    first, second = o["betas"]
    value.sub_(rate * (torch.sign(first * mean + (1 - first) * gradient) + s.decay * value))
    mean.copy_(second * mean + (1 - second) * gradient)


def adagrad(s: State, o: Mapping[str, Any], value: Tensor, gradient: Tensor, rate: float, number: int) -> None:
    total = s.zeros("total", value)
    total.add_(gradient**2)
    value.sub_(rate * (s.decay * value + gradient / (total.sqrt() + o["eps"])))


def rowwise_adagrad(s: State, o: Mapping[str, Any], value: Tensor, gradient: Tensor, rate: float, number: int) -> None:
    names = s.reading.type.names
    rows = s.reading.rows or set(names[:1])
    others = [i for i, name in enumerate(names) if name not in rows]
    squares = (gradient**2).mean(others, keepdim=True) if others else gradient**2
    total = s.zeros("total", squares)
    total.add_(squares)
    value.sub_(rate * (s.decay * value + gradient / (total.sqrt() + o["eps"])))


def adafactor(s: State, o: Mapping[str, Any], value: Tensor, gradient: Tensor, rate: float, number: int) -> None:
    names = s.reading.type.names
    split = s.reading.matrix or (frozenset(s.reading.rows or names[:-1]), frozenset())
    weight = float(number) ** -o["decay_rate"]
    if not split[0] or split[0] | split[1] == set(names):
        moment = s.zeros("moment", value)
        moment.add_(weight * (gradient**2 - moment))
    else:
        squares = s.matrices(gradient**2, split)
        row, column = s.zeros("row", squares.mean(2)), s.zeros("column", squares.mean(1))
        row.add_(weight * (squares.mean(2) - row))
        column.add_(weight * (squares.mean(1) - column))
        each = []
        for r, c in zip(row, column, strict=True):
            each.append(torch.outer(r, c) / max(float(r.mean()), o["eps"]))
        moment = s.unfolded(torch.stack(each), split, value)
    direction = gradient / moment.clamp(min=o["eps"] ** 2).sqrt()
    length = float((direction**2).mean().sqrt())
    relative = max(o["eps_scale"], float((value**2).mean().sqrt()))
    step = min(rate, 1 / sqrt(number)) * relative / max(1.0, length / o["clip_threshold"])
    value.sub_(rate * s.decay * value + step * direction)


def muon(s: State, o: Mapping[str, Any], value: Tensor, gradient: Tensor, rate: float, number: int) -> None:
    split = s.reading.matrix
    assert split is not None
    momentum = s.zeros("momentum", value)
    momentum.copy_(o["momentum"] * momentum + (1 - o["momentum"]) * gradient)
    ahead = (1 - o["momentum"]) * gradient + o["momentum"] * momentum if o["nesterov"] else momentum
    stack = s.matrices(ahead, split)
    each = torch.stack([_orthogonal(matrix, o["steps"], o["eps"]) for matrix in stack])
    _, rows, columns = stack.shape
    scale = sqrt(max(1.0, columns / rows)) if o["adjust"] == "original" else 0.2 * sqrt(max(rows, columns))
    value.sub_(rate * s.decay * value + rate * scale * s.unfolded(each, split, value))


def _orthogonal(matrix: Tensor, steps: int, eps: float) -> Tensor:
    """The iteration maps each singular value by the same polynomial."""
    left, values, right = torch.linalg.svd(matrix / max(float(matrix.norm()), eps), full_matrices=False)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def adamw_8bit(s: State, o: Mapping[str, Any], value: Tensor, gradient: Tensor, rate: float, number: int) -> None:
    if value.numel() < max(1, o["min_size"]) or not value.dim():
        adamw(s, o, value, gradient, rate, number)
        return
    mean, square = s.zeros("mean", value), s.zeros("square", value)  # as they are once they were rounded
    adamw(s, o, value, gradient, rate, number)
    mean.copy_(_rounded(mean, o["block_size"], signed=True))
    square.copy_(_rounded(square, o["block_size"], signed=False))


def _rounded(x: Tensor, block: int, signed: bool) -> Tensor:
    """What is nearest among the codes times the largest magnitude, block by block."""
    codes, parts = torch.tensor(_codes(signed), dtype=torch.float64), []
    for part in x.reshape(-1).split(block):
        scale = part.abs().max()
        distance = (part[:, None] / scale.clamp(min=1e-12) - codes).abs()
        parts.append(codes[distance.argmin(1)] * scale)
    return torch.cat(parts).view(x.shape)


def _codes(signed: bool) -> list[float]:
    """Sign, a decimal exponent from 0 to -6 and a linear fraction from 0.1 to 1, which shares the bits that remain."""
    found = [0.0, 1.0]
    for exponent in range(7):
        bits = 6 - exponent + (not signed)
        middles = [(0.1 + 0.9 * (i + 0.5) / 2**bits) * 10.0**-exponent for i in range(2**bits)]
        found += middles + [-each for each in middles] * signed
    assert len(found) == CODES
    return sorted(found)


UPDATES: Mapping[str, Callable[[State, Mapping[str, Any], Tensor, Tensor, float, int], None]] = {
    each.__name__: each for each in (adamw, sgd, lion, adagrad, rowwise_adagrad, adafactor, muon, adamw_8bit)
}


def rule_of(optimizer: spec.Optimizer, path: str, reading: Reading, scopes: Mapping[str, str]) -> spec.OptimizerRule:
    """The first rule that matches a parameter, and can update it. `scopes` are the names in the file of blocks and
    repeats by path.
    """
    return next(
        rule
        for rule in optimizer.rules
        if any(_matches(each, path, reading, scopes) for each in rule.targets) and _updates(rule, reading)
    )


def _updates(rule: spec.OptimizerRule, reading: Reading) -> bool:
    """Muon is for what has rows and columns."""
    if rule.call is None or rule.call.name != "muon":
        return True
    inner, stacked = reading.matrix or (frozenset(), frozenset())
    return bool(inner) and inner | stacked != set(reading.type.names)


def _matches(target: tuple[str, ...], path: str, reading: Reading, scopes: Mapping[str, str]) -> bool:
    is_matrix = reading.matrix is not None and len(reading.type.names) > 1
    match target:
        case ("all",):
            return True
        case ("matrices",):
            return is_matrix
        case ("embeddings",):
            return bool(reading.rows)
        case ("vectors",):
            return not is_matrix and not reading.rows
    parts: list[tuple[str, int | None]] = []  # each with the number of the iteration
    for part in path.split("."):
        parts = [*parts[:-1], (parts[-1][0], int(part))] if part.isdigit() else [*parts, (part, None)]
    names = [name for name, _ in parts]
    wanted = [re.fullmatch(r"(\w+)(?:\[(\d+)(?:\.\.(\d+))?\])?", each) for each in target]
    for end in range(len(target), len(parts) + 1):
        declared = [scopes.get(".".join(names[: i + 1]), name) for i, name in enumerate(names[:end])]
        for own in (names[:end], *([declared] if end < len(parts) else [])):
            pairs = zip(wanted, own[-len(target) :], parts[end - len(target) : end], strict=True)
            if all(_is_part(each, name, number) for each, name, (_, number) in pairs):
                return True
    return False


def _is_part(wanted: re.Match[str] | None, name: str, number: int | None) -> bool:
    assert wanted is not None
    own, first, last = wanted.groups()
    return own == name and (first is None or (number is not None and int(first) <= number <= int(last or first)))
