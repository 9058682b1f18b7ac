"""The seeds of replica groups (`sync = local`): each draws samples and dropout masks of its own."""

from __future__ import annotations

# Of the golden ratio, as in docs/random.md: the seeds of groups are far apart.
_STEP, _SEEDS = 0x9E3779B97F4A7C15, 1 << 63


def seed_of(seed: int, group: int) -> int:
    """The seed with which a group draws samples and dropout masks: that of the file, for the first."""
    return (seed + group * _STEP) % _SEEDS
