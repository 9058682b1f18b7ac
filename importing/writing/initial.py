"""How parameters begin: by the rule of the module that drew them, as far as a sample tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor

from partita.importing.said import number_text

FEW = 8  # elements that tell nothing of a distribution
NEAR = 4.0  # standard errors
CLOSE = 0.02  # how well a deviation is to be known, for a formula of any sizes or for a second digit
ROUGH = 0.1  # the same, for a formula that modules use
USUALLY = "sqrt(2 / ("  # how these begin: of Glorot's, and of He's by what a layer makes
USUAL = (1.0, 0.02)  # deviations that modules draw with


def constant(number: float) -> str:
    """All elements are one number."""
    return {0.0: "zeros()", 1.0: "ones()"}.get(number, f"constant({number_text(number)})")


def drawn(every: Tensor, fans: Mapping[str, int], others: Mapping[str, float], layers: int) -> str:
    """The distribution that elements are a sample of. `fans`: sizes, as text, that bounds of it may follow; `others`:
    variances that it may have; `layers`: of how many layers it is.
    """
    deviation, error = float(every.std()), 1 / sqrt(2 * len(every))
    bound = float(every.abs().max())
    # As `nn.Linear`, `nn.Conv2d` and `nn.LSTM` do. Of several the least is the likeliest that no element is beyond.
    for text, size in sorted(fans.items(), key=lambda each: -each[1]):
        most = 1 / sqrt(size)
        if bound <= most * 1.001 and abs(deviation * sqrt(3 * size) - 1) < NEAR * error:
            return f"uniform(1 / sqrt({text}))" if size > 1 else "uniform(1)"
    if bound < 1.9 * deviation and len(every) > 4 * FEW:
        for text, own in others.items():
            if (
                text.startswith(USUALLY)
                and bound <= sqrt(3 * own) * 1.001
                and abs(deviation / sqrt(own) - 1) < NEAR * error
            ):
                return f"uniform({text.replace('2 / (', '6 / (')})"
        return f"uniform({float(f'{bound:.2g}'):g})"
    if len(every) > FEW and abs(float(every.mean())) > max(deviation, NEAR * deviation / sqrt(len(every))):
        return f"constant({number_text(float(f'{float(every.mean()):.2g}'))})"
    usual = [f"{each:g}" for each in USUAL if abs(deviation / each - 1) < NEAR * error]
    if layers > 1 and abs(deviation * sqrt(2 * layers) / 0.02 - 1) < NEAR * error:  # as GPT-2's ends of residuals
        usual.append(f"0.02 / sqrt({2 * layers})")
    # As Glorot and Bengio (2010), and He et al. (2015), say.
    for times in (1, 2):
        for text, size in fans.items():
            if abs(deviation / sqrt(times / size) - 1) < NEAR * error:
                usual.append(f"1 / sqrt({text})" if times == 1 else f"sqrt(2 / ({text}))")
    for text, own in others.items():
        told = NEAR * error < (ROUGH if text.startswith(USUALLY) else CLOSE)
        usual += [text] * (told and abs(deviation / sqrt(own) - 1) < NEAR * error)
    return f"normal({[*usual, f'{deviation:.{1 + (NEAR * error < CLOSE)}g}'][0]})"


def is_table(several: Sequence[Tensor], trained: bool, share: float) -> bool:
    """Whether parameters of the same place of all layers are no sample: the same in all and not about zero, or not
    trained and few.
    """
    first = several[0]
    least = 2 if len(several) > 1 else FEW
    if first.numel() <= least or first.device.type == "meta" or bool((first == first.flatten()[0]).all()):
        return False
    alike = len(several) > 1 and all(torch.equal(each, first) for each in several)
    centered = abs(float(first.mean())) < NEAR * float(first.std()) / sqrt(first.numel())
    return (alike and not centered) or (not trained and share < 0.1)
