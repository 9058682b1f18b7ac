"""The primitive operations: one class each, registered by name in `partita.compiler.ops.op.OPS`."""

from partita.compiler.ops import (
    attend,
    collective,
    communication,
    dot,
    lookup,
    loss,
    normalize,
    optimizer,
    pointwise,
    position,
    reduce,
    shape,
)
from partita.compiler.ops.op import OPS, Op

__all__ = [
    "OPS",
    "Op",
    "attend",
    "collective",
    "communication",
    "dot",
    "lookup",
    "loss",
    "normalize",
    "optimizer",
    "pointwise",
    "position",
    "reduce",
    "shape",
]
