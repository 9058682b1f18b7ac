"""The memory that attention and its gradient work in, besides operands and results: on a GPU or a CPU, whichever needs
more (`partita.runtime.kernels.attention`).

Fused kernels make no scores. They may want operands padded, with rows that are dense, on two batch axes, and repeated
where heads share keys. Where scores are made, in the dtype of accumulation, the forward pass has them twice, as they
are summed up; the gradient has the weights and their gradients, and products before they are widened.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from partita.compiler.ops.fused_attention import DENOMINATORS_OF, EFFICIENT_SIZE, FLASH_SIZE, ROWS_OF, rounded_up
from partita.compiler.ops.op import wide_bytes, widening_bytes
from partita.compiler.ops.position import random_bytes, zigzag_ranks
from partita.dsl.types import BYTES, Type

if TYPE_CHECKING:
    from partita.compiler.ops.attention import Attention

ROWS = 5  # tensors with a number for each query, while results of several pieces are merged


def forward_bytes(op: Attention, operands: Sequence[Type]) -> int:
    """Of the forward pass."""
    fused = 2 * _padded(op, operands) + _denominators(op, operands) + _mask(op, operands)
    unfused = 2 * _scores(op, operands) + _given(op, operands)
    if op.random:
        unfused += _products(op, operands)
    merged = op.sink or op.in_pieces(operands)
    rows = (ROWS if merged else 2 if _makes_scores(op, operands) else 0) * _queries(op, operands)
    copies = _repeated(op, operands) + sum(_turned(op, operands))
    return max(max(unfused, fused) + copies + rows + _pieces(op, operands), _drawn(op, operands))


def gradient_bytes(op: Attention, operands: Sequence[Type]) -> int:
    """Of the gradient, of which the last operand is the output's cotangent."""
    *inputs, output, _, d = operands
    turned = _turned(op, inputs)
    # On a CPU a gradient is turned back to the order of its operand, one after the other.
    fused = 4 * _padded(op, inputs) + _denominators(op, inputs) + _mask(op, inputs) + max(turned)
    scores = (2 + op.random + (op.softcap is not None)) * _scores(op, inputs)
    weighed = wide_bytes(output) + widening_bytes(output) + widening_bytes(d)
    unfused = scores + max(_products(op, inputs), weighed if scores else 0) + _given(op, inputs)
    copies = 2 * _repeated(op, inputs) + sum(turned) + (2 * d.bytes if turned[0] else 0) + (weighed if op.sink else 0)
    rows = (ROWS if op.sink else 2) * _queries(op, inputs)
    return max(max(unfused, fused) + copies + rows + 3 * _pieces(op, inputs), _drawn(op, inputs))


def _makes_scores(op: Attention, operands: Sequence[Type]) -> bool:
    """Whether scores are materialized: on GPUs also in f64, and for heads that are too large for its kernels."""
    q, _, v = operands[:3]
    size = max(q.axis(op.along).size, v.axis(op.wide).size)
    flash = q.dtype == "bf16" and not op.segments
    return bool(op.materializes) or q.dtype == "f64" or size > (FLASH_SIZE if flash else EFFICIENT_SIZE)


def _pairs(op: Attention, operands: Sequence[Type]) -> int:
    """The number of scores."""
    q, k = operands[:2]
    return q.without([op.along]).elements * k.axis(op.over).size


def _scores(op: Attention, operands: Sequence[Type]) -> int:
    """Scores, if they are made."""
    q, k = operands[:2]
    materialized = _makes_scores(op, operands)
    return wide_bytes(q.without([op.along])) * k.axis(op.over).size if materialized else 0


def _products(op: Attention, operands: Sequence[Type]) -> int:
    """Products as large as scores, before they are widened."""
    q = operands[0]
    narrow = _makes_scores(op, operands) and widening_bytes(q) > 0
    return _pairs(op, operands) * BYTES[q.dtype] if narrow else 0


def _queries(op: Attention, operands: Sequence[Type]) -> int:
    """A number for each query."""
    return wide_bytes(operands[0].without([op.along]))


def _given(op: Attention, operands: Sequence[Type]) -> int:
    """Masks and biases as tensors on two batch axes, and which weights are kept."""
    if not op.materializes:
        return 0
    shared, own, _ = op.orders(*operands[:3])
    lead = [*shared, *own]
    sizes = [
        BYTES[x.dtype]
        for name, x in zip(op.extras, operands[3:], strict=False)
        if name in ("mask", "bias") and not _joins(x, lead[1:])
    ]
    return _pairs(op, operands) * (sum(sizes) + op.random)


