"""Numbers that are none: where the first NaN or infinity of a step came from.

The loss and the gradients' squares are summed over all ranks before parameters are updated. Where that sum is not
finite nothing is updated; the step is repeated, which computes the same, by a program that hands over every value that
it makes, and every rank notes the first one that is not finite. The earliest of these is named.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from time import time
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve

from partita.compiler.graph import Node
from partita.compiler.pipeline import Compilation
from partita.compiler.program import Program
from partita.runtime.tracing.recording import traced

if TYPE_CHECKING:
    from partita.runtime.training import Rank


class NotFinite(Exception):
    """A training step came to a loss or a gradient norm that is not finite. The step changed nothing.

    `origin` says where that began, once it is found.
    """

    def __init__(self, step: int, statistics: Mapping[str, float], origin: str = "") -> None:
        self.step, self.statistics, self.origin = step, statistics, origin
        what = "the loss" if "loss" in statistics else "the gradient norm"
        found = "nan" if any(value != value for value in statistics.values()) else "infinite"
        begun = f"; the first value that is not finite: {origin}" if origin else ""
        super().__init__(f"{what} of step {step} is {found}{begun}")


@define(eq=False)
class _First:
    """The first value that is not finite: its name, when it was made, and of which microbatch."""

    name: str = ""
    time: float = float("inf")
    microbatch: int = 0

    def note(self, name: str, tensor: torch.Tensor, microbatch: int) -> None:
        if not self.name and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            self.name, self.time, self.microbatch = name, time(), microbatch


def origin(rank: Rank, step: int, batch: Mapping[str, torch.Tensor]) -> Generator[None, None, str | None]:
    """What was not finite first, on the rank that had it; None on all others.

    Clocks of several machines may differ by more than a message takes: then the rank named may be one that the value
    came to.
    """
    from partita.runtime.executor import Executor

    state = traced(rank.plan.training)
    program = _without_update(state)
    first = _First()
    for name, tensor in batch.items():
        first.note(f"the input `{name}`", tensor, -1)
    for name, tensor in rank.memory.masters.items():
        first.note(f"the parameter `{name}`", tensor, -1)
    executor = Executor(
        program, rank.rank, rank.transport, rank.memory, rank.plan.train.seed, rank.device, keep_totals=True
    )
    context = executor.context
    context.record = lambda name, tensor: first.note(name, tensor, context.microbatch)
    yield from executor.step(step, batch)
    for (_, name), tensor in executor.totals.items():
        first.note(f"the gradient of `{name}`", tensor, -1)
    times = torch.zeros(rank.plan.ranks, dtype=torch.float64, device=rank.device)
    times[rank.rank] = min(first.time, 1e30)
    handle = rank.transport.sum_over_ranks(times)
    while not handle.done():
        yield
    earliest = int(times.argmin())
    if earliest != rank.rank:
        return None
    if not first.name:
        return "no value of the step by itself: only their sums over microbatches and ranks are too large"
    return _described(first, state, rank.rank)


def _without_update(state: Compilation) -> Program:
    assert state.program is not None
    ranks = tuple(evolve(each, update=None) for each in state.program.ranks)
    return evolve(state.program, ranks=ranks)


def _described(first: _First, state: Compilation, rank: int) -> str:
    if first.microbatch < 0:
        return f"{first.name} on rank {rank}"
    node = _node(state, first.name)
    assert node is not None
    place = f" ({node.span.place})" if node.span is not None else ""
    where = f"in {node.phase} of microbatch {first.microbatch} of stage {node.stage}"
    return f"`{first.name}` {where} on rank {rank}{place}"


def _node(state: Compilation, name: str) -> Node | None:
    assert state.partitioned is not None
    for stage in state.partitioned.stages:
        for node in stage.nodes:
            if any(value.name == name for value in node.outputs):
                return node
    return None
