"""Changes of a finished compilation, wherever its nodes and values stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from attrs import evolve, frozen

from partita.compiler.graph import Accumulator, Input, Master, Node, Parameter, Value
from partita.compiler.ops.communication import Send
from partita.compiler.passes.cut import StageGraph, message_of
from partita.compiler.passes.stacked import Stacked
from partita.compiler.passes.update import BufferUpdate, OuterUpdate, ParameterUpdate, UpdateGraph
from partita.compiler.state import Compilation

Exchange: TypeAlias = Mapping[Value, Value]
Replacement: TypeAlias = Mapping[Node, Sequence[Node]]

ENDS = (UpdateGraph, ParameterUpdate, BufferUpdate, OuterUpdate, Stacked, Master)
RECORDS = (*ENDS, StageGraph, Input, Parameter, Accumulator)


@frozen(eq=False)
class Place:
    """A list of nodes in a compilation. `stage` is None for what belongs to the end of the step."""

    state: Compilation
    name: str
    nodes: tuple[Node, ...]
    stage: int | None = None

    def changed(self, values: Exchange, replaced: Replacement | None = None, made: bool = False) -> Compilation:
        """The compilation with other values read here (and made, where `made`), and with nodes replaced."""
        change = Change(values, replaced or {}, made)
        if self.stage is None:
            return evolve(self.state, update=change.of(self.state.update))
        partitioned = self.state.partitioned
        stages = list(partitioned.stages)
        own = stages[self.stage]
        stages[self.stage] = change.of(own)
        sends = [node for stage in stages for node in stage.nodes if isinstance(node.op, Send)]
        partitioned = evolve(partitioned, stages=tuple(stages), messages=tuple(message_of(node) for node in sends))
        totals = any(each.value in values for each in own.accumulators)
        update = change.of(self.state.update) if totals else self.state.update
        return evolve(self.state, partitioned=partitioned, update=update)


def places(state: Compilation) -> Iterator[Place]:
    """All places of a compilation."""
    for stage in state.partitioned.stages:
        yield Place(state, f"stage {stage.index}", stage.nodes, stage.index)
    update = state.update
    for index, nodes in update.reduce:
        yield Place(state, f"the reductions of stage {index}", nodes)
    for index, nodes in update.finish:
        yield Place(state, f"the squares of stage {index}", nodes)
    yield Place(state, "the metrics", update.metrics)
    yield Place(state, "clipping", update.clip)
    for each in update.parameters:
        yield Place(state, f"the gradient of {each.name}", each.finish)
        yield Place(state, f"what the update of {each.name} prepares", each.prepare)
        yield Place(state, f"the update of {each.name}", each.update)
    for stacked in update.stacked:
        yield Place(state, f"what updates of {', '.join(stacked.parameters)} share", stacked.nodes)
    yield Place(state, "the updates of buffers", update.buffer_nodes)
    for average in update.outer:
        yield Place(state, f"the average of {average.name} over groups", average.nodes)


@frozen(eq=False)
class Change:
    """Values exchanged and nodes replaced, in whatever record they stand."""

    values: Exchange
    replaced: Replacement
    made: bool

    def of(self, thing: Any) -> Any:
        """The changed thing."""
        if isinstance(thing, Value):
            return self.values.get(thing, thing)
        if isinstance(thing, Node):
            outputs = self.of(thing.outputs) if self.made else thing.outputs
            return evolve(thing, inputs=self.of(thing.inputs), outputs=outputs)
        if isinstance(thing, tuple):
            return tuple(new for each in thing for new in self._all(each))
        if isinstance(thing, RECORDS):
            return evolve(thing, **{f.name: self.of(getattr(thing, f.name)) for f in attrs.fields(type(thing))})
        return thing

    def _all(self, thing: Any) -> Sequence[Any]:
        if isinstance(thing, Node) and thing in self.replaced:
            return self.replaced[thing]
        return (self.of(thing),)
