"""What a collective holds of memory is what the compiler says of it (`Buffers`): on Gloo, and where the backend adds.

Live tensors are counted as `bench/memory.py` counts them. One process stands for a group: operations are started and
end, but nothing is exchanged. What arrives is what was sent, where its length matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from attrs import define, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import Live

from partita.compiler.ops.collective import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from partita.compiler.ops.op import Argument
from partita.compiler.ops.ring import Ppermute
from partita.compiler.ops.sparse import BLOCK, ENTRY, SOURCE, SparseAllToAll
from partita.dsl.types import Axis, Type
from partita.runtime.context import Context
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.streams import HostStreams
from partita.runtime.transports.collectives import ALL_REDUCE
from partita.runtime.transports.groups import AxisGroup, CollectiveWork
from partita.runtime.transports.transport import Tensors, Transport


@define(eq=False)
class Begun:
    """An operation that has ended; keeps its tensors until it is waited for."""

    tensors: Any

    def done(self) -> bool:
        self.tensors = None
        return True


@frozen
class Alone:
    """A transport of one group."""

    group: AxisGroup

    def collective(
        self, kind: str, axis: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]
    ) -> CollectiveWork:
        return self.group.collective(kind, tensors, arguments)


def begin(_: str, tensors: Any, operation: Any, *arguments: Any, **options: Any) -> Begun:
    if operation is dist.all_to_all_single and arguments[0].dtype == torch.int64 and len(arguments) == 2:
        arguments[0].copy_(arguments[1])  # the lengths of lists
    return Begun(tensors)


KINDS = (AllGather, ReduceScatter, AllReduce, AllToAll, Ppermute, SparseAllToAll)


@st.composite
def collectives(draw: st.DrawFn, kind: type[Collective]) -> tuple[Collective, tuple[Type, ...]]:
    """A collective of a kind among two or three ranks, and the types of its operands."""
    parts, count = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    if kind is SparseAllToAll:
        head = (Axis(SOURCE, 1), Axis(BLOCK, parts), Axis(ENTRY, 40))
        rows = Type("f32", (*head, Axis("width", draw(st.integers(1, 5)))))
        return SparseAllToAll("m", parts, SOURCE, BLOCK), (Type("i64", head), rows)
    dtypes = draw(st.sampled_from((("f32",), ("bf16",), ("f32", "bf16", "i64"))))
    sizes = st.integers(1, 9).map(lambda each: each if kind is AllReduce else each * parts)
    types = tuple(
        Type(draw(st.sampled_from(dtypes)), (Axis("a", draw(sizes)), Axis("b", draw(sizes)))) for _ in range(count)
    )
    if kind is AllReduce:
        return AllReduce("m", parts, count, draw(st.booleans())), types
    if kind is Ppermute:
        return Ppermute("m", parts, "a", count), types
    axes = tuple(draw(st.sampled_from("ab")) for _ in types)
    if kind is AllToAll:
        return AllToAll("m", parts, axes, tuple("b" if each == "a" else "a" for each in axes)), types
    return (AllGather if kind is AllGather else ReduceScatter)("m", parts, axes), types


def held(op: Collective, types: Sequence[Type], sums: bool) -> tuple[int, int]:
    """The bytes that it holds as it is in flight, and the most."""
    names = [f"x{i}" for i in range(len(types))]
    tensors = [torch.zeros(type.shape, dtype=DTYPES[type.dtype]) for type in types]
    group = AxisGroup(op.over, op.parts, None, sums, HostStreams(), op.over, begin)
    started = op.start([Argument(name, type) for name, type in zip(names, types, strict=True)])
    known = {"c": Context(0, torch.device("cpu"), transport=cast("Transport", Alone(group)))}
    with pytest.MonkeyPatch.context() as patch, Live() as live:
        live.aside = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
        patch.setattr(dist, "get_rank", lambda group: 0)
        handle = eval(started, {**known, **dict(zip(names, tensors, strict=True))})
        flying = live.now
        results = handle.result()
        assert [tuple(each.shape) for each in results] == [type.shape for type in op.infer(*types)]
    return flying, live.peak


@pytest.mark.few(6)
@pytest.mark.parametrize("adds", [True, False], ids=["the ranks add", "the backend adds"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_a_collective_holds_what_the_compiler_says(kind: type[Collective], adds: bool, data: st.DataObject) -> None:
    """Just that, besides operands. Reductions of several dtypes are made one by one."""
    op, types = data.draw(collectives(kind))
    results = op.infer(*types)
    said = op.buffers(types, results, adds)
    made = said.received + (0 if said.in_place else said.made or sum(each.bytes for each in results)) + said.adding
    one_by_one = kind in (ReduceScatter, AllReduce) and len({type.dtype for type in types}) > 1
    flying, most = held(op, types, sums=not adds)
    assert flying <= said.sent + said.received
    assert most <= max(said.sent + said.received, made + one_by_one * said.sent)
    if kind is not SparseAllToAll and not one_by_one:
        assert flying == said.sent + said.received
        assert most == max(flying, made)


def test_what_a_backend_sums_in_place_is_a_copy() -> None:
    """A bucket of one tensor may be the tensor itself, which others read."""

    def overwrite(_: str, tensors: Any, operation: Any, *arguments: Any, **options: Any) -> Begun:
        assert operation is dist.all_reduce
        arguments[0].fill_(7.0)
        return Begun(tensors)

    x = torch.ones(3)
    group = AxisGroup("m", 2, None, True, HostStreams(), "m", overwrite)
    (total,) = group.collective(ALL_REDUCE, (x,), ((False,),)).result()
    assert total.tolist() == [7.0] * 3
    assert x.tolist() == [1.0] * 3
