"""Operations on rows in the order of their experts compute what their plain forms do of rows in their own order."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from partita.compiler.ops.experts import RoutedDot, RoutedWeightGradient
from partita.compiler.ops.grouped import (
    CombineRows,
    GroupedDot,
    GroupedWeightGradient,
    Permute,
    SortByExpert,
    Unpermute,
)
from partita.compiler.ops.op import Op
from partita.dsl.types import Axis, Type
from tests.compiler.ops.op_cases import CASES, Case
from tests.compiler.ops.placing import equal, run
from tests.compiler.ops.test_ops import tensor

B, S, C = Axis("batch", 2), Axis("seq", 3), Axis("chosen", 2)
EMBED, FFN, EXPERTS = Axis("embed", 4), Axis("ffn", 5), Axis("experts", 3)
ROWS = (B, S, C)
SHARDS = (("experts", "x", 2),)


def f(*axes: Axis) -> Type:
    return Type("f64", axes)


def drawn(*types: Type, limit: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(types))
    return [
        torch.randint(0, limit, type.shape, generator=generator)
        if type.dtype == "i64"
        else torch.randn(type.shape, generator=generator, dtype=torch.float64)
        for type in types
    ]


def applied(op: Op, *operands: tuple[Type, torch.Tensor]) -> list[tuple[Type, torch.Tensor]]:
    """Results of an operation on the second of two ranks along `x`, with their types."""
    types = [type for type, _ in operands]
    found = run(op, types, [x for _, x in operands], {"x": 1})
    return list(zip(op.infer(*types), found, strict=True))


IDS = (Type("i64", ROWS), Type("i64", (S, B)), Type("i64", (C, B)))
TAKEN = (f(B, S, C, EMBED), f(B, S, EMBED), f(S, EMBED, B), f(EMBED, B, C), f(C), f(B, S, C), f(S, C, EMBED, FFN))


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("type", TAKEN, ids=str)
def test_rows_taken_into_order_and_put_back_are_as_they_were(ids: Type, type: Type):
    """Once for each position of the axes that they lack; in the order of their ids."""
    given = list(zip((ids, type), drawn(ids, type), strict=True))
    order, places, (_, ends) = applied(SortByExpert(ROWS, EXPERTS), given[0])
    wanted = Type(type.dtype, (*ROWS, *(axis for axis in type.axes if axis not in ROWS)))
    (taken,) = applied(Permute(ROWS), given[1], order)
    (put,) = applied(Unpermute(ROWS, tuple(reversed(wanted.names))), taken, places)
    full = torch.einsum(given[1][1], [*range(len(type.axes))], [*range(len(type.axes))])
    full = full.permute([type.names.index(a) for a in wanted.names if type.has(a)])
    full = full[tuple(slice(None) if type.has(a) else None for a in wanted.names)].expand(wanted.shape)
    assert equal(put[1], full.permute(*reversed(range(full.dim()))))
    (own,) = applied(Permute(ROWS), (ids, given[0][1]), order)
    assert own[1].tolist() == sorted(own[1].tolist())
    assert ends.tolist() == [sum(x <= k for x in own[1].tolist()) for k in range(3)]


@pytest.mark.parametrize("over", [("chosen",), ("batch",), ("seq", "batch")])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_summed_as_they_are_put_back(over: tuple[str, ...], weighted: bool):
    for order_of_weights in list(permutations(ROWS))[::2]:
        types = [Type("i64", ROWS), f(FFN, *ROWS, EMBED), f(*order_of_weights)]
        ids, x, weights = zip(types, drawn(*types), strict=True)
        order, places, _ = applied(SortByExpert(ROWS, EXPERTS), ids)
        (taken,) = applied(Permute(ROWS), x, order)
        others = [weights] if weighted else []
        plain = CombineRows(ROWS, over, ()).plain(x[0], *(type for type, _ in others))
        (wanted,) = applied(plain, x, *others)
        (found,) = applied(CombineRows(ROWS, over, wanted[0].names), taken, places, *others)
        assert found[0] == wanted[0]
        assert equal(found[1], wanted[1])


@pytest.mark.parametrize(("guarded", "shards"), [(False, ()), (True, ()), (False, SHARDS)])
@pytest.mark.parametrize("ids", IDS, ids=str)
def test_products_are_those_of_rows_in_their_own_order(ids: Type, guarded: bool, shards: tuple):
    """Also where an id may be outside, or experts are on other ranks: such rows yield zeros, and are in no sum."""
    order_of = SortByExpert(ROWS, EXPERTS, guarded, shards)
    share = 2 if shards else 1
    types = [ids, f(B, S, C, EMBED), f(EMBED, EXPERTS, FFN), f(FFN, B, S, C)]
    given = list(zip(types, drawn(*types, limit=7 if guarded or shards else 3), strict=True))
    of_ids, x, w, d = given
    order, places, ends = applied(order_of, of_ids)
    (x_rows,), (d_rows,) = (applied(Permute(ROWS), each, order) for each in (x, d))
    product = GroupedDot(("embed",), "experts", guarded, share)
    assert product.plain(order_of) == RoutedDot(("embed",), "experts", guarded, shards)
    (wanted,) = applied(product.plain(order_of), x, w, of_ids)
    (rows,) = applied(product, x_rows, w, ends)
    ((_, found),) = applied(Unpermute(ROWS, wanted[0].names), rows, places)
    assert equal(found, wanted[1])
    outer = GroupedWeightGradient(("embed",), "experts", w[0].axes, share)
    assert outer.plain(order_of) == RoutedWeightGradient(("embed",), "experts", w[0].axes, guarded, shards)
    ((_, wanted),) = applied(outer.plain(order_of), x, of_ids, d)
    ((_, found),) = applied(outer, x_rows, ends, d_rows)
    assert equal(found, wanted)


def rows_of(case: Case) -> tuple[Axis, ...]:
    """Two axes of the results by whose positions an operation computes, if it has such."""
    results = case.op.infer(*case.operands)
    own = [axis for axis in results[0].axes if len(results) == 1 and case.op.elementwise_over({axis.name})]
    return tuple(own[:2])


BY_ROW = [case for case in CASES if rows_of(case)]


@pytest.mark.few(131)
@pytest.mark.parametrize("case", BY_ROW, ids=lambda case: case.name)
def test_what_computes_row_by_row_does_so_in_any_order(case: Case):
    """Of rows in some order, it makes its results in that order: positions of two axes as one."""
    rows = rows_of(case)
    generator = np.random.default_rng(1)
    given = [(type, tensor(type, case, generator)) for type in case.operands]
    order = Permute(rows), (Type("i64", rows), torch.zeros([axis.size for axis in rows], dtype=torch.int64))
    type, _, _ = SortByExpert(rows, EXPERTS).infer(order[1][0])
    mixed = (type, torch.randperm(type.elements, generator=torch.Generator().manual_seed(2)))
    names = {axis.name for axis in rows}
    taken = [applied(Permute(rows), each, mixed)[0] if names & {*each[0].names} else each for each in given]
    (result,) = applied(case.op, *given)
    (wanted,) = applied(Permute(rows), result, mixed)
    ((found_type, found),) = applied(case.op, *taken)
    assert equal(found.permute([found_type.names.index(name) for name in wanted[0].names]), wanted[1])


def test_most_kinds_of_arithmetic_compute_row_by_row():
    assert {case.op.name for case in BY_ROW} == {
        "arrive",
        "prefetch",
        "copy_out",
        "land",
        "outer_sgd",
        "sum_of_groups",
        "pointwise",
        "cast",
        "to_float8",
        "dot",
        "reduce",
        "sgd",
        "ema",
        "to_host",
        "to_device",
    }
