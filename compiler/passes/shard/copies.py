"""The copies of values in other layouts: each is made once, where that is cheapest, for a given set of readers.

A copy no larger than its source (reduced, a part, or exchanged) belongs to the value: it is made on the value's stage,
and anyone reads it. A larger one (gathered), or one that another stage or pass makes, belongs to the stage and the pass
that use it: it is not sent, and not kept from the forward pass for the backward pass. A partial sum is reduced once, to
its default layout, from which other layouts are derived.
"""

from __future__ import annotations

from attrs import define, evolve, field

from partita.compiler.graph import Builder, Input, Node, Phase, Value
from partita.compiler.layout import MAX, REPLICATED, SUM, Layout, State, is_split, layout_of, local_type
from partita.compiler.passes.shard.choice import local_op
from partita.compiler.passes.shard.resharding import Resharding
from partita.dsl.types import Type

# Groups of phases that share copies: B and W of a microbatch are one.
GROUP = {
    Phase.PROLOGUE: "P",
    Phase.FORWARD: "F",
    Phase.BACKWARD: "B",
    Phase.WEIGHT: "B",
    Phase.FINISH: "E",
    Phase.UPDATE: "U",
}


@define(eq=False)
class Lazy:
    """A global value that is made in any layout on demand: an input, or the result of a `node` without operands. `kept`
    are those made so far.
    """

    value: Value
    default: Layout
    node: Node | None = None
    kept: dict[Layout, Value] = field(factory=dict)


