"""Loops along an axis: what is added up over the positions is added in f32."""

from __future__ import annotations

import torch

from partita.runtime.kernels.scan import scan


def test_sums_over_positions_are_not_rounded_at_each():
    terms = torch.full((300,), 1.0 / 256, dtype=torch.bfloat16)
    (total,) = scan(lambda x: (x,), [], [terms], [], 300, 0, False)
    assert float(total) == 300 / 256  # in bf16 it would stop growing
