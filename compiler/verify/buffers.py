"""Validates the updates of buffers, and what becomes of parameters after theirs: each new value is that of the
single-device program, and stored once.

It is computed from the totals of the statistics and from masters, as these are before anything is stored. Every stage
that keeps the buffer also keeps what its update reads, and gets the totals. UPDATE nodes have no stage: every rank runs
those that the buffers it keeps need.
"""

from __future__ import annotations

from attrs import define

from partita.compiler.graph import Phase, Value
from partita.compiler.passes.update import BufferUpdate
from partita.compiler.verify.ending import Ending, Values
from partita.compiler.verify.rules import require


@define(eq=False)
class Buffers:
    """Checks the updates of all buffers. Without `training` there are none."""

    ending: Ending
    training: bool

    def run(self) -> None:
        """Check the nodes that compute new values, then each buffer."""
        ending, check = self.ending, self.ending.check
        update, whole = ending.update, ending.whole
        with check.at(where="the updates of buffers"):
            expected = [each.buffer for each in whole.graph.updates] if self.training else []
            updated = [each.name for each in update.buffers]
            require(sorted(updated) == sorted(expected), "not every buffer is updated once")
        values: Values = {}
        accumulated: dict[Value, tuple[int, str]] = {}
        for stage in ending.partitioned.stages:
            for each in stage.accumulators:
                if each.parameter is None:
                    type = whole.accumulators[each.name][0].value.type
                    values[each.value] = check.numbering.given("total", each.name, type=type)
                    accumulated[each.value] = stage.index, each.name
        for master in update.masters:
            with check.at(ending.declared(master.parameter).span, "the updates of buffers"):
                values[master.value] = self._master(master.parameter, master.value, master.kind)
        ending.nodes(update.buffer_nodes, values, Phase.UPDATE, "the updates of buffers")
        for buffer in update.buffers:
            with check.at(ending.declared(buffer.name).span, f"the update of `{buffer.name}`"):
                self._stored(buffer, values, accumulated)

    def _master(self, name: str, value: Value, kind: str = "master") -> int:
        check, layout = self.ending.check, self.ending.layouts[name].param
        require(value.layout == layout, f"`{value.name}` is not stored as {layout}", value)
        number = check.numbering.given(kind, name, type=self.ending.declared(name).master)
        return check.given(number, value)

    def _stored(self, each: BufferUpdate, values: Values, accumulated: dict[Value, tuple[int, str]]) -> None:
        """The new value is stored over the buffer, on every stage that keeps it, from what there is there."""
        ending, update = self.ending, self.ending.update
        kind = "parameter" if each.after else "buffer"
        require(ending.declared(each.name).buffer != each.after, f"`{each.name}` is no {kind}")
        stages = ending.partitioned.stage_sets()
        require(each.stages == stages[each.name], f"`{each.name}` is not updated on the stages that have it")
        require(each.new in values, f"`{each.new.name}` is not available", each.new)
        expected = ending.whole.updates[each.name]
        require(values[each.new] == expected, f"`{each.new.name}` is not the new value of `{each.name}`", each.new)
        self._master(each.name, each.master)
        require(each.new.layout == each.master.layout, f"`{each.name}` is stored in another layout", each.new)
        read = {each.new, *(value for node in update.nodes_of([each]) for value in node.inputs)}
        totals = [(*accumulated[value], value) for value in accumulated if value in read]
        require(sorted(each.totals, key=str) == sorted(totals, key=str), "the totals are not those that it reads")
        for master in update.masters:
            early = master.value in read and master.after != each.after
            require(
                not early, f"`{master.parameter}` is read as it is {'before' if each.after else 'after'} the update"
            )
            colocated = set(each.stages) <= set(stages[master.parameter])
            require(master.value not in read or colocated, f"`{master.parameter}` is not kept where `{each.name}` is")
