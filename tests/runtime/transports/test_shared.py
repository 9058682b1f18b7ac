"""Channels in shared memory: laws over random messages, and who may hand memory over."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from time import sleep

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.instructions import Traffic
from partita.runtime.transports import same_host
from partita.runtime.transports.failures import ConnectionLost
from partita.runtime.transports.lines import same_bits
from partita.runtime.transports.same_host import SameHostPeers
from partita.runtime.transports.shared import ASLEEP, Incoming, Outgoing, size_for

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux, and a Python built on it")


@contextmanager
def channel(traffic: Traffic, spins: bool = False) -> Iterator[tuple[Outgoing, Incoming]]:
    """Both ends, each with a mapping of its own."""
    handle = os.memfd_create("test")
    os.ftruncate(handle, size_for(traffic))
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    out = Outgoing("the send", a, mmap.mmap(handle, 0), traffic)
    into = Incoming("the receive", b, mmap.mmap(handle, 0), traffic, spins)
    os.close(handle)
    try:
        yield out, into
    finally:
        out.close()
        into.close()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 9), max_size=3))
    bits = torch.randint(
        0, 256, (*shape, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    dtype = draw(st.sampled_from(DTYPES))
    return bits[..., 0] > 127 if dtype == torch.bool else bits.view(torch.int64).squeeze(-1).to(dtype).contiguous()


@given(data=st.data(), steps=st.lists(st.lists(tensors(), min_size=1, max_size=6), min_size=1, max_size=4))
def test_messages_arrive_in_order_and_bit_for_bit(data: st.DataObject, steps: list[list[torch.Tensor]]) -> None:
    """However sends and receives of a step are interleaved: all sends first is what rendezvous forbids."""
    traffic = Traffic(max(map(len, steps)), max(sum(each.nbytes for each in step) for step in steps))
    with channel(traffic) as (out, into):
        for step in steps:
            buffers = [torch.zeros_like(each) for each in step]
            handles = []
            sent = posted = 0
            while posted < len(step):
                if sent < len(step) and (sent == posted or data.draw(st.booleans())):
                    assert out.post(step[sent]).done()
                    sent += 1
                else:
                    handles.append(into.post(buffers[posted]))
                    posted += 1
                    if data.draw(st.booleans()) and posted <= sent:
                        assert handles[-1].done()  # and all before it
            for each in step[sent:]:
                out.post(each)
            for handle in data.draw(st.permutations(handles)):
                assert handle.done()
            assert all(map(same_bits, step, buffers))


@pytest.mark.parametrize("spins", [False, True])
def test_who_sleeps_is_woken(spins: bool) -> None:
    with channel(Traffic(50, 50 * 4), spins) as (out, into):
        values = []

        def receive() -> None:
            for _ in range(200):
                buffer = torch.zeros(1)
                into.post(buffer).done()
                values.append(float(buffer))

        waiting = Thread(target=receive)
        waiting.start()
        for i in range(200):
            if i % 20 == 0:
                sleep(0.005)  # by now it sleeps
            while i % 50 == 0 and len(values) < i:
                sleep(0.001)  # a step has been taken
            out.post(torch.tensor([float(i)]))
        waiting.join(30)
        assert values == [float(i) for i in range(200)]
        assert into.busy_wait > 0 or not spins


def test_who_has_gone_is_noticed_after_what_it_sent() -> None:
    with channel(Traffic(2, 8)) as (out, into):
        out.post(torch.tensor([7.0]))
        out.close()
        buffer = torch.zeros(1)
        assert into.post(buffer).done()
        assert float(buffer) == 7.0
        with pytest.raises(ConnectionLost, match="the receive failed: the other process is gone"):
            into.post(buffer).done()
    with channel(Traffic(2, 8)) as (out, into):
        out._words[ASLEEP] = 1
        into.close()
        with pytest.raises(ConnectionLost, match="the send failed: "):
            out.post(torch.tensor([7.0]))


def test_what_does_not_fit_the_program_is_refused() -> None:
    with channel(Traffic(2, 8)) as (out, into):
        out.post(torch.zeros(1))
        with pytest.raises(AssertionError, match="the receive: 4 bytes have come, not 8"):
            into.post(torch.zeros(2)).done()
    with channel(Traffic(2, 8)) as (out, into):
        out.post(torch.zeros(1))
        out.post(torch.zeros(1))
        with pytest.raises(AssertionError, match="the send: more messages than a step sends"):
            out.post(torch.zeros(1))


@contextmanager
def met() -> Iterator[SameHostPeers]:
    """A rank that has met itself and another one of its machine, which is itself."""
    listener, _ = same_host._own(b"t" * 16)
    if listener is None:
        pytest.skip("memory cannot be shared here")
    yield SameHostPeers(
        False, (0b0011, 0b0111, 0b0100, 0b0000), {1: (listener.getsockname(), b"t" * 16)}, listener, b"t" * 16
    )
    listener.close()


def test_only_ranks_that_reach_each_other_are_near() -> None:
    with met() as found:
        assert found.is_local(0, 1)
        assert not found.is_local(0, 2)
        assert not found.is_local(1, 2), "only one of them has reached the other"
        assert not found.is_local(3, 3), "it cannot share memory"
    assert not SameHostPeers().is_local(0, 0)


def test_strangers_are_not_let_in() -> None:
    """Nor is what they hand over, whatever they call it; and nobody waits for ever."""
    with met() as found:
        name = found._doors[1][0]
        stranger = SameHostPeers(False, found._reached, {1: (name, b"x" * 16)})
        stranger.offer("0->1 forward", 1, 4096)
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(name)
        silent.close()
        offered, memory = found.offer("0->1 forward", 1, 64)
        memory[:2] = b"hi"
        taken, same = found.take("0->1 forward")
        assert same[:2] == b"hi"
        assert len(same) == 64
        offered.close()
        taken.close()
        assert found._door is not None
        found._door.settimeout(0.1)
        with pytest.raises(ConnectionLost, match=r"sharing memory for 1->0 backward failed: timed out"):
            found.take("1->0 backward")


def test_offers_may_come_in_any_order() -> None:
    with met() as found:
        for name in ("b", "a"):
            found.offer(name, 1, 64)[1][:1] = name.encode()
        assert found.take("a")[1][:1] == b"a"
        assert found.take("b")[1][:1] == b"b"
