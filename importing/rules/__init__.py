"""Operations of this package: which dimensions are one axis, and what the language says for each."""

from partita.importing.rules import (
    attention,
    convolution,
    ctc,
    layers,
    loops,
    pointwise,
    products,
    recurrence,
    routing,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "ctc",
    "layers",
    "loops",
    "pointwise",
    "products",
    "recurrence",
    "routing",
    "views",
]
