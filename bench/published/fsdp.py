"""Steps as torch's FSDP runs them: what is computed is our program's, what is sent is FSDP's.

A unit is an iteration of a repeat; what is outside of all is the root. Each microbatch gathers a unit's parameters in
one flat message for its forward pass and, unless they are kept, once more for its backward pass, and reduces its
gradients in one. All messages go through one communicator, in the order in which they are issued: the gather of the
next unit, then the reduction of the one that is computed. A gather is issued as soon as the limiter lets it, which has
two under way: when the unit before the one that is computed is done. So it runs beside what is computed, issued before
a unit's backward pass or after it (`BACKWARD_PRE`, `BACKWARD_POST`). The root is gathered before the first unit and
reduced after the last, and a microbatch ends with its last reduction (`torch/distributed/fsdp/_runtime_utils.py`:
`_unshard`, `_post_backward_hook`, `_post_backward_final_callback`).

Gradients and, in FSDP2, parameters are also copied between tensors and messages. FSDP1 concatenates gradients (the
backward pass of the views of a flat parameter), casts them to the dtype that is reduced, and divides them
(`_div_if_needed`); FSDP2 casts as it copies in (`_chunk_cat`), and copies out what it gathers
(`split_with_sizes_copy`; both in `_fully_shard/_fsdp_collectives.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from attrs import define, field, frozen

from partita.compiler.analysis.execution import BLOCKING, narrowed
from partita.compiler.analysis.time import StreamSimulation, partial_remat_products
from partita.compiler.analysis.traffic import update_nodes
from partita.compiler.costs.links import Link
from partita.compiler.costs.nodes import timed
from partita.compiler.graph import Node, Phase
from partita.compiler.ops.optimizer import target_of
from partita.compiler.passes.place import iteration_of
from partita.compiler.state import Scheduled

HALF = 2  # bytes of an element of bf16, in which is gathered


@frozen
class FSDP:
    """How it is set up: `version` 1 or 2; whether parameters are `kept` for the backward pass (`SHARD_GRAD_OP`), and
    otherwise gathered again; bytes of an element as gradients are `reduced`; whether layers that are made again are so
    `whole`, as before torch 2.1; whether products of units have operands of 8 bits (`narrow`).
    """

    version: int = 1
    kept: bool = False
    reduced: int = 4
    whole: bool = False
    narrow: bool = False

    @property
    def unpacked(self) -> float:
        """Bytes that are moved for each element of what has been gathered."""
        return 0.0 if self.version == 1 else 2 * HALF

    @property
    def packed(self) -> float:
        """Bytes that are moved for each element of what will be reduced."""
        if self.version == 2:
            return HALF + self.reduced
        cast = HALF + self.reduced if self.reduced != HALF else 0
        return 2 * HALF + cast + 2 * self.reduced


@frozen
class Part:
    """What one pass computes of a unit (`path` None: of the root), in seconds."""

    path: str | None
    seconds: float


def step_seconds(state: Scheduled, fsdp: FSDP) -> float:
    """Seconds of a step of a program that is split over one mesh axis, and has no pipeline."""
    (stage,), (rank,) = state.partitioned.stages, state.plan.ranks
    forward = _parts(state, fsdp, [node for node in stage.nodes if node.phase is Phase.FORWARD])
    backward = _parts(state, fsdp, [node for node in stage.nodes if node.phase in (Phase.BACKWARD, Phase.WEIGHT)])
    if fsdp.whole:
        again = {part.path: part.seconds for part in _parts(state, fsdp, partial_remat_products(state, stage))}
        backward = [Part(part.path, part.seconds + again.pop(part.path, 0.0)) for part in backward]
    end = StreamSimulation(state, BLOCKING)
    end.run([*state.update.statistic_nodes(rank.stages), *state.update.clip, *update_nodes(state, rank)])
    return state.microbatches * _Microbatch(state, fsdp).run(forward, backward) + end.arrived


def _parts(state: Scheduled, fsdp: FSDP, nodes: Sequence[Node]) -> list[Part]:
    """What is computed, in order; without the sums of gradients, since FSDP has its own."""
    repeats = state.partitioned.graph.repeats
    found = timed(nodes, state.device, state.compiles)
    took = [
        (node, iteration_of(node.scope, repeats), 0.0 if target_of(node.op) is not None else seconds)
        for node, seconds in (narrowed(state, found) if fsdp.narrow else found)
    ]
    runs = groupby(took, key=lambda each: each[1])
    return [Part(path, sum(seconds for _, _, seconds in run)) for path, run in runs]


@define
class _Microbatch:
    """Runs one on a clock, on which messages follow one another beside what is computed."""

    state: Scheduled
    fsdp: FSDP
    clock: StreamSimulation = field(init=False)
    link: Link = field(init=False)
    ranks: int = field(init=False)
    elements: dict[str | None, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        (axis,) = self.state.mesh.sharding
        self.clock = StreamSimulation(self.state, BLOCKING)
        self.link, self.ranks = self.state.mesh.link(axis), self.state.mesh.sizes[axis]
        self.elements = {None: 0}
        repeats = self.state.partitioned.graph.repeats
        for each in self.state.step.parameters:
            path = iteration_of(each.name, repeats)
            self.elements[path] = self.elements.get(path, 0) + each.value.type.elements

    def run(self, forward: Sequence[Part], backward: Sequence[Part]) -> float:
        """Seconds of both passes."""
        self.clock.now = self.gather(None)
        self.pass_through(forward, gathers=True, reduces=False)
        self.pass_through(backward, gathers=not self.fsdp.kept, reduces=True)
        self.compute(0.0, None, self.fsdp.unpacked + self.fsdp.packed)
        return self.reduce(None)

    def pass_through(self, parts: Sequence[Part], gathers: bool, reduces: bool) -> None:
        """Compute the parts in order, each when its unit is there; what is sent is not waited for."""
        units = [part.path for part in parts if part.path is not None]
        there = {units[0]: self.gather(units[0])} if gathers else {}
        following = iter(units[1:])
        for part in parts:
            if part.path is None:
                self.compute(part.seconds, None, 0.0)
                continue
            if gathers:
                after = next(following, None)
                if after is not None:
                    there[after] = self.gather(after)
                self.clock.now = max(self.clock.now, there[part.path])
            self.compute(part.seconds, part.path, gathers * self.fsdp.unpacked + reduces * self.fsdp.packed)
            if reduces:
                self.reduce(part.path)

    def gather(self, path: str | None) -> float:
        """When a unit's parameters have arrived, if their gather is issued now."""
        return self.send(*self.link.gather(self.ranks, HALF * self.elements[path]))

    def reduce(self, path: str | None) -> float:
        """When a unit's gradients have been reduced, if that is issued now."""
        return self.send(*self.link.scatter(self.ranks, self.fsdp.reduced * self.elements[path]))

    def send(self, latency: float, moving: float) -> float:
        """When a message has arrived that is issued now."""
        free, link = self.clock.free, self.link
        free[link.name] = max(self.clock.now, free.get(link.name, 0.0)) + latency + moving
        self.clock.links[link.name] = link
        return free[link.name]

    def compute(self, seconds: float, path: str | None, moved: float) -> None:
        """Compute, and move so many bytes for each element of a unit."""
        device = self.state.device
        copying = moved * self.elements[path] / (device.bandwidth * device.streaming)
        self.clock.now = self.clock.after(seconds + copying)
