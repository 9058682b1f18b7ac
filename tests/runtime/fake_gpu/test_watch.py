"""What is watched on a GPU that is not there: waiting, and the order of streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from partita.runtime.context import Context
from partita.runtime.fake_gpu.device import DEVICE, fake_gpu
from partita.runtime.fake_gpu.nccl import FakeNccl
from partita.runtime.fake_gpu.watch import Kind, Stopped, Watch
from partita.runtime.kernels.host import copy_out, land
from partita.runtime.kernels.optimizers import ema
from partita.runtime.streams import DeviceStreams


def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def kinds(wrong: Callable[[Watch], object], offloads: bool = False) -> set[Kind]:
    watch = Watch(torch.float32, offloads)
    with fake_gpu(watch):
        try:
            wrong(watch)
        except Stopped:
            assert watch.faults
    return {each.kind for each in watch.faults}


WAITING = {
    "item": lambda watch: new().item(),
    "list": lambda watch: new(3).tolist(),
    "truth": lambda watch: bool(new()),
    "nonzero": lambda watch: new(3).nonzero(),
    "mask": lambda watch: new(3)[new(3) > 0],
    "to_host": lambda watch: new(3).cpu(),
    "to_device": lambda watch: torch.zeros(3).to(DEVICE),
    "not_pinned": lambda watch: torch.zeros(3).to(DEVICE, non_blocking=True),
    "number": lambda watch: torch.tensor(1.0, device=DEVICE),
    "synchronize": lambda watch: torch.cuda.synchronize(),
    "event": lambda watch: torch.cuda.Event().synchronize(),
}


@pytest.mark.parametrize("what", WAITING)
def test_the_host_is_seen_to_wait(what: str):
    assert kinds(WAITING[what]) == {Kind.SYNCHRONISATION}


def test_what_is_launched_ahead_waits_for_nothing():
    def ahead(watch: Watch) -> None:
        x = torch.zeros(3, pin_memory=True).to(DEVICE, non_blocking=True)
        x[1:] += torch.full((), 2.0, device=DEVICE)
        torch.empty(3, pin_memory=True).copy_(x[None, :, None].view(-1), non_blocking=True)

    assert not kinds(ahead)


def broadcasts(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


FROM_HERE, FROM_OTHER = broadcasts(0), broadcasts(1)


def sent(watch: Watch, after: Callable[[FakeNccl, torch.Tensor], object]) -> None:
    after(FakeNccl(watch, 0, 2), new(4))


def test_messages_are_read_after_they_have_arrived():
    def early(group: FakeNccl, x: torch.Tensor) -> None:
        work = group.broadcast([x], FROM_OTHER)
        x + 1
        work.wait()

    def in_time(group: FakeNccl, x: torch.Tensor) -> None:
        group.broadcast([x], FROM_OTHER).wait()
        x + 1

    assert kinds(lambda watch: sent(watch, early)) == {Kind.LIFETIME}
    assert not kinds(lambda watch: sent(watch, in_time))


def test_what_is_sent_stays_as_it_is():
    def changed(group: FakeNccl, x: torch.Tensor) -> None:
        work = group.broadcast([x], FROM_HERE)
        x.add_(1)
        work.wait()

    assert kinds(lambda watch: sent(watch, changed)) == {Kind.LIFETIME}


def test_the_host_reads_what_has_landed():
    kept = []

    def updated(watch: Watch, waits: bool) -> None:
        context, gradient = Context(0, DEVICE, streams=DeviceStreams(DEVICE)), new(4)
        copy = copy_out(gradient, context)
        if waits:
            land(copy, context)
            del gradient  # what is freed then has been copied
        else:
            kept.append(gradient)
        ema(torch.zeros(4), copy, 1, 0.9)

    def overwritten(watch: Watch) -> None:
        master = torch.zeros(4, pin_memory=True)
        there = master.to(DEVICE, non_blocking=True)
        ema(master, torch.zeros(4), 1, 0.9)
        there + 1

    assert kinds(lambda watch: updated(watch, False), offloads=True) == {Kind.LIFETIME}
    assert not kinds(lambda watch: updated(watch, True), offloads=True)
    assert kinds(overwritten, offloads=True) == {Kind.LIFETIME}


def test_what_is_changed_in_place_is_written_once():
    """Also if it was there before it was watched."""
    total = torch.zeros(4, device="meta")
    watch = Watch(torch.float32, there="meta")
    with watch:
        total.add_(1)
    (launch,) = watch.taken()
    assert (launch.read, launch.written) == (16, 16)


def test_what_is_cleared_is_not_read():
    """One tensor, or many by one kernel."""
    totals = [torch.ones(4, device="meta"), torch.ones(2, device="meta")]
    watch = Watch(torch.float32, there="meta")
    with watch:
        totals[0].zero_()
        torch._foreach_zero_(totals)
    assert [(each.read, each.written) for each in watch.taken()] == [(0, 16), (0, 24)]


def test_memory_is_freed_after_other_streams():
    def freed(watch: Watch, waits: bool) -> None:
        stream, x = torch.cuda.Stream(DEVICE), new(4)
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(stream):
            x + 1
        if waits:
            torch.cuda.current_stream(DEVICE).wait_stream(stream)
        del x

    def freed_there(watch: Watch) -> None:
        """While another stream is current: the memory is given back to that which computes all the same."""
        stream, x = torch.cuda.Stream(DEVICE), new(4)
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(stream):
            x + 1
            del x

    assert kinds(lambda watch: freed(watch, False)) == {Kind.LIFETIME}
    assert kinds(freed_there) == {Kind.LIFETIME}
    assert not kinds(lambda watch: freed(watch, True))


def test_the_most_above_the_limit_is_known():
    """It is not what there is where the limit is first exceeded."""
    watch = Watch(torch.float32, there="meta")
    watch.limit = 8
    with watch:
        kept = [torch.zeros(count, device="meta") for count in (4, 40)]
    most, _ = watch.above
    assert most == watch.peak == sum(each.nbytes for each in kept)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (lambda group: group.allreduce([torch.zeros(4)]), Kind.DEVICE),
        (lambda group: group.allreduce([new(4, 2).t()]), Kind.DEVICE),
        (lambda group: group.allreduce([new(4, dtype=torch.bool)]), Kind.DTYPE),
        (lambda group: group.all_gather_single(new(4), new(4)), Kind.LIFETIME),
    ],
    ids=["host", "strided", "boolean", "size"],
)
def test_nccl_is_given_what_it_takes(what: Callable[[FakeNccl], object], kind: Kind):
    assert kind in kinds(lambda watch: what(FakeNccl(watch, 0, 2)))
