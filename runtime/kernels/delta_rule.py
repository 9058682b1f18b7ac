"""The gated delta rule, one position after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.registry import kernel


@kernel
def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor | None = None) -> Tensor:
    """o[t] = S[t]ᵀ·q[t] of S[t] = a[t]·S[t−1] + k[t]·(β[t]·(v[t] − (a[t]·S[t−1])ᵀ·k[t]))ᵀ, computed in f32 at least.

    q, k and the gates a: [positions, others, keys]; v and β: [positions, others]; a size may be 1 for all.
    """
    memory = widened(v.new_zeros(()))
    results = []
    for t in range(len(v)):
        key = widened(k[t])
        if gate is not None:
            memory = memory * gate[t]
        lacking = widened(beta[t]) * (widened(v[t]) - (memory * key).sum(-1))
        memory = memory + key * lacking.unsqueeze(-1)
        results.append((memory * widened(q[t])).sum(-1))
    return torch.stack(results).to(v.dtype)
