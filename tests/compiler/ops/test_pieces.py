"""Pieces of a tensor, gathered or summed one by one, are pieces of what is gathered or summed whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.ops.op import Op
from partita.compiler.ops.pieces import Join, Piece, contiguous
from partita.dsl.types import Axis, Type
from partita.runtime.transports.collectives import all_gather, reduce_scatter
from tests.compiler.ops.placing import run

SIZES = st.integers(1, 3)


def cut(x: torch.Tensor, type: Type, axis: str, pieces: int, blocks: int = 1) -> list[torch.Tensor]:
    view = contiguous(type, axis, blocks)
    return [run(Piece(axis, pieces, k, blocks, view), [type], [x], {})[0] for k in range(pieces)]


def joined(parts: list[torch.Tensor], type: Type, axis: str, blocks: int = 1) -> torch.Tensor:
    """`type` is that of the whole."""
    own = type.resized(axis, type.axis(axis).size // len(parts))
    return run(Join(axis, blocks), [own] * len(parts), parts, {})[0]


def numbered(type: Type) -> torch.Tensor:
    return torch.arange(float(type.elements), dtype=torch.float64).view(type.shape)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Type, str, int, int]:
    """A shard of a tensor, an axis of it, a number of pieces, and of ranks."""
    pieces = draw(SIZES)
    sizes = {name: draw(SIZES) for name in "abc"}
    axis = draw(st.sampled_from("abc"))
    sizes[axis] *= pieces
    return Type("f64", tuple(Axis(name, size) for name, size in sizes.items())), axis, pieces, draw(SIZES)


@given(case=cases(), over=st.sampled_from("abc"))
def test_gathered_pieces_are_pieces_of_what_is_gathered(case: tuple[Type, str, int, int], over: str):
    type, axis, pieces, ranks = case
    shards = [numbered(type) + 1000 * rank for rank in range(ranks)]
    dim = type.position(over)
    whole, full = all_gather(shards, dim)[0], type.resized(over, type.axis(over).size * ranks)
    sent = [all_gather(each, dim)[0] for each in zip(*(cut(x, type, axis, pieces) for x in shards), strict=True)]
    blocks = ranks if axis == over else 1
    assert all(map(torch.equal, sent, cut(whole, full, axis, pieces, blocks)))
    assert torch.equal(joined(sent, full, axis, blocks), whole)


@given(case=cases(), over=st.sampled_from("abc"))
def test_pieces_of_a_sum_are_scattered_as_the_whole_is(case: tuple[Type, str, int, int], over: str):
    type, axis, pieces, ranks = case
    full = type.resized(over, type.axis(over).size * ranks)
    parts = [numbered(full) * (rank + 1) for rank in range(ranks)]
    dim = type.position(over)
    blocks = ranks if axis == over else 1
    sent = zip(*(cut(x, full, axis, pieces, blocks) for x in parts), strict=True)
    found = list(zip(*(reduce_scatter(each, dim) for each in sent), strict=True))
    for own, wanted in zip(found, reduce_scatter(parts, dim), strict=True):
        assert torch.equal(joined(list(own), type, axis), wanted)


@given(case=cases())
def test_only_a_contiguous_piece_is_a_view(case: tuple[Type, str, int, int]):
    """Others are copied, as what sends them counts on."""
    type, axis, pieces, blocks = case
    type = type.resized(axis, type.axis(axis).size * blocks)
    x = numbered(type)
    for k, piece in enumerate(cut(x, type, axis, pieces, blocks)):
        assert piece.is_contiguous()
        op = Piece(axis, pieces, k, blocks, contiguous(type, axis, blocks))
        if op.is_view:
            assert piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "op",
    [Piece("a", 3, 0, 1, True), Piece("a", 2, 2, 1, True), Piece("a", 2, 0, 2), Piece("a", 2, 0), Piece("b", 2, 0)],
)
def test_what_is_not_there_is_not_taken(op: Op):
    with pytest.raises((AssertionError, LookupError, ValueError)):
        op.infer(Type("f32", (Axis("a", 2),)))
