"""Groups that train apart (`sync = local`): their seeds, and what a rank keeps for each.

Group g has the g-th equal part of the rows of each batch, and draws samples and dropout masks with a seed of its own.
Ranks along the mesh axis of groups train neighboring groups, those of one rank one after the other. All groups begin
with the same parameters. What is not trained they share.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import frozen

from partita.compiler.layout import Layout
from partita.compiler.ops.groups import ANCHOR
from partita.compiler.program import ParameterRecord, Program
from partita.dsl.types import Type

# Of the golden ratio, as in docs/random.md: the seeds of groups are far apart.
_STEP, _SEEDS = 0x9E3779B97F4A7C15, 1 << 63


def seed_of(seed: int, group: int) -> int:
    """The seed with which a group draws samples and dropout masks: that of the file, for the first."""
    return (seed + group * _STEP) % _SEEDS
