"""A walk that also says where rounding decides what is computed, and how large values become."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import torch
from attrs import define
from torch import Tensor

from partita.dsl import spec
from partita.runtime.interpreter.named import Named
from partita.runtime.interpreter.walk import At, Walk


@define(eq=False)
class Cautious(Walk):
    """A walk. `largest` is that of all finite values computed, and infinite where rounding decides what is chosen."""

    largest: float = 0.0

    def outputs(self) -> dict[str, Tensor]:
        """The model's outputs, with axes in the order of their types."""
        values = self.body(self.model.answering, self.model.name, self.given())
        return {name: values[index].data.detach() for name, index in self.model.outputs}

    def apply(self, step: spec.Apply, path: str, values: Sequence[Named]) -> Named:
        result = super().apply(step, path, values)
        if result.data.is_floating_point() and result.data.numel():
            finite = result.data.detach().nan_to_num(0.0, 0.0, 0.0)
            self.largest = max(self.largest, float(finite.abs().max()))
        return result

    def _accuracy(self, at: At, logits: Named, targets: Named, *rest: Named) -> Named:
        """No number where rounding decides which logit is the greatest."""
        best = logits.ordered([*targets.axes, at.options["over"]]).data.sort(-1).values
        if best.shape[-1] > 1 and bool((best[..., -1] - best[..., -2]).abs().min() <= 1e-9 * best.abs().max()):
            return Named(torch.tensor(nan, dtype=torch.float64))
        return super()._accuracy(at, logits, targets, *rest)

    def _top_k(self, at: At, x: Named) -> Named:
        over = at.options["over"]
        ranked = x.ordered([*(name for name in x.axes if name != over), over]).data.detach().sort(-1, True).values
        gaps = (ranked[..., :-1] - ranked[..., 1:])[..., : at.sizes[at.options["into"]]]
        if gaps.numel() and bool(gaps.min() <= 1e-9 * (ranked.abs().max() + 1e-9)):
            self.largest = inf
        return super()._top_k(at, x)
