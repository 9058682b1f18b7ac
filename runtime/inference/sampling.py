"""Writing text: ids one after the other, each chosen by the logits that the model gives for what is there so far.

The model sees at most as many ids as its sequence is long, the window. Once they fill it, it goes on with the last half
of them, at the first positions: what the logits are computed by (`Scorer`) makes no difference to the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.runtime.inference.choice import Choice
from partita.runtime.inference.scoring import Scorer


def written(scorer: Scorer, prompt: Sequence[int], length: int, choice: Choice) -> Iterator[int]:
    """`length` ids that follow a prompt of from one to `window` ids, as they are chosen."""
    ids = list(prompt)
    for index in range(length):
        if len(ids) > scorer.model.window:
            ids = ids[-max(1, scorer.model.window // 2) :]
        ids.append(choice.of(scorer.logits(ids), index))
        yield ids[-1]
