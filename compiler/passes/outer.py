"""The average of replica groups (`sync = local`): what happens once in `every` steps, after the update.

Each group has its own copy of every trained parameter, stored in the same layout. Each rank slices its copies to the
shards whose optimizer states it keeps, and adds those of its groups: over the mesh axis of groups, these are partial
sums, which are reduced. The outer optimizer updates the anchor, which is kept in the layout of states, and every group
goes on from that: it is gathered and stored over its copy. Buffers that steps update are averaged likewise. The states
of the inner optimizers stay as they are.

Where these lie in the host's memory, the anchor does, and is updated there. Copies of groups that lie there are added
there; what ranks exchange is on the device.

The mesh axis of groups is one like any other here, though it is none for the rest of the program.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import evolve

from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import SUM, Layout, layout_of, local_type, tensor_type
from partita.compiler.mesh import Mesh
from partita.compiler.ops.groups import ANCHOR, Outer, OuterSgd, SumOfGroups, outer_optimizer
from partita.compiler.ops.optimizer import Store
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.passes.sharded_builder import ShardedBuilder
from partita.compiler.passes.update import OuterUpdate, UpdateGraph
from partita.dsl.check.groups import Groups
from partita.dsl.spec import Call


def joined_mesh(mesh: Mesh) -> Mesh:
    """The mesh, with its axis of groups as one like any other."""
    return evolve(mesh, replica_axis=None)


def with_outer_updates(
    update: UpdateGraph, mesh: Mesh, groups: Groups, local: Call, on_host: Collection[str] = ()
) -> UpdateGraph:
    """The end of a step with the average of groups that follows some. The host's memory has what is kept of the
    parameters `on_host`.
    """
    build = _OuterBuilder(mesh, groups)
    op = outer_optimizer(local)
    outer = [
        build.update(each.name, each.stages, each.master, each.layouts.state, op, each.name in on_host)
        for each in update.parameters
    ]
    mean = OuterSgd(groups.count, 1.0)
    for each in (each for each in update.buffers if not each.after):
        assert each.master.type.is_float, "there are no means of integers: such files are refused"
        outer.append(build.update(each.name, each.stages, each.master, each.master.layout, mean))
    return evolve(update, outer=tuple(outer))


class _OuterBuilder:
    def __init__(self, mesh: Mesh, groups: Groups) -> None:
        self.replica_axis, self.groups = mesh.replica_axis, groups
        self.mesh = joined_mesh(mesh)
        self.build = ShardedBuilder(Resharding(self.mesh))

    def update(
        self, name: str, stages: tuple[int, ...], master: Value, state: Layout, op: Outer, on_host: bool = False
    ) -> OuterUpdate:
        """The average of a parameter or buffer, of which states are laid out so, and may lie in the host's memory."""
        build = self.build
        build.scope, build.span, build.phase, build.stage, build.nodes = name, None, Phase.OUTER, None, []
        masters = tuple(
            Value(f"master({name})@{member}", master.type, master.layout, host=master.host)
            for member in range(self.groups.members)
        )
        shards = [build.moved(each, state) for each in masters]
        summed = state
        if self.replica_axis is not None:
            states = {**dict(state.states), self.replica_axis: SUM}
            summed = layout_of(((over, states.get(over)) for over in self.mesh.sharding), state.flat)
        (total,) = build.laid_out(SumOfGroups(len(shards)), shards, (summed,), f"total({name})")
        total = build.copied(build.moved(total, state), on_host)
        whole = tensor_type(master.type, master.layout, self.mesh.sizes)
        type = local_type(whole, state, self.mesh.sizes)
        state_values = tuple(Value(f"{each}({name})", type, state, host=on_host) for each in (ANCHOR, *op.states))
        anchor = build.laid_out(
            op, (state_values[0], total, *state_values[1:]), (state,) * len(state_values), f"new({name})"
        )[0]
        gathered = build.copied(build.moved(anchor, master.layout), master.host)
        build.nodes += [Node(Store(), (each, gathered), (), name, None, Phase.OUTER) for each in masters]
        return OuterUpdate(name, stages, masters, state_values, (ANCHOR, *op.states), tuple(build.nodes))
