"""Candidates that differ from one in one thing: of its layout (`moves`), or in the order of its pipeline (`orders`).

They reach what bounds do not go through: contexts and axes of experts of every size, the ways in which keys and values
are exchanged, state in the host's memory, collectives in pieces; a vocabulary that all stages share, slices of the
sequence, updates that do not wait for their step, searched orders. And they lead from a file's own layout to a better
one near to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from partita.compiler.costs.devices import Device
from partita.compiler.planner.space import EXCHANGES, Candidate, Space
from partita.compiler.schedules.generator import SCHEDULES
from partita.compiler.schedules.timeline import Timeline
from partita.dsl.config.builtins import DEFAULT_SCHEDULE

# Axes that give a factor of two to another axis, and take one from it.
GIVING = ("data", "tensor", "pipe")
# Numbers of slices of each microbatch, and of pieces of what tensor parallelism exchanges beside products.
SLICES = (2, 4)
PIECES = (1, 2, 4)
# Orders cannot win more than the bubble; below this share they are not searched.
BUBBLE = 0.01


def moves(space: Space, candidate: Candidate, device: Device) -> Iterator[Candidate]:
    """Valid candidates whose mesh or layout differs in one thing, the most promising first."""
    seen = {candidate}
    for each in _moves(space, evolve(candidate, schedule=DEFAULT_SCHEDULE, chunks=1), device):
        if each not in seen and space.valid(each) and (not space.whole or space.microbatches(each) == 1):
            seen.add(each)
            yield each


def _moves(space: Space, base: Candidate, device: Device) -> Iterator[Candidate]:
    yield from _lighter(space, base)
    if base.context > 1:
        yield from (evolve(base, exchange=each) for each in EXCHANGES)
    if space.experts:
        yield evolve(base, routed=not base.routed)
        yield from _exchanged(base, "expert")
    if space.positions:
        # What a longer context leaves of memory may hold whole gradients.
        for each in _exchanged(evolve(base, exchange=base.exchange or "zigzag", zero=min(1, base.zero)), "context"):
            each = evolve(each, exchange=each.exchange if each.context > 1 else "")
            yield each
            if each.context > base.context and each.data < base.data:
                yield evolve(each, size=2 * each.size)  # of as many positions as before
            if each.recompute:
                yield evolve(each, recompute="")
    if device.gpu and (base.offload or base.recompute or base.zero > 1 or base.size == 1):
        # Memory is short: what the state leaves may hold activations instead, or whole gradients.
        yield evolve(base, offload=not base.offload)
        yield evolve(base, offload=not base.offload, recompute="")
        yield evolve(base, offload=not base.offload, zero=min(1, base.zero))
    if base.size > 1 and base.size % 2 == 0:
        yield evolve(base, size=base.size // 2)
    yield evolve(base, size=2 * base.size)
    if base.tensor > 1:
        yield evolve(base, sequence=not base.sequence)
        yield from (evolve(base, pieces=each) for each in PIECES if each != base.pieces)
    for axis in GIVING:
        yield from _exchanged(base, axis)


def _lighter(space: Space, base: Candidate) -> Iterator[Candidate]:
    """The same with less to do or to store, in more of the memory that there is: all at once, then one by one."""
    yield evolve(base, zero=1 if base.data_parallel_size > 1 else base.zero, sequence=base.tensor > 1, recompute="")
    if base.data_parallel_size > 1 and base.zero != 1:
        yield evolve(base, zero=1)
    ways = ("", *space.blocks)
    fewer = ways[: ways.index(base.recompute)] if base.recompute in ways else ways
    lighter = base.tensor > 1 and not base.sequence
    for recompute in fewer:
        if lighter:
            yield evolve(base, sequence=True, recompute=recompute)
        yield evolve(base, recompute=recompute)


def _exchanged(base: Candidate, axis: str) -> Iterator[Candidate]:
    """A mesh axis twice as long, and half as long, others the other way round."""
    size = getattr(base, axis)
    for other in (each for each in GIVING if each != axis):
        other_size = getattr(base, other)
        if other_size % 2 == 0:
            yield evolve(base, **{axis: 2 * size, other: other_size // 2})
        if size % 2 == 0:
            yield evolve(base, **{axis: size // 2, other: 2 * other_size})


def orders(space: Space, base: Candidate, timeline: Timeline) -> Iterator[Candidate]:
    """Other orders for the pipeline of a candidate, if its ranks wait for one another, or for the one with most to do:
    then all may share what is theirs alone.
    """
    if base.pipe == 1 or SCHEDULES[base.schedule].searched:
        return
    shared = space.vocabularies and all(space.given.axes[name].size % base.pipe == 0 for name in space.vocabularies)
    if shared and not base.shared and timeline.idle >= BUBBLE:
        yield evolve(base, shared=True)
    if timeline.bubble < BUBBLE:
        return
    if not base.late and not space.given.trained[1].late:
        yield evolve(base, late=True)
    if (
        space.positions
        and base.context == 1
        and any(each.name == "slices" for each in SCHEDULES[base.schedule].settings)
    ):
        for count in SLICES:
            if space.given.axes[space.positions].size % count == 0:
                yield evolve(base, slices=count)
    if base.chunks <= 2 and base.slices == 1:
        yield from (evolve(base, schedule=each.name) for each in SCHEDULES.values() if each.searched)
