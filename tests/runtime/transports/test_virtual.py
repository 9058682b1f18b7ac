"""The virtual cluster: in-order rendezvous, exact about deadlock, hard on programs that touch buffers early.

Programs are lists of operations per rank: `post` hands the next transfer of a channel over, `wait` waits for
an earlier post. The oracle for deadlock is a rendezvous machine of ten lines that knows nothing of the
cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from partita.compiler.instructions import Channel
from partita.compiler.mesh import Mesh
from partita.runtime.transports.lines import BufferReused, CommunicationError, Deadlock, Mismatch, UnmatchedOperation
from partita.runtime.transports.virtual import VirtualCluster

LINE = "all ranks"
Operation = tuple[str, Channel | str, int]  # ("post" or "wait", what, index of the post on it)
Program = list[list[Operation]]


def value(channel: Channel | str, index: int, rank: int) -> float:
    return 100.0 * index + 10.0 * rank + len(str(channel))


def step(cluster: VirtualCluster, rank: int, program: list[Operation], seen: list[tuple]) -> Iterator[None]:
    transport = cluster.transport(rank)
    posts = {}
    for kind, what, index in program:
        if kind == "post":
            if what == LINE:
                tensor = torch.tensor([value(what, index, rank)])
                posts[what, index] = transport.gather_over_ranks(tensor), tensor
            elif what.source == rank:
                tensor = torch.tensor([value(what, index, rank)])
                posts[what, index] = transport.send(what, tensor), tensor
            else:
                tensor = torch.zeros(1)
                posts[what, index] = transport.receive(what, tensor), tensor
        else:
            handle, tensor = posts[what, index]
            while not handle.done():
                yield
            if what == LINE:
                seen.append((rank, what, index, handle.result()[0].sum().item()))
            elif what.destination == rank:
                seen.append((rank, what, index, tensor.item()))


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, Program]:
    """Ranks whose posts match one to one and in order; the waits stand anywhere after their posts."""
    ranks = draw(st.integers(1, 4))
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    lines: list[Channel | str] = [LINE]
    if pairs:
        lines += draw(
            st.lists(
                st.builds(
                    lambda pair, way: Channel(*pair, way),
                    st.sampled_from(pairs),
                    st.sampled_from(["forward", "backward"]),
                ),
                min_size=1,
                max_size=5,
                unique=True,
            )
        )
    counts = {line: draw(st.integers(0, 3)) for line in lines}
    program: Program = []
    for rank in range(ranks):
        mine = [
            line
            for line, count in counts.items()
            if line == LINE or rank in (line.source, line.destination)
            for _ in range(count)
        ]
        operations: list[Operation] = []
        posted: dict[Channel | str, int] = {}
        for line in draw(st.permutations(mine)):
            index = posted.get(line, 0)
            posted[line] = index + 1
            operations.append(("post", line, index))
            if draw(st.booleans()):
                operations.append(("wait", line, index))
        waited = {(line, index) for kind, line, index in operations if kind == "wait"}
        rest = [(line, index) for line, count in posted.items() for index in range(count)]
        operations += [
            ("wait", line, index) for line, index in draw(st.permutations(rest)) if (line, index) not in waited
        ]
        program.append(operations)
    return ranks, program


def deadlocks(ranks: int, program: Program) -> bool:
    """The oracle: run everything that can run; an operation is through when all its ends have posted it."""
    places = [0] * ranks
    posted: dict[tuple, int] = {}
    moved = True
    while moved:
        moved = False
        for rank, operations in enumerate(program):
            while places[rank] < len(operations):
                kind, line, index = operations[places[rank]]
                if kind == "post":
                    posted[line, index] = posted.get((line, index), 0) + 1
                elif posted[line, index] < (ranks if line == LINE else 2):
                    break
                places[rank] += 1
                moved = True
    return any(place < len(operations) for place, operations in zip(places, program, strict=True))


def open_pipeline(cluster: VirtualCluster, channels: Sequence[Channel]) -> None:
    """Every rank opens the channels of a mesh that is one pipeline."""
    for rank in range(cluster.ranks):
        cluster.transport(rank).open(Mesh((("pipe", cluster.ranks),), "pipe"), channels)


def run(cluster: VirtualCluster, program: Program) -> list[tuple]:
    open_pipeline(cluster, sorted({line for operations in program for _, line, _ in operations if line != LINE}))
    seen: list[tuple] = []
    cluster.run([step(cluster, rank, operations, seen) for rank, operations in enumerate(program)])
    return seen


@given(case=programs(), strict=st.booleans(), seed=st.integers(0, 3))
def test_a_program_deadlocks_exactly_where_rendezvous_does(case: tuple[int, Program], strict: bool, seed: int) -> None:
    ranks, program = case
    cluster = VirtualCluster(ranks, strict=strict, seed=seed)
    if deadlocks(ranks, program):
        with pytest.raises(Deadlock) as caught:
            run(cluster, program)
        for rank in range(ranks):
            assert f"rank {rank} " in str(caught.value)
        # All posts match, so nobody waits for a rank that is through: there must be a cycle.
        assert caught.value.cycle
        return
    for rank, line, index, got in run(cluster, program):
        if line == LINE:
            assert got == sum(value(line, index, other) for other in range(ranks))
        else:
            assert got == value(line, index, line.source), (rank, line, index)


@given(case=programs(), seed=st.integers(0, 3))
def test_runs_are_deterministic(case: tuple[int, Program], seed: int) -> None:
    ranks, program = case
    assume(not deadlocks(ranks, program))
    assert run(VirtualCluster(ranks, seed=seed), program) == run(VirtualCluster(ranks, seed=seed), program)


@given(case=programs(), data=st.data())
def test_a_dropped_post_is_found(case: tuple[int, Program], data: st.DataObject) -> None:
    ranks, program = case
    assume(ranks > 1 and not deadlocks(ranks, program))
    places = [(rank, i) for rank, ops in enumerate(program) for i, (kind, _, _) in enumerate(ops) if kind == "post"]
    assume(places)
    rank, place = data.draw(st.sampled_from(places))
    line = program[rank][place][1]
    # The last of its line on this rank, and its wait: the rest of the program is as before.
    last = max(i for kind, other, i in program[rank] if other == line)
    broken = [list(operations) for operations in program]
    broken[rank] = [op for op in program[rank] if op[1:] != (line, last)]
    with pytest.raises(CommunicationError):
        run(VirtualCluster(ranks), broken)


F, B = Channel(0, 1, "forward"), Channel(1, 0, "backward")


def cluster_of_two(strict: bool = True) -> VirtualCluster:
    cluster = VirtualCluster(2, strict=strict)
    open_pipeline(cluster, [F, B])
    return cluster


def waiting(handle) -> Iterator[None]:
    while not handle.done():
        yield


def test_a_sender_that_writes_too_early_is_caught() -> None:
    cluster = cluster_of_two()

    def sender() -> Iterator[None]:
        tensor = torch.ones(3)
        handle = cluster.transport(0).send(F, tensor)
        tensor += 1
        yield from waiting(handle)

    def receiver() -> Iterator[None]:
        yield from waiting(cluster.transport(1).receive(F, torch.empty(3)))

    with pytest.raises(BufferReused, match=r"rank 0 .* send 0 on 0->1 forward"):
        cluster.run([sender(), receiver()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_posted_buffer_holds_garbage_until_it_is_done(dtype: torch.dtype) -> None:
    cluster = cluster_of_two()
    buffer = torch.ones(3, dtype=dtype)
    early = []

    def sender() -> Iterator[None]:
        yield from waiting(cluster.transport(0).send(F, torch.ones(3, dtype=dtype)))

    def receiver() -> Iterator[None]:
        handle = cluster.transport(1).receive(F, buffer)
        yield  # the other end has posted now, and still nothing has arrived
        early.append(buffer.clone())
        yield from waiting(handle)

    cluster.run([sender(), receiver()])
    assert not torch.any(early[0] == 1)
    assert torch.all(buffer == 1)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("buffer", "named"),
    [(torch.empty(4), r"float32\[4\]"), (torch.empty(3, dtype=torch.float64), r"float64\[3\]")],
)
def test_ends_that_differ_are_refused(strict: bool, buffer: torch.Tensor, named: str) -> None:
    cluster = cluster_of_two(strict)

    def sender() -> Iterator[None]:
        yield from waiting(cluster.transport(0).send(F, torch.ones(3)))

    def receiver() -> Iterator[None]:
        yield from waiting(cluster.transport(1).receive(F, buffer))

    with pytest.raises(Mismatch, match=rf"operation 0 on 0->1 forward .*float32\[3\].*{named}"):
        cluster.run([sender(), receiver()])


def test_the_deadlock_message_names_every_rank_and_the_cycle() -> None:
    cluster = cluster_of_two()

    def zero() -> Iterator[None]:
        yield from waiting(cluster.transport(0).receive(B, torch.empty(1)))
        yield from waiting(cluster.transport(0).send(F, torch.empty(1)))

    def one() -> Iterator[None]:
        yield from waiting(cluster.transport(1).receive(F, torch.empty(1)))
        yield from waiting(cluster.transport(1).send(B, torch.empty(1)))

    with pytest.raises(Deadlock) as caught:
        cluster.run([zero(), one()])
    assert str(caught.value) == (
        "deadlock: no rank can continue:\n"
        "  rank 0 waits for receive 0 on 1->0 backward, which rank 1 has not posted\n"
        "  rank 1 waits for receive 0 on 0->1 forward, which rank 0 has not posted\n"
        "  the cycle: rank 0 -> rank 1 -> rank 0"
    )
    assert caught.value.cycle == (0, 1)


def test_waiting_for_a_rank_that_has_finished_is_a_deadlock_without_a_cycle() -> None:
    cluster = cluster_of_two()

    def zero() -> Iterator[None]:
        yield from waiting(cluster.transport(0).receive(B, torch.empty(1)))

    with pytest.raises(Deadlock, match="rank 1 has finished") as caught:
        cluster.run([zero(), iter(())])
    assert caught.value.cycle == ()


def test_what_nobody_received_is_found_at_the_end() -> None:
    cluster = cluster_of_two()

    def zero() -> Iterator[None]:
        cluster.transport(0).send(F, torch.ones(1))
        yield

    with pytest.raises(UnmatchedOperation, match="rank 0: send 0 on 0->1 forward"):
        cluster.run([zero(), iter(())])


def test_a_cluster_runs_step_after_step() -> None:
    cluster = cluster_of_two()
    got: list[float] = []

    def sender(number: int) -> Iterator[None]:
        yield from waiting(cluster.transport(0).send(F, torch.tensor([float(number)])))

    def receiver() -> Iterator[None]:
        buffer = torch.empty(1)
        yield from waiting(cluster.transport(1).receive(F, buffer))
        got.append(buffer.item())

    for number in range(5):
        cluster.run([sender(number), receiver()])
    assert got == [0, 1, 2, 3, 4]


def test_the_seed_changes_the_order_of_completion() -> None:
    channels = [Channel(0, 1, name) for name in ("a", "b", "c", "d")]

    def order(seed: int) -> Sequence[str]:
        cluster = VirtualCluster(2, seed=seed)
        open_pipeline(cluster, channels)
        arrived: list[str] = []

        def sender() -> Iterator[None]:
            handles = [cluster.transport(0).send(channel, torch.ones(1)) for channel in channels]
            for handle in handles:
                yield from waiting(handle)

        def receiver() -> Iterator[None]:
            pending = {channel: cluster.transport(1).receive(channel, torch.empty(1)) for channel in channels}
            while pending:
                for channel in [channel for channel, handle in pending.items() if handle.done()]:
                    arrived.append(channel.direction)
                    del pending[channel]
                if pending:
                    yield

        cluster.run([sender(), receiver()])
        return tuple(arrived)

    assert len({order(seed) for seed in range(20)}) > 5
