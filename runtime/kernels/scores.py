"""The scores of a piece of attention, queries of consecutive positions and such keys, and what is made of them, on
[B, H, position, over]: by torch's fused kernels where one applies, otherwise materialized.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from operator import and_

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn.functional import pad

from partita.compiler.ops.fused_attention import (
    CUDNN_SIZE,
    DENOMINATORS_OF,
    EFFICIENT_LENGTH,
    EFFICIENT_SIZE,
    FLASH_SIZE,
    ROWS_OF,
    rounded_up,
)
from partita.compiler.ops.runs import Runs
from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.native import attention as native
from partita.runtime.kernels.pieces import Piece, in_order, part

CUDNN_VERSION = 91500  # 9.15.0

aten = torch.ops.aten
flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def plain_attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention on a CPU that nothing but causality restricts, with queries from the first key on."""
    q, k, v = rows(q), rows(k), rows(v)
    result = native.attended(q, k, v, causal, scale)
    if result is not None:
        return result
    return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def plain_gradients(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, denominator: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients of queries, keys and values."""
    d, q, k, v, o = (rows(x) for x in (d, q, k, v, o))
    result = native.gradients(d, q, k, v, o, denominator, causal, scale)
    if result is not None:
        return result
    dq, dk, dv = flash_backward(d, q, k, v, o, denominator, 0.0, causal, scale=scale)
    return dq, dk, dv


def rows(x: Tensor) -> Tensor:
    """The tensor with rows that are dense in memory and do not overlap: torch's kernel assumes that, and passes their
    stride to BLAS, which computes nothing if it is shorter than a row (one key for all positions).
    """
    if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _padded_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors with rows of one length, the shorter padded with zeros: products with them stay what they are. Kernels of
    GPUs take rows of eights.
    """
    longest = max(x.shape[-1] for x in tensors)
    if tensors[0].is_cuda:
        longest = rounded_up(longest, ROWS_OF)
    return [x if x.shape[-1] == longest else pad(x, (0, longest - x.shape[-1])) for x in tensors]


def unpadded(x: Tensor, count: int) -> Tensor:
    """The first positions along the last axis, in memory of their own: what they were padded with is not kept."""
    return x if x.shape[-1] == count else x[..., :count].clone(memory_format=torch.contiguous_format)


@cache
def prefers_cudnn(device: torch.device) -> bool:
    """Whether torch's own choice of a kernel on a GPU begins with cuDNN's: on Hopper and on Blackwell, with a version
    that is right for lengths that are no multiple of 128 (`check_prefer_cudnn_attention` in torch's `sdp_utils.cpp`).
    """
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    major, _ = torch.cuda.get_device_capability(device)
    return version is not None and version > CUDNN_VERSION and major in (9, 10)


@frozen(eq=False)
class Scores:
    """How scores are made of queries and keys: what they are given besides, on [B, H, position, over]."""

    causal: bool
    scale: float
    start: int = 0
    window: int | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    segments: Tensor | None = None
    keep: Tensor | None = None
    rate: float = 0.0
    own: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether causality alone, if anything, restricts what queries see."""
        return not self.materialized and self.window is None and self.segments is None

    @property
    def materialized(self) -> bool:
        """Whether no fused kernel makes them."""
        return any(each is not None for each in (self.mask, self.bias, self.softcap, self.keep))

    def allowed(self, q4: Tensor, k4: Tensor) -> Tensor | None:
        """A boolean tensor that broadcasts to the scores; None if everything is allowed."""
        masks = [each for each in (self.mask, self._near(q4, k4), self._same()) if each is not None]
        return reduce(and_, masks) if masks else None

    def _near(self, q4: Tensor, k4: Tensor) -> Tensor | None:
        """Where causality and the window let positions see each other."""
        if not self.causal and self.window is None:
            return None
        count, start = q4.shape[-2], self.start
        allowed = torch.ones(count, k4.shape[-2], dtype=torch.bool, device=q4.device)
        if self.causal:
            allowed = allowed.tril(start)
        if self.window is not None:
            allowed = allowed.triu(start - self.window + 1)
            if not self.causal:
                allowed = allowed.tril(start + self.window - 1)
        return allowed

    def _same(self) -> Tensor | None:
        """Where the query's segment is the key's."""
        return None if self.segments is None or self.own is None else self.own.transpose(-1, -2) == self.segments

    def added(self, q4: Tensor, k4: Tensor) -> tuple[bool, Tensor | None]:
        """Arguments for torch's own kernel: causal, if queries begin at the first key; otherwise numbers to add."""
        alone = self.segments is None and self.window is None and not (self.causal and self.start)
        allowed = None if alone else self.allowed(q4, k4)
        if allowed is None:
            return self.causal, None
        keys = allowed.shape[-1]
        width = rounded_up(keys, ROWS_OF) if q4.is_cuda else keys  # where a row begins in memory
        added = torch.zeros((*allowed.shape[:-1], width), dtype=q4.dtype, device=q4.device)[..., :keys]
        return False, added.masked_fill_(~allowed, float("-inf"))

    def made(self, q4: Tensor, k4: Tensor, slopes: bool = False) -> tuple[Tensor, Tensor | None]:
        """The scores, and if asked for the slope of the soft cap. What is as large as scores is changed in place, here
        and below: it is most of the memory of attention that has it.
        """
        scores = widened(q4 @ k4.transpose(-1, -2)).mul_(self.scale)
        slope = None
        if self.softcap is not None:
            bounded = scores.div_(self.softcap).tanh_()
            if slopes:
                scores = bounded * self.softcap
                slope = bounded.square_().neg_().add_(1)
            else:
                scores = bounded.mul_(self.softcap)
        if self.bias is not None:
            scores.add_(self.bias)
        allowed = self.allowed(q4, k4)
        if allowed is not None:
            scores.masked_fill_(allowed.logical_not(), float("-inf"))
        return scores, slope

    def kept(self, weights: Tensor) -> Tensor:
        """Weights, or their gradients, after dropout."""
        return weights if self.keep is None else (weights * self.keep).div_(1 - self.rate)

    def fused(self, q4: Tensor) -> bool:
        """Whether torch's own kernel with its gradient applies: on a CPU."""
        return not self.materialized and q4.is_cpu

    @property
    def placed(self) -> bool:
        """Whether positions count."""
        return self.causal or self.window is not None or self.segments is not None

    def flash(self, q4: Tensor, k4: Tensor, v4: Tensor) -> bool:
        """Whether FlashAttention applies: on a GPU, in half precision, up to a head size. Where positions count, it
        aligns the last query with the last key.
        """
        if self.materialized or self.segments is not None or not q4.is_cuda:
            return False
        fits = q4.dtype in (torch.bfloat16, torch.float16) and max(q4.shape[-1], v4.shape[-1]) <= FLASH_SIZE
        return fits and (not self.placed or self.start + q4.shape[-2] == k4.shape[-2])

    def cudnn(self, q4: Tensor, k4: Tensor, v4: Tensor) -> bool:
        """Whether cuDNN's attention applies where FlashAttention does: up to a head size, without a window. It aligns
        the first query with the first key, and does not know a single key.
        """
        if self.window is not None or (self.placed and self.start) or k4.shape[-2] == 1:
            return False
        return max(q4.shape[-1], v4.shape[-1]) <= CUDNN_SIZE and prefers_cudnn(q4.device)

    def efficient(self, q4: Tensor, k4: Tensor, v4: Tensor) -> bool:
        """Whether memory-efficient attention (Rabe and Staats, arXiv 2112.05682, as xFormers has it) applies: on a GPU,
        in f32 as well, where every query sees its own position, up to a head size and a length.
        """
        if self.materialized or not q4.is_cuda or max(q4.shape[-2], k4.shape[-2]) > EFFICIENT_LENGTH:
            return False
        fits = q4.dtype in (torch.float32, torch.bfloat16, torch.float16)
        fits = fits and max(q4.shape[-1], v4.shape[-1]) <= EFFICIENT_SIZE
        return fits and (not self.placed or 0 <= self.start <= k4.shape[-2] - q4.shape[-2])

    def at(self, queries: Runs, keys: Runs) -> Scores:
        """With what is given besides in the order of positions, and the segments of the queries, which are those of the
        keys at their positions. All three begin in the order in which queries and keys stand.
        """
        segments = in_order(self.segments, -1, keys)
        own = segments
        if segments is not None:
            own = torch.cat([segments.narrow(-1, start, count) for start, count in sorted(queries)], -1)
        tensors = (in_order(in_order(each, -1, keys), -2, queries) for each in (self.mask, self.bias, self.keep))
        mask, bias, keep = tensors
        return evolve(self, mask=mask, bias=bias, keep=keep, segments=segments, own=own)

    def of(self, piece: Piece) -> Scores:
        """Those of a piece."""
        tensors = (self.mask, self.bias, self.keep)
        mask, bias, keep = (None if x is None else part(part(x, -2, piece.queries), -1, piece.keys) for x in tensors)
        segments = None if self.segments is None else part(self.segments, -1, piece.keys)
        own = None if self.own is None else part(self.own, -1, piece.queries)
        return evolve(
            self,
            causal=piece.causal,
            start=piece.start,
            mask=mask,
            bias=bias,
            keep=keep,
            segments=segments,
            own=own,
        )


def attended(how: Scores, q4: Tensor, k4: Tensor, v4: Tensor) -> tuple[Tensor, Tensor]:
    """The attended values, as wide as the wider of keys and values, and the logarithm of the denominator: −∞ for a
    query that may attend to nothing, which yields zero.
    """
    if how.fused(q4):
        causal, added = how.added(q4, k4)
        q4, k4, v4 = _padded_rows(q4, k4, v4)
        if added is None:
            return plain_attended(q4, k4, v4, causal, how.scale)
        o, denominator = aten._scaled_dot_product_flash_attention_for_cpu(
            q4, k4, v4, 0.0, causal, attn_mask=added, scale=how.scale
        )
        return o, denominator
    if how.flash(q4, k4, v4):
        kernel = _cudnn if how.cudnn(q4, k4, v4) else _flash
        return kernel(how, *_padded_rows(q4, k4, v4))
    if how.efficient(q4, k4, v4):
        causal, added = how.added(q4, k4)
        o, denominator, *_ = aten._scaled_dot_product_efficient_attention(
            *_padded_rows(q4, k4, v4), _of_all_heads(added, q4), True, 0.0, causal, scale=how.scale
        )
        return o, unpadded(denominator, q4.shape[-2])
    scores, _ = how.made(q4, k4)
    denominator = torch.logsumexp(scores, -1)
    finite = denominator.masked_fill(denominator == float("-inf"), 0.0)
    return how.kept(scores.sub_(finite.unsqueeze(-1)).exp_()).to(v4.dtype) @ v4, denominator


def gradients(
    how: Scores, q4: Tensor, k4: Tensor, v4: Tensor, o4: Tensor, l4: Tensor, d4: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys and values, and of the scores where they are made. `o4`, `l4` and `d4` are the
    attended values, the logarithm of the denominator (zero for a query that may attend to nothing) and the cotangent:
    of all keys, also if these are some.
    """
    if how.fused(q4):
        causal, added = how.added(q4, k4)
        d4, q4, k4, v4, o4 = _padded_rows(d4, q4, k4, v4, o4)
        if added is None:
            return *plain_gradients(d4, q4, k4, v4, o4, l4, causal, how.scale), None
        dq, dk, dv = flash_backward(d4, q4, k4, v4, o4, l4, 0.0, causal, attn_mask=added, scale=how.scale)
        return dq, dk, dv, None
    if how.flash(q4, k4, v4):
        kernel = _cudnn_gradient if how.cudnn(q4, k4, v4) else _flash_gradient
        dq, dk, dv = kernel(how, _padded_rows(d4, q4, k4, v4, o4), l4)
        return dq, dk, dv, None
    if how.efficient(q4, k4, v4):
        d4, q4, k4, v4, o4 = _padded_rows(d4, q4, k4, v4, o4)
        causal, added = how.added(q4, k4)
        state = q4.new_empty((), dtype=torch.int64)  # not read without dropout
        count = l4.shape[-1]
        l4 = pad(l4, (0, rounded_up(count, DENOMINATORS_OF) - count), value=float("inf"))  # as the forward kernel does
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            d4, q4, k4, v4, _of_all_heads(added, q4), o4, l4.contiguous(), state, state, 0.0, [True, True, True, False],
            causal,
            scale=how.scale,
        )  # fmt: skip
        return dq, dk, dv, None
    p, slope = how.made(q4, k4, slopes=True)
    p.sub_(l4.unsqueeze(-1)).exp_()
    dv = how.kept(p).to(d4.dtype).transpose(-1, -2) @ d4
    biased = how.kept(widened(d4 @ v4.transpose(-1, -2)))
    biased.sub_((widened(o4) * widened(d4)).sum(-1, keepdim=True)).mul_(p)
    del p
    capped = biased if slope is None else slope.mul_(biased)
    ds = torch.mul(capped, how.scale, out=capped.new_empty(capped.shape, dtype=q4.dtype))
    return ds @ k4, ds.transpose(-1, -2) @ q4, dv, biased


def _of_all_heads(added: Tensor | None, q4: Tensor) -> Tensor | None:
    """What is added to scores, as a view for all heads."""
    return None if added is None else added.expand(*q4.shape[:2], *added.shape[-2:])


def _flash(how: Scores, q4: Tensor, k4: Tensor, v4: Tensor) -> tuple[Tensor, Tensor]:
    """FlashAttention: the result and the logarithm of the denominator."""
    if how.window is None:
        o, denominator, *_ = aten._scaled_dot_product_flash_attention(q4, k4, v4, 0.0, how.causal, scale=how.scale)
        return o, denominator
    across = [x.transpose(1, 2) for x in (q4, k4, v4)]
    o, denominator, *_ = aten._flash_attention_forward(
        *across,
        None,
        None,
        q4.shape[-2],
        k4.shape[-2],
        0.0,
        how.causal,
        False,
        scale=how.scale,
        **_sides(how.window, how.causal),
    )
    return o.transpose(1, 2), denominator


def _flash_gradient(how: Scores, tensors: Sequence[Tensor], l4: Tensor) -> tuple[Tensor, ...]:
    """Its gradients, of the output's cotangent, queries, keys, values and the output."""
    _, q4, k4, *_ = tensors
    # Without dropout the random state is not read; sequences of one length have no list of lengths.
    numbers = q4.new_empty(3, dtype=torch.uint64)  # one tensor: torch.compile fills a number of its own
    state, offset = numbers.narrow(0, 0, 2), numbers.select(0, 2)
    lengths = None, None, q4.shape[-2], k4.shape[-2]
    if how.window is None:
        result = aten._scaled_dot_product_flash_attention_backward(
            *tensors, l4, *lengths, 0.0, how.causal, state, offset, scale=how.scale
        )
        return tuple(result)
    across = [x.transpose(1, 2) for x in tensors]
    result = aten._flash_attention_backward(
        *across, l4, *lengths, 0.0, how.causal, state, offset, scale=how.scale, **_sides(how.window, how.causal)
    )
    return tuple(x.transpose(1, 2) for x in result)


def _cudnn(how: Scores, q4: Tensor, k4: Tensor, v4: Tensor) -> tuple[Tensor, Tensor]:
    """cuDNN's attention: the result and the logarithm of the denominator."""
    o, denominator, *_ = aten._scaled_dot_product_cudnn_attention(
        q4, k4, v4, None, True, 0.0, how.causal, scale=how.scale
    )
    return o, denominator.reshape(q4.shape[:-1])


def _cudnn_gradient(how: Scores, tensors: Sequence[Tensor], l4: Tensor) -> tuple[Tensor, ...]:
    """Its gradients, of the output's cotangent, queries, keys, values and the output."""
    _, q4, k4, *_ = tensors
    state = q4.new_empty((), dtype=torch.int64)  # not read without dropout
    lengths = None, None, q4.shape[-2], k4.shape[-2]
    result = aten._scaled_dot_product_cudnn_attention_backward(
        *tensors, l4.unsqueeze(-1).contiguous(), state, state, None, *lengths, 0.0, how.causal, scale=how.scale
    )
    return tuple(result)


def _sides(window: int, causal: bool) -> dict[str, int]:
    """FlashAttention's window: how far to the left and to the right a query sees."""
    return {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1}
