"""Collectives on the virtual cluster, and the packing of the process transport, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.mesh import Mesh
from partita.runtime.context import Context
from partita.runtime.transports.collectives import collect
from partita.runtime.transports.lines import BufferReused, Deadlock, Mismatch, UnmatchedOperation
from partita.runtime.transports.packing import pack, unpack
from partita.runtime.transports.virtual import VirtualCluster, VirtualTransport

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def named(transport: VirtualTransport) -> Context:
    """The collectives by name, as programs call them."""
    return Context(0, torch.device("cpu"), transport=transport)


@frozen
class Case:
    """A collective along `axis` of a mesh: every rank's bucket, and the arguments of each tensor."""

    mesh: Mesh
    axis: str
    kind: str
    buckets: dict[int, tuple[torch.Tensor, ...]]
    arguments: list[tuple[Any, ...]]

    def post(self, transport: VirtualTransport) -> Any:
        return transport.collective(self.kind, self.axis, self.buckets[transport.rank], self.arguments)

    def expected(self, rank: int, i: int) -> np.ndarray:
        """Result i of a rank, in float64, from its description."""
        group = self.mesh.group(rank, self.axis)
        parts = [self.buckets[other][i].to(torch.float64).numpy() for other in group]
        own = group.index(rank)
        if self.kind == "all-gather":
            return np.concatenate(parts, self.arguments[i][0])
        if self.kind == "all-reduce":
            return np.maximum.reduce(parts) if self.arguments[i][0] else np.add.reduce(parts)
        if self.kind == "reduce-scatter":
            return np.split(np.add.reduce(parts), len(group), self.arguments[i][0])[own]
        gathered, cut = self.arguments[i]
        return np.concatenate([np.split(part, len(group), cut)[own] for part in parts], gathered)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small integers, so that sums are exact in every dtype; strides of transposed and sliced tensors."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: max(sizes) > 1))
    mesh = Mesh(tuple((f"m{i}", size) for i, size in enumerate(sizes)))
    axis = draw(st.sampled_from(mesh.sharding))
    parts = mesh.sizes[axis]
    kind = draw(st.sampled_from(KINDS))
    # A maximum is the whole bucket's, as a sum is.
    maximum = kind == "all-reduce" and draw(st.booleans())
    least = {"all-reduce": 0, "all-to-all": 2}.get(kind, 1)
    forms = []
    arguments: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 3), min_size=least, max_size=4))
        if kind == "all-reduce":
            arguments.append((maximum,))
        else:
            dims = draw(st.permutations(range(len(shape))))
            arguments.append(tuple(dims[: 2 if kind == "all-to-all" else 1]))
            if kind != "all-gather":
                shape[arguments[-1][-1]] *= parts
        dtype = draw(st.sampled_from(DTYPES[:5] if kind in ("reduce-scatter", "all-reduce") else DTYPES))
        forms.append((shape, dtype, draw(st.permutations(range(len(shape)))), draw(st.booleans())))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    buckets = {
        rank: tuple(made(shape, order, sliced, generator).to(dtype) for shape, dtype, order, sliced in forms)
        for rank in range(mesh.ranks)
    }
    return Case(mesh, axis, kind, buckets, arguments)


def made(shape: list[int], order: list[int], sliced: bool, generator: torch.Generator) -> torch.Tensor:
    """A tensor of this shape whose axes lie in memory in another order, perhaps with gaps between its elements."""
    stored = [shape[i] for i in order]
    if sliced and stored:
        stored[-1] *= 2
    tensor = torch.randint(-9, 10, stored, generator=generator)
    if sliced and stored:
        tensor = tensor[..., ::2]
    return tensor.permute([order.index(i) for i in range(len(shape))])


def finished(handle: Any) -> Iterator[None]:
    while not handle.done():
        yield


@given(case=cases(), strict=st.booleans(), seed=st.integers(0, 3))
def test_collectives_equal_their_descriptions(case: Case, strict: bool, seed: int) -> None:
    cluster = VirtualCluster(case.mesh.ranks, strict, seed)
    results: dict[int, tuple[torch.Tensor, ...]] = {}

    def step(transport: VirtualTransport) -> Iterator[None]:
        transport.open(case.mesh, [])
        # Twice, the second waited for first: what is posted later completes later all the same.
        first, second = case.post(transport), case.post(transport)
        yield from finished(second)
        assert first.done()
        results[transport.rank] = second.result()

    cluster.run([step(cluster.transport(rank)) for rank in range(case.mesh.ranks)])
    wanted = {rank: [case.expected(rank, i) for i in range(len(case.arguments))] for rank in results}
    for rank, found in results.items():
        for tensor, given_, expected in zip(found, case.buckets[rank], wanted[rank], strict=True):
            assert tensor.is_contiguous()
            assert tensor.dtype == given_.dtype
            np.testing.assert_array_equal(tensor.to(torch.float64).numpy(), expected)
            tensor.fill_(1)  # would show in the next rank's, or in what was given, if they shared memory
    for i, expected in enumerate(wanted[0]):
        np.testing.assert_array_equal(case.expected(0, i), expected)


