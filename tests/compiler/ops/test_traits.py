"""What operations say of themselves, held against what they do."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.costs.nodes import kernel_of
from partita.compiler.graph import Builder, Value
from partita.compiler.ops import OPS
from partita.compiler.ops.attend import Attend, AttendGradient
from partita.compiler.ops.collective import Flatten, Part, Reshard, Unflatten
from partita.compiler.ops.convolution import Product
from partita.compiler.ops.delta_scan import DeltaScan, DeltaScanBlocks
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.experts import RoutedDot, RoutedWeightGradient
from partita.compiler.ops.float8 import Float8Dot
from partita.compiler.ops.groups import Outer, SumOfGroups
from partita.compiler.ops.intervals import Interval
from partita.compiler.ops.op import Op
from partita.compiler.ops.optimizer import Accumulate, Ema, Store, Update
from partita.compiler.ops.pieces import Piece
from partita.compiler.ops.pointwise import Cast, Constant, Pointwise
from partita.compiler.ops.position import Iota
from partita.compiler.ops.reduce import ArgMax, Reduce
from partita.compiler.ops.shape import Arrange, Concat, Merge, Slice
from partita.compiler.ops.slices import OfSlices
from partita.compiler.optimizers.adamw import AdamW
from partita.compiler.optimizers.muon import Orthogonalize
from partita.dsl.types import Axis
from tests.compiler.ops.op_cases import CASES, A, B, C, Case, f, i
from tests.compiler.ops.placing import run
from tests.compiler.ops.test_ops import tensor

MOVED = (
    Case("part", Part("x", 3, "a"), (f(A, B),)),
    Case("flatten", Flatten("flat", ("a", "b"), A.size * B.size, A.size * B.size), (f(A, B),)),
    Case("unflatten", Unflatten((A,)), (f(Axis("flat", A.size + 1)),)),
    Case("piece", Piece("a", 2, 1, view=True), (f(Axis("a", 4), B),)),
    Case("sum_of_groups", SumOfGroups(1), (f(A, B),)),
)


def made(case: Case, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Operands of a case, and what the operation makes of them on the second rank of each mesh axis."""
    generator = np.random.default_rng(seed)
    operands = [tensor(type, case, generator) for type in case.operands]
    return operands, run(case.op, case.operands, operands, {"x": 1, "time": 1})


def memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


VIEWS = [case for case in (*CASES, *MOVED) if case.op.is_view]


@pytest.mark.parametrize("case", VIEWS, ids=lambda case: case.name)
def test_a_view_shows_its_operand(case: Case):
    operands, (result,) = made(case)
    assert memory(result) == memory(operands[0])
    assert not case.op.allocates


def test_every_view_has_a_case():
    assert {type(case.op) for case in VIEWS} == {op for op in OPS.values() if op.is_view}


@pytest.mark.parametrize("case", [case for case in CASES if not case.op.allocates], ids=lambda case: case.name)
def test_what_allocates_nothing_returns_what_it_was_given(case: Case):
    operands, results = made(case)
    assert {memory(x) for x in results} <= {memory(x) for x in operands}


RETURNED = [case for case in CASES if case.op.name == "attend_gradient" or getattr(case.op, "inverse", False)]


@pytest.mark.parametrize("case", RETURNED, ids=lambda case: case.name)
def test_what_products_read_next_lies_in_the_order_of_its_type(case: Case):
    """They read it as a matrix, and would copy what is in another order, without anyone having counted that."""
    _, results = made(case)
    assert all(each.is_contiguous() for each in results)


@pytest.mark.few(223)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_takes_no_time_has_no_kernel(case: Case):
    build = Builder()
    build.apply_all(case.op, *(Value(f"x{k}", type) for k, type in enumerate(case.operands)))
    assert (kernel_of(build.nodes[0]) is None) == (case.op.is_view or isinstance(case.op, OfSlices))


@pytest.mark.few(195)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_arithmetic_has_a_size(case: Case):
    """Products are part of the arithmetic; only what makes products has matrices."""
    results = case.op.infer(*case.operands)
    flops, products = case.op.flops(case.operands, results), case.op.product_flops(case.operands, results)
    assert 0 <= products <= flops
    makers = (Dot, Float8Dot, Product, Attend, AttendGradient, RoutedDot, RoutedWeightGradient, Orthogonalize)
    makers += (DeltaScan, DeltaScanBlocks)
    assert (products > 0) == isinstance(case.op, makers)
    if case.op.matrices(case.operands, results) is not None:
        assert products > 0
    assert case.op.accessed(case.operands, results) >= sum(type.bytes for type in results)


def test_a_matrix_product_has_the_sizes_of_its_arithmetic():
    for case in (case for case in CASES if isinstance(case.op, Dot)):
        results = case.op.infer(*case.operands)
        sizes = case.op.matrices(case.operands, results)
        if results[0].axes:
            assert 2 * np.prod(sizes) == case.op.flops(case.operands, results), case.name
        else:
            assert sizes is None


def test_changes_of_layout_say_so():
    for name, op in OPS.items():
        # A turn of a ring sends shards on, and leaves them shards.
        assert (issubclass(op, Reshard) and op.reshards) == (issubclass(op, Reshard) and name != "turn"), name


def test_what_works_in_place_says_so():
    for name, op in OPS.items():
        assert op.overwrites == issubclass(op, (Update, Ema, Store, Outer)), name


def test_what_reads_the_moment_of_itself_is_no_part_of_a_kernel():
    """Random numbers are another draw in each step, and an update has another rate: torch must not keep them."""
    for op in (AdamW(0.9, 0.99, 1e-8, 0.0), *(case.op for case in CASES if case.op.random and not case.operands)):
        assert not op.fusible
    assert not Accumulate("t", f(A)).fusible


# ---------------------------------------------------------------- intervals

OPERATIONS: list[tuple[Op, int]] = [
    *((Pointwise(name), 2) for name in ("add", "subtract", "multiply", "maximum", "minimum")),
    *((Pointwise(name), 1) for name in ("negate", "abs")),
    (Arrange(("b", "a")), 1),
    (Cast("i32"), 1),
    (Slice("a", C, 0), 1),
    (Concat(("a", "a"), Axis("n", 12)), 2),
    (Merge(("a", "b"), Axis("n", 36)), 1),
    (Reduce("sum", ("a",), "i64"), 1),
    (Reduce("max", ("a",), "i64"), 1),
    (ArgMax("a"), 1),
]
ENDS = st.tuples(st.integers(-9, 9), st.integers(-9, 9)).map(lambda pair: (min(pair), max(pair)))


@pytest.mark.few(4)
@pytest.mark.parametrize(("op", "count"), OPERATIONS, ids=lambda x: re.sub(r"\W+", "-", str(x)))
@given(data=st.data())
def test_results_lie_in_their_interval(op: Op, count: int, data: st.DataObject):
    intervals: list[Interval] = [data.draw(ENDS) for _ in range(count)]
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    types = [i(A, B)] * count
    operands = [torch.from_numpy(generator.integers(low, high + 1, (6, 6))) for low, high in intervals]
    (result,) = run(op, types, operands, {})
    low, high = op.interval(intervals, types, op.infer(*types)[0])
    assert low <= int(result.min())
    assert int(result.max()) <= high


def test_intervals_without_operands():
    assert Constant(7, "i64").interval([], [], i()) == (7, 7)
    assert Iota(A).interval([], [], i(A)) == (0, 5)


def test_what_is_not_known_is_anything():
    low, high = Cast("i64").interval([(0, 1)], [f(A)], i(A))
    assert (low, high) == (-np.inf, np.inf)
