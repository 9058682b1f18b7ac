"""The context of emitted functions (`c` in their signatures), and how those that communicate are run.

An emitted function that communicates is a generator: it yields the handle of a collective and is sent the results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from time import perf_counter_ns
from types import GeneratorType
from typing import Any, cast

import torch
from attrs import define, field

from partita.runtime.python_functions import CustomFunction, CustomUpdate, Functions, Wanted
from partita.runtime.streams import Handle, HostStreams, Streams
from partita.runtime.tracing.flight import Flight
from partita.runtime.transports.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE_ROWS,
    REDUCE_SCATTER,
    TURN,
)
from partita.runtime.transports.transport import Collective, Tensors, Transport


@define
class Context:
    """The state of a step. `seed` and `step` determine random numbers; `rates` are the learning rates of the optimizer
    rule by rule; `update` counts parameter updates, from 1.

    `group` is which of the replica groups computes; its `seed` is its own.
    `microbatch` counts through all batches of a step; `first` is the first microbatch of the current batch. `slice` is
    which part of its sequence is run, and `shared` the tensors that the slices of the microbatch share on a stage.
    `position` is where the part of a sequence begins that a step goes through (`partita.compiler.passes.decode`).
    `coordinates` are the rank's along every mesh axis. Collectives run on the transport, along a mesh axis. `functions`
    are those of the operations that the file defines. `record` is
    called with the values of a traced program, `lap` after each operation of a timed one; `flight` counts collectives.
    `waited` is the time functions have waited for collectives, in nanoseconds. Copies between the device and the host
    run on `streams`; `arriving` are those that are under way, by the `id` of the copy.
    """

    seed: int
    device: torch.device
    step: int = 0
    update: int = 0
    group: int = 0
    microbatch: int = 0
    first: int = 0
    slice: int = 0
    shared: dict[str, torch.Tensor] = field(factory=dict)
    position: int = 0
    rates: tuple[float, ...] = ()
    coordinates: Mapping[str, int] = field(factory=dict)
    transport: Transport | None = None
    functions: Functions = field(factory=dict)
    record: Callable[[str, torch.Tensor], None] | None = None
    lap: Callable[[int], None] | None = None
    flight: Flight | None = None
    waited: int = 0
    streams: Streams = field(factory=HostStreams)
    arriving: dict[int, Handle] = field(factory=dict)

    def updates(self, every: int, first: int) -> int:
        """How many times what is done in one of `every` updates, from the `first` on, is done, this time included; 0 if
        not this time.
        """
        times, left = divmod(self.update - first, every)
        return 0 if left or times < 0 else times + 1

    def of_slices(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that the slices of the microbatch share, zero before the first of them."""
        tensor = self.shared.get(key)
        if tensor is None:
            tensor = self.shared[key] = torch.zeros(shape, dtype=dtype, device=self.device)
        return tensor

    def custom(self, name: str, operands: Tensors, expected: Wanted) -> Tensors:
        """The results of an operation that the file defines. Raises OperationFailed."""
        return cast(CustomFunction, self.functions[name])(operands, expected)

    def python_update(
        self,
        name: str,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        states: Tensors,
        rate: float,
        number: int,
        decay: float,
    ) -> Tensors:
        """Update a parameter and its states in place by a function of the file's own. Raises OperationFailed."""
        cast(CustomUpdate, self.functions[name]).update(parameter, gradient, states, rate, number, decay)
        return (parameter, *states)

    def custom_gradient(self, name: str, ds: Tensors, operands: Tensors) -> Tensors:
        """The gradients of its float operands. Raises OperationFailed."""
        return cast(CustomFunction, self.functions[name]).gradients(ds, operands)

    def all_gather(self, axis: str, tensors: Tensors, dims: Sequence[int]) -> Collective:
        """Start an all-gather of each tensor along its dimension."""
        return self._start(ALL_GATHER, axis, tensors, tuple(zip(dims)))

    def reduce_scatter(self, axis: str, tensors: Tensors, dims: Sequence[int]) -> Collective:
        """Start a reduce-scatter (sum) of each tensor along its dimension."""
        return self._start(REDUCE_SCATTER, axis, tensors, tuple(zip(dims)))

    def all_reduce(self, axis: str, tensors: Tensors, maximum: bool = False) -> Collective:
        """Start an all-reduce of each tensor: a sum, or a maximum."""
        return self._start(ALL_REDUCE, axis, tensors, ((maximum,),) * len(tensors))

    def all_to_all(
        self, axis: str, tensors: Tensors, gathered_dims: Sequence[int], cut_dims: Sequence[int]
    ) -> Collective:
        """Start an all-to-all that reshards each tensor: gathered along one dimension, cut along the other."""
        return self._start(ALL_TO_ALL, axis, tensors, tuple(zip(gathered_dims, cut_dims, strict=True)))

    def exchange_rows(
        self, axis: str, tensors: Tensors, gathered_dims: Sequence[int], cut_dims: Sequence[int]
    ) -> Collective:
        """Start an all-to-all, as `all_to_all`, of entries that the first tensor has ids of."""
        return self._start(EXCHANGE_ROWS, axis, tensors, tuple(zip(gathered_dims, cut_dims, strict=True)))

    def turn(self, axis: str, tensors: Tensors) -> Collective:
        """Start sending each tensor to the next rank, and receiving those of the one before."""
        return self._start(TURN, axis, tensors, ((),) * len(tensors))

    def _start(self, kind: str, axis: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]) -> Collective:
        assert self.transport is not None, "what runs without a transport has no collectives"
        if self.flight is not None:
            self.flight.collective()
        return self.transport.collective(kind, axis, tensors, arguments)


def begun(called: Any, context: Context) -> Generator[None, None, Any]:
    """Run an emitted function's result up to its first wait at once; the returned generator does the rest.

    The generator yields while a handle is not done, adds its waiting time to the context, and returns what the function
    returns. The result of a function that does not communicate passes through.
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
    """The tensors one by one, without holding on to them: a value sent into a generator otherwise lives until the next
    wait, past its last use.
    """
    left = list(reversed(tensors))
    del tensors
    while left:
        yield left.pop()