@define(eq=False)
class Materialized:
    """A global value: its default layout, where it was made (`stage` None: on all stages), and its copies by layout.

    `primary`: the value as it was made; `weight`: a parameter, gathered once a step if `hoisted`; `kept`: `primary` and
    the copies that belong to the value; `expanded`: those that belong to a stage and pass.
    """

    value: Value
    default: Layout
    primary: Value
    deferred: bool = False
    weight: bool = False
    hoisted: bool = True
    stage: int | None = None
    phase: Phase = Phase.FORWARD
    scope: str = ""
    kept: dict[Layout, Value] = field(factory=dict)
    expanded: dict[tuple[int | None, str], dict[Layout, Value]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.kept[self.primary.layout] = self.primary

    def copies(self, stage: int | None, group: str) -> dict[Layout, Value]:
        """The copies that a node on a stage, in a group of phases, can read."""
        copies = self.kept
        for key in ((stage, "P"), (stage, group)):
            if key in self.expanded:
                copies = {**copies, **self.expanded[key]}
        return copies


@define(eq=False)
class Copies:
    """Makes the copies, as nodes of `build`. `portable` values are computed on every stage that reads them."""

    build: Builder
    resharding: Resharding
    portable: set[Value]
    declared: dict[Value, Input]
    inputs: list[Input] = field(factory=list)

    def read(self, known: Materialized | Lazy, layout: Layout, node: Node) -> Value:
        """A value in a layout, for a node; made if it does not exist."""
        if isinstance(known, Lazy):
            return self.free(known, layout)
        group = GROUP[node.phase]
        crosses = known.stage not in (None, node.stage) and known.value not in self.portable
        if (existing := self._there(known, layout, node, crosses)) is not None:
            return existing
        if known.primary.layout.partial:
            base = self.reduced_layout(known, layout)
            if base not in known.kept:
                source = min(known.kept.values(), key=lambda v: self.resharding.cost(v.type, v.layout, base))
                known.kept[base] = self.reshard(source, base, known.stage, known.phase, known.scope, node)
            if (existing := self._there(known, layout, node, crosses)) is not None:
                return existing
        copies = known.copies(node.stage, group)
        sources = [copy for at, copy in copies.items() if not at.partial] or list(copies.values())
        source = min(sources, key=lambda v: self.resharding.cost(v.type, v.layout, layout))
        if crosses and source in known.kept.values():
            wire = self._wire(source)
            if wire not in known.kept:
                known.kept[wire] = self.reshard(source, wire, known.stage, known.phase, known.scope, node)
            source = known.kept[wire]
        if known.weight and known.hoisted and node.phase is not Phase.UPDATE:
            phase, key = Phase.PROLOGUE, (node.stage, "P")
        else:
            phase, key = node.phase, (node.stage, group)
        own = GROUP[phase] == GROUP.get(known.phase) and not crosses and not known.weight
        for moved in self._steps(source, layout, node.stage, phase, node.scope, node):
            exchanged = moved.type.bytes <= source.type.bytes
            if exchanged and own and not moved.layout.partial:
                known.kept.setdefault(moved.layout, moved)  # what is exchanged and then gathered is only gathered again
            elif moved.layout == layout:
                known.expanded.setdefault(key, {})[layout] = moved
        return moved

    def available(self, known: Materialized, node: Node) -> tuple[Layout, ...]:
        """The layouts in which a node can read a value directly; partial values are not sent to other stages."""
        layouts = tuple(known.copies(node.stage, GROUP[node.phase]))
        if known.stage in (None, node.stage) or known.value in self.portable:
            return layouts
        return tuple(each for each in layouts if not each.partial) or (self.reduced_layout(known, REPLICATED),)

    def _there(self, known: Materialized, layout: Layout, node: Node, crosses: bool) -> Value | None:
        """The value in a layout, if it exists; not if it is better sent in its wire layout."""
        copies = known.copies(node.stage, GROUP[node.phase])
        existing = copies.get(layout)
        if existing is None or (crosses and existing is known.kept.get(layout) and self._wire(existing) != layout):
            return None
        return existing

    def _wire(self, value: Value) -> Layout:
        """The layout in which a value is sent to another stage: as slices if gathering them is cheaper."""
        pipe = self.resharding.mesh.pipe
        if pipe is None:
            return value.layout
        layout, type = value.layout, value.type
        link = self.resharding.mesh.link(pipe)
        for over in self.resharding.mesh.sharding:
            if layout.state(over) is not None:
                continue
            parts = self.resharding.mesh.sizes[over]
            states = dict(layout.states)
            inner = {
                states.get(m) for m in self.resharding.mesh.sharding[self.resharding.mesh.sharding.index(over) + 1 :]
            }
            axis = next((a for a in type.axes if a.size % parts == 0 and a.name not in inner), None)
            if axis is None:
                continue
            cut = layout_of((m, axis.name if m == over else states.get(m)) for m in self.resharding.mesh.sharding)
            part = type.resized(axis.name, axis.size // parts)
            saved = (type.bytes - part.bytes) / link.bandwidth
            if self.resharding.cost(part, cut, layout) < saved:
                layout, type = cut, part
        return layout

    def reduced_layout(self, known: Materialized, target: Layout) -> Layout:
        """The layout that a partial value is reduced to: its default, along the mesh axes that are to be reduced."""
        primary, flat = known.primary.layout, known.default.flat
        states: dict[str, State] = {}
        for over in self.resharding.mesh.sharding:
            state = primary.state(over)
            if state == SUM and target.state(over) != SUM:
                state = known.default.state(over)
                own = flat is None or state != flat.axis
                if is_split(state) and own and not self._divides(known.value.type, state, over, primary, states):
                    state = None
            elif state == MAX and target.state(over) != MAX:
                state = None
            states[over] = state
        return layout_of(states.items(), flat)

    def _divides(self, type: Type, axis: str, over: str, primary: Layout, states: dict[str, State]) -> bool:
        """Whether an axis can be split over one more mesh axis."""
        parts = self.resharding.mesh.sizes[over]
        for other in self.resharding.mesh.sharding:
            if other != over and states.get(other, primary.state(other)) == axis:
                parts *= self.resharding.mesh.sizes[other]
        return type.axis(axis).size % parts == 0

    def reshard(
        self, source: Value, target: Layout, stage: int | None, phase: Phase, scope: str, reader: Node
    ) -> Value:
        """Append the steps from a value to a layout, and return the last one's result."""
        return self._steps(source, target, stage, phase, scope, reader)[-1]

    def _steps(
        self, source: Value, target: Layout, stage: int | None, phase: Phase, scope: str, reader: Node
    ) -> list[Value]:
        """Append the steps from a value to a layout, and return the results of all; the value itself without any."""
        self.build.scope, self.build.span = scope, reader.span
        self.build.stage, self.build.phase = stage, phase
        values = [source]
        for step in self.resharding.path(source.type, source.layout, target):
            moved = source.derived(self.build.unique(f"{source.name}.{step.op.made}"), step.type, step.layout)
            self.build.nodes.append(Node(step.op, (values[-1],), (moved,), scope, reader.span, phase, stage))
            values.append(moved)
        return values[1:] or values

    def free(self, known: Lazy, layout: Layout) -> Value:
        """An input, or the result of a node without operands, in a layout."""
        if layout in known.kept:
            return known.kept[layout]
        whole = known.value
        value = whole.laid_out(local_type(whole.type, layout, self.resharding.mesh.sizes), layout)
        if known.kept:
            value = value.derived(self.build.unique(f"{whole.name}.part"))
        if known.node is None:
            self.inputs.append(evolve(self.declared[whole], value=value))
        else:
            op = local_op(known.node, (), (layout,), self.resharding.mesh)
            self.build.nodes.append(known.node.changed(op=op, outputs=(value,)))
        known.kept[layout] = value
        return value
