"""One case or more for every primitive operation: the op, and its operands' types, whose axes may have any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from attrs import frozen

from partita.compiler.graph import Builder, Value
from partita.compiler.ops.attend import Attend, AttendGradient
from partita.compiler.ops.attend_block import AttendBlock, AttendBlockGradient
from partita.compiler.ops.body import body_of
from partita.compiler.ops.convolution import Conv, ConvImageGradient, ConvKernelGradient
from partita.compiler.ops.cumsum import BlockSums, CumulativeSum
from partita.compiler.ops.custom import Custom, CustomGradient
from partita.compiler.ops.decoding import ConcatHistory, UpdateCache
from partita.compiler.ops.delta_rule import DeltaRule
from partita.compiler.ops.delta_scan import DeltaScan, DeltaScanBlocks
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.experts import RoutedDot, RoutedWeightGradient, TopK
from partita.compiler.ops.float8 import Float8Dot, ToFloat8
from partita.compiler.ops.four_bits import Dequantize
from partita.compiler.ops.groups import OuterNesterov, OuterSgd, SumOfGroups
from partita.compiler.ops.host import CopyOut, Prefetch, ToDevice, ToHost, WaitCopyOut, WaitPrefetch
from partita.compiler.ops.inverse import Inverse
from partita.compiler.ops.linear_scan import BlockEnds, LinearScan, LinearScanBlocks, LinearScanGradient
from partita.compiler.ops.lookup import Gather, OneHot, ScatterAdd, ScatterMax
from partita.compiler.ops.loss import ExpSum, KnownTargets, NegativeLogLikelihood, NegativeLogLikelihoodGradient, Pick
from partita.compiler.ops.normalize import (
    LayerNormGradient,
    LayerNormScaleGradient,
    Normalize,
    NormalizeGradient,
    RmsNormGradient,
)
from partita.compiler.ops.op import Op
from partita.compiler.ops.optimizer import Ema
from partita.compiler.ops.pointwise import FUNCTIONS, Cast, Detach, Pointwise, constant, pointwise
from partita.compiler.ops.position import Dropout, Iota, Microbatch, Random, Rope, RopeAt
from partita.compiler.ops.reduce import ArgMax, FirstIndex, Reduce
from partita.compiler.ops.ring import MergeAttended
from partita.compiler.ops.scan import Scan, StatesBefore
from partita.compiler.ops.shape import Arrange, Concat, Expand, Flip, Merge, Pad, Rename, Rotate, Shift, Slice, Split
from partita.compiler.ops.slices import GatherSlices, KeepInFirstPart, OfSlices, PlaceSlice, ScatterSlices
from partita.compiler.ops.slots import Collect, Dispatch, Load, SlotIndex
from partita.compiler.ops.sparse import (
    BLOCK,
    ENTRY,
    SOURCE,
    Coalesce,
    DistinctIds,
    LookUpEntries,
    MergeRows,
    TakeEntries,
    UpdateRows,
)
from partita.compiler.ops.stack import Stack, Unstack
from partita.compiler.ops.windows import Fold, Patches
from partita.compiler.ops.zigzag import Zigzag
from partita.compiler.optimizers.adafactor import Adafactor, FactoredInverseRoot, InverseRoot, RunningMean
from partita.compiler.optimizers.adagrad import Adagrad
from partita.compiler.optimizers.adamw import AdamW
from partita.compiler.optimizers.adamw_8bit import AdamW8bit
from partita.compiler.optimizers.lion import Lion
from partita.compiler.optimizers.muon import Momentum, Muon, Orthogonalize
from partita.compiler.optimizers.python import PythonUpdate
from partita.compiler.optimizers.rowwise_adagrad import RowwiseAdagrad
from partita.compiler.optimizers.sgd import Sgd
from partita.dsl.types import Axis, Type
from tests.compiler.ops.placing import run

# Multiples of six: each axis can be cut in two, in three, and in both, one within the other.
A, B, C, D, E, F = Axis("a", 6), Axis("b", 6), Axis("c", 6), Axis("d", 6), Axis("e", 6), Axis("f", 6)
MATRICES, ROWS, COLUMNS = Axis("matrix", 6), Axis("rows", 6), Axis("columns", 6)
BLOCKS, ENTRIES, SOURCES = Axis(BLOCK, 6), Axis(ENTRY, 6), Axis(SOURCE, 6)
M, S, T, V, Z = Axis("m", 36), Axis("s", 12), Axis("t", 6), Axis("v", 12), Axis("z", 12)


def f(*axes: Axis) -> Type:
    return Type("f64", axes)


def i(*axes: Axis) -> Type:
    return Type("i64", axes)


# Six times 256 blocks follow each other, so that there are six factors.
QUANTIZED = Dequantize((Axis("m", 6 * 256 * 4), B), ("b", "m"), 4, "f64")


def codes(*axes: Axis) -> Type:
    return Type("u8", axes)


def bools(*axes: Axis) -> Type:
    return Type("bool", axes)


@frozen
class Case:
    """`limit` bounds the integers of an operand; `positive` keeps floats away from zero."""

    name: str
    op: Op
    operands: tuple[Type, ...]
    limit: int = 2
    positive: bool = False
    # Operations that exist only as gradients of others have no gradient of their own.
    differentiable: bool = True

    def types(self, order: int) -> tuple[Type, ...]:
        """The operands' types, with their axes in one of all orders."""
        if self.op.name in FIXED:
            return self.operands
        return tuple(_shuffled(type, order >> k) for k, type in enumerate(self.operands))


