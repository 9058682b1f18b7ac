"""Formats numbers for people: `1.5 GiB`, `12.4 M`, `3.2 ms`."""

from __future__ import annotations

from collections.abc import Sequence

Unit = tuple[str, float]
UNITS: Sequence[Unit] = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))


def unit_of(largest: float, units: Sequence[Unit] = UNITS) -> Unit:
    """The unit, of some in ascending order, for an axis that ends at `largest`: the largest that is not beyond."""
    return next((each for each in reversed(units) if each[1] <= largest), units[0])


def bytes_text(value: float) -> str:
    """Bytes in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count_text(value: float) -> str:
    """A count in powers of 1000."""
    for unit in ("", " K", " M", " B"):
        if abs(value) < 1000:
            return f"{value:.0f}{unit}" if unit == "" else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f} T"


def seconds_text(value: float) -> str:
    """Seconds, milliseconds or microseconds."""
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} µs"


def microbatches_text(count: int, slices: int = 1) -> str:
    """`8 microbatches`, `8 microbatches of 2 slices`: of `count` that are slices."""
    parts = count // slices
    return f"{parts} microbatch{'es' * (parts > 1)}" + (f" of {slices} slices" if slices > 1 else "")


def percent_text(value: float) -> str:
    """A share in percent."""
    return f"{value:.1%}"


def short_text(value: float) -> str:
    """A number without a unit in about five digits."""
    return f"{value:.4g}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:.4f}".rstrip("0").rstrip(".")


def plain_text(value: float) -> str:
    """A number without a unit."""
    return f"{value:,.6g}"


def queues_text(needed: int) -> str:
    """What the streams of a GPU need of its hardware queues, of which there are up to 32."""
    if needed == 1:
        return "hosts may wait in any action, and streams may share a hardware queue"
    return f"hosts may wait in any action; each of {needed} streams needs a hardware queue of its own"


def listed_numbers(numbers: Sequence[int], limit: int | None = None) -> str:
    """`0 to 11`, `0, 3, 7`, or `0, 3 …` of more than `limit`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:limit]))
    return f"{shown} …" if limit is not None and len(numbers) > limit else shown
