"""How rotary positions are scaled for longer texts: as the configuration of a module says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from partita.importing.said import call, number_text
from partita.runtime.kernels.positions import SCALINGS


@frozen
class Scaling:
    """A scaling with its arguments: as text, and as numbers in the order of the kernel."""

    name: str
    text: str
    arguments: tuple[Any, ...]

    def rates(self, base: float, count: int) -> tuple[Tensor, float]:
        """The angle between two positions, for each of so many pairs, and the factor of what is turned."""
        return SCALINGS[self.name](base ** (-torch.arange(count, dtype=torch.float64) / count), base, *self.arguments)


def scalings(module: nn.Module) -> list[tuple[float, Scaling]]:
    """The bases and scalings that configurations of a module and of its parts name."""
    found: dict[tuple[float, Scaling], None] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        for each in _each(given):
            scaling = _scaling(each)
            base = each.get("rope_theta", getattr(config, "rope_theta", 10_000.0))
            if scaling is not None:
                found[float(base), scaling] = None
    return list(found)


def _each(given: Any) -> Iterator[Mapping[str, Any]]:
    """Parameters of positions; some configurations have them by kind of layer."""
    if isinstance(given, Mapping):
        if "rope_type" in given or "type" in given:
            yield given
        else:
            yield from (each for each in given.values() if isinstance(each, Mapping))


def _scaling(given: Mapping[str, Any]) -> Scaling | None:
    kind, factor = given.get("rope_type", given.get("type")), given.get("factor")
    original = given.get("original_max_position_embeddings")
    if factor is None or original is None:
        return None
    named: dict[str, Any] = {"factor": number_text(float(factor)), "original": int(original)}
    if kind == "llama3":
        low, high = float(given.get("low_freq_factor", 1.0)), float(given.get("high_freq_factor", 4.0))
        named |= {"low": number_text(low) if low != 1 else None, "high": number_text(high) if high != 4 else None}
        return Scaling("llama3", call("llama3", **named), (float(factor), int(original), low, high))
    if kind == "yarn":
        fast, slow = float(given.get("beta_fast") or 32), float(given.get("beta_slow") or 1)
        attention, truncate = given.get("attention_factor"), bool(given.get("truncate", True))
        scale, whole = given.get("mscale"), given.get("mscale_all_dim")
        if attention is None and scale and whole:
            attention = _grown(float(factor), float(scale)) / _grown(float(factor), float(whole))
        named |= {
            "fast": number_text(fast) if fast != 32 else None,
            "slow": number_text(slow) if slow != 1 else None,
            "attention": None if attention is None else number_text(float(attention)),
            "truncate": None if truncate else False,
        }
        return Scaling("yarn", call("yarn", **named), (float(factor), int(original), fast, slow, attention, truncate))
    return None


def _grown(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * float(torch.tensor(factor, dtype=torch.float64).log()) + 1.0
