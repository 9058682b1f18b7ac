"""Times operations in the context of programs: steps of whole programs, with a timestamp after each operation.

An operation that is repeated alone is faster than among others: its code and operands stay in the core's private
caches, or, if they do not fit, none of them do. In a step each operation finds what the previous one left there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import perf_counter_ns
from typing import Any

import torch
from attrs import define, field

from partita.compiler.codegen.writer import Probe
from partita.compiler.costs.nodes import kernel_of
from partita.compiler.costs.record import Timing
from partita.compiler.graph import Node
from partita.compiler.ops.op import Kernel
from partita.compiler.pipeline import assembled
from partita.compiler.state import Compilation
from partita.runtime.data.binding import open_data
from partita.runtime.rank import CompiledRun, Rank
from partita.runtime.transports.lines import PostedOperation
from partita.runtime.transports.transport import Tensors
from partita.runtime.transports.virtual import VirtualCluster, VirtualTransport

WARM_UP, STEPS = 2, 6
_BEGINNING = -1


@define(eq=False)
class KernelTimer(Probe):
    """A `Probe` that numbers the kernels of a program, and the clock that the program's functions call.

    On a GPU a lap is an event in the stream on which the program runs.
    """

    device: torch.device
    numbers: dict[tuple[Kernel, str], int] = field(factory=dict)
    _order: list[int] = field(factory=list)
    _times: list[int | torch.cuda.Event] = field(factory=list)

    def begin(self) -> list[str]:
        """A lap before a function's first operation, so that what precedes it does not count."""
        return [f"c.lap({_BEGINNING})"]

    def after(self, node: Node, added: bool, names: Sequence[str]) -> list[str]:
        """A lap after each operation that takes time; views count toward the operation that follows them."""
        known = kernel_of(node, added)
        return [] if known is None else [f"c.lap({self.numbers.setdefault(known, len(self.numbers))})"]

    def lap(self, number: int) -> None:
        """Record that the operation of this number is done."""
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._times.append(event)
        else:
            self._times.append(perf_counter_ns())
        self._order.append(number)

    def resume(self) -> None:
        """What precedes this does not count: other ranks may have run."""
        self.lap(_BEGINNING)

    def read(self) -> dict[int, float]:
        """The mean seconds of each number since the last call."""
        samples = defaultdict[int, list[float]](list)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for (before, after), number in zip(pairwise(self._times), self._order[1:], strict=True):
            if number != _BEGINNING:
                samples[number].append(_seconds(before, after))
        self._order.clear()
        self._times.clear()
        return {number: fmean(seconds) for number, seconds in samples.items()}


def _seconds(before: Any, after: Any) -> float:
    """Between two times of the host in nanoseconds, or two events of a GPU."""
    return (after - before) / 1e9 if isinstance(before, int) else float(before.elapsed_time(after)) / 1e3


@define(eq=False)
class _Untimed(VirtualTransport):
    """Starting a collective, where others may complete it, does not count towards the next operation."""

    started: Callable[[], None] = lambda: None

    def collective(
        self, kind: str, axis: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]
    ) -> PostedOperation:
        """As usual."""
        operation = super().collective(kind, axis, tensors, arguments)
        self.started()
        return operation


class _Cluster(VirtualCluster):
    transports = _Untimed


def measure(state: Compilation, device: torch.device) -> dict[tuple[Kernel, str], float]:
    """The seconds of every kernel of a program, by kernel and dtype: the mean over its ranks, which take turns."""
    laps = KernelTimer(device)
    plan = CompiledRun(state.spec, assembled(state, laps), None)
    cluster = _Cluster(state.mesh.ranks, strict=False)
    ranks = []
    for number in range(state.mesh.ranks):
        transport = cluster.transport(number)
        assert isinstance(transport, _Untimed)
        transport.started = laps.resume
        ranks.append(rank := Rank(plan, number, transport, device))
        rank.training.context.lap = laps.lap

    def resumed(steps: Iterator[None]) -> Iterator[None]:
        for _ in steps:
            yield
            laps.resume()

    dataset = open_data(plan.program, plan.train, Path())
    steps = []
    for number in range(1, WARM_UP + STEPS + 1):
        batch = dataset.batch(number) if dataset else {}
        cluster.run([resumed(rank.step(number, rank.tensors(batch), (0.0,))) for rank in ranks])
        steps.append(laps.read())
    del steps[:WARM_UP]
    # A mean: a step is a sum, to which interference by the machine adds too. The longest is left out.
    return {
        known: fmean(sorted(step[number] for step in steps)[:-1])
        for known, number in laps.numbers.items()
        if number in steps[0]
    }


def timings(measurements: Sequence[dict[tuple[Kernel, str], float]]) -> list[Timing]:
    """The timings of several programs; a kernel that some of them share gets the mean."""
    every = defaultdict[tuple[Kernel, str], list[float]](list)
    for each in measurements:
        for known, seconds in each.items():
            every[known].append(seconds)
    return [
        Timing(kernel.name, dtype, kernel.features, max(kernel.work, 1.0), fmean(seconds))
        for (kernel, dtype), seconds in every.items()
    ]
