"""The next id from its logits: the most likely one, or one drawn by a pure function of (seed, position)."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from partita.runtime.initial import unit_uniform
from partita.runtime.philox import stream, words


@frozen
class Choice:
    """How an id is chosen of logits. With `temperature` zero it is the most likely one, the first of them. Otherwise
    logits are divided by the temperature, then all but the `top_k` largest are left out, then all but the most likely
    that together have probability `top_p` (the nucleus of Holtzman et al., arXiv 1904.09751), and one is drawn.

    What a run writes after a `step` of training is drawn anew for each.
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    step: int | None = None

    def of(self, logits: Tensor, index: int) -> int:
        """The id at `index` of the text, from logits [vocabulary]."""
        if self.temperature == 0:
            return int(logits.argmax())
        # Stable, so that equal logits are in the order of their ids.
        scores, ids = (logits.double() / self.temperature).sort(descending=True, stable=True)
        if self.top_k is not None:
            scores, ids = scores[: self.top_k], ids[: self.top_k]
        reached = scores.softmax(0).cumsum(0)
        count = int((reached < self.top_p).sum()) + 1  # up to the first with which they have the probability
        reached = reached[:count]
        key = stream(self.seed, "sample", index, "" if self.step is None else f"step {self.step}")
        drawn = float(unit_uniform(words(key, 0, 1))[0])
        return int(ids[min(int((reached <= drawn * reached[-1]).sum()), len(reached) - 1)])


def drawn_in_rows(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """An id for each row of logits [rows, vocabulary], divided by a temperature; and the logarithm of its probability,
    f64: it is the first id at which the sum of probabilities up to it exceeds the row's number in `uniform`, [0, 1).
    """
    scores = logits.double()
    scores = (scores - scores.amax(1, keepdim=True)) / temperature
    reached = scores.exp().cumsum(1)
    total = reached[:, -1:]
    ids = torch.searchsorted(reached, uniform[:, None] * total, right=True).clamp(max=logits.shape[1] - 1)
    return ids[:, 0], (scores.gather(1, ids) - total.log())[:, 0]
