"""Constants, recognized by their elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from partita.importing.patterns.scalings import Scaling

# What attention adds to a score that does not count is at most this.
MASKED = -1e4


@frozen
class Mask:
    """Which keys a query may attend to: those up to its own position if `causal`, and less than `window` away."""

    causal: bool
    window: int | None


def mask_of(elements: Tensor) -> Mask | None:
    """What a mask along [..., query, key] says: true, or 0, where a query may attend. None if it is another one."""
    if elements.dim() < 2:
        return None
    if elements.dtype != torch.bool:
        if not bool(((elements == 0) | (elements <= MASKED)).all()):
            return None
        elements = elements == 0
    each = elements.reshape(-1, *elements.shape[-2:])
    if not bool((each == each[:1]).all()):
        return None
    allowed = each[0]
    queries, keys = allowed.shape
    if bool(allowed.all()):
        return Mask(False, None)
    if queries != keys:
        return None
    behind = torch.arange(queries)[:, None] - torch.arange(keys)[None]
    widest = int(behind[allowed].max()) + 1
    if torch.equal(allowed, behind >= 0):
        return Mask(True, None)
    if torch.equal(allowed, (behind >= 0) & (behind < widest)):
        return Mask(True, widest)
    return Mask(False, widest) if torch.equal(allowed, behind.abs() < widest) else None


def progression_of(elements: Tensor) -> Tensor | None:
    """An arithmetic progression of numbers with few digits, in f64: 0.1, 0.5, 0.9 of a table in f32."""
    if len(elements) < 2:
        return None
    exact = elements.double()
    first, step = (float(f"{float(each):.6g}") for each in (exact[0], exact[1] - exact[0]))
    made = first + step * torch.arange(len(exact), dtype=torch.float64)
    return made if torch.equal(made.float(), exact.float()) else None


def band_of(elements: Tensor) -> tuple[int | None, int | None] | None:
    """The least and the most by which a row is behind a column, of a table [row, column] that is true there alone."""
    rows, columns = elements.shape
    behind = torch.arange(rows)[:, None] - torch.arange(columns)[None]
    if not bool(elements.any()):
        return None
    least, most = int(behind[elements].min()), int(behind[elements].max())
    if not torch.equal(elements, (behind >= least) & (behind <= most)):
        return None
    return (least if least > 1 - columns else None), (most if most < rows - 1 else None)


def scaling_of(cosines: Tensor, sines: Tensor, scalings: Sequence[tuple[float, Scaling]]) -> tuple[float, str] | None:
    """The base and the text of the scaling whose angles tables have at [position, pair]."""
    positions, pairs = cosines.shape
    for base, scaling in scalings:
        rates, factor = scaling.rates(base, pairs)
        angles = torch.arange(positions).double()[:, None] * rates
        exact = ((angles.cos() * factor, cosines), (angles.sin() * factor, sines))
        if all(rounded(ours, theirs, angles) for ours, theirs in exact):
            return base, scaling.text
    return None


def base_of(cosines: Tensor, sines: Tensor) -> float | None:
    """The base of rotary positions whose angles at [position, pair] are position · base^(-pair / pairs)."""
    positions, pairs = cosines.shape
    if positions < 2:
        return None
    cosines, sines = cosines.double(), sines.double()
    angles = torch.atan2(sines[1], cosines[1])
    base = float(f"{float(angles[1] ** -pairs):.4g}") if pairs > 1 else 10_000.0
    exact = torch.arange(positions).double()[:, None] * base ** (-torch.arange(pairs).double() / pairs)
    near = all(rounded(ours, theirs, exact) for ours, theirs in ((exact.cos(), cosines), (exact.sin(), sines)))
    return base if near else None


def rounded(exact: Tensor, table: Tensor, angles: Tensor) -> bool:
    """Whether a table is an exact one but for rounding in f32 of angles, of frequencies, and of results."""
    return bool(((exact - table.double()).abs() <= 4e-7 * (1 + angles.abs())).all())
