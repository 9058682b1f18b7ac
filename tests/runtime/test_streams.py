"""A GPU's streams and events order what the program says is ordered, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from attrs import define, field, frozen
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.instructions import COMPUTE
from partita.compiler.streams import START, Launch
from partita.runtime.streams import ENDED, DeviceStreams, Posting
from partita.runtime.transports.posted import enqueued, posted

GPU = torch.device("cuda")
POOL = 32  # streams that torch hands out in turn


@define(eq=False)
class Stream:
    """What was enqueued: names of operations, and events that are waited for, as what was recorded then."""

    name: str
    items: list[object] = field(factory=list)

    @property
    def cuda_stream(self) -> int:
        return int(self.name) % POOL

    def wait_event(self, event: Event) -> None:
        if event.at is not None:  # as CUDA has it, one that was never recorded has occurred
            self.items.append(event.at)

    def wait_stream(self, other: Stream) -> None:
        self.items.append(Mark(other, len(other.items)))

    def record_event(self) -> Event:
        return Event(Mark(self, len(self.items)))


@frozen(eq=False)
class Mark:
    stream: Stream
    count: int


@define(eq=False)
class Event:
    at: Mark | None = None

    def record(self, stream: Stream) -> None:
        self.at = Mark(stream, len(stream.items))


def before(mark: Mark, seen: set[tuple[str, int]] | None = None) -> set[object]:
    """The operations that have ended when a stream gets there."""
    seen = set() if seen is None else seen
    found: set[object] = set()
    if (id(mark.stream), mark.count) in seen:
        return found
    seen.add((id(mark.stream), mark.count))
    for each in mark.stream.items[: mark.count]:
        found |= before(each, seen) if isinstance(each, Mark) else {each}
    return found


@contextmanager
def cuda() -> Iterator[tuple[Callable[[], Stream], dict[str, Stream]]]:
    """torch.cuda with such streams: the current one, and those that were made."""
    current, made = [Stream(COMPUTE)], []

    @contextmanager
    def stream(own: Stream) -> Iterator[None]:
        current.append(own)
        yield
        current.pop()

    def new(device: torch.device, priority: int) -> Stream:
        made.append(Stream(str(len(made))))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", new)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
        yield (lambda: current[-1]), made


@st.composite
def launches(draw: st.DrawFn) -> list[Launch]:
    """Any launches whose events are of earlier instructions."""
    found: list[Launch] = []
    for i in range(draw(st.integers(1, 12))):
        stream = draw(st.sampled_from([COMPUTE, "a", "b"]))
        earlier = [*range(i), START]
        found.append(Launch(stream, tuple(draw(st.lists(st.sampled_from(earlier), max_size=2, unique=True)))))
    return found


def ordered(given: Sequence[Launch]) -> list[set[int]]:
    """What has ended before each instruction starts."""
    found: list[set[int]] = []
    tails: dict[str, set[int]] = {}
    for i, launch in enumerate(given):
        own = set(tails.get(launch.stream, ()))
        for event in launch.after:
            own |= {START} if event == START else found[event] | {event}
        found.append(own)
        tails[launch.stream] = own | {i}
    return found


@given(launches(), st.booleans())
def test_what_is_ordered_is_what_launches_say(given_: list[Launch], waits: bool):
    with cuda() as (current, made):
        device = DeviceStreams(GPU)
        begun: dict[tuple[int, int], Mark] = {}
        step = 0

        def run(i: int) -> object:
            begun[step, i] = Mark(current(), len(current().items))
            current().items.append((step, i))
            return ENDED

        def later(i: int) -> Iterator[None]:
            yield
            run(i)

        def computes(i: int) -> object:
            if waits:
                return later(i)
            run(i)
            return None

        parts = [
            (lambda i=i: computes(i))
            if launch.stream == COMPUTE
            else Posting(lambda: (), lambda i=i: run(i), lambda handle: None)
            for i, launch in enumerate(given_)
        ]
        bound = device.bound(given_, parts)
        for step in (0, 1):
            current().items.append((step, START))
            for each in bound:
                for _ in each() or ():
                    pass
        expected = ordered(given_)
        for i, own in enumerate(expected):
            found = {j for which, j in before(begun[1, i]) if which == 1}
            assert found - {START} == own - {START}
            assert START not in own or START in found
        assert len(made) == len({each.stream for each in given_} - {COMPUTE})


def test_operations_of_functions_are_behind_what_computes_and_it_is_behind_their_handles():
    with cuda() as (current, _):
        device = DeviceStreams(GPU)
        current().items.append("before")
        began = []

        def operation(tensor: torch.Tensor) -> object:
            began.append(Mark(current(), len(current().items)))
            current().items.append(f"operation {int(tensor)}")
            return ENDED

        handles = [device.launch("along data", operation, torch.tensor(i)) for i in range(2)]
        current().items.append("beside")
        assert before(began[0]) == {"before"}
        assert before(began[1]) == {"before", "operation 0"}
        assert "operation 0" not in before(Mark(current(), len(current().items)))
        assert handles[1].done()
        assert {"operation 0", "operation 1"} <= before(Mark(current(), len(current().items)))


class Work:
    waited = 0

    def wait(self) -> None:
        self.waited += 1


def test_nccl_is_joined_where_it_is_posted_and_gloo_where_it_is_waited_for():
    """So an operation is on the stream that is current where it is posted, and what waits for it is events alone."""
    work, tensor = Work(), torch.zeros(1)
    handle = posted("a send", tensor, lambda: work)
    assert (work.waited, handle.done(), work.waited) == (0, True, 1)
    work = Work()
    handle = enqueued("a send", tensor, lambda: work)
    assert (work.waited, handle.done(), work.waited) == (1, True, 1)
    assert handle.tensors is tensor
    said = []
    assert enqueued("a sum", tensor, lambda **options: said.append(options), group="data", async_op=True).done()
    posted("a sum", tensor, lambda **options: said.append(options) or Work(), group="data", async_op=True)
    assert said == [{"group": "data"}, {"group": "data", "async_op": True}]


def test_names_of_one_stream_of_the_pool_are_refused():
    """They would order what nothing else does: ranks could then wait for each other."""
    with cuda():
        device = DeviceStreams(GPU)
        launches = [Launch(f"channel {i}") for i in range(POOL + 1)]
        parts = [Posting(lambda: (), lambda: ENDED, lambda handle: None) for _ in launches]
        device.bound(launches[:POOL], parts[:POOL])
        with pytest.raises(AssertionError, match="torch has 32 streams, and `channel 32` would be one of them again"):
            device.bound(launches, parts)
