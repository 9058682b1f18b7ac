"""What emitted functions see of the moment (`c` in their signatures), and how those that communicate are run.

Such a function is a generator. It yields the handle of a collective that it waits for, and is sent the results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from time import perf_counter_ns
from types import GeneratorType
from typing import Any

import torch
from attrs import define, field

from partita.runtime.tracing.flight import Flight
from partita.runtime.transports.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from partita.runtime.transports.transport import Collective, Tensors, Transport


@define
class Context:
    """The moment: random numbers are drawn by `seed` and `step`; `rate` is the learning rate, and `update` counts those
    of the parameters, from 1.

    `microbatch` counts through all batches of a step, of which this one begins with `first`. `coordinates` are the
    rank's along every mesh axis. The collectives are the transport's, along a mesh axis. `record` is called with the
    values that a traced program makes, `lap` after each operation of one that is timed; `flight` counts collectives.
    `waited` is for how many nanoseconds functions have waited for their collectives.
    """

    seed: int
    device: torch.device
    step: int = 0
    update: int = 0
    microbatch: int = 0
    first: int = 0
    rate: float = 0.0
    coordinates: Mapping[str, int] = field(factory=dict)
    transport: Transport | None = None
    record: Callable[[str, torch.Tensor], None] | None = None
    lap: Callable[[int], None] | None = None
    flight: Flight | None = None
    waited: int = 0

    def all_gather(self, axis: str, tensors: Tensors, dims: Sequence[int]) -> Collective:
        """Start a gather of each tensor along its dimension."""
        return self._start(ALL_GATHER, axis, tensors, tuple(zip(dims)))

    def reduce_scatter(self, axis: str, tensors: Tensors, dims: Sequence[int]) -> Collective:
        """Start a sum of each tensor, of which each rank gets its part along a dimension."""
        return self._start(REDUCE_SCATTER, axis, tensors, tuple(zip(dims)))

    def all_reduce(self, axis: str, tensors: Tensors, maximum: bool = False) -> Collective:
        """Start a sum, or maximum, of each tensor."""
        return self._start(ALL_REDUCE, axis, tensors, ((maximum,),) * len(tensors))

    def all_to_all(
        self, axis: str, tensors: Tensors, gathered_dims: Sequence[int], cut_dims: Sequence[int]
    ) -> Collective:
        """Start an exchange, from parts of each tensor along one dimension to parts along another."""
        return self._start(ALL_TO_ALL, axis, tensors, tuple(zip(gathered_dims, cut_dims, strict=True)))

    def _start(self, kind: str, axis: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]) -> Collective:
        assert self.transport is not None, "what runs without a transport has no collectives"
        if self.flight is not None:
            self.flight.collective()
        return self.transport.collective(kind, axis, tensors, arguments)


def begun(called: Any, context: Context) -> Generator[None, None, Any]:
    """Run what an emitted function returned up to its first wait, at once; the rest is the generator's.

    That one yields while a handle is not done, and returns what the function returns. A function that does not
    communicate has returned it already. How long it waits is added in the context.
    """
    handle = None
    if isinstance(called, GeneratorType):
        try:
            handle = next(called)
        except StopIteration as end:
            called = end.value
    return _rest(called, handle, context)


def _rest(called: Any, handle: Collective | None, context: Context) -> Generator[None, None, Any]:
    if handle is None:
        return called
    try:
        while True:
            before = perf_counter_ns()
            while not handle.done():
                yield
            context.waited += perf_counter_ns() - before
            handle = called.send(_handed_over(handle.result()))
    except StopIteration as end:
        return end.value


def _handed_over(tensors: Tensors) -> Iterator[torch.Tensor]:
    """The tensors one by one, held no longer than that: what is sent in is otherwise held up to the next wait, and
    so outlives its last use."""
    left = list(reversed(tensors))
    del tensors
    while left:
        yield left.pop()
