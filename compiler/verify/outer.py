"""Validates the average of replica groups: of each trained parameter, and of each buffer that steps update.

Each group's copy counts once in the sum over groups, on the rank that trains it; the reduction of that sum is checked
by the rules of any other along the mesh axis of groups. The declared outer optimizer updates the anchor in place, and
every copy is overwritten once with the result. Nothing else may read an anchor or a copy after it has been written.
Each lies in the memory that the layout says. An operation has all its operands and results in one, except for copies
from one to the other and what stores the result; `partita.compiler.verify.copies` checks the order of these copies.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import define

from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import SUM, Layout
from partita.compiler.ops.collective import is_reshard
from partita.compiler.ops.groups import ANCHOR, Outer, OuterSgd, SumOfGroups, outer_optimizer
from partita.compiler.ops.host import HostCopy
from partita.compiler.ops.optimizer import Store
from partita.compiler.passes.outer import joined_mesh
from partita.compiler.passes.update import OuterUpdate
from partita.compiler.verify.checker import Checker, quoted
from partita.compiler.verify.copies import memories
from partita.compiler.verify.ending import Ending, Values
from partita.compiler.verify.rules import Rules, require
from partita.compiler.verify.value_numbering import UNKNOWN, ValueNumbering
from partita.dsl.check.groups import Groups
from partita.dsl.spec import Call


@define(eq=False)
class Outers:
    """Checks the averages of all parameters and buffers; there are none unless groups train apart. What is kept of the
    parameters `offloaded` lies in the host's memory, and so do the copies of those `on_host`.
    """

    ending: Ending
    groups: Groups | None
    local: Call | None
    offloaded: Collection[str] = ()
    on_host: Collection[str] = ()

    def run(self) -> None:
        """Check that what steps update is averaged, and how."""
        ending, check = self.ending, self.ending.check
        updated = [each.name for each in ending.update.parameters]
        updated += [each.name for each in ending.update.buffers if not each.after]
        with check.at(where="the average of groups"):
            expected = updated if self.local is not None else []
            averaged = [each.name for each in ending.update.outer]
            require(
                sorted(averaged) == sorted(expected), "not everything that steps update is averaged once over groups"
            )
        if self.groups is None or self.local is None:
            return
        mesh = joined_mesh(check.rules.mesh)
        own = Checker(Rules(mesh), ValueNumbering(mesh.parts), problems=check.problems)
        for each in ending.update.outer:
            with own.at(ending.declared(each.name).span, f"the average of `{each.name}`"):
                self._average(each, own, self.groups, self.local)
        check.nodes += own.nodes
        check.reshardings += own.reshardings

    def _average(self, each: OuterUpdate, check: Checker, groups: Groups, local: Call) -> None:
        declared, layouts = self.ending.declared(each.name), self.ending.layouts[each.name]
        op = outer_optimizer(local) if declared.trained else OuterSgd(groups.count, 1.0)
        state = layouts.state if declared.trained else layouts.param
        stages = self.ending.partitioned.stage_sets()[each.name]
        require(each.stages == stages, f"`{each.name}` is not averaged on the stages that have it, {stages}")
        require(
            len(set(each.masters)) == groups.members,
            f"a rank trains {groups.members} groups",
            *each.masters,
        )
        values: Values = {}
        for member, master in enumerate(each.masters):
            require(master.layout == layouts.param, f"`{master.name}` is not stored as {layouts.param}", master)
            right = master.host == (each.name in self.on_host)
            require(right, f"`{master.name}` lies in the wrong memory", master)
            number = check.numbering.given("copy", each.name, member, type=declared.master)
            values[master] = check.given(number, master)
        names = (ANCHOR, *op.states)
        require(each.state_names == names, f"`{each.name}` is kept as {', '.join(names)} besides its copies")
        for name, value in zip(each.state_names, each.states, strict=True):
            require(value.layout == state, f"`{value.name}` is not stored as {state}", value)
            right = value.host == (each.name in self.offloaded)
            require(right, f"`{value.name}` lies in the wrong memory", value)
            values[value] = check.given(check.numbering.given(name, each.name, type=declared.master), value)
        total = check.numbering.given("total", each.name, type=declared.master)
        self._nodes(each, op, check, values, total)

    def _nodes(self, each: OuterUpdate, op: Outer, check: Checker, values: Values, total: int) -> None:
        """The nodes in order: sum, reduction, outer optimizer, and stores of its result."""
        copies = [values[master] for master in each.masters]
        new, stored = UNKNOWN, list[Value]()
        for node in each.nodes:
            require(node.phase is Phase.OUTER, f"{quoted(node)} is in phase {node.phase}")
            memories(node)
            for value in node.inputs:
                require(value in values, f"`{value.name}` is not available", value)
            late = [value for value in node.inputs if value in stored]
            require(not late, "what was overwritten is read after it, or overwritten again", *late)
            numbers = tuple(values[value] for value in node.inputs)
            if node.op == SumOfGroups(len(copies)):
                require(list(numbers) == copies, "the sum has not each copy of the rank's groups once", *node.inputs)
                self._partial(node, check)
                results: tuple[int, ...] = (total,)
            elif node.op == Store():
                target, value = node.inputs
                require(target in each.masters, f"`{target.name}` is overwritten", target)
                require(new != UNKNOWN and values[value] == new, f"`{value.name}` is not the new anchor", value)
                check.results(node, numbers, new=True)
                stored.append(target)
                results = ()
            elif node.op == op:
                anchor, summed, *others = node.inputs
                require((anchor, *others) == each.states, "the anchor is updated in a copy, or from others", anchor)
                require(values[summed] == total, f"`{summed.name}` is not the sum over all groups", summed)
                results = check.results(node, numbers, new=True)
                new = results[0]
                stored += each.states
            else:
                moves = isinstance(node.op, HostCopy)
                require(is_reshard(node.op) or moves, f"{quoted(node)} is no part of the average as it is declared")
                results = check.results(node, numbers, new=moves)
            values.update(zip(node.outputs, results, strict=True))
        left = [master for master in each.masters if master not in stored]
        require(not left, f"a group does not go on from the anchor of `{each.name}`", *left)

    def _partial(self, node: Node, check: Checker) -> None:
        """The sum over a rank's groups is a partial one over all groups."""
        apart = self.ending.check.rules.mesh.replica_axis
        (result,) = node.outputs
        for value in node.inputs:
            layout = Layout(
                tuple(
                    (over, state)
                    for over in check.rules.mesh.sharding
                    if (state := SUM if over == apart else value.layout.state(over)) is not None
                ),
                value.layout.flat,
            )
            require(
                result.layout == layout and result.type == value.type, "its terms have other layouts", value, result
            )