@given(case=cases())
def test_packed_rows_carry_buckets_of_any_form(case: Case) -> None:
    """What the process transport sends as bytes arrives: the moves of each collective, with the rows handed over."""
    group = case.mesh.group(0, case.axis)
    buckets = [case.buckets[rank] for rank in group]
    if case.kind in ("all-gather", "all-reduce"):
        dims = [dim for (dim,) in case.arguments] if case.kind == "all-gather" else [0] * len(buckets[0])
        buckets = [tuple(t.reshape(1) if t.dim() == 0 else t for t in bucket) for bucket in buckets]
        packed = [pack(bucket, dims, 1) for bucket in buckets]
        found = unpack(torch.cat([each.rows for each in packed]), packed[0].pieces, dims)
        expected = collect("all-gather", buckets, [(dim,) for dim in dims])[0]
    else:
        cut = [arguments[-1] for arguments in case.arguments]
        gathered = [arguments[0] for arguments in case.arguments]
        packed = [pack(bucket, cut, len(group)) for bucket in buckets]
        found = unpack(torch.stack([each.rows[0] for each in packed]), packed[0].pieces, gathered)
        expected = collect("all-to-all", buckets, list(zip(gathered, cut, strict=True)))[0]
    for tensor, wanted in zip(found, expected, strict=True):
        assert tensor.is_contiguous()
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted)


def test_sums_add_in_order_of_the_coordinate() -> None:
    parts = [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    ((found,), *_) = collect("all-reduce", [(part,) for part in parts], [(False,)])
    assert torch.equal(found, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    assert not torch.equal(found, parts[0] + (parts[1] + (parts[2] + parts[3])))


# ---------------------------------------------------------------- what does not fit together

SQUARE = Mesh((("data", 2), ("tensor", 2)))
Step = Callable[[VirtualTransport], Iterator[None]]


def run(*steps: Step, strict: bool = True) -> None:
    """Run a step on each rank of the square; the last one on all the rest."""
    cluster = VirtualCluster(4, strict)
    for rank in range(4):
        cluster.transport(rank).open(SQUARE, [])
    cluster.run([steps[min(rank, len(steps) - 1)](cluster.transport(rank)) for rank in range(4)])


def test_groups_entered_in_different_orders_deadlock() -> None:
    def step(*axes: str) -> Step:
        def run(transport: VirtualTransport) -> Iterator[None]:
            for axis in axes:
                yield from finished(named(transport).all_gather(axis, (torch.ones(1),), (0,)))

        return run

    run(step("data", "tensor"))
    one, other = step("data", "tensor"), step("tensor", "data")
    with pytest.raises(Deadlock) as caught:
        run(one, other, other, one)
    assert str(caught.value) == (
        "deadlock: no rank can continue:\n"
        "  rank 0 waits for all-gather 0 on data (ranks 0, 2), which rank 2 has not posted\n"
        "  rank 1 waits for all-gather 0 on tensor (ranks 0, 1), which rank 0 has not posted\n"
        "  rank 2 waits for all-gather 0 on tensor (ranks 2, 3), which rank 3 has not posted\n"
        "  rank 3 waits for all-gather 0 on data (ranks 1, 3), which rank 1 has not posted\n"
        "  the cycle: rank 0 -> rank 2 -> rank 3 -> rank 1 -> rank 0"
    )


def posting(post: Callable[[VirtualTransport], Any]) -> Step:
    def step(transport: VirtualTransport) -> Iterator[None]:
        yield from finished(post(transport))

    return step


FOUR = torch.ones(4, 4)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("post", "other"),
    [
        (
            lambda t: named(t).reduce_scatter("tensor", (FOUR,), (0,)),
            r"reduce-scatter of rank 1: float32\[4, 4\] \(0,\)",
        ),
        (lambda t: named(t).all_gather("tensor", (FOUR,), (1,)), r"all-gather of rank 1: float32\[4, 4\] \(1,\)"),
        (
            lambda t: named(t).all_gather("tensor", (FOUR.double(),), (0,)),
            r"all-gather of rank 1: float64\[4, 4\] \(0,\)",
        ),
        (lambda t: named(t).all_gather("tensor", (FOUR[:2],), (0,)), r"all-gather of rank 1: float32\[2, 4\] \(0,\)"),
        (
            lambda t: named(t).all_gather("tensor", (FOUR, FOUR), (0, 0)),
            r"all-gather of rank 1: float32\[4, 4\] \(0,\) \+ float32",
        ),
    ],
)
def test_ranks_that_differ_are_refused(strict: bool, post: Callable[[VirtualTransport], Any], other: str) -> None:
    same = posting(lambda t: named(t).all_gather("tensor", (FOUR,), (0,)))
    expected = rf"operation 0 on tensor \(ranks 0, 1\) .*all-gather of rank 0: float32\[4, 4\] \(0,\), {other}"
    with pytest.raises(Mismatch, match=expected):
        run(same, posting(post), same, strict=strict)


def test_a_tensor_that_changes_before_the_collective_is_done_is_caught() -> None:
    def step(transport: VirtualTransport) -> Iterator[None]:
        tensor = torch.ones(2, 2)[:, 0]
        handle = named(transport).all_reduce("data", (tensor,))
        tensor += 1
        yield from finished(handle)

    with pytest.raises(BufferReused, match=r"rank . .* all-reduce 0 on data \(ranks"):
        run(step)


def test_a_result_is_taken_once_and_not_before_it_is_there() -> None:
    def early(transport: VirtualTransport) -> Iterator[None]:
        handle = named(transport).all_reduce("data", (FOUR,))
        yield
        handle.result()

    with pytest.raises(AssertionError, match=r"all-reduce 0 on data .* before that is complete"):
        run(early)

    def twice(transport: VirtualTransport) -> Iterator[None]:
        handle = named(transport).all_reduce("data", (FOUR,))
        yield from finished(handle)
        handle.result()
        handle.result()

    with pytest.raises(AssertionError, match="again"):
        run(twice)


def test_a_collective_that_some_ranks_skip_is_found() -> None:
    def posts(transport: VirtualTransport) -> Iterator[None]:
        named(transport).all_reduce("tensor", (FOUR,))
        yield

    with pytest.raises(UnmatchedOperation, match=r"rank 0: all-reduce 0 on tensor \(ranks 0, 1\)"):
        run(posts, lambda transport: iter(()))
