"""Thread blocks of a GPU: those of all groups that a rank is in have room on it together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.instructions import Channel
from partita.compiler.mesh import Mesh
from partita.runtime.transports.thread_blocks import BETWEEN, COLLECTIVE, WITHIN, allot

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SIZES, st.integers(1, 8), st.integers(48, 160))
def test_all_groups_of_a_rank_have_room_together(sizes: list[int], node: int, multiprocessors: int):
    mesh = Mesh((("pipe", sizes[0]), *((f"axis{i}", size) for i, size in enumerate(sizes[1:]))), "pipe")
    pairs = [(a, b) for a in range(sizes[0]) for b in range(sizes[0]) if abs(a - b) in (1, sizes[0] - 1) and a != b]
    channels = [Channel(a, b, "forward" if b > a else "backward") for a, b in pairs]
    machines = [rank // node for rank in range(mesh.ranks)]
    found = allot(mesh, channels, machines, multiprocessors)
    taken = {rank: found.collective * (len(mesh.joined) + 1) for rank in range(mesh.ranks)}
    for channel in channels:
        for rank in range(mesh.ranks):
            ends = rank, mesh.peer(rank, channel.destination)
            if mesh.pipe_rank(rank) == channel.source:
                for each in ends:
                    taken[each] += found.of_messages(ends)
    least = len(mesh.joined) + 1 + 2 * len(channels)  # one each
    assert max(taken.values()) <= max(multiprocessors, least)
    assert 1 <= found.collective <= COLLECTIVE
    assert 1 <= found.within <= WITHIN
    assert 1 <= found.between <= BETWEEN


def test_messages_within_a_machine_have_what_its_link_needs():
    mesh = Mesh((("pipe", 4),), "pipe")
    channels = [Channel(i, i + 1, "forward") for i in range(3)]
    found = allot(mesh, channels, [0, 0, 1, 1], 132)
    assert [found.of_messages((i, i + 1)) for i in range(3)] == [WITHIN, BETWEEN, WITHIN]
    assert found.collective == COLLECTIVE
