"""Convolution, against torch's own; which windows can be split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from partita.compiler.graph import Builder, Value
from partita.compiler.ops.convolution import Conv
from partita.compiler.ops.windows import Patches
from partita.dsl.types import Axis, Type
from partita.runtime import kernels
from tests.compiler.interpret import interpret

BATCH, CHANNELS, FILTERS = Axis("batch", 2), Axis("channels", 4), Axis("filters", 6)
SPATIAL = [Axis("depth", 5), Axis("height", 7), Axis("width", 6)]
POSITIONS = [Axis("planes", 3), Axis("rows", 4), Axis("columns", 3)]
WINDOW = [Axis("kd", 3), Axis("kh", 3), Axis("kw", 2)]


def conv(count: int) -> Conv:
    """Along so many axes, with a stride of 2."""
    return Conv(
        axes=tuple(SPATIAL[:count]),
        into=tuple(POSITIONS[:count]),
        size=tuple(WINDOW[:count]),
        stride=(2,) * count,
        padding=((1, 1), (1, 1), (0, 0))[:count],
        dilation=(1,) * count,
        over=("channels",),
    )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_torch_computes_the_same(count: int, channels_last: bool, dtype: str):
    """Of images in the order in which torch has them, and in that of many files."""
    op = conv(count)
    image = (BATCH, *op.axes, CHANNELS) if channels_last else (BATCH, CHANNELS, *op.axes)
    x, w = Value("x", Type(dtype, image)), Value("w", Type(dtype, (*op.size, CHANNELS, FILTERS)))
    generator = torch.Generator().manual_seed(count)
    feeds = {v: torch.randn(v.type.shape, generator=generator).to(TORCH[dtype]) for v in (x, w)}
    build = Builder()
    result = build.apply(op, x, w)
    (found,) = interpret(build.nodes, feeds, [result])
    first = (BATCH, *op.into, FILTERS) if channels_last else (BATCH, FILTERS, *op.into)
    assert result.type == Type(dtype, first)
    torchs = feeds[x].movedim(-1, 1) if channels_last else feeds[x]
    kernel = feeds[w].permute(count + 1, count, *range(count))
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[count - 1]
    padding = tuple(before for before, _ in op.padding)
    expected = function(torchs.double(), kernel.double(), None, op.stride, padding)
    expected = expected.movedim(1, -1) if channels_last else expected
    torch.testing.assert_close(found.double(), expected, rtol=2e-2 if dtype == "bf16" else 1e-5, atol=1e-4)
    if dtype == "bf16":  # products are summed in more digits than they have: rounded once, not at each sum
        assert (found.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


TORCH = {"f32": torch.float32, "bf16": torch.bfloat16}


def test_windows_have_memory_of_their_own():
    """Though a view may show them."""
    x = torch.arange(6.0)
    for sizes, stride in (((1,), (1,)), ((2,), (2,)), ((2,), (1,))):
        found = kernels.patches(x, (0,), sizes, stride, ((0, 0),), (1,), 0.0)
        assert found.is_contiguous()
        assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_what_lies_outside_has_the_dtype_of_the_image(dtype: torch.dtype):
    """A number that is too large for it is its largest."""
    x = torch.ones(2, dtype=dtype)
    fill = -1e300 if dtype.is_floating_point else -3 if dtype == torch.int32 else 0.0
    found = kernels.patches(x, (0,), (1,), (1,), ((1, 0),), (1,), fill)
    assert found.dtype == dtype
    least = torch.finfo(dtype).min if dtype.is_floating_point else fill
    assert found.flatten().tolist() == [least, 1, 1]


def test_a_fold_adds_up_in_more_digits_than_bf16_has():
    d = torch.full((300, 300), 1.0, dtype=torch.bfloat16)
    found = kernels.fold(d, (0,), (599,), (1,), ((0, 0),), (1,))
    assert float(found[299]) == 300


@pytest.mark.parametrize(
    ("size", "stride", "padding", "split"),
    [(2, 2, 0, True), (1, 2, 0, True), (1, 1, 0, True), (3, 2, 1, False), (3, 2, 0, False), (2, 2, 1, False)],
)
def test_only_windows_that_lie_apart_are_split(size: int, stride: int, padding: int, split: bool):
    """A part of the image has its own windows then, and they are the right ones."""
    count = (12 + 2 * padding - size) // stride + 1
    x, rows, window = Axis("x", 12), Axis("rows", count), Axis("window", size)
    op = Patches((x,), (rows,), (window,), (stride,), ((padding, padding),), (1,))
    rules = op.sharding_rules([Type("f64", (x,))], op.infer(Type("f64", (x,))))
    assert any(rule.operands == ("x",) for rule in rules) == split
    if not split:
        return
    local = op.sharded("x", 6, "data", 2).sharded("rows", count // 2, "data", 2)
    data = torch.from_numpy(np.random.default_rng(0).normal(size=12))
    value, part = Value("x", Type("f64", (x,))), Value("part", Type("f64", (Axis("x", 6),)))
    build, parts = Builder(), Builder()
    (whole,) = interpret(build.nodes, {value: data}, [build.apply(op, value)])
    halves = []
    result = parts.apply(local, part)
    for half in data.chunk(2):
        halves += interpret(parts.nodes, {part: half.clone()}, [result])
    assert torch.equal(torch.cat(halves), whole)