def _joins(x: Type, axes: Sequence[str]) -> bool:
    """Whether axes of a tensor, which it may lack all, are one axis in memory."""
    axes = [name for name in axes if not x.has(name) or x.axis(name).size > 1]
    if not any(map(x.has, axes)):
        return True
    if not all(map(x.has, axes)):
        return False
    names = [axis.name for axis in x.axes if axis.size > 1]
    first = names.index(axes[0])
    return names[first : first + len(axes)] == axes


def _drawn(op: Attention, operands: Sequence[Type]) -> int:
    """What lives while it is drawn which weights are kept, before anything else is computed."""
    return random_bytes("keep", _pairs(op, operands)) if op.random else 0


def _mask(op: Attention, operands: Sequence[Type]) -> int:
    """What a fused kernel adds to the scores, for a window or segments: as numbers, and booleans twice."""
    q, k = operands[:2]
    if op.materializes or not (op.window or op.segments):
        return 0
    pairs = q.axis(op.over).size * rounded_up(k.axis(op.over).size, ROWS_OF)
    if op.segments:
        ids = operands[3 + op.extras.index("segments")]
        _, own, _ = op.orders(*operands[:3])
        pairs *= ids.elements // ids.axis(op.over).size
        # Where several axes are heads for the kernel, the mask repeats along those that the ids lack.
        pairs *= prod(q.axis(name).size for name in own if not ids.has(name))
    return pairs * (wide_bytes(q) // q.elements + 2)


def _repeated(op: Attention, operands: Sequence[Type]) -> int:
    """Keys and values repeated along the axes that only queries have."""
    q, k, v = operands[:3]
    _, own, _ = op.orders(q, k, v)
    return prod(q.axis(name).size for name in own) * (k.bytes + v.bytes) if own else 0


def _pieces(op: Attention, operands: Sequence[Type]) -> int:
    """What is made of queries in pieces, in the dtype of accumulation and once more as a piece makes it; in zigzag
    order also keys and values in their own.
    """
    if not op.in_pieces(operands):
        return 0
    q, k, v = operands[:3]
    attended = op.attended(q, v)
    own = 2 * wide_bytes(attended) + (attended.bytes if widening_bytes(attended) else 0)
    return own if zigzag_ranks(op.over, op.shards) is None else own + k.bytes + v.bytes


def _turned(op: Attention, operands: Sequence[Type]) -> tuple[int, int, int]:
    """Queries, keys and values that do not lie as kernels want them, with the batch axes that they lack: with dense
    rows, on two batch axes, and where scores are made by products on one.
    """
    q, k, v = operands[:3]
    shared, own, _ = op.orders(q, k, v)
    sizes = []
    for x, row in ((q, op.along), (k, op.along), (v, op.wide)):
        lead = [*shared, *(own if x is q else ())][not op.materializes :]
        # Products copy what was expanded, which may be any of them where scores are made.
        lies = x.names[-1] == row and _joins(x, lead) and not _makes_scores(op, operands)
        sizes.append(0 if lies else x.bytes * prod(q.axis(name).size for name in shared if not x.has(name)))
    return sizes[0], sizes[1], sizes[2]


def _padded(op: Attention, operands: Sequence[Type]) -> int:
    """A query, key or value padded to the larger of their sizes, which fused kernels want equal; on GPUs a multiple."""
    q, k, v = operands[:3]
    along, wide = q.axis(op.along).size, v.axis(op.wide).size
    if op.materializes:
        return 0
    larger = rounded_up(max(along, wide), ROWS_OF)
    if along == wide == larger:
        return 0
    _, own, _ = op.orders(q, k, v)
    repeated = prod(q.axis(name).size for name in own)
    return q.bytes // along * larger + repeated * max(k.bytes // along, v.bytes // wide) * larger


def _denominators(op: Attention, operands: Sequence[Type]) -> int:
    """Denominators of as many queries as a kernel of GPUs makes them for, if these are more."""
    q = operands[0]
    queries = [q.axis(name).size for name in op.queries(operands)]
    count = queries[-1] if op.orders(*operands[:3])[2] else 1
    if op.materializes or count % DENOMINATORS_OF == 0:
        return 0
    return _queries(op, operands) // count * rounded_up(count, DENOMINATORS_OF)