# Accumulated and updated tensors share one order; the order of the rest is the compiler's choice.
FIXED = (
    *("python_update", "adamw", "sgd", "ema", "lion", "rowwise_adagrad", "adafactor", "momentum", "muon", "adamw_8bit"),
    *("scatter_add", "scan", "routed_outer", "unstack", "update_rows", "scatter_max", "adagrad", "float8_dot"),
    "four_bits",
    *("sum_of_groups", "outer_sgd", "outer_nesterov"),
)


def _shuffled(type: Type, order: int) -> Type:
    orders = list(permutations(type.axes))
    return Type(type.dtype, orders[order % len(orders)])


def fitted(case: Case, types: Sequence[Type], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Operands that follow from others as they must."""
    if case.op.name in ("first_index", "exp_sum"):
        # Their second operand is the maximum of the first.
        over = types[0].position(case.op.over)  # type: ignore[attr-defined]
        names = [name for name in types[0].names if name in types[1].names]
        tensors[1] = tensors[0].amax(over).permute([names.index(name) for name in types[1].names])
    if case.op.name == "to_float8":
        # Of each row of the first.
        rows = [i for i, name in enumerate(types[0].names) if not types[1].has(name)]
        names = [name for name in types[0].names if types[1].has(name)]
        tensors[1] = tensors[0].abs().amax(rows).permute([names.index(name) for name in types[1].names])
    if case.op.name == "float8_dot":
        # Bits of small whole numbers, and rows of any size.
        tensors[:2] = [((x % 5).float() - 2).to(torch.float8_e4m3fn).view(torch.uint8) for x in tensors[:2]]
        tensors[2:] = [x.abs() + 1 for x in tensors[2:]]
    if case.op.name in ("dispatch", "collect"):
        # No two choices of one expert have one slot.
        order = tuple(name for name in ("b", "c") if types[1].has(name))
        tensors[2] = run(SlotIndex(order), [types[1]], [tensors[1]], {})[0]
        tensors[2] = tensors[2].permute([types[1].names.index(name) for name in types[2].names])
    if case.op.name == "update_rows":
        # A list of entries has no id twice: here it has one of two, the other one, or none.
        position = next(i for i, type in enumerate(types) if type.dtype == "i64")
        ids = tensors[position]
        ids[..., 1] = torch.where(ids[..., 1] > 0, 1 - ids[..., 0], -1)
        ids[..., 2:] = -1
    return tensors


POSITIVE = ("log", "sqrt", "rsqrt", "divide", "floor_divide", "remainder", "power", "power_exponent_gradient")


def _pointwise() -> list[Case]:
    cases = []
    for name in FUNCTIONS:
        op = Pointwise(name)
        positive = name in POSITIVE or name.startswith(("sqrt", "rsqrt"))
        last = not name.endswith("_gradient") and FUNCTIONS[name].derivative is not None
        if name == "where":
            shapes = [(bools(A), f(A, B), f(B)), (bools(A, B), f(), f(A, B))]
        elif name.startswith("logical"):
            pair = [(bools(A, B, C), bools(C, A)), (bools(B), bools(A, B)), (bools(A, B), bools(A, B))]
            shapes = [(bools(A, B),)] if name == "logical_not" else pair
        elif "{2}" in FUNCTIONS[name].text:
            shapes = [(f(A, B, C), f(A, B, C), f(A, B, C)), (f(A, B, C), f(B), f(C)), (f(B), f(), f(A, B))]
        elif "{1}" in FUNCTIONS[name].text:
            shapes = [(f(A, B, C), f(A, B, C)), (f(A, B, C), f(B)), (f(), f(A, B)), (f(C, A), f(A, B, C))]
        else:
            shapes = [(f(A, B),), (f(),)]
        cases += [Case(f"{name}-{k}", op, types, 2, positive, last) for k, types in enumerate(shapes)]
    return cases


def _scan() -> tuple[Op, Op, Op]:
    """h[t] = tanh(h[t−1]·w + x[t]) along `t`, with states [a, b], and a loop of the kind that its gradient is; and that
    of where(m, h[t−1] + x[t], 0).
    """
    x, w, state = Value("x", f(A, B)), Value("w", f(B)), Value("h", f(A, B))
    build = Builder()
    made = pointwise(build, "tanh", pointwise(build, "multiply_add", state, w, x))
    forward = Scan(T, body_of(build.nodes, [state, x, w], [made, made]), 1, 1, 1)
    build = Builder()
    flow = pointwise(build, "multiply", pointwise(build, "add", state, x), w)
    summed = build.apply(Reduce("sum", ("a",), "f64"), flow)
    body = body_of(build.nodes, [state, x, w], [flow, flow, summed])
    linear = Scan(T, body, 1, 1, 1, initial=False, backward=True, linear=(0,))
    build, mask = Builder(), Value("m", bools(B))
    flow = pointwise(build, "add", state, x)
    chosen = pointwise(build, "where", mask, flow, constant(build, 0.0, flow))
    body = body_of(build.nodes, [state, x, mask], [chosen, chosen])
    return forward, linear, Scan(T, body, 1, 1, 1, initial=False, backward=True, linear=(0,))


FORWARD, LINEAR, CHOSEN = _scan()

ATTEND: Callable[..., Attend] = lambda causal=False, mask=False, bias=False, **more: Attend(  # noqa: E731
    "t", "d", causal, 0.7, mask, bias, **more
)

# Windows of six elements: that overlap and begin outside; that lie apart; along two axes.
OVERLAPPING = {"axes": (V,), "into": (V,), "size": (D,), "stride": (1,), "padding": ((2, 3),), "dilation": (1,)}
APART = {"axes": (M,), "into": (T,), "size": (D,), "stride": (6,), "padding": ((0, 0),), "dilation": (1,)}
TWO = {
    "axes": (V, Z),
    "into": (T, E),
    "size": (D, F),
    "stride": (2, 2),
    "padding": ((2, 2), (5, 5)),
    "dilation": (1, 2),
}

CASES: list[Case] = [
    *_pointwise(),
    Case("cast", Cast("f64"), (f(A, B),)),
    Case("cast-integers", Cast("f64"), (i(A, B),), limit=100, differentiable=False),
    Case("cast-wider", Cast("i64"), (Type("i32", (A, B)),), limit=100, differentiable=False),
    Case("cast-eight-bits", Cast("u8"), (i(A, B),), limit=1000, differentiable=False),
    Case("cast-from-eight-bits", Cast("i64"), (Type("u8", (A, B)),), differentiable=False),
    Case("cast-truncates", Cast("i64"), (f(A, B),), differentiable=False),
    Case("cast-booleans", Cast("f64"), (bools(A, B),), differentiable=False),
    Case("detach", Detach(), (f(A),), differentiable=False),
    Case("to_host", ToHost(), (f(A),), differentiable=False),
    Case("copy_out", CopyOut(), (f(A),), differentiable=False),
    Case("land", WaitCopyOut(), (f(A), f(A)), differentiable=False),
    Case("prefetch", Prefetch(), (f(A),), differentiable=False),
    Case("arrive", WaitPrefetch(), (f(A),), differentiable=False),
    Case("to_device", ToDevice(), (f(A),), differentiable=False),
    Case("dot-matrix", Dot(("b",)), (f(A, B), f(B, C))),
    Case("dot-two", Dot(("b", "c")), (f(A, B, C), f(B, C, D))),
    Case("dot-batch", Dot(("c",)), (f(A, B, C), f(A, C, D))),
    Case("dot-outer", Dot(()), (f(A), f(B))),
    Case("dot-all", Dot(("a", "b")), (f(A, B), f(A, B))),
    Case("dot-vector", Dot(("a",)), (f(A, B), f(A))),
    Case("dot-elementwise", Dot(()), (f(A, B), f(A, B))),
    Case("sum", Reduce("sum", ("a",), "f64"), (f(A, B),)),
    Case("sum-all", Reduce("sum", ("a", "b"), "f64"), (f(A, B),)),
    Case("sum-integers", Reduce("sum", ("a",), "i64"), (i(A, B),), limit=100, differentiable=False),
    Case("max", Reduce("max", ("b",), "f64"), (f(A, B, C),)),
    Case("to_float8", ToFloat8(), (f(A, B, C), f(A, C)), differentiable=False),
    Case("to_float8-two", ToFloat8(), (f(A, B, C), f(B)), differentiable=False),
    Case("float8_dot", Float8Dot(("b",)), (codes(A, B), codes(C, B), f(A), f(C)), differentiable=False),
    Case(
        "float8_dot-two",
        Float8Dot(("b", "c")),
        (codes(A, B, C), codes(B, C, D, E), f(A), f(D, E)),
        differentiable=False,
    ),
    Case("four_bits", QUANTIZED, tuple(QUANTIZED.form.types.values()), differentiable=False),
    Case("argmax", ArgMax("b"), (f(A, B, C),), differentiable=False),
    Case("first_index", FirstIndex("b"), (f(A, B, C), f(A, C)), differentiable=False),
    Case("cumsum", CumulativeSum("b"), (f(A, B, C),)),
    Case("cumsum-backward", CumulativeSum("a", True), (f(A, B),)),
    Case("cumsum-integers", CumulativeSum("b"), (i(A, B),), limit=100, differentiable=False),
    Case("cumsum-exclusive", CumulativeSum("b", True, True), (f(A, B),)),
    Case("cumsum-block", CumulativeSum("s", block=2), (f(A, S), f(A, Axis("s", 6))), differentiable=False),
    Case("block_sums", BlockSums("s", 2), (f(A, S, B),), differentiable=False),
    Case("arrange", Arrange(("b", "a")), (f(A, B),)),
    Case("rename", Rename((("a", "z"),)), (f(A, B),)),
    Case("split", Split("m", (A, B)), (f(C, M),)),
    Case("merge", Merge(("b", "a"), M), (f(A, C, B),)),
    Case("merge-adjacent", Merge(("a", "b"), M), (f(C, A, B),)),
    Case("expand", Expand((C, D)), (f(A, B),)),
    Case("expand-scalar", Expand((C,)), (f(),)),
    Case("slice", Slice("v", Axis("z", 6), 3), (f(A, V, B),)),
    Case("pad", Pad("a", Z, 1), (f(C, A),)),
    Case("shift", Shift("a", 2), (f(A, B, C),)),
    Case("shift-back", Shift("b", -1), (f(A, B),)),
    Case("go_on", ConcatHistory("s", 6), (f(A, Axis("s", 6), B), f(A, S, B)), differentiable=False),
    Case("of_slices", OfSlices("k", f(A, S)), (), differentiable=False),
    Case("gather_slices", GatherSlices("s"), (f(A, S, B), f(A, Axis("s", 6), B)), differentiable=False),
    Case("scatter_slices", ScatterSlices("s", 6), (f(A, S, B), f(A, S, B)), differentiable=False),
    Case("place_slice", PlaceSlice("s", 12), (f(A, Axis("s", 6), B),), differentiable=False),
    Case("first_part", KeepInFirstPart("slice"), (f(A, B),), differentiable=False),
    Case("keep", UpdateCache("s"), (f(A, S, B), f(A, Axis("s", 6), B)), differentiable=False),
    Case("concat", Concat(("a", "b"), Z), (f(A, C), f(B, C))),
    Case("gather", Gather("v"), (i(A, B), f(V, C)), limit=12),
    Case("gather-two", Gather("v"), (i(A), f(C, V, B)), limit=12),
    Case("gather-batch", Gather("v"), (i(A, B), f(A, V, C)), limit=12),
    Case("gather-guarded", Gather("v", True), (i(A, B), f(V, C)), limit=15),
    Case("gather-guarded-batch", Gather("v", True), (i(A), f(A, V)), limit=15),
    Case("gather-guarded-one", Gather("v", True), (i(), f(V)), limit=15),
    Case("one_hot", OneHot(V, "f64"), (i(A, B),), limit=12, differentiable=False),
    Case("one_hot-guarded", OneHot(V, "f64", True), (i(A),), limit=15, differentiable=False),
    Case("scatter_add", ScatterAdd("v", (V, C)), (i(A, B), f(A, B, C)), limit=12, differentiable=False),
    Case("scatter_add-guarded", ScatterAdd("v", (V, C), True), (i(A), f(A, C)), limit=15, differentiable=False),
    Case("scatter_add-batch", ScatterAdd("v", (A, V, C)), (i(A, B), f(A, B, C)), limit=12, differentiable=False),
    Case("scatter_max", ScatterMax("v", (V, C)), (i(A, B), f(A, B, C)), limit=12, differentiable=False),
    Case("scatter_max-batch", ScatterMax("v", (A, V, C)), (i(A, B), f(A, B, C)), limit=12, differentiable=False),
    Case(
        "coalesce",
        Coalesce(("a",), 2, BLOCKS, ENTRIES),
        (i(A, B), f(A, B, C)),
        limit=14,
        differentiable=False,
    ),
    Case(
        "coalesce-by-source",
        Coalesce((), 2, BLOCKS, ENTRIES, SOURCES, "b"),
        (i(B, D), f(B, D, C)),
        limit=12,
        differentiable=False,
    ),
    Case(
        "merge_rows",
        MergeRows(("a",), 2, ENTRIES),
        (i(A, BLOCKS, ENTRIES), i(A, BLOCKS, ENTRIES), f(A, BLOCKS, ENTRIES, C), f(A, BLOCKS, ENTRIES, C)),
        differentiable=False,
    ),
    Case(
        "merge_rows-of-sources",
        MergeRows((), 6, ENTRIES, SOURCE),
        (i(SOURCES, BLOCKS, ENTRIES), f(SOURCES, BLOCKS, ENTRIES, C)),
        limit=6,
        differentiable=False,
    ),
    Case(
        "distinct_ids",
        DistinctIds(("a",), 2, BLOCKS, ENTRIES, SOURCES, "b"),
        (i(A, B),),
        limit=14,
        differentiable=False,
    ),
    Case(
        "look_up_entries",
        LookUpEntries("v"),
        (i(SOURCES, A, BLOCKS, ENTRIES), f(A, V, C)),
        differentiable=False,
    ),
    Case(
        "take_entries",
        TakeEntries("b"),
        (f(SOURCES, A, BLOCKS, ENTRIES, C), i(A, B)),
        limit=36,
        differentiable=False,
    ),
    Case(
        "update_rows",
        UpdateRows.of(Sgd(0.0, False, 0.1), "v"),
        (f(A, V), f(A, BLOCKS, ENTRIES), i(A, BLOCKS, ENTRIES)),
        differentiable=False,
    ),
    Case(
        "update_rows-of-one-table",
        UpdateRows.of(Sgd(0.9, False, 0.1), "v"),
        (f(C, V), f(BLOCKS, ENTRIES, C), f(C, V), i(BLOCKS, ENTRIES)),
        differentiable=False,
    ),
    Case("layer_norm", Normalize(("b",), 1e-5, True), (f(A, B),)),
    Case("rms_norm", Normalize(("b", "c"), 1e-5, False), (f(A, B, C),)),
    Case(
        "normalize_gradient",
        NormalizeGradient(("b",), True),
        (f(A, B), f(A, B), f(A)),
        differentiable=False,
    ),
    Case(
        "layer_norm_gradient",
        LayerNormGradient(("b", "c")),
        (f(A, B, C), f(A, B, C), f(A), f(B, C)),
        differentiable=False,
    ),
    Case(
        "layer_norm_scale_gradient",
        LayerNormScaleGradient(("b", "c")),
        (f(A, B, C), f(A, B, C), f(A), f(B, C)),
        differentiable=False,
    ),
    Case(
        "rms_norm_gradient",
        RmsNormGradient(("b", "c")),
        (f(A, B, C), f(A, B, C), f(A), f(B, C)),
        differentiable=False,
    ),
    Case("patches", Patches(**OVERLAPPING), (f(A, V, C),)),
    Case("patches-apart", Patches(**APART), (f(A, M),)),
    Case("patches-two", Patches(**TWO, fill=0.5), (f(C, V, Z),)),
    Case("fold", Fold(**OVERLAPPING), (f(A, V, C, D),)),
    Case("fold-apart", Fold(**APART), (f(A, T, D),)),
    Case("fold-two", Fold(**TWO), (f(T, E, C, D, F),)),
    Case("conv", Conv(**OVERLAPPING, over=("b",)), (f(A, B, V), f(D, B, C))),
    Case("conv-apart", Conv(**APART, over=("b",)), (f(A, B, M), f(D, B, C))),
    Case("conv-groups", Conv(**OVERLAPPING, over=("e",)), (f(A, B, E, V), f(D, B, E, C))),
    Case("conv-channels-apart", Conv(**OVERLAPPING, over=()), (f(A, B, V), f(D, B))),
    Case("conv-two", Conv(**TWO, over=("b",)), (f(B, V, Z), f(D, F, B, C))),
    Case(
        "conv_image_gradient",
        ConvImageGradient(**OVERLAPPING, over=("e",), image=(B, A, V, E)),
        (f(A, B, C, V), f(D, B, E, C)),
        differentiable=False,
    ),
    Case(
        "conv_image_gradient-apart",
        ConvImageGradient(**APART, over=("b",), image=(A, B, M)),
        (f(A, C, T), f(D, B, C)),
        differentiable=False,
    ),
    Case(
        "conv_kernel_gradient",
        ConvKernelGradient(**OVERLAPPING, over=("e",), of=(D, B, E, C)),
        (f(A, B, E, V), f(A, B, C, V)),
        differentiable=False,
    ),
    Case(
        "conv_kernel_gradient-apart",
        ConvKernelGradient(**APART, over=("b",), of=(C, D, B)),
        (f(A, B, M), f(A, C, T)),
        differentiable=False,
    ),
    Case("attend", ATTEND(), (f(A, T, B, D), f(A, T, B, D), f(A, T, B, D))),
    Case("attend-causal", ATTEND(causal=True), (f(A, T, B, D), f(A, T, B, D), f(A, T, B, D))),
    Case("attend-grouped", ATTEND(causal=True), (f(A, T, B, C, D), f(A, T, B, D), f(A, T, B, D))),
    Case("attend-one-head", ATTEND(), (f(T, D), f(T, D), f(T, D))),
    Case("attend-cross", ATTEND(), (f(A, S, B, D), f(A, T, B, D), f(A, T, B, D))),
    Case("attend-single-query", ATTEND(), (f(A, D), f(A, T, D), f(A, T, D))),
    Case("attend-mask", ATTEND(mask=True), (f(A, S, B, D), f(A, T, B, D), f(A, T, B, D), bools(A, T))),
    Case("attend-bias", ATTEND(bias=True), (f(A, S, B, D), f(A, T, B, D), f(A, T, B, D), f(B, S, T))),
    Case(
        "attend-both",
        ATTEND(causal=True, mask=True, bias=True),
        (f(A, T, B, C, D), f(A, T, B, D), f(A, T, B, D), bools(A, T), f(B, T)),
    ),
    Case("attend-shared-keys", ATTEND(), (f(A, S, B, D), f(T, B, D), f(A, T, B, D))),
    Case("attend-window", ATTEND(causal=True, window=3), (f(T, B, D), f(T, D), f(T, D))),
    Case("attend-around", ATTEND(window=2), (f(T, D), f(T, D), f(T, D))),
    Case("attend-softcap", ATTEND(softcap=0.8, bias=True), (f(A, S, D), f(A, T, D), f(A, T, D), f(S, T))),
    Case("attend-segments", ATTEND(segments=True), (f(A, T, B, D), f(A, T, D), f(A, T, D), i(A, T))),
    Case("attend-segments-heads", ATTEND(segments=True), (f(T, B, D), f(T, D), f(T, D), i(B, T))),
    Case("attend-segments-one", ATTEND(causal=True, segments=True), (f(T, D), f(T, D), f(T, D), i(T))),
    Case("attend-sink", ATTEND(causal=True, sink=True), (f(T, B, D), f(T, D), f(T, D), f(B))),
    Case("attend-sink-mask", ATTEND(mask=True, sink=True), (f(A, D), f(A, T, D), f(A, T, D), bools(A, T), f(A))),
    Case(
        "attend-dropout",
        ATTEND(causal=True, dropout=0.25, key="k", numbered=(("t", 6), ("a", 6), ("t", 6))),
        (f(A, T, D), f(T, D), f(A, T, D)),
    ),
    Case("attend-values", ATTEND(causal=True, values="e"), (f(A, T, B, D), f(A, T, B, D), f(A, T, B, E))),
    Case("attend-wide-values", ATTEND(values="s"), (f(A, T, C, D), f(A, T, D), f(A, T, S))),
    Case(
        "attend_gradient",
        AttendGradient("t", "d", True, 0.7),
        (f(A, T, D), f(A, T, D), f(A, T, D), f(A, T, D), f(A, T), f(A, T, D)),
        differentiable=False,
    ),
    *(
        Case(f"attend_block-{name}", op, (f(A, S, B, C, D), f(A, S, B, D), f(A, S, B, E)), differentiable=False)
        for name, op in {
            "own": AttendBlock("s", "d", True, 0.7, values="e", blocks=6),
            "all": AttendBlock("s", "d", False, 0.7, values="e", blocks=6, turn=5),
        }.items()
    ),
    Case(
        "attend_block_gradient",
        AttendBlockGradient("s", "d", True, 0.7, blocks=6, turn=2),
        (f(A, S, D), f(A, S, D), f(A, S, D), f(A, S, D), f(A, S), f(A, S, D)),
        differentiable=False,
    ),
    Case("merge_attended", MergeAttended("f64"), (f(A, T, D), f(A, T), f(A, T, D), f(A, T)), differentiable=False),
    Case("zigzag", Zigzag("v", 3), (f(A, V),)),
    Case("zigzag-back", Zigzag("v", 3, back=True), (f(A, V),)),
    Case("delta_scan", DeltaScan("t", "e", "d"), (f(A, T), f(A, T, D, E), f(T, E, D, A), f(T, D, A, B))),
    Case("delta_scan-backward", DeltaScan("t", "e", "d", True), (f(T, A, D), f(T, E, D), f(D, T, E), f(D, T, B, A))),
    Case(
        "delta_scan-block",
        DeltaScan("s", "e", "d", block=2),
        (f(S), f(A, S, D, E), f(A, D, S, E), f(S, A, D, B), f(A, Axis("s", 6), D, B)),
        differentiable=False,
    ),
    Case(
        "delta_scan_blocks",
        DeltaScanBlocks("s", "e", "d", 2),
        (f(S, D), f(S, D, E), f(S, D, E), f(A, D, S)),
        differentiable=False,
    ),
    Case(
        "delta_scan_blocks-backward",
        DeltaScanBlocks("s", "e", "d", 2, True),
        (f(A, S), f(D, B, S, E), f(S, E, D, B), f(B, S, A, D)),
        differentiable=False,
    ),
    Case("rope_at-sections", RopeAt("d", 100.0, sections=(1, 2)), (f(A, D, B), i(B, Axis("n", 2))), limit=9),
    Case("flip", Flip("v"), (f(A, V, B),)),
    Case("rotate", Rotate("v", 5), (f(A, V, B),)),
    Case("rotate-back", Rotate("v", -14), (f(V, B),)),
    Case("inverse", Inverse("d", "e"), (f(D, A, E),)),
    Case("inverse-triangular", Inverse("d", "e", True), (f(E, A, D),)),
    Case("delta_rule", DeltaRule("s", "d"), (f(A, S, D), f(S, D), f(S, A, B), f(A, S), f(S)), differentiable=False),
    Case(
        "delta_rule-each",
        DeltaRule("s", "d"),
        (f(S, D), f(A, S, D), f(S, B), f(S, C), f(A, D, S)),
        differentiable=False,
    ),
    Case("delta_rule-plain", DeltaRule("s", "d", False), (f(S, D), f(A, S, D), f(S), f(S, A)), differentiable=False),
    Case("linear_scan", LinearScan("s"), (f(A, S), f(A, S, B))),
    Case("linear_scan-backward", LinearScan("s", True), (f(S, A), f(S, A))),
    Case("linear_scan-exclusive", LinearScan("s", exclusive=True), (f(S), f(A, S)), differentiable=False),
    Case(
        "linear_scan-block",
        LinearScan("s", block=2),
        (f(A, S), f(A, S, B), f(A, Axis("s", 6), B)),
        differentiable=False,
    ),
    Case("linear_scan_blocks", LinearScanBlocks("s", 2), (f(S, B), f(A, S, B)), differentiable=False),
    Case("linear_scan_blocks-backward", LinearScanBlocks("s", 2, True), (f(S), f(S, A)), differentiable=False),
    Case("block_ends", BlockEnds("s", 2), (f(A, S),), differentiable=False),
    Case("block_ends-backward", BlockEnds("s", 2, True), (f(A, S),), differentiable=False),
    Case(
        "linear_scan_gradient",
        LinearScanGradient("s"),
        (f(A, S), f(A, S, B), f(A, S, B)),
        differentiable=False,
    ),
    Case(
        "linear_scan_gradient-backward", LinearScanGradient("s", True), (f(S), f(S, A), f(S, A)), differentiable=False
    ),
    Case(
        "linear_scan_gradient-block",
        LinearScanGradient("s", True, 2),
        (f(S), f(A, S), f(A, S), f(A, Axis("s", 6)), f(Axis("s", 6), A)),
        differentiable=False,
    ),
    Case(
        "attend_gradient-sink",
        AttendGradient("t", "d", True, 0.7, window=3, sink=True),
        (f(T, D), f(T, D), f(T, D), f(), f(T, D), f(T), f(T, D)),
        differentiable=False,
    ),
    Case(
        "attend_gradient-values",
        AttendGradient("t", "d", True, 0.7, values="e"),
        (f(A, T, D), f(A, T, D), f(A, T, E), f(A, T, E), f(A, T), f(A, T, E)),
        differentiable=False,
    ),
    # Its gradient has tests of its own: the states at all positions carry it, not its first result.
    Case("scan", FORWARD, (f(A, B), f(T, A, B), f(B)), differentiable=False),
    Case("scan-linear", LINEAR, (f(T, A, B), f(B)), differentiable=False),
    Case("scan-chosen", CHOSEN, (f(T, A, B), bools(B)), differentiable=False),
    Case("states_before", StatesBefore("t"), (f(A, B), f(A, T, B)), differentiable=False),
    Case("states_before-backward", StatesBefore("t", True), (f(A), f(T, A)), differentiable=False),
    Case("nll", NegativeLogLikelihood("e"), (f(A, B, E), i(A, B)), limit=6),
    Case(
        "nll_gradient",
        NegativeLogLikelihoodGradient("e"),
        (f(A, B), f(A, B, E), i(A, B), f(A, B)),
        limit=6,
        differentiable=False,
    ),
    Case("known_targets", KnownTargets(E, -1), (i(A, B),), limit=8, differentiable=False),
    Case("nll-guarded", NegativeLogLikelihood("e", True), (f(A, B, E), i(A, B)), limit=8),
    Case(
        "nll_gradient-guarded",
        NegativeLogLikelihoodGradient("e", True),
        (f(A, B), f(A, B, E), i(A, B), f(A, B)),
        limit=8,
        differentiable=False,
    ),
    Case("exp_sum", ExpSum("e"), (f(A, B, E), f(A, B)), differentiable=False),
    Case("pick", Pick("e"), (f(A, B, E), i(A, B)), limit=6, differentiable=False),
    Case("pick-guarded", Pick("e", True), (f(A, B, E), i(A, B)), limit=8, differentiable=False),
    Case("top_k", TopK("s", T), (f(A, S, C),), differentiable=False),
    Case("routed_dot", RoutedDot(("b",), "e"), (f(A, B), f(E, B, C), i(A, D)), limit=6),
    Case("routed_dot-chosen", RoutedDot(("b",), "e"), (f(A, D, B), f(E, B, C), i(A, D)), limit=6),
    Case("routed_dot-batch", RoutedDot(("b",), "e"), (f(A, D, B), f(E, D, B, C), i(A)), limit=6),
    Case("routed_dot-vector", RoutedDot(("b", "c"), "e"), (f(A, B, C), f(E, B, C), i(A)), limit=6),
    Case("routed_dot-guarded", RoutedDot(("b",), "e", True), (f(A, B), f(E, B, C), i(A)), limit=8),
    Case(
        "routed_outer",
        RoutedWeightGradient(("b",), "e", (E, B, C)),
        (f(A, B), i(A, D), f(A, D, C)),
        limit=6,
        differentiable=False,
    ),
    Case(
        "routed_outer-batch",
        RoutedWeightGradient(("b",), "e", (E, D, B, C), True),
        (f(A, D, B), i(A), f(A, D, C)),
        limit=8,
        differentiable=False,
    ),
    Case("slot_index", SlotIndex(("c", "b")), (i(A, B, C),), limit=6, differentiable=False),
    Case("slot_index-one", SlotIndex(("b",)), (i(A, B),), limit=6, differentiable=False),
    Case("dispatch", Dispatch(("b", "c"), E, Z), (f(A, B, D), i(A, B, C), i(A, B, C)), limit=6),
    Case("dispatch-chosen", Dispatch(("b", "c"), E, Z, True), (f(A, B, C, D), i(A, B, C), i(A, B, C)), limit=8),
    Case("dispatch-one", Dispatch(("b",), E, Z), (f(B), i(B), i(B)), limit=6),
    Case("collect", Collect("e", "z"), (f(A, E, Z, D), i(A, B, C), i(A, B, C)), limit=6),
    Case("collect-one", Collect("e", "z", True), (f(E, Z), i(B), i(B)), limit=8),
    Case("load", Load(("b",), E, "f64"), (i(A, B),), limit=6, differentiable=False),
    Case("load-guarded", Load(("b", "c"), E, "f64", True), (i(A, B, C),), limit=8, differentiable=False),
    Case("microbatch", Microbatch("m", 12, (("m", "time", 3),)), (f(A, M, C),), differentiable=False),
    Case("iota", Iota(A), (), differentiable=False),
    Case("rope", Rope("b", "d", 100.0), (f(A, B, C, D),)),
    Case("rope-interleaved", Rope("b", "d", 100.0, interleaved=True), (f(A, B, C, D),)),
    Case("rope-part", Rope("b", "d", 100.0, interleaved=True, part=2 / 3), (f(A, B, C, D),)),
    Case("rope-at", RopeAt("d", 100.0), (f(A, B, C, D), i(B, A))),
    Case("rope-at-part", RopeAt("b", 100.0, interleaved=True, part=2 / 3), (f(A, B, C, D), i(C))),
    Case("rope-scaled", Rope("b", "d", 100.0, ("yarn", 4.0, 40, 8.0, 1.0, None, False)), (f(A, B, D),)),
    Case("random", Random("normal", 1.0, "k", (A, B), (("a", 6), ("b", 6)), "f64"), (), differentiable=False),
    Case("dropout", Dropout(0.25), (f(A, B), bools(A, B))),
    *(
        Case(name, Custom(name, (("a", "b"), ("b",)), (f(A, B),), ("a",), (1,)), (f(A, B), f(B)))
        for name in ("weighted", "by_autograd")
    ),
    Case("both", Custom("both", (("a", "b"), ("b",)), (f(A, B), f(A), i(A, B)), ("a",)), (f(A, B), f(B))),
    Case("scaled", Custom("scaled", (("a", "b"), ("a",)), (f(A, B),), ("a", "b"), (0,)), (f(A, B), i(A))),
    Case(
        "custom_gradient",
        CustomGradient("weighted", (("a", "b"), ("b",)), (("a", "b"),), ("a",)),
        (f(A, B), f(A, B), f(B)),
        differentiable=False,
    ),
    Case("adamw", AdamW(0.9, 0.99, 1e-8, 0.1), (f(A, B),) * 4, positive=True, differentiable=False),
    Case("sgd", Sgd(0.0, False, 0.1), (f(A, B),) * 2, differentiable=False),
    Case("sgd-momentum", Sgd(0.9, True, 0.1), (f(A, B),) * 3, differentiable=False),
    Case("ema", Ema(0.9), (f(A, B),) * 2, differentiable=False),
    Case("sum_of_groups", SumOfGroups(3), (f(A, B),) * 3, differentiable=False),
    Case("outer_sgd", OuterSgd(3, 0.7), (f(A, B),) * 2, differentiable=False),
    Case("outer_nesterov", OuterNesterov(3, 0.7, 0.9), (f(A, B),) * 3, differentiable=False),
    Case("python_update", PythonUpdate("descended", 1, 0.1), (f(A, B),) * 3, differentiable=False),
    Case("lion", Lion(0.9, 0.99, 0.1), (f(A, B),) * 3, differentiable=False),
    Case(
        "rowwise_adagrad",
        RowwiseAdagrad(("a",), 6, 1e-8, 0.1),
        (f(A, B), f(A, B), f(A), f(A)),
        positive=True,
        differentiable=False,
    ),
    Case("adagrad", Adagrad(1e-8, 0.1), (f(A, B), f(A, B), f(A, B)), positive=True, differentiable=False),
    Case("running_mean", RunningMean(6, 0.8), (f(A, B), f(A, B)), differentiable=False),
    Case("inverse_root", InverseRoot(1e-3), (f(A, B),), positive=True, differentiable=False),
    Case(
        "factored_inverse_root",
        FactoredInverseRoot((A, B, C), 6, 1e-3),
        (f(A, B), f(A, C), f(A)),
        positive=True,
        differentiable=False,
    ),
    Case(
        "adafactor",
        Adafactor(("b",), ("a",), 216, (6, 6), 6, 0.8, 1e-7, 1e-3, 1.0, 0.1),
        (f(A, B, C), f(A, B, C), f(A, B), f(A, C), f(A, B), f(A, C), f(A, B, C), f(), f()),
        positive=True,
        differentiable=False,
    ),
    Case(
        "adafactor-whole",
        Adafactor((), (), 36, (1,), 1, 0.8, 1e-7, 1e-3, 1.0, 0.1),
        (f(A, B), f(A, B), f(A, B), f(A, B), f(A, B), f(), f()),
        positive=True,
        differentiable=False,
    ),
    Case("momentum", Momentum(0.9, True), (f(A, B), f(A, B)), differentiable=False),
    Case("orthogonalize", Orthogonalize(("b",), ("a",), 2, 1e-7), (f(A, B, C),), differentiable=False),
    Case("stack", Stack((("b", "a"), ("c", "b")), ("rows", "columns"), 6), (f(A, B), f(B, C)), differentiable=False),
    Case(
        "stack-of-stacks",
        Stack((("d", "e", "b", "a"), ("d", "c", "b")), ("rows", "columns"), 48),
        (f(A, E, B, D), f(B, C, D)),
        differentiable=False,
    ),
    Case(
        "unstack",
        Unstack(1, ("a", "b"), ("rows", "columns"), (), ("b", "a")),
        (f(MATRICES, ROWS, COLUMNS),),
        differentiable=False,
    ),
    Case(
        "unstack-a-stack",
        Unstack(1, ("d", "e", "a", "b"), ("rows", "columns"), (6, 6), ("a", "d", "b", "e")),
        (f(Axis("matrix", 42), ROWS, COLUMNS),),
        differentiable=False,
    ),
    Case(
        "muon",
        Muon(("b",), ("a",), 0.9, True, 2, 1e-7, 1.5, 0.1),
        (f(A, B, C),) * 4,
        differentiable=False,
    ),
    Case(
        "adamw_8bit",
        AdamW8bit(0.9, 0.99, 1e-8, 0.1, 2),
        (f(A, Z), f(A, Z), codes(A, Z), f(A, Axis("z", 6)), codes(A, Z), f(A, Axis("z", 6))),
        positive=True,
        differentiable=False,
    ),
]

# `constant` has no operands and no numbers of its own to test; `carry` and `resume` are about states, which programs
# that keep some are tested with; the rest are statements or the runtime's. Changes of layout have tests of their own,
# and so do operations on rows in the order of their experts, and on pieces, which nothing shards (`test_grouped`,
# `test_pieces`).
# A roll is split into as many parts as it has blocks.
WITHOUT_CASE = {"roll", "constant", "accumulate", "store", "carry", "resume", "send", "receive"}
WITHOUT_CASE |= {"piece", "join"}
WITHOUT_CASE |= {"row_order", "take_rows", "put_rows", "combine_rows", "grouped_dot", "grouped_outer"}
