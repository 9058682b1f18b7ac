"""The learning rate of each step: a pure function of the settings and the step, which counts from 1.

All but `constant` warm up first: in steps 1 to `warmup` the rate is peak · step / warmup. After that, with p =
(step - warmup) / (total - warmup), clamped to at most 1:

    linear    floor + (peak - floor) · (1 - p)
    cosine    floor + (peak - floor) · (1 + cos(pi p)) / 2  (Loshchilov and Hutter, SGDR, 2017)
    wsd       peak until `decay` steps before `total`, then linear decay to the floor  (Hu et al., MiniCPM, 2024)

So the rate is `peak` at step `warmup`, and `floor` at step `total` and beyond. Two have no total, and end nowhere:

    inverse_sqrt  peak · sqrt(warmup / step), but at least the floor  (Vaswani et al., 2017)
    stepwise      peak, times `factor` for each `every` steps since the warmup, but at least the floor
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sqrt
from typing import Any

from partita.dsl.spec import Call, Optimizer


def _constant(step: int, *, value: float) -> float:
    return value


def _linear(step: int, *, peak: float, warmup: int, total: int, floor: float) -> float:
    return floor + (peak - floor) * (1.0 - _share(step, warmup, total))


def _cosine(step: int, *, peak: float, warmup: int, total: int, floor: float) -> float:
    return floor + (peak - floor) * (1.0 + cos(pi * _share(step, warmup, total))) / 2.0


def _wsd(step: int, *, peak: float, warmup: int, total: int, decay: int, floor: float) -> float:
    return floor + (peak - floor) * (1.0 - _share(step, max(warmup, total - decay), total))


def _inverse_sqrt(step: int, *, peak: float, warmup: int, floor: float) -> float:
    return max(floor, peak * sqrt(warmup / step))


def _stepwise(step: int, *, peak: float, warmup: int, every: int, factor: float, floor: float) -> float:
    # Steps up to `warmup + every` have the peak.
    return max(floor, peak * factor ** (max(0, step - warmup - 1) // every))


def _share(step: int, first: int, last: int) -> float:
    """The fraction of the distance from step `first` to step `last` that is done, in [0, 1]."""
    if step >= last:
        return 1.0
    return max(0.0, (step - first) / (last - first))


LEARNING_RATES: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "stepwise": _stepwise,
}


def learning_rates(optimizer: Optimizer, step: int) -> tuple[float, ...]:
    """The learning rates of a step (from 1), one for each rule of an optimizer that updates."""
    return tuple(learning_rate(call.arguments["lr"], step) for call in optimizer.calls)


def learning_rate(call: Call, step: int) -> float:
    """The learning rate of a step (from 1)."""
    assert step >= 1, "steps count from 1"
    arguments: dict[str, Any] = dict(call.arguments)
    warmup = arguments.get("warmup", 0)
    if step < warmup:
        return float(arguments["peak"] * step / warmup)
    return float(LEARNING_RATES[call.name](step, **arguments))
