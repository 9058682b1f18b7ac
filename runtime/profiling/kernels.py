"""What operations take where they stand in programs: steps of whole programs, with a clock behind each operation.

An operation alone, again and again, is quicker than among others: its code and its operands are in the core's own
caches, and where they are not, all of them are not. In a step each finds what the one before has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import perf_counter_ns
from typing import Any

import torch
from attrs import define, field

from partita.compiler.costs.nodes import kernel_of
from partita.compiler.costs.record import Timing
from partita.compiler.graph import Node
from partita.compiler.ops.op import Kernel
from partita.compiler.pipeline import assembled
from partita.compiler.state import Compilation
from partita.runtime.data.binding import open_data
from partita.runtime.rank import Plan, Rank
from partita.runtime.transports.virtual import VirtualCluster

WARM_UP, STEPS = 2, 6
_BEGINNING = -1


@define(eq=False)
class Laps:
    """A `Probe` that numbers the kernels of a program, and the clock that its functions call.

    On a GPU a lap is an event in the stream on which the program runs, and says when the device got there.
    """

    device: torch.device
    numbers: dict[tuple[Kernel, str], int] = field(factory=dict)
    _order: list[int] = field(factory=list)
    _times: list[int | torch.cuda.Event] = field(factory=list)

    def begin(self) -> list[str]:
        """What is before a function's first operation is none of it."""
        return [f"c.lap({_BEGINNING})"]

    def after(self, node: Node, added: bool, names: Sequence[str]) -> list[str]:
        """A lap for each operation that takes time; views have theirs in the operation behind them."""
        known = kernel_of(node, added)
        return [] if known is None else [f"c.lap({self.numbers.setdefault(known, len(self.numbers))})"]

    def lap(self, number: int) -> None:
        """An operation of this number is done."""
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._times.append(event)
        else:
            self._times.append(perf_counter_ns())
        self._order.append(number)

    def read(self) -> dict[int, float]:
        """The mean seconds of each number since the last reading."""
        found = defaultdict[int, list[float]](list)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for (before, after), number in zip(pairwise(self._times), self._order[1:], strict=True):
            if number != _BEGINNING:
                found[number].append(_seconds(before, after))
        self._order.clear()
        self._times.clear()
        return {number: fmean(seconds) for number, seconds in found.items()}


def _seconds(before: int | torch.cuda.Event, after: int | torch.cuda.Event) -> float:
    if isinstance(before, int) or isinstance(after, int):
        assert isinstance(before, int)
        assert isinstance(after, int)
        return (after - before) / 1e9
    return float(before.elapsed_time(after)) / 1e3


def measure(state: Compilation, device: torch.device) -> dict[tuple[Kernel, str], float]:
    """The seconds of every kernel of a program of one rank, by kernel and dtype."""
    laps = Laps(device)
    plan = Plan(state.spec, assembled(state, laps), None)
    cluster = VirtualCluster(1, strict=False)
    rank = Rank(plan, 0, cluster.transport(0), device)
    rank.training.context.lap = laps.lap
    dataset = open_data(plan.program, plan.train, Path())
    steps = []
    for number in range(1, WARM_UP + STEPS + 1):
        batch = rank.tensors(dataset.batch(number)) if dataset else {}
        cluster.run([rank.step(number, batch, 0.0)])
        steps.append(laps.read())
    del steps[:WARM_UP]
    # A mean, as a step is a sum: what the machine does meanwhile takes time there too. The longest is left out.
    return {
        known: fmean(sorted(step[number] for step in steps)[:-1])
        for known, number in laps.numbers.items()
        if number in steps[0]
    }


def timings(found: Sequence[dict[tuple[Kernel, str], float]]) -> list[Timing]:
    """Of several programs; of a kernel that some of them share, the mean."""
    every = defaultdict[tuple[Kernel, str], list[float]](list)
    for each in found:
        for known, seconds in each.items():
            every[known].append(seconds)
    return [
        Timing(kernel.name, dtype, kernel.features, max(kernel.work, 1.0), fmean(seconds))
        for (kernel, dtype), seconds in every.items()
    ]
